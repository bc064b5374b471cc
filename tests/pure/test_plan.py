"""Plans: which rule speaks of what, what they compose to, and rules that can't be meant."""

import re

import pytest
import torch

import vescale as vs
from vescale._errors import LayoutError, PlanError
from vescale.spmd.placements import P, Partial, RaggedShard, Shard
from vescale.spmd.plan import Plan, Staged

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
COLUMNS, ROWS, CUT = P(tp=Shard(1)), P(tp=Shard(0)), P(dp=RaggedShard((0,), (3, 1)))
TREE = {"blocks": [{"fc.weight": torch.ones(8, 4), "fc.bias": torch.ones(8)}], "head": torch.ones(4, 4)}


def rests(plan, tree=TREE):
    return {entry.path: entry.rest.spec for entry in plan.resolve(tree)}


def test_the_first_match_wins():
    plan = Plan(MESH, {r".*weight": ROWS, r"blocks\.0\.fc\.weight|head": COLUMNS})
    assert rests(plan) == {"blocks.0.fc.bias": P(), "blocks.0.fc.weight": ROWS, "head": COLUMNS}


def test_rules_match_whole_paths():
    with pytest.raises(PlanError, match="match no parameter: 'weight'"):
        Plan(MESH, {"weight": ROWS}).resolve(TREE)


def test_a_rule_that_matches_nothing_lists_near_misses():
    plan = Plan(MESH, {r"block\.\d+\.fc\.weight": ROWS, "heads": ROWS, "head": ROWS, "zzz": ROWS})
    with pytest.raises(PlanError) as caught:
        plan.resolve(TREE)
    message = str(caught.value)
    assert "(near: blocks.0.fc.weight" in message
    assert "'heads' (near: head)" in message  # every such rule, at once
    assert "'zzz' (there are blocks." in message
    assert "'head' (near" not in message  # that one matches


def test_a_rule_behind_another_has_matched():
    """A parameter that an earlier rule took was still meant by it."""
    Plan(MESH, {".*": P(), "head": ROWS}).resolve(TREE)


def test_at_rest_and_in_use():
    plan = Plan(MESH, {"head": Staged(init=CUT, run=COLUMNS), ".*": ROWS})
    *_, head = plan.resolve(TREE)
    assert (head.rest.spec, head.run.spec) == (CUT, COLUMNS)
    assert head.rule == "head"
    assert all(entry.rest is entry.run for entry in plan.resolve(TREE)[:-1])


def test_every_parameter_that_does_not_fit_is_named():
    with pytest.raises(PlanError) as caught:
        Plan(MESH, {".*": P(dp=RaggedShard((0,), (2, 1)))}).resolve(TREE)
    message = str(caught.value)
    for path in ("blocks.0.fc.weight of shape (8, 4)", "blocks.0.fc.bias of shape (8,)", "head of shape"):
        assert path in message
    assert "4 prefix rows for 3 units" in message


def test_it_prints_as_a_table():
    plan = Plan(MESH, {"head": Staged(init=CUT, run=P()), r".*\.weight": ROWS})
    assert [re.split(r"  +", line) for line in str(plan.resolve(TREE)).split("\n")] == [
        ["parameter", "shape", "at rest", "in use", "on rank 0", "rule"],
        ["blocks.0.fc.bias", "(8,)", "P()", "same", "(8,) 32 B", "-"],
        ["blocks.0.fc.weight", "(8, 4)", "P(tp=Shard(0))", "same", "(4, 4) 64 B", r".*\.weight"],
        ["head", "(4, 4)", str(CUT), "P()", "(3, 4) 48 B", "head"],
    ]


def test_inputs_match_a_path_or_a_prefix_at_a_dot():
    plan = Plan(MESH, inputs={"batch": P("dp"), "batch.mask": P(), "": P("tp")})
    assert plan.input_spec("batch") == plan.input_spec("batch.tokens.0") == P("dp")
    assert plan.input_spec("batch.mask") == plan.input_spec("batch.mask.x") == P()
    assert plan.input_spec("batches") == P("tp")  # no prefix of it ends at a dot
    assert Plan(MESH, inputs={"batch": P("dp")}).input_spec("batches") is None


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_prefixes_that_match_nothing(kind):
    plan = Plan(MESH, **{kind: {"batches": P("dp")}})
    with pytest.raises(PlanError, match=rf"{kind} key 'batches'.*\n.*\n.*near: batch"):
        getattr(plan, f"check_{kind}")(["batch.tokens", "params.w"])
    getattr(plan, f"check_{kind}")(["batches.x"])


