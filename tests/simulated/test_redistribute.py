"""Redistribution between any two layouts against plain slicing of the global tensor, bit for bit."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.layouts import layouts, meshes, shapes
from vescale._errors import ArgumentError, LayoutError
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import assemble, flat_indices, local_slice
from vescale.spmd.mesh import Mesh, make_mesh
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Replicate, Shard
from vescale.spmd.redistribute import bind, plan, redistribute


def simulated(mesh: AbstractMesh) -> Mesh:
    return make_mesh(dict(zip(mesh.axis_names, mesh.shape)), backend="simulated")


def contributions(value: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Local tensors that mean `value`: with pending reductions each rank has something to say.

    Whole numbers, so that every order of summation is exact.
    """
    pieces = [local_slice(value, layout, rank).clone() for rank in range(layout.mesh.size)]
    for axis, op in layout.partials.items():
        for rank, piece in enumerate(pieces):
            index, size = layout.mesh.coordinate(rank)[axis], layout.mesh.axis_size(axis)
            if op in ("sum", "avg"):
                piece += index if index < size - 1 else -sum(range(size - 1))
            elif index != size - 1:
                piece -= index + 1 if op == "max" else -(index + 1)
    return pieces


def check(src: Layout, dst: Layout, dtype: torch.dtype = torch.float32) -> None:
    numel = math.prod(src.shape)
    value = (torch.arange(numel) % 31 + 1).to(dtype).view(src.shape)
    before = contributions(value, src)
    kept = [tensor.clone() for tensor in before]
    after = redistribute(before, src, dst, simulated(src.mesh))
    for rank, tensor in enumerate(after):
        assert tuple(tensor.shape) == dst.local_shape(rank)
        assert tensor.dtype == dtype
        assert torch.equal(before[rank], kept[rank]), "an input was modified"
        if not dst.partials:
            assert torch.equal(tensor, local_slice(value, dst, rank)), (src, dst, rank)
    assert torch.equal(assemble(dict(enumerate(after)), dst), value)


@st.composite
def pairs(draw, axes=(1, 2), partial=True):
    mesh, shape = draw(meshes(axes)), draw(shapes())
    return draw(layouts(mesh, shape, partial)), draw(layouts(mesh, shape, partial))


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_any_pair(pair):
    check(*pair)


@settings(max_examples=150, deadline=None)
@given(pairs(axes=(3, 3)))
def test_any_pair_on_three_axes(pair):
    check(*pair)


PLACEMENTS = {
    "dp": (
        Replicate(),
        Shard(0),
        Shard(1),
        InterleavedShard(0, 2),
        RaggedShard((0,), (3, 1)),
        RaggedShard((0, 1), (0, 1)),
        Partial("sum"),
    ),
    "tp": (
        Replicate(),
        Shard(0),
        Shard(1),
        InterleavedShard(1, (3, 1)),
        RaggedShard((0,), (1, 0, 1)),
        RaggedShard((), (0, 1, 0)),
        Partial("avg"),
    ),
}


@pytest.mark.parametrize("shape", [(8, 4), (5, 7), (12, 6)])
def test_every_pair_of_placements(shape):
    """Every legal (dp, tp) layout to every other one, in both orders of the splits."""
    mesh = AbstractMesh(("dp", "tp"), (2, 3))
    legal = set()
    for dp, tp in itertools.product(*PLACEMENTS.values()):
        for spec in (P(dp=dp, tp=tp), P(tp=tp, dp=dp)):
            try:
                legal.add(Layout(mesh, spec, shape))
            except LayoutError:
                continue
    assert len(legal) > 20
    for src, dst in itertools.product(legal, legal):
        check(src, dst)


def test_a_strided_slice_of_a_ragged_tensor_made_partial():
    """Found by the property above: the contribution was read as if the slice were contiguous."""
    mesh = AbstractMesh(("dp", "tp", "pp"), (2, 2, 2))
    src = P(dp=RaggedShard.on_rank(1, 2))
    dst = P(tp=Shard(0), pp=InterleavedShard(0, 2), dp=Partial())
    check(Layout(mesh, src, (8,)), Layout(mesh, dst, (8,)))


def test_a_ragged_tensor_without_elements():
    mesh = AbstractMesh(("dp", "tp", "pp"), (2, 2, 2))
    partial = P(dp=Partial(), tp=Partial(), pp=Partial())
    ragged = P(dp=Shard(1), tp=RaggedShard((0, 1), (0, 1)))
    check(Layout(mesh, partial, (4, 0)), Layout(mesh, ragged, (4, 0)))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dst", [P(), P(dp=Shard(0)), P(dp=Shard(1))], ids=str)
