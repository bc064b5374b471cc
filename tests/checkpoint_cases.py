"""What tests of checkpoints train, save and compare: a toy with dropout, on many meshes and plans."""

from pathlib import Path

import torch
import torch.nn.functional as F

import vescale as vs
from tests import toy
from vescale import _tree


def cases():
    """name -> (mesh axes, params rules, fsdp)"""
    ragged = lambda w, b: {  # noqa: E731
        r".*\.w": vs.P(dp=vs.RaggedShard((0, 1), w)),
        r".*\.b": vs.P(dp=vs.RaggedShard((0,), b)),
    }
    fsdp = vs.FSDP("dp", toy.WRAP)
    return {
        "4 ragged": ({"dp": 4}, ragged((5, 0, 3, 1), (1, 0, 2, 0)), None),
        "4, other units": ({"dp": 4}, ragged((1, 2, 3, 0), (0, 0, 3, 0)), None),
        "4, fsdp": ({"dp": 4}, {}, fsdp),
        "4, fsdp in tiles": ({"dp": 4}, {}, vs.FSDP("dp", toy.WRAP, block={r".*\.w": vs.Tile(3, 3)})),
        "1": ({"dp": 1}, {}, None),
        "2 ragged": ({"dp": 2}, ragged((1, 2), (1, 2)), None),
        "2 split by columns": ({"dp": 2}, {r"blocks.*\.w": vs.P(dp=vs.Shard(1))}, None),
        "3 ragged": ({"dp": 3}, ragged((0, 5, 1), (0, 0, 1)), None),
        "2x2": (
            {"dp": 2, "tp": 2},
            {
                r"blocks.*\.w": vs.P(tp=vs.Shard(0), dp=vs.RaggedShard((0,), (1, 2))),
                r"head\.w": vs.P(dp=vs.Shard(0), tp=vs.Shard(1)),
            },
            None,
        ),
        "2x2, hsdp": ({"tp": 2, "dp": 2}, {}, vs.FSDP(("tp", "dp"), toy.WRAP)),
    }


def make_plan(mesh, rules, fsdp):
    staged = {rule: vs.Staged(init=spec, run=vs.P()) for rule, spec in rules.items()}
    return vs.Plan(mesh, staged, fsdp=fsdp)


def loss_fn(params, batch):
    x = batch
    for number in range(2):
        block = params["blocks"][str(number)]
        x = F.dropout(torch.tanh(x @ block["w"] + block["b"]), 0.2)
    return (x @ params["head"]["w"] + params["head"]["b"]).square().sum(1).mean()


OPTIMIZER = vs.optim.adamw(1e-2)


def make_step(plan):
    def step(params, state, batch):
        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    return vs.parallelize(step, plan, donate=("params", "state"))


def codes(mesh):
    """What 8-bit state is to a checkpoint: integers and their scales, cut alike."""
    size = mesh.abstract.axis_size("dp")
    cut = vs.P(dp=vs.RaggedShard((0,), (4,) if size == 1 else (1, *[0] * (size - 2), 3)))
    put = lambda value: vs.distribute_tensor(value, mesh, cut)  # noqa: E731
    return {
        "codes": put(torch.arange(256, dtype=torch.uint8).view(16, 16)),
        "scales": put(torch.linspace(1, 2, 4)),
    }


def make_tree(mesh, plan, step=None, steps=2):
    """A trained state of everything that a checkpoint may hold, and the step that made it."""
    torch.manual_seed(7)
    step = step or make_step(plan)
    params = vs.distribute(toy.make_params(torch.float32), plan)
    state = OPTIMIZER.init(params)
    for seed in range(steps):
        params, state, _ = step(params, state, toy.make_batch(torch.float32, seed))
    tree = {
        "params": params,
        "state": state,
        "frozen": vs.distribute_tensor(torch.arange(6).bfloat16(), mesh, vs.P(dp=uneven(mesh))),
        "eight_bit": codes(mesh),
        "empty": vs.distribute_tensor(torch.empty(0, 3), mesh, vs.P(dp=vs.Shard(0))),
        "scalar": vs.distribute_tensor(torch.tensor(3.5, dtype=torch.float64), mesh, vs.P()),
        "rng": {"key": vs.rng.key(5), "torch": torch.get_rng_state()},
        "generator": torch.Generator().manual_seed(3),
        "step": steps,
        "history": [0.1, float("inf"), True, "a b"],
    }
    return tree, step


def uneven(mesh):
    """6 elements over the ranks of dp, some with none."""
    size = mesh.abstract.axis_size("dp")
    return vs.RaggedShard((0,), {1: (6,), 2: (1, 5), 3: (4, 0, 2), 4: (1, 0, 2, 3)}[size])


def abstract_tree(mesh, plan):
    """A tree like that of `make_tree`, on this mesh, without values."""
    shapes = _tree.tree_map(lambda p: p.to("meta"), toy.make_params(torch.float32))
    params = vs.checkpoint.abstract(shapes, plan)
    return {
        "params": params,
        "state": OPTIMIZER.init(params),
        "frozen": vs.distribute_tensor(torch.zeros(6).bfloat16(), mesh, vs.P(dp=vs.Shard(0))),
        "eight_bit": {
            "codes": vs.distribute_tensor(torch.zeros(16, 16, dtype=torch.uint8), mesh, vs.P(dp=vs.Shard(1))),
            "scales": torch.zeros(4),
        },
        "empty": vs.distribute_tensor(torch.empty(0, 3), mesh, vs.P()),
        "scalar": torch.empty((), dtype=torch.float64, device="meta"),
        "rng": {"key": vs.rng.key(0), "torch": torch.get_rng_state()},
        "generator": torch.Generator(),
        "step": 0,
        "history": [0.0, 0.0, False, ""],
    }


def values(tree):
    """Every leaf by path, as a plain global tensor or value."""
    paths, leaves, _ = _tree.flatten_with_path(tree)
    found = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, vs.DTensor):
            leaf = leaf.full_tensor()
        found[path] = leaf.get_state() if isinstance(leaf, torch.Generator) else leaf
    return found


def same(a, b):
    """Whether two trees have the same leaves, to the bit."""
    ours, theirs = values(a), values(b)
    if ours.keys() != theirs.keys():
        return False
    return all(equal(ours[path], theirs[path]) for path in ours)


def equal(x, y):
    if isinstance(x, torch.Tensor):
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)]
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(*flat)
    return type(x) is type(y) and x == y


def size_of(path):
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def odd_tensors(mesh, fill=None):
    """6 elements over 4 ranks, empty ranks, no elements, 0-d, replicas, many boxes."""
    make = lambda value, spec: vs.distribute_tensor(  # noqa: E731
        value if fill is None else torch.full_like(value, fill), mesh, spec
    )
    return {
        "six": make(torch.arange(6.0), vs.P(dp=vs.Shard(0))),
        "ragged": make(torch.arange(60.0).view(3, 4, 5), vs.P(dp=vs.RaggedShard((0, 1, 2), (13, 0, 29, 18)))),
        "none": make(torch.zeros(0, 3), vs.P(dp=vs.Shard(0))),
        "scalar": make(torch.tensor(2.5), vs.P()),
        "whole": make(torch.arange(64.0).view(8, 8), vs.P()),
        "on one": make(torch.arange(4.0), vs.P(dp=vs.RaggedShard.on_rank(2, 4))),
        "columns": make(torch.arange(32.0).view(4, 8), vs.P(dp=vs.InterleavedShard(1, 2))),
    }