def test_outputs():
    plan = Plan(MESH, outputs={"": P(), "0.loss": P("dp")})
    assert plan.output_spec("0.loss") == P("dp")
    assert plan.output_spec("1") == P()


def test_plans_compose():
    first = Plan(MESH, {".*": ROWS}, {"x": P("dp"), "y": P()}, {"0": P()}, {"a.input": P()})
    second = Plan(MESH, {"head": COLUMNS, ".*bias": P()}, {"x": P("tp")}, {"1": P("dp")}, {"b.input": P()})
    both = first | second
    assert list(both.params) == ["head", ".*bias", ".*"]  # rules of the second come first
    assert rests(both)["head"] == COLUMNS
    assert both.inputs == {"x": P("tp"), "y": P()}
    assert both.outputs == {"0": P(), "1": P("dp")}
    assert list(both.activations) == ["b.input", "a.input"]
    assert list(first.params) == [".*"]


def test_a_rule_of_both_is_the_seconds():
    both = Plan(MESH, {"a": ROWS, ".*": P()}) | Plan(MESH, {".*": COLUMNS})
    assert both.params == {".*": COLUMNS, "a": ROWS}


def test_plans_of_two_meshes_do_not_compose():
    other = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    with pytest.raises(PlanError, match="one mesh"):
        Plan(MESH) | Plan(other)


@pytest.mark.parametrize("kind", ["params", "inputs", "outputs", "activations"])
def test_values_are_placements(kind):
    with pytest.raises(PlanError, match=r"P of placements by axis name"):
        Plan(MESH, **{kind: {"x": Shard(0)}})
    if kind != "params":
        with pytest.raises(PlanError, match="Staged"):
            Plan(MESH, **{kind: {"x": Staged(P(), P())}})


@pytest.mark.parametrize("kind", ["params", "inputs", "outputs", "activations"])
def test_axes_are_the_meshs(kind):
    with pytest.raises(LayoutError) as caught:
        Plan(MESH, **{kind: {"x": P(pp=Shard(0))}})
    assert f"Plan {kind}['x']" in str(caught.value)
    assert "the mesh has the axes dp, tp" in str(caught.value)


def test_axes_of_both_stages_are_checked():
    with pytest.raises(LayoutError, match="axis 'fsdp'"):
        Plan(MESH, {"x": Staged(init=P(fsdp=Shard(0)), run=P())})


@pytest.mark.parametrize("kind", ["params", "activations"])
def test_keys_are_regular_expressions(kind):
    with pytest.raises(PlanError, match="regular expressions"):
        Plan(MESH, **{kind: {"blocks.[": P()}})


def test_a_distributed_tree_lies_at_rest():
    plan = Plan(MESH, {"head": Staged(init=CUT, run=P()), ".*": ROWS})
    found = vs.distribute(TREE, plan)
    assert found["head"].layout.spec == CUT
    assert found["blocks"][0]["fc.bias"].layout.spec == ROWS
    moved = vs.distribute(found, Plan(MESH, {".*": P()}))
    assert torch.equal(moved["head"].locals[3], TREE["head"])


def test_repr_leaves_out_what_is_empty():
    assert repr(Plan(MESH, inputs={"x": P("dp")})) == f"Plan({MESH!r}, inputs={{'x': P(dp=Shard(0))}})"


def test_a_pending_reduction_may_be_an_input():
    assert Plan(MESH, inputs={"x": P(dp=Partial())}).input_spec("x") == P(dp=Partial())


def test_a_tree_in_the_place_of_the_plan():
    with pytest.raises(vs.VescaleError, match=r"remedy: vs\.distribute\(params, plan\)"):
        vs.distribute(Plan(MESH), TREE)  # type: ignore[arg-type]
