"""The harness on real ranks: they have the bits of simulated ones, and where they don't the instruction is
named."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import vescale as vs
from tests.faults import Backwards
from vescale._errors import ArgumentError
from vescale.spmd import redistribute
from vescale.spmd.placements import P, Shard

pytestmark = pytest.mark.processes


def train(params, x):
    def loss(params):
        return F.dropout(torch.tanh(x @ params["w"]), 0.5).square().sum()

    value, gradients = vs.value_and_grad(loss)(params)
    return {"w": params["w"] - 0.1 * gradients["w"]}, value


def arguments():
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(8, 8, generator=generator)}, torch.randn(16, 8, generator=generator)]


def plan(**axes):
    mesh = vs.make_mesh(axes, backend="simulated")
    return vs.Plan(mesh, {"w": P(tp=Shard(1))} if "tp" in axes else {}, {"x": P(dp=Shard(0))})


def test_a_train_step_on_real_ranks(pool):
    found = vs.testing.assert_consistent(
        train,
        arguments(),
        {"both": plan(dp=2, tp=2)},
        bitwise=False,
        steps=2,
        donate=["params"],
        processes=pool,
    )
    assert len(found.runs) == 4
    assert found.runs[-1] == "both on dp=2xtp=2, op by op, real processes"
    assert found.compared == 2 * 2 * (1 + 4) * 2  # modes, steps, simulated and four real ranks, leaves


def backwards_on_real_ranks(params, x):
    """The fault: real ranks add up in another order, from the first call on."""
    if dist.is_initialized():
        redistribute.Reduction = Backwards
    return train(params, x)


def mend():
    redistribute.Reduction = Backwards.__base__


def test_another_order_on_real_ranks_is_named(pool):
    with pytest.raises(vs.testing.Inconsistent, match="has other bits than the simulated rank") as caught:
        vs.testing.assert_consistent(
            backwards_on_real_ranks,
            arguments(),
            plan(dp=4),
            bitwise=False,
            static=[True],
            processes=pool,
        )
    pool.run(mend)
    found = caught.value
    assert found.run.endswith("static, real processes")
    assert found.divergence.op == "all_reduce over dp"
    assert "test_harness.py:" in found.divergence.line


def test_what_cannot_be_sent_is_told(pool):
    with pytest.raises(ArgumentError, match="at the top of a module"):
        vs.testing.assert_consistent(lambda x: x, [torch.ones(4)], plan(dp=2), processes=pool)


def test_a_pool_that_is_too_small_is_told():
    small = vs.testing.RankPool(2)  # never started
    with pytest.raises(ArgumentError, match=r"RankPool\(4\)"):
        vs.testing.assert_consistent(train, arguments(), plan(dp=4), bitwise=False, processes=small)


def test_lanes_on_real_ranks(pool):
    plans = [plan(dp=1), plan(dp=2)]
    found = vs.testing.assert_consistent(
        train, arguments(), plans, bitwise=False, steps=2, processes=pool, lanes={"dp": 4}
    )
    assert len(found.runs) == 4
