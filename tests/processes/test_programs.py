"""Programs on real ranks: the bits of simulated ones, and an error where ranks disagree, never a hang."""

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, ragged, train_step
from tests.processes.test_world import world_mesh
from vescale import _tree
from vescale._errors import ConsistencyError, PlanError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.program import passes
from vescale.spmd.program.passes import Pass, registry
from vescale.testing.pool import RankPool

pytestmark = pytest.mark.processes

STEPS = 3
RULES = {
    (("dp", 2), ("tp", 2)): ragged(TP, RaggedShard((0,), (5, 3))),
    (("dp", 4),): ragged({}, RaggedShard((0,), (3, 0, 4, 1))),
}


def train(mesh, rules):
    """Every output of some steps, as the ranks of this process hold them: [rank][leaf]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    model, opt = make_model(), vs.optim.adamw(1e-3)
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))})
    step = vs.parallelize(train_step(model, opt), plan, donate=("params", "opt_state"))
    params = vs.distribute(parameters(model), plan)
    state, losses = opt.init(params), []
    for seed in range(STEPS):
        rows = batch(seed)
        if mesh.backend == "processes":  # each rank reads its own
            size = rows.shape[0] // mesh["dp"].size
            rows = rows[mesh.coordinate("dp") * size :][:size]
            rows = vs.from_local(rows, mesh, P(dp=Shard(0)))
        params, state, loss = step(params, state, rows)
        losses.append(loss)
    torch.set_num_threads(threads)
    assert step.cache_info().misses == 1
    leaves = _tree.leaves((params, state, losses))
    return [[leaf.to_local(rank) for leaf in leaves] for rank in mesh.local_ranks]


def train_here(axes):
    (found,) = train(world_mesh(axes), RULES[axes])
    return found


@pytest.mark.parametrize("axes", RULES, ids=str)
def test_a_train_step_has_the_bits_of_simulated_ranks(pool, axes):
    expected = train(vs.make_mesh(dict(axes), backend="simulated"), RULES[axes])
    for there, here in zip(pool.run(train_here, axes), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def train_early(axes):
    """The same, with collectives that start early and are waited for where they are needed."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    passes.register(Pass("early", passes.DECISIONS, lambda data: passes.start_early(data, kinds)))
    try:
        return train_here(axes)
    finally:
        registry.unregister("early")


@pytest.mark.parametrize("axes", RULES, ids=str)
def test_collectives_that_start_early_have_the_same_bits(pool, axes):
    expected = train(vs.make_mesh(dict(axes), backend="simulated"), RULES[axes])
    for there, here in zip(pool.run(train_early, axes), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


# Ranks that disagree. Each job returns the text of its rank's error.


def told(run, *args):
    try:
        run(*args)
    except ConsistencyError as error:
        return str(error)
    return "no error"


def rows_plan():
    return vs.Plan(world_mesh((("dp", 4),)), inputs={"x": P(dp=Shard(0))})


def differing_batch():
    x = torch.ones(8, 2)
    x[0, 0] += dist.get_rank() == 2
    return told(vs.parallelize(lambda x: x.sum(), rows_plan()), x)


def test_a_plain_tensor_that_differs(pool):
    for message in pool.run(differing_batch):
        assert "x on rank 2" in message
        assert "vs.from_local" in message
        assert "call 1 of" in message


def differing_weight():
    weight = torch.ones(2) * (dist.get_rank() == 1)
    return told(vs.parallelize(lambda x: x * weight, rows_plan()), torch.ones(8, 2))


def test_a_closed_over_tensor_that_differs(pool):
    assert all("closed-over tensor 0 on rank 1" in message for message in pool.run(differing_weight))


def branch_on_the_rank(x):
    return x.max() if dist.get_rank() == 3 else x.sum()


def differing_code():
    return told(vs.parallelize(branch_on_the_rank, rows_plan()), torch.ones(8, 2))


def test_a_branch_on_the_rank_inside_the_function(pool):
    for message in pool.run(differing_code):
        assert "collective 0 is" in message
        assert "on rank 0" in message
        assert "on rank 3" in message
        assert "call 1 of branch_on_the_rank" in message


def longer_on_one(x):
    return (x.sum(), x.max()) if dist.get_rank() == 1 else (x.sum(), x.sum())


def longer_sequence():
    return told(vs.parallelize(longer_on_one, rows_plan()), torch.ones(8, 2))


def test_a_collective_more_on_one_rank(pool):
    for message in pool.run(longer_sequence):
        assert "collective 1 is" in message
        assert "rank 1" in message


def differing_shape():
    rows = 8 + 4 * (dist.get_rank() == 2)
    return told(vs.parallelize(lambda x: x.sum(), rows_plan()), torch.ones(rows, 2))


def test_a_shape_that_differs(pool):
    for message in pool.run(differing_shape):
        assert "float32[8,2]" in message
        assert "float32[12,2]" in message
        assert "on rank 2" in message


def differing_static():
    run = vs.parallelize(lambda x, by: x * by, rows_plan())
    return told(run, torch.ones(8, 2), float(dist.get_rank() == 1))


def test_a_static_argument_that_differs(pool):
    for message in pool.run(differing_static):
        assert "by is static 0.0 on rank 0 and static 1.0 on rank 1" in message


def differing_function():
    first, second = (vs.parallelize(fn, rows_plan()) for fn in (branch_on_the_rank, longer_on_one))
    return told(second if dist.get_rank() == 1 else first, torch.ones(8, 2))


def test_other_functions_on_other_ranks(pool):
    for message in pool.run(differing_function):
        assert "branch_on_the_rank" in message
        assert "longer_on_one" in message
        assert "rank 1" in message or "rank 0" in message


def refuses_everywhere():
    x = vs.distribute_tensor(torch.ones(8, 2), world_mesh((("dp", 4),)), P())
    with pytest.raises(PlanError, match=r"x\.redistribute"):
        vs.parallelize(lambda x: x, rows_plan())(x)
    return vs.parallelize(lambda x: x.sum(), rows_plan())(torch.ones(8, 2)).item()


def test_errors_of_one_rank_alone_leave_the_others_in_step(pool):
    assert pool.run(refuses_everywhere) == [16.0] * 4


def one_call_more():
    """Rank 0 runs a program that nobody else runs."""
    run = vs.parallelize(lambda x: x.sum(), rows_plan())
    return told(run, torch.ones(8, 2)) if dist.get_rank() == 0 else "nothing"


def test_a_call_that_one_rank_makes(pool):
    """It says who is missing when the store's patience is over, less than that of the pool."""
    with RankPool(4, timeout=12) as ranks:
        ranks.run(refuses_everywhere)  # a first program takes its time
        first, *others = ranks.run(one_call_more)
    assert "no word from rank 1, 2, 3" in first
    assert "one_call_more" in first
    assert others == ["nothing"] * 3
