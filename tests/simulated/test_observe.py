"""Observed runs: every node's value is seen, and it is the one that plain torch makes of the same graph."""

import pytest
import torch

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, train_step as gpt_step
from tests.toy import WRAP, train_step
from vescale import _tree
from vescale._errors import ArgumentError
from vescale.spmd.observe import observe, observe_plainly, same_bits
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.plan import Staged
from vescale.spmd.program.partition import Map, Move

CUT = RaggedShard((0,), (2, 1))
AT_REST = {r"blocks.*w": Staged(init=P(dp=CUT), run=P())}
PLANS = {
    "dp": ({"dp": 2},),
    "ragged": ({"dp": 2}, AT_REST),
    "fsdp": ({"dp": 2}, {}, vs.FSDP("dp", WRAP)),
    "fsdp-tp": ({"dp": 2, "tp": 2}, {r"blocks.*w": P(tp=Shard(1))}, vs.FSDP("dp", WRAP)),
}


def gpt():
    """A train step of the small GPT, tensor parallel, and its arguments."""
    model, opt = make_model(torch.float64), vs.optim.adamw(1e-3)
    plan = vs.Plan(vs.make_mesh({"tp": 2}, backend="simulated"), TP)
    step = vs.parallelize(gpt_step(model, opt), plan, donate=("params", "opt_state"))
    params = vs.distribute(parameters(model), plan)
    return step, (params, opt.init(params), batch())


@pytest.mark.parametrize("name", ["gpt", *PLANS])
def test_a_train_step(name):
    """The results of the call; every value within rounding of plain torch's; every replica alike."""
    step, args = gpt() if name == "gpt" else train_step(*PLANS[name])
    plain, seen = {}, {}
    expected = observe_plainly(step, args, {}, lambda node: plain.update(node.results))

    def watch(observed):
        for value in observed.results:
            if value.is_filling:
                continue
            assert value.strays() == ()
            if value.source in plain:
                seen[value.source] = observed
                torch.testing.assert_close(
                    value.whole(), plain[value.source], rtol=1e-9, atol=1e-12, equal_nan=True
                )

    results = observe(step, args, {}, watch)
    for ours, theirs in zip(_tree.leaves(results), _tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-9, atol=1e-12)
    called = step(*args)  # donates: what was observed has left the arguments alone
    for ours, theirs in zip(_tree.leaves(results), _tree.leaves(called), strict=True):
        for rank in ours.mesh.local_ranks:
            assert same_bits(ours.to_local(rank), theirs.to_local(rank))
    # Gradients in buffers and a handful of nodes that a rule expands are not seen; the others are.
    assert len(seen) > 0.8 * len(plain)
    nodes = {observed.node for observed in seen.values()} - {None}
    assert len(nodes) > 0.6 * len(plain)


def test_lines_and_layouts():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    def fn(x, w):
        y = x @ w
        return y.sum()

    step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}))
    seen = []
    total = observe(step, (torch.ones(4, 3), torch.ones(3, 2)), {}, seen.append)
    assert total.full_tensor() == 24
    names = [observed.name for observed in seen]
    assert names == ["arguments", "aten.mm.default", "aten.sum.default", "all_reduce over dp"]
    assert [value.name for value in seen[0].results] == ["x", "w"]
    assert "test_observe.py" in seen[1].origin.line
    assert [observed.node for observed in seen] == [None, 0, 1, None]
    assert seen[1].results[0].layout.spec == P(dp=Shard(0))
    assert isinstance(seen[3].step, Move)
    assert seen[2].results[0].source == seen[3].results[0].source
    assert seen[3].operands == seen[2].results


def test_replicas_that_differ_are_strays():
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    pieces = [torch.zeros(3) for _ in range(4)]
    pieces[3][1] = -0.0
    x = vs.from_local(pieces, mesh, P())
    seen = []
    observe(vs.parallelize(lambda x: x + 1, vs.Plan(mesh)), (x,), {}, seen.append)
    assert seen[0].results[0].strays() == (3,)
    assert seen[1].results[0].strays() == ()  # 1 - 0.0 is 1


def test_draws_leave_the_generator_where_the_call_does():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    def fn(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(4, 3).t().reshape(4, 3)

    step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}))
    x = torch.randn(4, 3)
    states, results = [], []
    for run in (
        lambda: step(x).full_tensor(),
        lambda: observe(step, (x,), {}, lambda observed: None).full_tensor(),
        lambda: observe_plainly(step, (x,), {}),
        lambda: fn(x),
    ):
        torch.manual_seed(3)
        results.append(run())
        states.append(torch.get_rng_state())
    assert all(same_bits(result, results[0]) for result in results)
    assert all(torch.equal(state, states[0]) for state in states)


def test_inside_a_mapped_function():
    """Its instructions are seen with local values; plainly it is one node."""
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    @vs.shard_map(mesh=mesh, in_specs=(P(dp=RaggedShard((0,), (3, 1))),), out_specs=P())
    def total(x):
        return vs.psum((x * x).sum(), "dp")

    step = vs.parallelize(lambda x: 2 * total(x + 1), vs.Plan(mesh))
    seen, plain = [], []
    x = torch.arange(4.0)
    assert observe(step, (x,), {}, seen.append).full_tensor() == 60
    inner = [observed for observed in seen if observed.inner is not None]
    assert any(observed.name == "aten.sum.default" for observed in inner)
    assert any(observed.name == "psum over dp" for observed in inner)
    locals = [value.locals for observed in inner for value in observed.results]
    assert [tensor.tolist() for tensor in locals[-2].values()] == [30.0, 30.0]
    with pytest.raises(ArgumentError, match="inside shard_map"):
        inner[0].results[0].whole()
    assert observe_plainly(step, (x,), {}, plain.append) == 60
    mapped = next(observed for observed in seen if isinstance(observed.step, Map) and observed.inner is None)
    assert plain[mapped.node].node.op.name() == "vescale::mapped"


def test_what_is_no_program_is_refused():
    plan = vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"))
    for step in (
        abs,
        vs.parallelize(lambda x: -x, plan, static=False),
        vs.parallelize(torch.nn.ReLU(), plan),
    ):
        with pytest.raises(ArgumentError, match="static=True"):
            observe(step, (torch.ones(2),), {}, lambda observed: None)


def test_an_error_names_the_line():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    step = vs.parallelize(lambda x, at: x[at], vs.Plan(mesh))
    with pytest.raises(IndexError) as caught:
        observe(step, (torch.ones(2), torch.tensor([7])), {}, lambda observed: None)
    assert any("test_observe.py" in note for note in caught.value.__notes__)
