"""`vs.parallelize` on simulated ranks: what comes back, what is kept, and what it refuses."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, ragged, train_step
from vescale import _tree
from vescale._errors import ArgumentError, LayoutError, PlanError, TraceError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Replicate, Shard

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ROWS = vs.Plan(MESH, inputs={"x": P(dp=Shard(0))})
X = torch.arange(8.0).view(4, 2)


def full(tree):
    return _tree.tree_map(lambda x: x.full_tensor() if isinstance(x, vs.DTensor) else x, tree)


def assert_equal(ours, theirs):
    ours, theirs = _tree.leaves(full(ours)), _tree.leaves(theirs)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def gpt(mesh, rules, dtype=torch.float32, **options):
    """The step for one device, the sharded one, and its parameters and state."""
    model, opt = make_model(dtype), vs.optim.adamw(1e-3)
    step = train_step(model, opt)
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))})
    params = vs.distribute(parameters(model), plan)
    return step, vs.parallelize(step, plan, **options), params, opt.init(params)


# A train step.


def test_one_rank_has_the_bits_of_plain_torch():
    mesh = vs.make_mesh({"dp": 1, "tp": 1}, backend="simulated")
    plain, step, params, state = gpt(mesh, TP)
    theirs = full(params), full(state)
    for seed in range(3):
        *ours, loss = step(params, state, batch(seed))
        *theirs, expected = plain(*theirs, batch(seed))
        assert_equal((ours, loss), (theirs, expected))
        params, state = ours


@pytest.mark.parametrize("rules", [TP, ragged(TP, RaggedShard((0,), (5, 3)))], ids=["tp", "ragged"])
def test_a_train_step_is_a_fixed_point(rules):
    plain, step, params, state = gpt(MESH, rules, torch.float64)
    theirs = full(params), full(state)
    layouts = [leaf.layout for leaf in _tree.leaves(params)] * 3 + [Layout(MESH.abstract, P(), ())]
    for seed in range(3):
        params, state, loss = step(params, state, batch(seed))
        assert [leaf.layout for leaf in _tree.leaves((params, state))] == layouts
        *theirs, expected = plain(*theirs, batch(seed))
        # Sums over ranks are made in another order; AdamW's m / sqrt(v) blows that up where v is tiny.
        assert abs(loss.item() - expected.item()) < 1e-12 * abs(expected.item())
        for ours, other in zip(_tree.leaves(full(params)), _tree.leaves(theirs[0])):
            assert (ours - other).abs().max() < 1e-7
    assert step.cache_info().misses == 1
    assert step.cache_info().hits == 2


def test_optimizer_state_takes_its_parameters_layout():
    """Plain tensors too, on their way in; the step of the optimizer, a scalar, is whole."""
    _, step, params, state = gpt(MESH, ragged(TP, RaggedShard((0,), (5, 3))))
    for given in (state, full(state)):
        _, found, _ = step(params, given, batch())
        for moment in ("exp_avg", "exp_avg_sq"):
            for name, tensor in found[moment].items():
                assert tensor.layout is params[name].layout
        assert found["step"].layout.spec == P()


def test_what_ends_in_a_parameters_path_and_has_another_shape_is_whole():
    plan = vs.Plan(MESH, {"w": P(dp=Shard(0))})
    step = vs.parallelize(lambda params, state: (params, state), plan)
    _, state = step({"w": X}, {"a": {"w": X}, "b": {"w": X[:3]}, "w": X * 2})
    assert state["a"]["w"].layout.spec == state["w"].layout.spec == P(dp=Shard(0))
    assert state["b"]["w"].layout.spec == P()


def test_results_mirror_arguments_of_their_structure_and_shapes():
    plan = vs.Plan(MESH, inputs={"tree.a": P(dp=Shard(0)), "tree.b": P(tp=Shard(1))})

    @vs.parallelize(plan)
    def step(tree):
        return {"new": {"b": tree["b"] + 1, "a": tree["a"] * tree["b"].sum()}, "other": tree["a"].t()}

    found = step({"a": X, "b": X})
    assert found["new"]["a"].layout.spec == P(dp=Shard(0))
    assert found["new"]["b"].layout.spec == P(tp=Shard(1))
    assert found["other"].layout.spec == P(dp=Shard(1))  # it stays where it is
    assert_equal(found["new"], {"a": X * X.sum(), "b": X + 1})


def test_results_go_where_the_plan_says():
    plan = vs.Plan(MESH, inputs={"x": P(dp=Shard(0))}, outputs={"0": P(tp=Shard(0)), "1": P()})
    sharded, whole, stays = vs.parallelize(lambda x: (x + 1, x + 2, x + 3), plan)(X)
    assert (sharded.layout.spec, whole.layout.spec) == (P(tp=Shard(0)), P())
    assert stays.layout.spec == P(dp=Shard(0))
    assert_equal((sharded, whole, stays), (X + 1, X + 2, X + 3))


def test_no_result_is_pending():
    assert vs.parallelize(lambda x: x.sum(0), ROWS)(X).layout.spec == P()


# Donation.


def test_donated_arguments_are_used_up():
    _, step, params, state = gpt(MESH, TP, donate=("params", "opt_state"))
    new, *_ = step(params, state, batch())
    for gone in (params["head.weight"], state["exp_avg"]["head.weight"]):
        with pytest.raises(ArgumentError, match="given away") as caught:
            gone.full_tensor()
        assert "call 1 of" in str(caught.value)
    with pytest.raises(ArgumentError, match=r"argument 'params\.head\.weight'"):
        params["head.weight"] + 1
    new["head.weight"].full_tensor()


def test_plain_tensors_are_never_used_up():
    double = vs.parallelize(lambda x: x * 2, ROWS, donate=("x",))
    assert_equal([double(X), double(X)], [X * 2, X * 2])


def test_only_arguments_are_donated():
    with pytest.raises(ArgumentError, match=r"donate=\['y'\](.|\n)*arguments are x"):
        vs.parallelize(lambda x: x, ROWS, donate=("y",))


# Arguments.


def test_static_arguments_are_part_of_the_signature():
    scaled = vs.parallelize(lambda x, by, kind="mul": x * by if kind == "mul" else x + by, ROWS)
    assert_equal([scaled(X, 2), scaled(X, 2, kind="add"), scaled(X, 3)], [X * 2, X + 2, X * 3])
    assert scaled.cache_info().misses == 3
    assert_equal(scaled(X, by=3, kind="mul"), X * 3)
    assert "structure" in scaled.cache_info().reasons[1] or "argument names" in scaled.cache_info().reasons[1]


def test_a_number_that_changes_is_a_miss_that_says_so():
    scaled = vs.parallelize(lambda x, by: x * by, ROWS)
    for by in (1.0, 2.0, 1.0):
        scaled(X, by)
    assert scaled.cache_info().hits == 1
    assert scaled.cache_info().reasons[1].startswith("leaf 1: ")


def test_true_is_not_one():
    kinds = vs.parallelize(lambda x, flag: x + (10 if flag is True else 0), ROWS)
    assert_equal([kinds(X, 1), kinds(X, True)], [X, X + 10])


def test_keyword_arguments_in_any_order():
    minus = vs.parallelize(lambda x, *, y, z=0: x - y + z, ROWS)
    assert_equal([minus(X, y=X * 2, z=1), minus(z=1, y=X * 2, x=X)], [1 - X, 1 - X])


def test_variable_arguments():
    total = vs.parallelize(
        lambda *xs, **named: sum(xs) + named["last"], vs.Plan(MESH, inputs={"xs": P("dp")})
    )
    assert_equal(total(X, X, last=X), X * 3)
    assert_equal(total(X, last=X), X * 2)


@_tree.register
@dataclass(frozen=True)
class State:
    x: object
    count: object


class Pair(NamedTuple):
    first: object
    second: object


def test_trees_come_back_as_they_are():
    plan = vs.Plan(MESH, inputs={"state.x": P(dp=Shard(0)), "pair.second.0": P(tp=Shard(1))})

    @vs.parallelize(plan)
    def step(state, pair, nothing):
        assert nothing is None
        return replace(state, count=state.count + 1), Pair(None, [pair.second[0] * 2, "static", ()])

    state, pair = step(State(X, torch.tensor(3)), Pair(None, [X, {}]), None)
    assert type(state) is State
    assert state.x.layout.spec == P(dp=Shard(0))
    assert state.count.item() == 4
    assert type(pair) is Pair
    assert pair.first is None
    assert pair.second[1:] == ["static", ()]
    assert pair.second[0].layout.spec == P(tp=Shard(1))
    assert_equal(pair.second[0], X * 2)


def test_the_same_tensor_twice_is_two_arguments():
    minus = vs.parallelize(lambda x, y: x - 2 * y, ROWS)
    x = vs.distribute_tensor(X, MESH, P(dp=Shard(0)))
    assert_equal(minus(x, x), -X)
    assert_equal(minus(X, X), -X)


def test_an_unhashable_static_argument():
    with pytest.raises(ArgumentError, match="bytearray"):
        vs.parallelize(lambda x, y: x, ROWS)(X, bytearray())
    with pytest.raises(ArgumentError, match="from_numpy") as caught:
        vs.parallelize(lambda x, y: x, ROWS)(X, torch.ones(100, 100).numpy())
    assert len(str(caught.value)) < 400  # not the whole array


def test_strided_arguments():
    run = vs.parallelize(lambda x: x.view(-1) * 2, vs.Plan(MESH))
    x = vs.from_local([X.t()] * 4, MESH, P())
    assert_equal(run(X.t()), X.t().reshape(-1) * 2)
    assert_equal(run(x), X.t().reshape(-1) * 2)


# What a program depends on besides its arguments.


def test_evaluation_mode_does_not_meet_the_program_of_training():
    model = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=True).eval(), nn.Dropout(0.5)
    )
    model.eval()
    run = vs.parallelize(lambda x: model(x), ROWS)
    assert_equal(run(X), model(X))
    model[2].p = 0.25  # a changed attribute is a changed program
    run(X)
    assert run.cache_info().misses == 2
    model[2].train()
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert_equal(run(X), expected)  # and not the program of before


def test_both_of_two_modules_are_watched():
    first, second = nn.Softplus(), nn.Softplus(beta=3)
    run = vs.parallelize(lambda x: second(first(x)), ROWS)
    run(X)
    first.beta = 2
    assert torch.allclose(run(X).full_tensor(), second(first(X)))


def test_modes_are_part_of_the_signature():
    run = vs.parallelize(lambda x: x @ x.t() + torch.zeros(()), ROWS)
    run(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(X).dtype == (X @ X.t() + torch.zeros(())).dtype
    assert run.cache_info().misses == 2
    assert "mode" in run.cache_info().reasons[1]


def test_closed_over_tensors_are_read_at_each_call():
    weight = torch.ones(2)
    run = vs.parallelize(lambda x: x * weight, ROWS)
    assert_equal(run(X), X)
    weight.fill_(3)
    assert_equal(run(X), X * 3)
    assert run.cache_info().misses == 1


def test_a_module_that_is_called_on_its_own_parameters():
    model = nn.Linear(2, 3)
    run = vs.parallelize(lambda x: model(x), ROWS)
    assert_equal(run(X), model(X).detach())


# Randomness.

PLACEMENTS = [
    P(),
    P(dp=Shard(0)),
    P(dp=Shard(1), tp=Shard(0)),
    P(tp=Shard(0), dp=Shard(0)),
    P(tp=InterleavedShard(1, 3)),
    P(tp=InterleavedShard(0, (3, 4)), dp=Shard(1)),
    P(dp=RaggedShard((0, 1), (5, 37))),
    P(tp=Shard(1), dp=RaggedShard((0,), (3, 4))),
    P(dp=RaggedShard.on_rank(1, 2)),
]


@pytest.mark.parametrize("draw", [vs.rng.normal, vs.rng.uniform], ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", PLACEMENTS, ids=str)
def test_keyed_draws_are_those_of_one_device(draw, spec):
    def fn(key):
        first, second = vs.rng.split(key)
        return draw(first, (7, 6)), draw(vs.rng.fold_in(second, 3), (7, 6)) * 2 + 1

    run = vs.parallelize(fn, vs.Plan(MESH, outputs={"": spec}))
    found = run(vs.rng.key(7))
    assert [x.layout.spec for x in found] == [Layout(MESH.abstract, spec, (7, 6)).spec] * 2
    assert_equal(found, fn(vs.rng.key(7)))
    assert not run.lower(vs.rng.key(7)).collectives()  # each rank draws its own elements only


def test_noise_is_drawn_where_it_is_added():
    run = vs.parallelize(lambda x, key: x + vs.rng.normal(key, x.shape), ROWS)
    assert_equal(run(X, vs.rng.key(0)), X + vs.rng.normal(vs.rng.key(0), X.shape))
    lowered = run.lower(X, vs.rng.key(0))
    assert not lowered.collectives()
    assert "float32[4,2] {dp=Shard(0)} = " in lowered.as_text()


# Pinned values.


def test_constrain_moves_a_value():
    run = vs.parallelize(lambda x: vs.constrain(x * 2, P(tp=Shard(0))), ROWS)
    found = run(X)
    assert found.layout.spec == P(tp=Shard(0))
    assert_equal(found, X * 2)
    assert [c.kind for c in run.lower(X).collectives()] in (["all_gather"], ["all_to_all"])


def test_constrain_pins_the_gradient_too():
    def fn(x):
        return vs.value_and_grad(lambda x: (vs.constrain(x, P()) ** 2).sum())(x)

    value, gradient = vs.parallelize(fn, vs.Plan(MESH, inputs={"x": P(dp=Shard(0))}))(X)
    assert gradient.layout.spec == P()
    assert_equal((value, gradient), ((X**2).sum(), 2 * X))


def test_constrain_under_vmap_is_one_of_each_slice():
    """In the order of the slice's own dims, whichever dim is mapped; no warning of a missing rule."""

    def each(x):
        return vs.vmap(lambda row: vs.constrain(row.exp(), P(tp=Shard(0))), 1)(x)

    run = vs.parallelize(each, ROWS)
    found = run(X)
    assert torch.equal(found.full_tensor(), each(X))
    assert found.layout.spec == P(tp=Shard(1))


