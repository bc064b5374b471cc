"""Train steps with lanes, and what they leave: shared by the tests on simulated ranks and on processes."""

import re

import torch

import vescale as vs
from tests import toy
from tests.gpt import TP, batch, make_model, parameters
from vescale import _tree
from vescale.spmd.placements import P, Shard

STEPS, LANES = 3, 8
RULES = {**TP, r"blocks\.\d+\.w": P(tp=Shard(1))}  # of the GPT, and of the toy model
# The mesh beside dp, the layouts in use, and FSDP over dp. Dropout with FSDP.
CASES = {
    "replicated": ({}, {}, False),
    "fsdp": ({}, {}, True),
    "fsdp, tp inside": ({"tp": 2}, RULES, True),
    "tp outside": ({"tp": 2}, RULES, False),
}


def mesh_of(case, ranks, backend=None):
    beside, *_ = CASES[case]
    axes = {**beside, "dp": ranks} if case == "tp outside" else {"dp": ranks, **beside}
    return vs.make_mesh(axes, backend=backend)


def with_dropout(loss_fn):
    """With numbers drawn by torch and by a key in it."""

    def fn(params, batch):
        first, loss = _tree.leaves(params)[0], loss_fn(params, batch)
        noise = torch.dropout(first * first, 0.5, True).sum()
        return loss + noise * vs.rng.dropout(vs.rng.key(7), batch.to(loss.dtype), 0.5).mean()

    return fn


def train_step(loss_fn, opt):
    """One step: also the loss, the norm by which gradients are clipped, and the gradients."""

    def step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        norm = sum(grad.square().sum() for grad in _tree.leaves(grads)).sqrt()
        clipped = _tree.tree_map(lambda grad: grad / norm.clamp(min=1), grads)
        updates, opt_state = opt.update(clipped, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, (loss, norm, grads)

    return step


def gpt(rows=8):
    """A loss, parameters, batches, and what FSDP wraps."""
    model = make_model()
    loss_fn = lambda params, batch: torch.func.functional_call(model, params, batch)  # noqa: E731
    return loss_fn, parameters(model), [batch(seed)[:rows] for seed in range(STEPS)], r"blocks\.\d+"


def small(rows=16):
    batches = [toy.make_batch(torch.float32, seed)[:rows] for seed in range(STEPS)]
    return toy.loss_fn, toy.make_params(torch.float32), batches, toy.WRAP


def start(mesh, case, model, lanes=LANES, donate=("params", "opt_state")):
    """A step, and what its calls are given."""
    _, rules, fsdp = CASES[case]
    loss_fn, values, batches, wrap = model
    opt, names = vs.optim.adamw(1e-2), _tree.paths(values)
    plan = vs.Plan(
        mesh,
        {rule: spec for rule, spec in rules.items() if any(re.fullmatch(rule, name) for name in names)},
        {"batch": P(dp=Shard(0))},
        fsdp=vs.FSDP("dp", wrap) if fsdp else None,
    )
    fn = train_step(with_dropout(loss_fn) if fsdp else loss_fn, opt)
    step = vs.parallelize(fn, plan, donate=donate, lanes=lanes and {"dp": lanes})
    params = vs.distribute(values, step.plan)
    return step, params, opt.init(params), batches


def train(mesh, case, model, **given):
    """Parameters and optimizer state after some steps, and of each its loss, norm and gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    torch.manual_seed(3)
    step, params, state, batches = start(mesh, case, model, **given)
    kept = []
    for rows in batches:
        params, state, told = step(params, state, rows)
        kept.append([leaf.full_tensor().clone() for leaf in _tree.leaves(told)])
    assert step.cache_info().misses == 1, step.cache_info()
    torch.set_num_threads(threads)
    return [leaf.full_tensor() for leaf in _tree.leaves((params, state))] + _tree.leaves(kept)


def contributions(layout):
    """A piece for each rank, equal where they hold the same, of floats that tell how they were summed."""
    pieces = []
    for rank in range(layout.mesh.size):
        place = [i + 1 if axis in layout.spec else 0 for axis, i in layout.mesh.coordinate(rank).items()]
        seed = torch.Generator().manual_seed(sum(i * 100**at for at, i in enumerate(place)))
        pieces.append(torch.randn(layout.local_shape(rank), generator=seed) * 100)
    return pieces


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
