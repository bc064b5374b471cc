"""Shampoo on real ranks, in one wave and in several: the bits of one device, and statistics kept once."""

import importlib
from typing import Any

import pytest
import torch

import vescale as vs
from tests.muon_cases import draw, equal, step_of
from tests.processes.test_muon import PLACED, SHAPES
from tests.processes.test_world import world_mesh
from tests.shampoo_cases import LR
from vescale import _tree
from vescale.testing.pool import RankPool

pytestmark = pytest.mark.processes

SEEDS = 1, 2, 3


def optimizer():
    return vs.optim.shampoo(LR, update_interval=2, weight_decay=0.1)


def train(axes, wave_bytes):
    """Parameters after some steps, whole; and how many elements of statistics each rank keeps."""
    waves: Any = importlib.import_module("vescale.spmd.program.passes.owner_waves")
    before, threads = waves.WAVE_BYTES, torch.get_num_threads()
    waves.WAVE_BYTES = wave_bytes
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    try:
        params, mesh, opt = draw(*SHAPES), world_mesh(axes), optimizer()
        specs = dict(zip(params, PLACED[axes], strict=True))
        plan = vs.Plan(mesh, specs, {f"grads.{name}": spec for name, spec in specs.items()})
        step = vs.parallelize(step_of(opt), plan, donate=("params", "opt_state"))
        placed = vs.distribute(params, plan)
        state = opt.init(placed)
        for seed in SEEDS:
            placed, state = step(placed, state, draw(*SHAPES, seed=seed))
        assert step.cache_info().misses == 1
        kept = sum(value.to_local().numel() for value in _tree.leaves(state["owned"]))
        return {name: p.full_tensor() for name, p in placed.items()}, kept
    finally:
        waves.WAVE_BYTES = before
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wave_bytes", [1 << 20, 64])
@pytest.mark.parametrize("axes", list(PLACED))
def test_real_ranks_have_the_bits_of_one_device(pool: RankPool, axes, wave_bytes):
    results = pool.run(train, axes, wave_bytes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        params, opt = draw(*SHAPES), optimizer()
        state = opt.init(params)
        for seed in SEEDS:
            params, state = step_of(opt)(params, state, draw(*SHAPES, seed=seed))
    finally:
        torch.set_num_threads(threads)
    for found, _ in results:
        equal(found, params)
    if len(axes) == 1:  # over two axes a rank of each of the other computes the same
        assert sum(kept for _, kept in results) == sum(v.numel() for v in _tree.leaves(state["owned"]))