def test_a_constraint_is_a_placement():
    with pytest.raises(ArgumentError, match=r"P of placements by axis name"):
        vs.parallelize(lambda x: vs.constrain(x, Shard(0)), ROWS)(X)  # type: ignore[arg-type]


def test_activations_are_pinned_by_module_path():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = vs.Plan(MESH, inputs={"x": P()}, activations={r"1\.(input|output)": P(dp=Shard(0), tp=Shard(1))})
    run = vs.parallelize(lambda x: model(x), plan)
    # A wider sum is made in two halves: at most a rounding of each of the 4 products.
    assert torch.allclose(run(X).full_tensor(), model(X), rtol=1e-6, atol=1e-6)
    assert "{dp=Shard(0), tp=Shard(1)} = aten.relu" in run.lower(X).as_text()


def test_activation_rules_that_match_nothing():
    plan = vs.Plan(MESH, activations={r"layers\.\d\.output": P()})
    model = nn.Sequential(nn.Linear(2, 4))
    with pytest.raises(PlanError, match=r"layers.*near: .*0\.output"):
        vs.parallelize(lambda x: model(x), plan)(X)


def test_an_activation_rule_for_an_input_that_is_passed_by_name():
    """It can't be pinned there: the rule would be silently without effect."""
    model = nn.Linear(2, 4)
    plan = vs.Plan(MESH, activations={r"\.input": P()})
    with pytest.raises(PlanError, match=r"match nothing(.|\n)*by position"):
        vs.parallelize(lambda x: model(input=x), plan)(X)
    vs.parallelize(lambda x: model(x), plan)(X)


