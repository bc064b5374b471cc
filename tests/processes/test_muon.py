"""Muon on real ranks, in one wave and in several: the bits of simulated ones, and of torch.optim.Muon."""

import importlib
from typing import Any

import pytest
import torch

import vescale as vs
from tests.muon_cases import LR, by_torch, draw, equal, step_of
from tests.processes.test_world import world_mesh
from vescale.testing.pool import RankPool

pytestmark = pytest.mark.processes

P, S, R = vs.P, vs.Shard, vs.RaggedShard
SHAPES = [(8, 6), (6, 8), (10, 4), (4, 3, 5), (4, 8)]
PLACED = {
    (("dp", 4),): [
        P(dp=S(0)),
        P(dp=S(1)),
        P(dp=R((0, 1), (3, 0, 30, 7))),
        P(dp=S(0)),
        P(dp=R((0,), (1, 1, 0, 2))),
    ],
    (("dp", 2), ("tp", 2)): [
        P(tp=S(0), dp=R((0,), (1, 3))),
        P(tp=S(1), dp=S(0)),
        P(tp=S(0)),
        P(tp=S(0), dp=R((0, 1), (1, 5))),
        P(dp=R((0, 1), (5, 27))),
    ],
}


def train(mesh, axes, wave_bytes):
    """Parameters after some steps, whole, and the number of collectives to owners."""
    waves: Any = importlib.import_module("vescale.spmd.program.passes.owner_waves")
    before, threads = waves.WAVE_BYTES, torch.get_num_threads()
    waves.WAVE_BYTES = wave_bytes
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    try:
        params = draw(*SHAPES)
        specs = dict(zip(params, PLACED[axes], strict=True))
        plan = vs.Plan(mesh, specs, {f"grads.{name}": spec for name, spec in specs.items()})
        opt = vs.optim.muon(LR)
        step = vs.parallelize(step_of(opt), plan, donate=("params", "opt_state"))
        placed, state = vs.distribute(params, plan), opt.init(vs.distribute(params, plan))
        for seed in (1, 2, 3):
            placed, state = step(placed, state, draw(*SHAPES, seed=seed))
        text = step.lower(placed, state, draw(*SHAPES)).as_text()
        return {name: p.full_tensor() for name, p in placed.items()}, text.count("= start")
    finally:
        waves.WAVE_BYTES = before
        torch.set_num_threads(threads)


def on_ranks(axes, wave_bytes):
    return train(world_mesh(axes), axes, wave_bytes)


@pytest.mark.parametrize("wave_bytes", [1 << 20, 64])
@pytest.mark.parametrize("axes", list(PLACED))
def test_real_ranks_have_the_bits_of_torch(pool: RankPool, axes, wave_bytes):
    results = pool.run(on_ranks, axes, wave_bytes)
    found, starts = results[0]
    params, gradients = draw(*SHAPES), [draw(*SHAPES, seed=seed) for seed in (1, 2, 3)]
    matrices = lambda tree: {name: p for name, p in tree.items() if p.dim() == 2}  # noqa: E731
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        equal(matrices(found), by_torch(matrices(params), list(map(matrices, gradients)), lr=LR))
    finally:
        torch.set_num_threads(threads)
    simulated, same = train(vs.make_mesh(dict(axes), backend="simulated"), axes, wave_bytes)
    equal(found, simulated)
    assert starts == same
    for other, _ in results[1:]:
        equal(other, found)
