"""shard_map on real values, on real ranks: the bits of simulated ones, and no hang."""

import pytest
import torch

import vescale as vs
from tests.dynamic_map_cases import CASES, run
from tests.processes.test_world import world_mesh
from vescale import P, Shard

pytestmark = pytest.mark.processes


def result(name):
    return run(name, world_mesh((("dp", 4),)), static=False)


@pytest.mark.parametrize("name", CASES)
def test_real_ranks_have_the_bits_of_simulated_ones(pool, name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = run(name, vs.make_mesh({"dp": 4}, backend="simulated"), static=True)
    torch.set_num_threads(threads)
    assert all(torch.equal(found, expected) for found in pool.run(result, name))


def part():
    """Ranks that run different collectives."""

    def fn(x):
        return vs.psum(x, "dp") if vs.axis_index("dp") == 2 else vs.pmax(x, "dp")

    mesh, rows = world_mesh((("dp", 4),)), P(dp=Shard(0))
    try:
        vs.shard_map(fn, mesh=mesh, in_specs=(rows,), out_specs=P(), static=False)(torch.ones(4))
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_ranks_that_part_at_a_collective_are_named(pool):
    for text in pool.run(part):
        assert "rank 2 called psum" in text or "called pmax" in text
        assert "every rank of the mesh makes the same calls" in text