# Looking inside.


def test_the_text_of_a_program():
    run = vs.parallelize(
        lambda x, w: (x @ w).relu().sum(),
        vs.Plan(MESH, inputs={"x": P(dp=Shard(0), tp=Shard(1)), "w": P(tp=Shard(0))}),
    )
    text = run.lower(X, torch.ones(2, 3)).as_text()
    assert text.startswith("mesh dp=2xtp=2\ninput  v0: float32[4,2] {dp=Shard(0), tp=Shard(1)}\n")
    assert "{dp=Shard(0), tp=Partial('sum')} = aten.mm.default(v0," in text
    assert "all_reduce over tp" in text
    assert "test_parallelize.py:" in text
    assert text.splitlines()[-1].startswith("return v")


def test_collectives_say_what_moves_and_why():
    run = vs.parallelize(lambda x: x.sum(), ROWS)
    (one,) = run.lower(X).collectives()
    assert (one.kind, one.axis, one.axes, one.value) == ("all_reduce", "dp", ("dp",), "float32[]")
    assert one.bytes == 4  # a rank receives the other's scalar
    assert one.cause == "result"
    assert "test_parallelize.py:" in one.origin
    assert "all_reduce" in str(run.lower(X).collectives()).splitlines()[1]


def test_lowering_runs_nothing():
    run = vs.parallelize(lambda x: x + 1, ROWS, donate=("x",))
    x = vs.distribute_tensor(X, MESH, P(dp=Shard(0)))
    assert "aten.add.Tensor" in run.lower(x).as_text()
    assert_equal(x, X)
    assert run.cache_info().misses == 0


