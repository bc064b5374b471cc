"""`vs.parallelize(..., static=False)` on real ranks: the bits of simulated ones, and of static mode."""

import pytest
import torch

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, train_step
from tests.processes.test_world import world_mesh
from vescale import P, Shard, _tree

pytestmark = pytest.mark.processes
AXES = (("dp", 2), ("tp", 2))


def trained(mesh, static):
    plan = vs.Plan(mesh, TP, {"batch": P(dp=Shard(0))})
    model, opt = make_model(), vs.optim.adamw(1e-3)
    step = vs.parallelize(train_step(model, opt), plan, static=static)
    params = vs.distribute(parameters(model), plan)
    state = opt.init(params)
    for seed in range(2):
        params, state, loss = step(params, state, batch(seed))
    return [leaf.full_tensor() for leaf in _tree.leaves((params, state, loss))]


def trained_here(static):
    return trained(world_mesh(AXES), static)


def test_a_step_has_the_bits_of_simulated_ranks_and_of_static_mode(pool):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = trained(vs.make_mesh(dict(AXES), backend="simulated"), static=True)
    torch.set_num_threads(threads)
    for static in (True, False):
        for found in pool.run(trained_here, static):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def branches(mesh):
    """Control flow on values: they are global, so ranks take the same branch."""

    def fn(x):
        while (total := x.sum()).item() > 1:
            x = x / 2 if x.max() > 0.5 else x / 4
        return total

    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0))})
    return vs.parallelize(fn, plan, static=False)(torch.arange(8.0)).full_tensor()


def branches_here():
    return branches(world_mesh(AXES))


def test_control_flow_on_values(pool):
    expected = branches(vs.make_mesh(dict(AXES), backend="simulated"))
    assert all(torch.equal(found, expected) for found in pool.run(branches_here))


def other_inputs():
    mesh = world_mesh(AXES)
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0))})
    try:
        vs.parallelize(lambda x: x.sum(), plan, static=False)(
            torch.full((4,), torch.distributed.get_rank() // 3)
        )
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_plain_inputs_are_compared_on_a_first_call(pool):
    for text in pool.run(other_inputs):
        assert "x" in text
        assert "from_local" in text or "rank" in text
