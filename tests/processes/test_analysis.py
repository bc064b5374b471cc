"""The memory of a rank that is a process: what the analysis says, buffers of collectives included."""

import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, ragged, train_step
from tests.memory import measured_peak
from tests.processes.test_world import world_mesh
from vescale.spmd.placements import P, RaggedShard, Shard

pytestmark = pytest.mark.processes


@contextmanager
def patient_gloo():
    """gloo's threads let go of buffers a moment after the call: wait for that, or it is counted."""
    real = dist.all_to_all_single

    def patient(*args, **kwargs):
        work = real(*args, **kwargs)
        if work is not None:
            work.wait()
        time.sleep(0.002)
        return work

    dist.all_to_all_single = patient
    try:
        yield
    finally:
        dist.all_to_all_single = real


def peaks(rules, donate):
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    model, opt = make_model(), vs.optim.adamw(1e-3)
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))})
    step = vs.parallelize(train_step(model, opt), plan, donate=donate)
    params = vs.distribute(parameters(model), plan)
    mine = batch()[4 * mesh.coordinate("dp") :][:4]
    args = params, opt.init(params), vs.from_local(mine, mesh, P(dp=Shard(0)))
    with patient_gloo():
        return step.lower(*args).memory_analysis(mesh.rank).peak, measured_peak(step, *args)


RULES = {"tp": TP, "ragged": ragged(TP, RaggedShard((0,), (5, 3)))}


@pytest.mark.parametrize("donate", [(), ("params", "opt_state")], ids=["kept", "donated"])
@pytest.mark.parametrize("rules", RULES)
def test_the_peak_is_what_is_allocated(pool, rules, donate):
    for found, real in pool.run(peaks, RULES[rules], donate):
        assert abs(found / real - 1) < 0.04


def reduction_peak():
    """Of one large all-reduce and one gather along the columns, in which buffers are most of it."""
    mesh, found = world_mesh((("dp", 2), ("tp", 2))), []
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0), tp=Shard(1))})
    for fn in (lambda x: x.sum(0).sin(), lambda x: vs.constrain(x * 2, P())):
        x = vs.distribute_tensor(torch.ones(4, 1 << 18), mesh, P(dp=Shard(0), tp=Shard(1)))
        step = vs.parallelize(fn, plan)
        with patient_gloo():
            found.append((step.lower(x).memory_analysis(mesh.rank).peak, measured_peak(step, x)))
    return found


def test_buffers_of_collectives(pool):
    for rank in pool.run(reduction_peak):
        for found, real in rank:
            assert abs(found / real - 1) < 0.03