def test_an_op_without_a_rule_runs_whole_and_says_so():
    run = vs.parallelize(lambda x: torch.block_diag(x) + 1, ROWS)
    assert_equal(run(X), torch.block_diag(X) + 1)
    (gather,) = run.lower(X).collectives()
    assert gather.kind == "all_gather"
    assert "aten.block_diag.default, which has no rule and runs whole" in gather.cause


# What is refused, before anything moves.


def test_rules_that_match_nothing():
    model = make_model()
    step = vs.parallelize(lambda params: params, vs.Plan(MESH, {r"block\.\d+\.attn\.qkv\.weight": P()}))
    with pytest.raises(PlanError, match=r"match no parameter.*near: blocks\.\d\.attn\.qkv\.weight"):
        step(parameters(model))


def test_rules_without_a_parameter_argument():
    with pytest.raises(PlanError, match=r"params_arg='weights'"):
        vs.parallelize(lambda weights: weights, vs.Plan(MESH, {".*": P()}))({"w": X})


def test_inputs_that_match_nothing():
    with pytest.raises(PlanError, match=r"inputs key 'xs'(.|\n)*near: x"):
        vs.parallelize(lambda x: x, vs.Plan(MESH, inputs={"xs": P()}))(X)


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(LayoutError, match=r"axis 'pp'(.|\n)*the axes dp, tp"):
        vs.Plan(MESH, {"w": P(pp=Shard(0))})
    with pytest.raises(LayoutError, match="axis 'pp'"):
        vs.parallelize(lambda x: vs.constrain(x, P(pp=Shard(0))), ROWS)(X)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P(dp=RaggedShard((0,), (1, 1, 2))), "units for 3 ranks"),
        (P(dp=RaggedShard((0,), (1, 2))), "4 prefix rows for 3 units"),
        (P(dp=Shard(2)), r"shape \(4, 2\)"),
        (P(dp=Partial("max"), tp=Partial()), "different reductions"),
    ],
)
def test_placements_that_do_not_fit(spec, words):
    step = vs.parallelize(lambda params: params, vs.Plan(MESH, {".*": spec}))
    with pytest.raises(PlanError, match=rf"w of shape \(4, 2\): (.|\n)*{words}"):
        step({"w": X})


