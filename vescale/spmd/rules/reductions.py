"""Reductions over dims: a sharded dim that is summed leaves a Partial; means become sum and global count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..._compat import overload_name
from ..program.ir import Node, TensorMeta
from .notation import (
    ALL_DIMS,
    Dims,
    LocalCall,
    Localise,
    Pattern,
    argument,
    operand_metas,
    overloads,
    rule,
)

aten = torch.ops.aten


def reduced_dims(node: Node, ndim: int, position: int = 1, name: str = "dim") -> set[int]:
    """The dims that a node reduces over: all when none is named."""
    dims = argument(node, position, name)
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in ((dims,) if isinstance(dims, int) else dims)}


def reduction_pattern(
    node: Node, metas: Sequence[TensorMeta], dims: set[int], keepdim: bool, position: int = 1, **options: Any
) -> Pattern:
    """Factors of the reduced dims are missing from the results (size 1 with keepdim).

    What sharding them does is in the options: it leaves a Partial, unless they are `whole=True` or `apart`
    says what to run in place of the op. `position` is that of the op's argument `dim`.
    """
    shape = operand_metas(node, metas)[0].shape
    operand: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    result: Dims = tuple(
        () if dim in dims else operand[dim] for dim in range(len(shape)) if dim not in dims or keepdim
    )
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    gone = frozenset(f"d{dim}" for dim in dims if dim < len(shape))
    results = tuple(result for out in node.outs if out is not None)
    apart = options.pop("apart", None)
    if apart is not None:
        options["expand"] = dict.fromkeys(gone, apart)
    else:
        options["whole" if options.pop("whole", False) else "sum"] = gone
    adapt = options.pop("local", None) or (lambda call: call)
    local: Localise = lambda call: adapt(_on_rows(call, dims, position))  # noqa: E731
    return Pattern((operand,), results, sizes, ragged=ALL_DIMS, local=local, **options)


def _on_rows(call: LocalCall, dims: set[int], position: int) -> LocalCall:
    """On a ragged piece (rows, *rest): the dims that were cut are one there."""
    cut = max(
        (len(layout.ragged[1].dims) for layout in call.operands if layout.ragged is not None), default=0
    )
    if cut < 2:
        return call
    given = argument(call.node, position, "dim")
    if isinstance(given, int):
        call = call.with_arg(position, max(given % len(call.operands[0].shape) - cut + 1, 0))
    elif given:
        call = call.with_arg(position, sorted({max(dim - cut + 1, 0) for dim in dims}))
    return replace(call, fn=_reshaped, args=(call.fn, call.results[0].local_shape(call.rank), *call.args))


def _reshaped(op: Any, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs).reshape(shape)


@rule([aten.sum.default, aten.sum.dim_IntList])
def sum_(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    return reduction_pattern(
        node, metas, reduced_dims(node, ndim), argument(node, 2, "keepdim", False), linear=(frozenset((0,)),)
    )


@rule([aten.nansum.default, *overloads(aten.count_nonzero)])
def sum_of_some(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    return reduction_pattern(node, metas, reduced_dims(node, ndim), argument(node, 2, "keepdim", False))


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

    keepdim = argument(node, 2, "keepdim", False)
    return reduction_pattern(node, metas, dims, keepdim, apart=sum_and_count, linear=(frozenset((0,)),))


@rule([*overloads(aten.var, aten.std, aten.var_mean, aten.std_mean)])
def variance(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Over a split dim: the mean first, then the mean square distance from it, of all elements alike."""
    shape = operand_metas(node, metas)[0].shape
    name = node.op.overloadpacket.__name__
    by_dim = overload_name(node.op) in ("dim", "correction")
    dims = reduced_dims(node, len(shape)) if by_dim else set(range(len(shape)))
    keepdim = bool(node.kwargs.get("keepdim", node.args[3] if len(node.args) > 3 else False))
    correction = node.kwargs.get("correction")
    if overload_name(node.op) != "correction":  # what was once the flag `unbiased`
        correction = argument(node, 2 if by_dim else 1, "unbiased", True)
    count = math.prod(shape[dim] for dim in dims if dim < len(shape))
    freedom = max(count - (1 if correction is None else float(correction)), 0.0)

    def apart(x: Any, *_: Any, **__: Any) -> Any:
        along = sorted(dims)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        # The mean of leading dims needs no dims of size 1 to be broadcast against all.
        middle = torch.mean(wide, along, keepdim=along != list(range(len(along))))
        squares = _squared(wide - middle)
        result = torch.sum(squares, along, keepdim) / freedom
        result = (result.sqrt() if name.startswith("std") else result).to(x.dtype)
        if not name.endswith("_mean"):
            return result
        return result, torch.mean(wide, along, keepdim).to(x.dtype)

    return reduction_pattern(node, metas, dims, keepdim, apart=apart, local=_without_rows)


