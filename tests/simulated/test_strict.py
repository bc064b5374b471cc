"""`strict=True`: what the plan asks for passes, what an op forces is an error that names the way to ask."""

import re

import pytest
import torch
from torch import nn

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, ragged, train_step
from vescale._errors import ShardingError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.program.cause import REASONS

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
X = torch.arange(32.0).view(8, 4)
ROWS = {"x": P(dp=Shard(0))}


def strict(fn, *args, **plan):
    """The collectives of fn under strict."""
    plan = vs.Plan(MESH, **plan)
    lowered = vs.parallelize(fn, plan, strict=True).lower(*args)
    free = vs.parallelize(fn, plan).lower(*args)
    assert lowered.as_text() == free.as_text()  # strict decides nothing
    assert all(c.asked and not c.remedy for c in free.collectives())
    return [(c.kind, c.reason) for c in free.collectives()]


def refused(fn, *args, **plan):
    """What strict says, and what it is about without strict."""
    plan = vs.Plan(MESH, **plan)
    with pytest.raises(ShardingError) as caught:
        vs.parallelize(fn, plan, strict=True)(*args)
    found = vs.parallelize(fn, plan).lower(*args).collectives()
    return str(caught.value), [c for c in found if not c.asked]


@pytest.mark.parametrize(
    "rules", [TP, ragged(TP, RaggedShard((0,), (5, 3)))], ids=["tensor parallel", "ragged at rest"]
)
def test_a_train_step_passes(rules):
    model, opt = make_model(), vs.optim.adamw(1e-3)
    plan = vs.Plan(MESH, rules, {"batch": P(dp=Shard(0))})
    step = vs.parallelize(train_step(model, opt), plan, strict=True)
    params = vs.distribute(parameters(model), plan)
    step(params, opt.init(params), batch())
    reasons = {c.reason for c in step.lower(params, opt.init(params), batch()).collectives()}
    assert reasons <= {"plan", "reduction", "result"}


def test_sequence_parallel_passes():
    """The residual stream is split over tp; what each contraction needs whole is asked for there."""
    model, opt = make_model(), vs.optim.adamw(1e-3)
    split, whole = P(dp=Shard(0), tp=Shard(1)), P(dp=Shard(0))
    stream = {r"blocks\.\d+\.(input|output)": split}
    asked = {r"blocks\.\d+\.(attn|mlp)\.output": split, r"blocks\.\d+\.(attn|mlp)\.input": whole}
    params = parameters(model)

    def found(activations):
        plan = vs.Plan(MESH, TP, {"batch": P(dp=Shard(0))}, activations=activations)
        step = vs.parallelize(train_step(model, opt), plan)
        return step.lower(params, opt.init(params), batch()).collectives()

    forced = [c for c in found(stream) if not c.asked]
    assert {c.kind for c in forced} == {"all_gather"}
    assert "blocks.0.attn" in forced[0].origin
    assert not [c for c in found({**stream, **asked}) if not c.asked]


def test_constraints_results_and_reductions_pass():
    def pinned(x):
        return vs.constrain(x * 2, P(dp=Shard(1))) + 1

    assert strict(pinned, X, inputs=ROWS) == [("all_to_all", "plan")]
    assert strict(lambda x: x + 1, X, inputs=ROWS, outputs={"": P()}) == [("all_gather", "result")]
    assert strict(lambda x: (x.t() @ x).sin(), X, inputs=ROWS) == [("all_reduce", "reduction")]
    assert strict(lambda x: x.sum(), X, inputs=ROWS) == [("all_reduce", "result")]


def test_parameters_that_are_staged_pass():
    params = {"params.w": X}
    step = lambda params, x: vs.value_and_grad(lambda p: (x @ p["w"]).square().sum())(params)  # noqa: E731
    del params
    found = strict(
        step, {"w": torch.ones(4, 4)}, X, params={"w": vs.Staged(init=P(dp=Shard(0)), run=P())}, inputs=ROWS
    )
    assert ("all_gather", "plan") in found
    assert ("reduce_scatter", "plan") in found


