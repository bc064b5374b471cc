"""From a global value to what ranks hold, and back: slicing, indexing and assembling, no exchange.

These are the plain definitions that the exchanges are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .layout import Layout
from .mesh import group_ranks
from .reduction import Reduction, neutral
from .regions import strides


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with the conjugate or sign that torch may only note on it: a collective sends memory."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def local_slice(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """What `rank` holds of the global value `tensor`: a view where the elements allow one.

    Over an axis with a pending sum the first rank has the value and the others zeros; with a
    pending avg, max or min all have it.

    Raises ArgumentError when the tensor does not have the layout's global shape.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, Shard
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=Shard(0)), (5,))
    >>> local_slice(torch.arange(5), layout, 1)
    tensor([3, 4])
    """
    if tuple(tensor.shape) != layout.shape:
        raise ArgumentError(
            explain(
                f"a tensor of shape {tuple(tensor.shape)}",
                where=layout,
                rule="the global value has the layout's shape",
                remedy="pass the whole tensor, or call from_local with the rank's own piece",
            )
        )
    tensor = in_memory(tensor)
    coordinate = layout.mesh.coordinate(rank)
    if any(op == "sum" and coordinate[axis] for axis, op in layout.partials.items()):
        value = neutral(tensor.dtype)
        shape = layout.local_shape(rank)
        return torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)
    piece = tensor
    for dim, intervals in enumerate(layout.index_sets(rank)):
        runs = [piece.narrow(dim, start, stop - start) for start, stop in intervals]
        piece = runs[0] if len(runs) == 1 else torch.cat(runs or [piece.narrow(dim, 0, 0)], dim)
    rows = layout.rows(rank)
    if rows is None:
        return piece
    assert layout.ragged is not None
    return _ragged_rows(piece, len(layout.ragged[1].dims), rows, layout.local_shape(rank))


def flat_indices(layout: Layout, rank: int, device: torch.device | str | None = None) -> Tensor:
    """The row-major global index of each local element, int64, in the local shape.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, Shard
    >>> flat_indices(Layout(AbstractMesh(("tp",), (2,)), P(tp=Shard(1)), (2, 4)), 1)
    tensor([[2, 3],
            [6, 7]])
    """
    piece = layout.piece_shape(rank)
    along = []  # the global offset of each index of the piece, by dim
    for intervals, stride in zip(layout.index_sets(rank), strides(layout.shape)):
        runs = [torch.arange(*interval, device=device) for interval in intervals]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        along.append(torch.cat(runs or [empty]) * stride)
    rows = layout.rows(rank)
    if rows is None:
        index = torch.zeros((), dtype=torch.int64, device=device)
        for dim, offsets in enumerate(along):
            index = index + offsets.view(-1, *(1,) * (len(piece) - dim - 1))
        return index
    assert layout.ragged is not None
    # Only this rank's rows, not the piece that they are cut from.
    width = math.prod(piece[len(layout.ragged[1].dims) :])
    place = torch.arange(rows[0] * width, rows[1] * width, device=device)
    index = torch.zeros_like(place)
    for offsets, size, stride in zip(along, piece, strides(piece)):
        if place.numel():
            index += offsets[place // stride % size]
    return index.view(layout.local_shape(rank))


def assemble(locals_by_rank: Mapping[int, Tensor], layout: Layout) -> Tensor:
    """The global value, from the local tensors of all ranks and the layout's regions.

    Pending reductions are completed in tree order. Of replicas the first is taken.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, Partial
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=Partial()), (2,))
    >>> assemble({0: torch.tensor([1, 2]), 1: torch.tensor([3, 4])}, layout)
    tensor([4, 6])
    """
    mesh = layout.mesh
    ops = {axis: op for axis, op in layout.partials.items() if mesh.axis_size(axis) > 1}
    values = dict(locals_by_rank)
    if ops:
        reduce = Reduction(mesh, ops)
        for rank in range(mesh.size):
            members = group_ranks(mesh, tuple(ops), rank)
            if members[0] == rank:
                values[rank] = reduce.tree([locals_by_rank[member] for member in members])
            else:
                values[rank] = values[members[0]]
    out = values[0].new_empty(math.prod(layout.shape))
    for rank in reversed(range(mesh.size)):
        flat, at = values[rank].reshape(-1), 0
        for start, stop in layout.regions(rank):
            out[start:stop] = flat[at : at + stop - start]
            at += stop - start
        assert at == flat.numel(), (layout, rank)
    return out.view(layout.shape)


def _ragged_rows(piece: Tensor, prefix: int, rows: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """The prefix rows `rows` of a piece, in the local shape."""
    if not prefix:
        return piece if rows[1] > rows[0] else piece.new_empty(shape)
    count = math.prod(piece.shape[:prefix])  # written out: -1 is ambiguous for an empty piece
    return piece.reshape(count, *piece.shape[prefix:])[rows[0] : rows[1]]
