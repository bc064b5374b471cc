"""Where NaNs and infinities begin: planted ones are found at their line, rank and index."""

import pytest
import torch

import vescale as vs
from tests.toy import WRAP, loss_fn, make_batch, make_params
from vescale._errors import ArgumentError
from vescale.debug import find_nonfinite
from vescale.spmd.placements import P, Partial, RaggedShard, Shard


def rows(size=4, spec=None):
    mesh = vs.make_mesh({"dp": size}, backend="simulated")
    return vs.Plan(mesh, inputs={"x": spec or P(dp=Shard(0))})


@pytest.mark.parametrize(
    "spec", [P(dp=Shard(0)), P(dp=Shard(1)), P(dp=RaggedShard((0, 1), (1, 0, 4, 3)))], ids=str
)
def test_a_log_of_a_negative_number(spec):
    def fn(x):
        y = x + 1
        z = y.log()
        return (z * 2).sum()

    x = torch.rand(8, 4)
    x[5, 3] = x[7, 1] = -2.0
    found = find_nonfinite(vs.parallelize(fn, rows(spec=spec)), x)
    assert found
    first = found.first
    assert (first.kind, first.op) == ("nan", "aten.log.default")
    assert first.index in ((5, 3), (7, 1))
    assert sum(first.counts.values()) == 2
    assert first.rank == min(first.counts)
    assert "test_debug_nonfinite.py" in first.line
    assert len(found.origins) == 1  # what follows from it is no origin
    assert "from -1 to" in first.operands[0]
    for text in ("nan in", "aten.log.default", first.line, str(list(first.index))):
        assert text in str(found)


def test_an_infinity_that_becomes_a_nan():
    def fn(x):
        y = 1 / x
        return (y - y).sum()

    found = find_nonfinite(vs.parallelize(fn, rows()), torch.tensor([1.0, 2.0, 0.0, 4.0]))
    assert [(origin.kind, origin.op) for origin in found.origins] == [
        ("inf", "aten.reciprocal.default"),
        ("nan", "aten.sub.Tensor"),
    ]
    assert found.first.rank == 2


def test_a_sum_over_ranks_that_overflows():
    x = torch.full((4,), 3e38)
    found = find_nonfinite(vs.parallelize(lambda x: x.sum(), rows()), x)
    assert (found.first.kind, found.first.op) == ("inf", "all_reduce over dp")
    assert set(found.first.counts) == {0, 1, 2, 3}


def test_a_mask_is_no_origin():
    def fn(x):
        masked = x.masked_fill(x < 0, float("-inf"))
        return torch.softmax(masked, 1), torch.full((3,), float("inf"))

    x = torch.randn(8, 4).abs()
    x[3, 1] = -1
    found = find_nonfinite(vs.parallelize(fn, rows()), x)
    assert not found
    assert found.intended == 2
    x[3] = -1  # all masked: softmax of nothing
    found = find_nonfinite(vs.parallelize(fn, rows()), x)
    assert (found.first.kind, found.first.op) == ("nan", "aten._softmax.default")


def test_an_argument():
    x = vs.from_local(
        [torch.ones(2), torch.tensor([1.0, torch.inf])], vs.make_mesh({"dp": 2}), P(dp=Partial())
    )
    plan = vs.Plan(x.mesh)
    found = find_nonfinite(vs.parallelize(lambda x: x + 1, plan), x)
    assert (found.first.op, found.first.value, found.first.rank) == ("the caller", "x", 1)


def test_inside_a_mapped_function():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    @vs.shard_map(mesh=mesh, in_specs=(P(dp=Shard(0)),), out_specs=P())
    def total(x):
        y = x / (1 - vs.axis_index("dp"))
        return vs.psum(y.sum(), "dp")

    found = find_nonfinite(vs.parallelize(total, vs.Plan(mesh)), torch.ones(4))
    assert (found.first.op, found.first.rank, found.first.counts) == ("aten.div.Tensor", 1, {1: 2})
    assert "test_debug_nonfinite.py" in found.first.line
    assert len(found.origins) == 1


@pytest.mark.parametrize("fsdp", [None, vs.FSDP("dp", WRAP)], ids=["replicated", "fsdp"])
def test_a_gradient(fsdp):
    """Finite forward, and a square root at zero backward; buffers of gradients are not taken for values."""
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    plan = vs.Plan(mesh, inputs={"batch": P(dp=Shard(0))}, fsdp=fsdp)

    def loss(params, batch):
        return loss_fn(params, batch) + params["head"]["b"].abs().sqrt().sum()

    params = make_params()
    step = vs.parallelize(vs.value_and_grad(loss), plan)
    assert not find_nonfinite(step, vs.distribute(params, plan), make_batch())
    params["head"]["b"][1] = 0.0
    placed = vs.distribute(params, plan)
    found = find_nonfinite(step, placed, make_batch())
    assert found.first.region == "backward"
    assert found.first.kind == "inf"
    assert "div" in found.first.op
    assert placed["head"]["b"].full_tensor()[1] == 0  # nothing is donated


def test_what_is_no_program_is_refused():
    with pytest.raises(ArgumentError, match="static=True"):
        find_nonfinite(vs.parallelize(lambda x: x, rows(), static=False), torch.ones(4))
