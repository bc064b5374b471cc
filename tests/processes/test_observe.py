"""Observed runs on real ranks: each sees its own piece, and the whole when all ask for it."""

import pytest
import torch

import vescale as vs
from tests.processes.test_world import world_mesh
from vescale.spmd.observe import observe, observe_plainly
from vescale.spmd.placements import P, Shard

pytestmark = pytest.mark.processes


def product():
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0)), "w": P(tp=Shard(0))})
    step = vs.parallelize(lambda x, w: (x @ w).relu().sum(), plan)
    x, w = torch.arange(12.0).view(4, 3) - 5, torch.arange(6.0).view(3, 2) - 2
    plain, wholes, found = {}, {}, []
    result = observe_plainly(step, (x, w), {}, lambda node: plain.update(node.results))

    def watch(seen):
        for value in seen.results:
            (rank,) = value.locals
            found.append((rank, tuple(value.locals[rank].shape) == value.layout.local_shape(rank)))
            wholes[value.source] = value.whole()

    total = observe(step, (x, w), {}, watch)
    same = all(torch.equal(wholes[value], plain[value]) for value in plain)
    return mesh.rank, found, same and total.full_tensor().item() == result.item()


def test_a_program_observed(pool):
    for rank, (own, found, same) in enumerate(pool.run(product)):
        assert own == rank
        assert found
        assert all(at == (rank, True) for at in found)
        assert same
