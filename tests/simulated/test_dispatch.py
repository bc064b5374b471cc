"""DTensors op by op, outside programs: the values of plain torch, and layouts that stay."""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from vescale._errors import ArgumentError, LayoutError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
GENERATOR = torch.Generator().manual_seed(0)
# Whole numbers: sums are exact in any order, so equality is bitwise.
X, Y = (torch.randint(-4, 5, (8, 6), generator=GENERATOR).double() for _ in range(2))
SPECS = [
    P(),
    P(dp=Shard(0)),
    P(dp=Shard(1), tp=Shard(0)),
    P(tp=Shard(0), dp=Shard(0)),
    P(tp=InterleavedShard(1, 3)),
    P(dp=RaggedShard((0,), (3, 5))),
    P(tp=Shard(1), dp=RaggedShard((0, 1), (5, 19))),
    P(dp=RaggedShard.on_rank(1, 2)),
]
PENDING = [P(dp=Partial()), P(dp=Partial("max")), P(dp=Partial("avg"), tp=Shard(0))]


def put(tensor, spec):
    return vs.distribute_tensor(tensor, MESH, spec)


def assert_same(ours, theirs):
    assert isinstance(ours, vs.DTensor)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert torch.equal(ours.full_tensor(), theirs)


OPS = {
    "a number": lambda x, y: x + 1,
    "from a number": lambda x, y: 1 - x,
    "a tensor": lambda x, y: x * y,
    "a plain tensor": lambda x, y: x + Y,
    "compare": lambda x, y: x > y,
    "sum": lambda x, y: x.sum(),
    "sum of a dim": lambda x, y: x.sum(1, keepdim=True),
    "mean": lambda x, y: x.sum(0) / 4,
    "largest": lambda x, y: x.amax(0),
    "index of the largest": lambda x, y: x.argmax(1),
    "matmul": lambda x, y: x @ y.t(),
    "linear": lambda x, y: F.linear(x, y),
    "transpose and flatten": lambda x, y: x.t().reshape(-1),
    "split": lambda x, y: x.split(2, dim=1)[1],
    "stack": lambda x, y: torch.stack([x, y]),
    "index": lambda x, y: x[2:5, -1],
    "cast": lambda x, y: x.to(torch.float32),
    "where": lambda x, y: torch.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("spec", [*SPECS, *PENDING], ids=str)
def test_values(op, spec):
    assert_same(OPS[op](put(X, spec), put(Y, spec)), OPS[op](X, Y))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_elementwise_work_stays_where_it_is(spec):
    x = put(X, spec)
    for result in (
        x + 1,
        x * x,
        x.exp(),
        -x,
        x.to(torch.float32),
        torch.zeros_like(x),
        torch.full_like(x, 2),
    ):
        assert result.layout is x.layout


# The full grid: every cut meets every other layout. Of the last, a piece can't be cut at 3 of 8 rows.
@pytest.mark.parametrize("other", [*SPECS, P(dp=Partial()), P(tp=Shard(0))], ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "Ragged" in str(spec)], ids=str)
def test_ragged_meets_everything(spec, other):
    x, y = put(X, spec), put(Y, other)
    assert_same(x + y, X + Y)
    assert_same(y * x, Y * X)
    assert_same(x @ y.t(), X @ Y.t())
    assert_same((x - y).square().sum(0), (X - Y).square().sum(0))


@pytest.mark.parametrize("spec", [*SPECS, *PENDING], ids=str)
def test_item(spec):
    assert put(X, spec).sum().item() == X.sum().item()
    assert float(put(X, spec)[0, 1]) == float(X[0, 1])


def test_control_flow_may_read_values_here():
    assert (put(X, P(dp=Shard(0))).abs().sum() > 0).item() is True


@pytest.mark.parametrize("spec", [*SPECS, P(dp=Partial())], ids=str)
def test_zeros_like_keeps_the_splits(spec):
    zeros = torch.zeros_like(put(X, spec))
    assert_same(zeros, torch.zeros_like(X))
    assert zeros.layout.digits == put(X, spec).layout.digits
    assert zeros.layout.ragged == put(X, spec).layout.ragged


def loss(w, x):
    return ((x @ w.t()).relu() * 2).sum() + w.square().sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_backward(spec):
    w, plain = put(X, spec).requires_grad_(), X.clone().requires_grad_()
    loss(w, put(Y, P(dp=Shard(0)))).backward()
    loss(plain, Y).backward()
    assert_same(w.grad, plain.grad)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("transform", [torch.func.grad, vs.grad], ids=["torch", "vescale"])
def test_functional_gradients(transform, spec):
    assert_same(transform(loss)(put(X, spec), put(Y, spec)), torch.func.grad(loss)(X, Y))


def test_cross_entropy_over_split_classes():
    target = torch.tensor([0, 5, 3, 3, -100, 1, 2, 4])
    ours = vs.value_and_grad(F.cross_entropy)(put(X, P(dp=Shard(0), tp=Shard(1))), put(target, P()))
    for mine, theirs in zip(ours, vs.value_and_grad(F.cross_entropy)(X, target)):
        # The sum of exponentials is made in two halves: a rounding or two.
        assert torch.allclose(mine.full_tensor(), theirs, rtol=1e-14, atol=1e-15)


def test_a_second_call_decides_nothing_anew():
    from vescale.spmd.program.dispatch import _programs

    x = put(X, P(dp=Shard(0)))
    assert_same(x.frac(), X.frac())
    before = _programs.info().misses
    x.frac()
    assert _programs.info().misses == before


# Refused.


def test_two_meshes():
    other = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    with pytest.raises(ArgumentError, match="2 meshes"):
        put(X, P()) + vs.distribute_tensor(Y, other, P())


def test_a_shape_that_depends_on_values():
    with pytest.raises(vs.VescaleError, match="shapes are static"):
        put(X, P(dp=Shard(0))).nonzero()


def test_shapes_that_do_not_fit_are_torchs_error():
    with pytest.raises(RuntimeError, match="reduction dim"):
        put(X, P()) @ put(Y, P())


def test_scalars_are_never_ragged():
    with pytest.raises(LayoutError, match="0-d tensors are never ragged"):
        put(X.sum(), P(dp=RaggedShard((), (1, 0))))
    assert put(X, P(dp=RaggedShard((0,), (3, 5)))).sum().layout is Layout(MESH.abstract, P(), ())