def test_mapped_functions_pass():
    mapped = vs.shard_map(lambda x: vs.psum(x, "tp"), mesh=MESH, in_specs=P(tp=Shard(0)), out_specs=P())
    found = strict(lambda x: mapped(x + 1), X, inputs=ROWS)
    assert [reason for _, reason in found] == ["mapped", "called"]


def test_an_op_without_a_rule_is_named():
    message, (one,) = refused(lambda x: torch.block_diag(x * 1), X, inputs=ROWS)
    assert one.reason == "unruled"
    assert "aten.block_diag.default, which has no rule" in message
    assert "test_strict.py" in message
    assert f"({one.bytes:,} bytes to rank 0)" in message
    assert one.remedy in message


def test_a_dim_that_an_op_needs_whole():
    message, (one,) = refused(lambda x: (x * 1).sort(0)[0], X, inputs=ROWS)
    assert one.reason in ("op", "unruled")
    assert "aten.sort" in message
    # The line that it names does it.
    assert "x = vs.constrain(x, vs.P(dp=Shard(1)))" in one.remedy  # no need to gather: columns are whole
    columns = P(dp=Shard(1))
    found = strict(lambda x: vs.constrain(x * 1, columns).sort(0)[0], X, inputs=ROWS)
    assert found == [("all_to_all", "plan")]


def test_operands_in_two_layouts():
    message, (one,) = refused(lambda x, y: x * y, X, X, inputs={"x": P(dp=Shard(0)), "y": P(dp=Shard(1))})
    assert (one.kind, one.reason) == ("all_to_all", "op")
    assert "for aten.mul.Tensor" in message
    name = re.search(r"inputs=\{'(\w)': (vs\.P\(.*?\))\}", one.remedy)
    assert name is not None
    fixed = {"x": P(dp=Shard(0)), "y": P(dp=Shard(1)), name[1]: eval(name[2], {"vs": vs, "Shard": Shard})}
    assert strict(lambda x, y: x * y, X, X, inputs=fixed) == []


def test_a_parameter_that_an_op_gathers():
    def step(params, x):
        return vs.value_and_grad(lambda p: torch.cumprod(p["w"], 0).sum() * x.sum())(params)

    message, found = refused(step, {"w": torch.ones(4)}, X, params={"w": P(dp=Shard(0))})
    assert 'params={r"w": vs.Staged(init=vs.P(dp=Shard(0)), run=vs.P())}' in found[0].remedy
    assert found[0].remedy in message
    staged = {"w": vs.Staged(init=P(dp=Shard(0)), run=P())}
    assert {reason for _, reason in strict(step, {"w": torch.ones(4)}, X, params=staged)} == {"plan"}


class Sorts(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, 0)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Sorts()

    def forward(self, x):
        return self.inner(x * 2)


def test_at_the_border_of_a_module_the_fix_is_a_rule_of_activations():
    model = Outer()
    _, (one,) = refused(lambda x: model(x), X, inputs=ROWS)
    rule = re.search(r'activations=\{r"(.*?)": vs\.P\(dp=Shard\(1\)\)\}', one.remedy)
    assert rule is not None
    assert rule[1] == r"inner\.input"
    found = strict(lambda x: model(x), X, inputs=ROWS, activations={rule[1]: P(dp=Shard(1))})
    assert found == [("all_to_all", "plan")]


def test_many_are_counted():
    def fn(x):
        for _ in range(7):
            x = vs.constrain(torch.cumprod(x, 0), P(dp=Shard(0)))
        return x

    message, found = refused(fn, X, inputs=ROWS)
    assert len(found) == 7
    assert "7 in all" in message
    assert "and 3 more" in message


def test_reasons_are_those_that_are_documented():
    from vescale.spmd.program import cause

    for reason in REASONS:
        assert f"\n    {reason} " in cause.__doc__
