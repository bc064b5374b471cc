"""Norms, clipping and safe steps over meshes: one reduction for all parameters in whatever layouts."""

import math

import pytest
import torch

import vescale as vs
from tests import gpt
from tests.optimizers import MESHES
from vescale import InterleavedShard, P, Partial, RaggedShard, Shard, _tree
from vescale.optim import (
    all_finite,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    loss_scale,
    sgd,
    skip_if_nonfinite,
)
from vescale.spmd import redistribute
from vescale.spmd.program import binding

INF, NAN = math.inf, math.nan
ORDERS = pytest.mark.parametrize("order", [2.0, INF], ids=str)

# A parameter for each way to lie on two axes, some ranks with nothing.
SPECS = {
    "whole": ((5,), P()),
    "rows": ((3, 4), P(dp=Shard(0))),  # uneven: 2 and 1
    "columns": ((3, 4), P(tp=Shard(1))),
    "both": ((4, 6), P(dp=Shard(0), tp=Shard(1))),
    "ragged": ((8, 3), P(dp=RaggedShard((0,), (3, 1)))),
    "on one": ((4, 4), P(dp=RaggedShard.on_rank(1, 2))),
    "ragged columns": ((6, 4), P(tp=Shard(1), dp=RaggedShard((0,), (0, 1)))),
    "sections": ((8,), P(tp=InterleavedShard(0, 2))),
    "few": ((1, 3), P(dp=Shard(0), tp=Shard(1))),  # ranks without an element
    "none": ((0, 3), P(dp=Shard(0))),
    "scalar": ((), P()),
}


def two_axes():
    return vs.make_mesh({"dp": 2, "tp": 2})


def make_grads(dtypes=(torch.float32,)):
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtypes[seed % len(dtypes)])
        for seed, (name, (shape, _)) in enumerate(SPECS.items())
    }


def placed(grads, mesh):
    return {name: vs.distribute_tensor(g, mesh, SPECS[name][1]) for name, g in grads.items()}


@pytest.fixture
def collectives(monkeypatch):
    """The kinds of the collectives that ranks are about to do."""
    kinds = []

    def counting(real, first):
        def bind(steps, *args, **kwargs):
            before = [*kinds, first(steps).kind]
            bound = real(steps, *args, **kwargs)
            kinds[:] = before  # of several together, where ranks are simulated, each is bound by itself
            return bound

        return bind

    one = lambda step: step  # noqa: E731
    monkeypatch.setattr(binding, "bind", counting(binding.bind, one))
    monkeypatch.setattr(redistribute, "bind_many", counting(redistribute.bind_many, lambda steps: steps[0]))
    monkeypatch.setattr(redistribute, "bind", counting(redistribute.bind, one))
    return kinds


MIXES = {"float32": (torch.float32,), "mixed": (torch.float32, torch.bfloat16, torch.float64)}


@ORDERS
@pytest.mark.parametrize("mix", MIXES)
def test_a_norm_in_a_program_is_one_reduction(mix, order):
    mesh, grads = two_axes(), make_grads(MIXES[mix])
    norm = vs.parallelize(lambda grads: global_norm(grads, order), vs.Plan(mesh))
    ours = placed(grads, mesh)
    (only,) = norm.lower(ours).collectives()
    assert (only.kind, only.axis) == ("all_reduce", "dp+tp")
    expected = global_norm(grads, order)
    found = norm(ours).full_tensor()
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if order == 2 else 0, atol=0)


@ORDERS
@pytest.mark.parametrize("static", [None, False], ids=["outside", "op by op"])
def test_a_norm_of_real_values_is_one_reduction(static, order, collectives):
    mesh, grads = two_axes(), make_grads()
    ours = placed(grads, mesh)
    norm = lambda grads: global_norm(grads, order)  # noqa: E731
    run = norm if static is None else vs.parallelize(norm, vs.Plan(mesh), static=False)
    collectives.clear()
    found = run(ours)
    assert collectives == ["all_reduce"]
    expected = norm(grads)
    torch.testing.assert_close(found.item(), expected.item(), rtol=1e-6 if order == 2 else 0, atol=0)
    torch.testing.assert_close(vs.TensorGroup(ours).norm(order), expected, rtol=1e-6, atol=0)


@ORDERS
def test_pending_reductions_are_finished_together(order, collectives):
    mesh = two_axes()
    parts = {name: [torch.full((3,), rank + 1.0 + n) for rank in range(4)] for n, name in enumerate("ab")}
    spec = P(dp=Partial(), tp=Partial())
    grads = {name: vs.DTensor(xs, mesh, vs.Layout(mesh.abstract, spec, (3,))) for name, xs in parts.items()}
    collectives.clear()
    found = global_norm(grads, order)
    assert collectives == ["all_reduce", "all_reduce"]  # of both tensors, then of the norm
    expected = global_norm({name: sum(xs) for name, xs in parts.items()}, order)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@ORDERS