def _without_rows(call: LocalCall) -> LocalCall:
    """torch warns of zero degrees of freedom where there is nothing to compute."""
    shapes = [result.local_shape(call.rank) for result in call.results]
    if any(map(math.prod, shapes)):
        return call
    kwargs = {"dtype": call.meta.dtype, "device": call.meta.device}
    return replace(call, fn=_empties, args=(shapes,), kwargs=kwargs)


def _empties(shapes: Sequence[tuple[int, ...]], **kwargs: Any) -> Any:
    made = [torch.empty(shape, **kwargs) for shape in shapes]
    return tuple(made) if len(made) > 1 else made[0]


def _squared(x: Any) -> Any:
    return (x * x.conj()).real if x.is_complex() else x * x


@rule([aten.linalg_vector_norm.default, aten.linalg__powsum.default, *overloads(aten.norm)])
def norm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Over a split dim: powers, their sum (or the extreme), and its root."""
    ndim = len(operand_metas(node, metas)[0].shape)
    dims = (
        reduced_dims(node, ndim, 2) if overload_name(node.op) not in ("Scalar", "ScalarOpt_dtype") else None
    )
    keepdim = argument(node, 3, "keepdim", False) if dims is not None else False
    order = argument(node, 1, "ord", 2)
    order = 2.0 if order is None else float(order)
    dims = set(range(ndim)) if dims is None else dims
    root = node.op is not aten.linalg__powsum.default

    def apart(x: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        along = sorted(dims)
        x = x if dtype is None else x.to(dtype)
        out = torch.abs(x).dtype if x.is_complex() else x.dtype
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if math.isinf(order):
            extreme = torch.amax if order > 0 else torch.amin
            return extreme(torch.abs(wide), along, keepdim).to(out)
        if order == 0:
            return torch.sum((wide != 0).to(wide.abs().dtype), along, keepdim).to(out)
        if order == 2:
            total = torch.sum(_squared(wide), along, keepdim)
            return (total.sqrt() if root else total).to(out)
        if order == 1:
            return torch.sum(torch.abs(wide), along, keepdim).to(out)
        total = torch.sum(torch.abs(wide) ** order, along, keepdim)
        return (total ** (1 / order) if root else total).to(out)

    return reduction_pattern(node, metas, dims, keepdim, 2, apart=apart)


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
    options = {"reduction": reduction, "extremes": {reduction: frozenset((0,))}}
    return reduction_pattern(node, metas, dims, keepdim, local=localise, **options)


def _beaten(dtype: torch.dtype, reduction: str) -> Any:
    if dtype.is_floating_point:
        return -math.inf if reduction == "max" else math.inf
    if dtype is torch.bool:
        return reduction == "min"
    return torch.iinfo(dtype).min if reduction == "max" else torch.iinfo(dtype).max


@rule(aten.aminmax.default)
def aminmax(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Over a split dim: two reductions, of which one rank's parts differ in kind."""

    def apart(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
        along = [] if dim is None else [dim]
        return torch.amin(x, along, keepdim), torch.amax(x, along, keepdim)

    ndim, keepdim = len(operand_metas(node, metas)[0].shape), node.kwargs.get("keepdim", False)
    made = reduction_pattern(node, metas, reduced_dims(node, ndim), keepdim, apart=apart)
    return replace(made, ragged=1, local=None)


@rule(aten.renorm.default)
def renorm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Each slice along a dim is scaled by its own norm."""
    shape = operand_metas(node, metas)[0].shape
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    whole = frozenset(sizes) - {f"d{node.args[2] % len(shape)}"}
    return Pattern((dims,), (dims,), sizes, whole=whole)


@rule([*overloads(aten.any, aten.all)])
def any_or_all(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    reduction = "max" if node.op.overloadpacket is aten.any else "min"
    keepdim = argument(node, 2, "keepdim", False)
    return reduction_pattern(node, metas, reduced_dims(node, ndim), keepdim, reduction=reduction)


@rule(
    [
        *overloads(aten.argmax, aten.argmin, aten.prod),
        aten.max.dim,
        aten.min.dim,
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
        return replace(made, results=made.operands, ragged=1, local=None)
    else:
        dims = reduced_dims(node, len(operand))
    made = reduction_pattern(node, metas, dims, len(operand) == len(result), whole=True)
    return replace(made, ragged=1, local=None)