def test_sums_are_added_in_one_tree(size, dtype, dst):
    """The same bits whether the sum is kept whole or scattered, and those of the drawn tree."""
    torch.manual_seed(0)
    shape = (size, 7)
    pieces = [(torch.randn(shape) * 100).to(dtype) for _ in range(size)]
    mesh = make_mesh({"dp": size}, backend="simulated")
    src = Layout(mesh.abstract, P(dp=Partial()), shape)
    a = [*pieces, None, None, None]
    pairs = [a[0] + a[1], a[2] + a[3] if size > 3 else a[2], a[4]]
    total = pairs[0] if pairs[1] is None else pairs[0] + pairs[1]
    total = total if pairs[2] is None else total + pairs[2]
    out = Layout(mesh.abstract, dst, shape)
    for rank, tensor in enumerate(redistribute(pieces, src, out, mesh)):
        assert torch.equal(tensor, local_slice(total, out, rank))


@pytest.mark.parametrize(("op", "expected"), [("avg", 2.0), ("max", 4.0), ("min", 0.0)])
def test_other_reductions(op, expected):
    mesh = make_mesh({"dp": 3}, backend="simulated")
    src, dst = (Layout(mesh.abstract, spec, (2,)) for spec in (P(dp=Partial(op)), P()))
    for tensor in redistribute([torch.full((2,), v) for v in (4.0, 0.0, 2.0)], src, dst, mesh):
        assert tensor.tolist() == [expected] * 2


def test_an_average_of_integers_is_refused():
    mesh = make_mesh({"dp": 2}, backend="simulated")
    src, dst = (Layout(mesh.abstract, spec, (2,)) for spec in (P(dp=Partial("avg")), P()))
    with pytest.raises(ArgumentError, match="int64"):
        redistribute([torch.tensor([1, 2])] * 2, src, dst, mesh)


def test_to_partial_and_back_keeps_every_bit():
    """Minus zero included: 0.0 + -0.0 is 0.0, so the others contribute minus zeros."""
    mesh = make_mesh({"dp": 3}, backend="simulated")
    replicated, partial, rows = (
        Layout(mesh.abstract, spec, (4,)) for spec in (P(), P(dp=Partial()), P(dp=Shard(0)))
    )
    value = torch.tensor([-0.0, math.inf, math.nan, 1e-45])
    there = redistribute([value] * 3, replicated, partial, mesh)
    for back in redistribute(there, partial, replicated, mesh):
        assert torch.equal(back.view(torch.int32), value.view(torch.int32))
    # A split becomes a sum without communication: each rank contributes its piece.
    pieces = [local_slice(value, rows, rank) for rank in range(3)]
    for back in redistribute(redistribute(pieces, rows, partial, mesh), partial, replicated, mesh):
        assert torch.equal(back.view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (P(dp=Shard(0)), P()),
        (P(dp=RaggedShard((0,), (3, 1))), P()),
        (P(dp=Partial()), P()),
        (P(dp=Partial()), P(dp=Shard(0))),
        (P(dp=Shard(0)), P(dp=Shard(1))),
    ],
    ids=str,
)
def test_collective_results_own_their_memory(src, dst):
    """Writing to a result changes neither an input nor the result of another rank."""
    mesh = make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    before, after = Layout(mesh.abstract, src, (4, 4)), Layout(mesh.abstract, dst, (4, 4))
    (step,) = plan(before, after)
    pieces = [local_slice(torch.ones(4, 4), before, rank).clone() for rank in range(4)]
    results = bind(step, mesh)(pieces)
    addresses = {t.untyped_storage().data_ptr() for t in [*pieces, *results]}
    assert len(addresses) == 8
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in results)


def test_inputs_may_have_any_strides():
    mesh = make_mesh({"dp": 2}, backend="simulated")
    value = torch.arange(24.0).view(4, 6)
    rows, columns = (Layout(mesh.abstract, P(dp=Shard(dim)), (4, 6)) for dim in (0, 1))
    strided = [local_slice(value, columns, rank).t().contiguous().t() for rank in range(2)]
    for rank, tensor in enumerate(redistribute(strided, columns, rows, mesh)):
        assert torch.equal(tensor, local_slice(value, rows, rank))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn])
def test_any_dtype_moves(dtype):
    mesh = AbstractMesh(("dp",), (3,))
    value = (torch.arange(20) % 2).to(dtype).view(5, 4)
    rows, ragged = (
        Layout(mesh, spec, (5, 4)) for spec in (P(dp=Shard(0)), P(dp=RaggedShard((0, 1), (7, 0, 13))))
    )
    pieces = [local_slice(value, rows, rank) for rank in range(3)]
    for rank, tensor in enumerate(redistribute(pieces, rows, ragged, simulated(mesh))):
        expected = local_slice(value, ragged, rank)
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_slicing_by_flat_index(data):
    """local_slice, flat_indices and assemble say the same."""
    layout = data.draw(layouts(data.draw(meshes()), data.draw(shapes()), partial=False))
    value = torch.arange(math.prod(layout.shape)).view(layout.shape)
    pieces = {rank: local_slice(value, layout, rank) for rank in range(layout.mesh.size)}
    for rank, piece in pieces.items():
        assert torch.equal(piece, flat_indices(layout, rank))
    assert torch.equal(assemble(pieces, layout), value)


def test_the_wrong_shape_is_refused():
    layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=Shard(0)), (4,))
    with pytest.raises(ArgumentError, match="from_local"):
        local_slice(torch.zeros(2), layout, 0)