def test_several_meshes(order, collectives):
    """A reduction for each, and results that each can use."""
    grads = make_grads()
    here, there = two_axes(), vs.make_mesh({"ep": 3})
    ours = placed(grads, here)
    ours["whole"] = vs.distribute_tensor(grads["whole"], there, P(ep=Shard(0)))
    collectives.clear()
    clipped, _ = clip_by_global_norm(0.5, order).update(ours, {}, ours)
    assert collectives == ["all_reduce"] * 2
    expected, _ = clip_by_global_norm(0.5, order).update(grads, {}, grads)
    for name, g in clipped.items():
        assert g.layout is ours[name].layout
        torch.testing.assert_close(g.full_tensor(), expected[name], rtol=1e-6, atol=0)


def test_the_norm_of_dtensors_has_a_gradient():
    mesh = two_axes()
    x = vs.distribute_tensor(torch.tensor([3.0, 4.0]), mesh, P(dp=Shard(0))).requires_grad_()
    global_norm({"x": x}).backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(("axes", "order"), [("2", INF), ("4", 2.0), ("2x2", 2.0), ("2x2", INF)])
def test_a_clipped_gpt_step_under_fsdp(axes, order):
    """One reduction over all axes for the norm, and the gradients of plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = gpt.GPT(1, 16, gpt.CONTEXT).double(), gpt.batch()
    mesh, clip = vs.make_mesh(MESHES[axes]), clip_by_global_norm(0.1, order)
    rules = gpt.TP if "tp" in MESHES[axes] else {}
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))}, fsdp=vs.FSDP("dp", r"blocks\.\d+"))

    def step(params, batch):
        loss_fn = lambda params, batch: torch.func.functional_call(model, params, batch)  # noqa: E731
        _, grads = vs.value_and_grad(loss_fn)(params, batch)
        return clip.update(grads, {}, params)[0]

    params = gpt.parameters(model)
    run, ours = vs.parallelize(step, plan), vs.distribute(params, plan)
    scalars = [c for c in run.lower(ours, batch).collectives() if c.value == "float64[]"]
    assert [c.axis for c in scalars] == ["+".join(MESHES[axes])]
    found = run(ours, batch)
    for name, g in step(params, batch).items():
        torch.testing.assert_close(found[name].full_tensor(), g, rtol=0, atol=1e-12)


# ---- steps that aren't taken


@pytest.mark.parametrize("bad", [None, INF, NAN], ids=str)
@pytest.mark.parametrize("where", ["ragged", "on one", "whole", "few"])
def test_a_value_on_one_rank_skips_the_step_of_all(where, bad):
    mesh, grads, params = two_axes(), make_grads(), make_grads()
    if bad is not None:
        grads[where].view(-1)[-1] = bad
    opt = skip_if_nonfinite(sgd(0.1, 0.9))

    def step(weights, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, weights)
        return apply_updates(weights, updates), opt_state

    run = vs.parallelize(step, vs.Plan(mesh))
    ours, state = placed(params, mesh), opt.init(placed(params, mesh))
    (only,) = run.lower(ours, state, placed(grads, mesh)).collectives()
    assert only.kind == "all_reduce"
    new, after = run(ours, state, placed(grads, mesh))
    same = [torch.equal(new[name].full_tensor(), params[name]) for name in SPECS if name != "none"]
    assert all(same) == (bad is not None)
    assert after["step"].full_tensor().item() == (bad is None)
    assert all_finite(placed(grads, mesh)) == (bad is None)


def test_everything_in_one_chain_takes_two_reductions():
    """The norm of what is clipped, and whether it is finite."""
    mesh, grads = two_axes(), make_grads()
    opt = loss_scale(chain(clip_by_global_norm(1.0), sgd(0.1)), init=4.0)

    def step(weights, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, weights)
        return apply_updates(weights, updates), opt_state

    run, ours = vs.parallelize(step, vs.Plan(mesh)), placed(grads, mesh)
    state = opt.init(ours)
    assert [c.kind for c in run.lower(ours, state, ours).collectives()] == ["all_reduce"] * 2
    new, after = run(ours, state, ours)
    expected, theirs = step(grads, opt.init(grads), grads)
    for name in SPECS:
        torch.testing.assert_close(new[name].full_tensor(), expected[name], rtol=1e-6, atol=1e-7)
    assert [x.full_tensor().item() for x in _tree.leaves(after)] == [x.item() for x in _tree.leaves(theirs)]
