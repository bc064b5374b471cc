"""Mapped functions that run alike traced and op by op; used on simulated and on real ranks."""

import torch

import vescale as vs
from vescale import P, RaggedShard, Shard

X = torch.arange(30, dtype=torch.float64).view(6, 5) / 7
ROWS, RAGGED = P(dp=Shard(0)), P(dp=RaggedShard((0,), (3, 1, 2, 0)))


def gathered(x):
    return vs.psum(vs.all_gather(x, "dp").sin(), "dp")


def exchanged(x):
    y = vs.all_to_all(x, "dp", 1, 0)
    return vs.all_to_all(y * 2, "dp", 0, 1)


def scattered(x):
    return vs.psum_scatter(vs.all_gather(x, "dp").cos(), "dp", sizes=(3, 1, 2, 0))


def sent(x):
    moved = vs.ppermute(x.sum(), "dp", [(0, 1), (1, 2), (3, 0)])
    return x * vs.broadcast(moved, "dp", root=1) + vs.axis_index("dp") + vs.pmax(x.sum(), "dp")


def slopes(x):
    return vs.grad(lambda w: vs.psum((x * w).sin().sum(), "dp"))(torch.ones((), dtype=x.dtype)).reshape(1)


CASES = {
    "gathered": (gathered, RAGGED, P()),
    "exchanged": (exchanged, P(dp=Shard(0)), P(dp=Shard(0))),
    "scattered": (scattered, RAGGED, RAGGED),
    "sent": (sent, RAGGED, RAGGED),
    "slopes": (slopes, RAGGED, P()),
}


def run(name, mesh, static):
    """The global result of a case."""
    fn, in_spec, out_spec = CASES[name]
    mapped = vs.shard_map(fn, mesh=mesh, in_specs=(in_spec,), out_specs=out_spec, static=static)
    x = X[:4, :4].contiguous() if name == "exchanged" else X
    return mapped(x).full_tensor()