def test_a_layout_that_differs_from_the_plans():
    x = vs.distribute_tensor(X, MESH, P(tp=Shard(0)))
    with pytest.raises(PlanError, match=r"x has the layout P\(tp=Shard\(0\)\)") as caught:
        vs.parallelize(lambda x: x, ROWS)(x)
    assert "x.redistribute(vs.P(dp=Shard(0)))" in str(caught.value)
    assert "vs.distribute(..., plan)" in str(caught.value)


def test_a_layout_that_differs_from_the_plans_on_a_later_call():
    run = vs.parallelize(lambda x: x, ROWS)
    run(vs.distribute_tensor(X, MESH, P(dp=Shard(0))))
    for other in (P(), P(tp=Shard(0)), P(dp=Shard(1))):
        with pytest.raises(PlanError, match="has the layout"):
            run(vs.distribute_tensor(X, MESH, other))


def test_another_mesh_object():
    x = vs.distribute_tensor(X, vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated"), P(dp=Shard(0)))
    with pytest.raises(PlanError, match="the plan's mesh object"):
        vs.parallelize(lambda x: x, ROWS)(x)


def test_control_flow_on_a_value():
    def fn(x):
        return x if x.sum() > 0 else -x  # the line

    with pytest.raises(TraceError, match=r"test_parallelize\.py:\d+ in fn(.|\n)*torch\.where"):
        vs.parallelize(fn, ROWS)(X)


def test_mutation_of_an_argument():
    def fn(tree):
        tree["w"].mul_(2)
        return tree

    with pytest.raises(TraceError, match=r"argument 'tree\.w'(.|\n)*test_parallelize\.py:\d+ in fn"):
        vs.parallelize(fn, vs.Plan(MESH))({"w": X.clone()})


def test_mutation_of_what_is_closed_over():
    weight = torch.ones(2)

    def fn(x):
        weight.mul_(2)
        return x

    with pytest.raises(TraceError, match=r"closed-over tensor of shape \(2,\)(.|\n)*in fn"):
        vs.parallelize(fn, ROWS)(X)


def test_a_failed_call_leaves_nothing_behind():
    fails = [True]

    def fn(x):
        if fails:
            raise KeyError("on purpose")
        return x + 1

    run = vs.parallelize(fn, ROWS)
    with pytest.raises(KeyError):
        run(X)
    fails.clear()
    assert_equal(run(X), X + 1)
    assert run.cache_info().misses == 1


def test_what_is_no_plan_or_no_function():
    with pytest.raises(ArgumentError, match=r"second argument is a vs\.Plan"):
        vs.parallelize(lambda x: x, MESH)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="first argument is a function"):
        vs.parallelize(3, ROWS)  # type: ignore[arg-type]


def test_it_reads_like_the_function():
    @vs.parallelize(ROWS)
    def double(x):
        """Twice."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert_equal(double.__wrapped__(X), X * 2)


def test_replicate_may_be_written_out():
    run = vs.parallelize(lambda x: x, vs.Plan(MESH, inputs={"x": P(dp=Replicate())}))
    assert run(vs.distribute_tensor(X, MESH, P())).layout.spec == P()


def test_a_function_of_no_tensors():
    run = vs.parallelize(lambda n: n * 2, vs.Plan(MESH))
    assert run(3) == 6
    assert not run.lower(3).collectives()


def test_an_argument_that_is_not_dense():
    with pytest.raises(ArgumentError, match=r"x, a tensor of torch.sparse_coo(.|\n)*to_dense"):
        vs.parallelize(lambda x: x, vs.Plan(MESH))(torch.eye(4).to_sparse())


def test_a_set_of_results():
    with pytest.raises(TraceError, match="a result of type set"):
        vs.parallelize(lambda x: {x * 2}, vs.Plan(MESH))(X)
