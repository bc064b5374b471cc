"""Torch's own random ops on real ranks: each draws alone, and all have the bits of one device."""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from tests.processes.test_world import world_mesh
from vescale import P, Shard

pytestmark = pytest.mark.processes

X = torch.linspace(0.01, 1, 42).view(7, 6)


def noisy(x):
    mask = F.dropout(x, 0.3)
    return mask + torch.randn(7, 6), torch.multinomial(x, 2), torch.randperm(6), torch.rand(7, 6) * mask


def drawn(static):
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    run = vs.parallelize(noisy, vs.Plan(mesh, inputs={"x": P(dp=Shard(0), tp=Shard(1))}), static=static)
    with torch.random.fork_rng():  # other tests of the pool go on from where they were
        torch.manual_seed(5)
        results = [result.full_tensor() for _ in range(2) for result in run(X)]
        return results, torch.get_rng_state()


@pytest.mark.parametrize("static", [True, False])
def test_all_ranks_have_the_bits_of_one_device(pool, static):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = [result for _ in range(2) for result in noisy(X)]
        after = torch.get_rng_state()
    for results, state in pool.run(drawn, static):
        assert all(map(torch.equal, results, expected))
        assert torch.equal(state, after)


def differing(static, draws):
    mesh = world_mesh((("dp", 4),))
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0))})
    run = vs.parallelize(lambda x: F.dropout(x, 0.5) if draws else x * 2, plan, static=static)
    with torch.random.fork_rng():
        torch.manual_seed(torch.distributed.get_rank() // 2)
        try:
            return run(X).full_tensor()
        except vs.VescaleError as error:
            return str(error)


@pytest.mark.parametrize("static", [True, False])
def test_other_seeds_are_one_error_that_names_the_ranks(pool, static):
    for text in pool.run(differing, static, True):
        assert "the default generator on rank 2, 3" in text
        assert "torch.manual_seed" in text
    for result in pool.run(differing, static, False):  # who draws nothing need not care
        assert torch.equal(result, X * 2)


def with_argument():
    mesh = world_mesh((("dp", 4),))
    seed = int(torch.distributed.get_rank() == 1)
    run = vs.parallelize(lambda x, g: x + torch.rand(6, generator=g), vs.Plan(mesh))
    try:
        run(X, torch.Generator().manual_seed(seed))
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_a_generator_that_differs_is_named(pool):
    for text in pool.run(with_argument):
        assert "g on rank 1" in text


def on_a_part():
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    part = mesh["tp"]
    if mesh.rank >= 2:  # the other group doesn't know of it
        return None
    run = vs.parallelize(lambda x: F.dropout(x, 0.5), vs.Plan(part, inputs={"x": P(tp=Shard(0))}))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return run(X).full_tensor()


def test_a_draw_on_a_part_of_the_mesh_is_its_own_affair(pool):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = F.dropout(X, 0.5)
    results = pool.run(on_a_part)
    assert all(torch.equal(result, expected) for result in results[:2])
    assert results[2:] == [None, None]
