"""Sorting, selecting and scanning along a dim, which is whole; every other dim is free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .batched import along, unless_empty, unsharded
from .notation import Dims, Pattern, argument, operand_metas, result_shapes, rule

aten = torch.ops.aten

# Where an op has its argument `dim`, and what it is when nothing is given.
_DIM = {
    aten.sort.default: (1, -1),
    aten.sort.stable: (1, -1),
    aten.topk.default: (2, -1),
    aten.cummax.default: (1, 0),
    aten.cummin.default: (1, 0),
    aten.cumprod.default: (1, 0),
    aten.logcumsumexp.default: (1, 0),
}
_REDUCING = {
    aten.kthvalue.default: 2,
    aten.median.dim: 1,
    aten.nanmedian.dim: 1,
    aten.mode.default: 1,
}


@rule(list(_DIM))
def scan(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    position, default = _DIM[node.op]
    dim = argument(node, position, "dim", default)
    return along(node, metas, [dim], ragged=1)


@rule(list(_REDUCING))
def selected(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """The results lack the dim, or have it with one index."""
    (x,) = operand_metas(node, metas)
    shape, ndim = x.shape, len(x.shape)
    if not ndim:
        return unsharded(node, metas)
    dim = argument(node, _REDUCING[node.op], "dim", -1) % ndim
    dims: Dims = tuple((f"d{place}",) for place in range(ndim))
    kept: Dims = ((),) if len(result_shapes(node, metas)[0]) == ndim else ()
    result = (*dims[:dim], *kept, *dims[dim + 1 :])
    return Pattern(
        (dims,),
        (result, result),
        {f"d{place}": size for place, size in enumerate(shape)},
        whole=frozenset((f"d{dim}",)),
        ragged=int(dim != 0),
        local=unless_empty(node, metas),
    )


@rule([aten.median.default, aten.nanmedian.default])
def selected_of_all(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return unsharded(node, metas)


@rule(aten.searchsorted.Tensor)
def searchsorted(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Values are free when all look in one sequence; with a sequence for each row, the rows are."""
    sequence, values = operand_metas(node, metas)[:2]
    if len(sequence.shape) == 1:
        return _looked_up(node, metas, sequence=0)
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(values.shape)))
    rows, sizes = dims[:-1], {f"d{dim}": size for dim, size in enumerate(values.shape)}
    sizes["s"] = sequence.shape[-1]
    searched: Dims = (*rows, ("s",))
    sorter = [searched] * (len(operand_metas(node, metas)) - 2)
    return Pattern(
        (searched, dims, *sorter),
        (dims,),
        sizes,
        whole=frozenset("s"),
        ragged=1,
        local=unless_empty(node, metas),
    )


@rule(aten.bucketize.Tensor)
def bucketize(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _looked_up(node, metas, sequence=1)


def _looked_up(node: Node, metas: Sequence[TensorMeta], sequence: int) -> Pattern:
    """Each value on its own; the sequence, and what sorts it, are whole."""
    operands = operand_metas(node, metas)
    shape = operands[1 - sequence].shape
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)} | {"s": operands[sequence].shape[0]}
    lists: list[Dims] = [(("s",),)] * len(operands)
    lists[1 - sequence] = dims
    return Pattern(
        tuple(lists), (dims,), sizes, whole=frozenset("s"), ragged=1, local=unless_empty(node, metas)
    )
