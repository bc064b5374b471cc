"""Reductions over dims: a sharded dim that is summed leaves a Partial; means become sum and global count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import Dims, LocalCall, Pattern, argument, operand_metas, overloads, rule

aten = torch.ops.aten


def reduced_dims(node: Node, ndim: int, position: int = 1, name: str = "dim") -> set[int]:
    """The dims that a node reduces over: all when none is named."""
    dims = argument(node, position, name)
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in ((dims,) if isinstance(dims, int) else dims)}


def reduction_pattern(
    node: Node, metas: Sequence[TensorMeta], dims: set[int], keepdim: bool, **options: Any
) -> Pattern:
    """Factors of the reduced dims are missing from the results (size 1 with keepdim)."""
    shape = operand_metas(node, metas)[0].shape
    operand: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    result: Dims = tuple(
        () if dim in dims else operand[dim] for dim in range(len(shape)) if dim not in dims or keepdim
    )
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    gone = frozenset(f"d{dim}" for dim in dims if dim < len(shape))
    results = tuple(result for out in node.outs if out is not None)
    if options.pop("whole", False):
        return Pattern((operand,), results, sizes, whole=gone, **options)
    return Pattern((operand,), results, sizes, sum=gone, **options)


@rule([aten.sum.default, aten.sum.dim_IntList])
def sum_(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    return reduction_pattern(
        node, metas, reduced_dims(node, ndim), argument(node, 2, "keepdim", False), linear=(frozenset((0,)),)
    )


@rule([aten.mean.default, aten.mean.dim])
def mean(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    dims = reduced_dims(node, len(shape))
    count = math.prod(shape[dim] for dim in dims if dim < len(shape))

    def sum_and_count(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        total = (
            torch.sum(x, dtype=dtype) if dim is None or not dim else torch.sum(x, dim, keepdim, dtype=dtype)
        )
        return total / count

    made = reduction_pattern(
        node, metas, dims, argument(node, 2, "keepdim", False), linear=(frozenset((0,)),)
    )
    return Pattern(
        made.operands,
        made.results,
        made.sizes,
        made.sum,
        linear=made.linear,
        expand=dict.fromkeys(made.sum, sum_and_count),
    )


@rule([aten.amax.default, aten.max.default])
def amax(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _extreme(node, metas, "max")


@rule([aten.amin.default, aten.min.default])
def amin(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _extreme(node, metas, "min")


def _extreme(node: Node, metas: Sequence[TensorMeta], reduction: str) -> Pattern:
    def localise(call: LocalCall) -> LocalCall:
        """A rank without elements contributes what any other value beats; torch would refuse."""
        if math.prod(call.operands[0].local_shape(call.rank)):
            return call
        value = _beaten(call.meta.dtype, reduction)
        kwargs = {"dtype": call.meta.dtype, "device": call.meta.device}
        return replace(
            call, fn=torch.full, args=(call.results[0].local_shape(call.rank), value), kwargs=kwargs
        )

    dims = reduced_dims(node, len(operand_metas(node, metas)[0].shape))
    keepdim = argument(node, 2, "keepdim", False)
    return reduction_pattern(node, metas, dims, keepdim, reduction=reduction, local=localise)


def _beaten(dtype: torch.dtype, reduction: str) -> Any:
    if dtype.is_floating_point:
        return -math.inf if reduction == "max" else math.inf
    if dtype is torch.bool:
        return reduction == "min"
    return torch.iinfo(dtype).min if reduction == "max" else torch.iinfo(dtype).max


@rule(
    [
        *overloads(aten.var, aten.argmax, aten.argmin, aten.prod),
        aten.any.dim,
        aten.all.dim,
        aten.any.default,
        aten.all.default,
        aten.logsumexp.default,
        aten.cumsum.default,
    ]
)
def unsplit(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Reductions whose dim is kept whole; the other dims may be sharded."""
    operand, result = operand_metas(node, metas)[0].shape, metas[node.outs[0] or 0].shape
    if len(operand) == len(result) == 0:
        dims: set[int] = set()
    elif node.op is aten.cumsum.default:
        dims = {node.args[1] % len(operand)}
        made = reduction_pattern(node, metas, dims, True, whole=True)
        return Pattern(made.operands, made.operands, made.sizes, whole=made.whole)
    else:
        dims = reduced_dims(node, len(operand))
    return reduction_pattern(node, metas, dims, len(operand) == len(result), whole=True)
