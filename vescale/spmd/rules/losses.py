"""Losses with a reduction. Over split elements: the losses one by one, then the sum or mean of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .elementwise import broadcast_pattern
from .notation import Dims, LocalCall, Pattern, argument, broadcast_dims, operand_metas, rule

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2

# Where the argument `reduction` stands.
_ELEMENTWISE = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
_ELEMENTWISE_BACKWARD = {
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
}
_BY_ROW = {aten.multi_margin_loss.default: 5, aten.multilabel_margin_loss_forward.default: 2}
_BY_ROW_BACKWARD = {
    aten.multi_margin_loss_backward.default: 6,
    aten.multilabel_margin_loss_backward.default: 3,
}


def _apart(op: Any, position: int, reduction: int) -> Callable[..., Any]:
    """The op without its reduction, and that on its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], NONE, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "reduction": NONE}
        made = op(*args, **kwargs)
        reduce = torch.mean if reduction == MEAN else torch.sum
        return (reduce(made[0]), *made[1:]) if isinstance(made, tuple) else reduce(made)

    return run


def _reduction(node: Node, position: int) -> int:
    return argument(node, position, "reduction", MEAN)


@rule(list(_ELEMENTWISE))
def elementwise_loss(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    position = _ELEMENTWISE[node.op]
    reduction = _reduction(node, position)
    if reduction == NONE:
        return broadcast_pattern(node, metas)
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    full = torch.broadcast_shapes(*shapes)
    sizes = {f"d{dim}": size for dim, size in enumerate(full)}
    operands = broadcast_dims(shapes, full)
    expand = dict.fromkeys(sizes, _apart(node.op, position, reduction))
    return Pattern(operands, ((),), sizes, expand=expand, ragged=1)


@rule(list(_ELEMENTWISE_BACKWARD))
def elementwise_loss_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    position = _ELEMENTWISE_BACKWARD[node.op]
    made = broadcast_pattern(node, metas)
    return replace(made, local=_of_all(position)) if _reduction(node, position) == MEAN else made


@rule(list(_BY_ROW))
def loss_by_row(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Rows (n c): a loss looks at all classes of its row."""
    position, metas_ = _BY_ROW[node.op], operand_metas(node, metas)
    reduction = _reduction(node, position)
    dims, sizes = _rows(metas_[0].shape)
    operands = tuple(_row_dims(len(meta.shape), dims, place) for place, meta in enumerate(metas_))
    loss = dims[:-1] if reduction == NONE else ()
    results: tuple[Dims, ...] = (loss, operands[1]) if len(node.outs) == 2 else (loss,)
    expand = {} if reduction == NONE else {"n": _apart(node.op, position, reduction)}
    return Pattern(operands, results, sizes, whole=frozenset("c"), expand=expand)


@rule(list(_BY_ROW_BACKWARD))
def loss_by_row_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    position, metas_ = _BY_ROW_BACKWARD[node.op], operand_metas(node, metas)
    reduction = _reduction(node, position)
    dims, sizes = _rows(metas_[1].shape)
    operands = tuple(_row_dims(len(meta.shape), dims, place) for place, meta in enumerate(metas_[1:]))
    gradient = dims[:-1] if reduction == NONE else ()
    local = _of_all(position) if reduction == MEAN else None
    return Pattern((gradient, *operands), (dims,), sizes, whole=frozenset("c"), local=local)


def _rows(shape: Sequence[int]) -> tuple[Dims, dict[str, int]]:
    names = "nc"[2 - len(shape) :]
    return tuple((name,) for name in names), dict(zip(names, shape, strict=True))


def _row_dims(ndim: int, dims: Dims, place: int) -> Dims:
    """Of logits (n c), targets (n) or (n c), and weights (c)."""
    if ndim == len(dims):
        return dims
    return dims[len(dims) - ndim :] if place == 2 else dims[:ndim]


def _of_all(position: int) -> Callable[[LocalCall], LocalCall]:
    """A mean of all rows or elements, and not of those of one rank."""

    def localise(call: LocalCall) -> LocalCall:
        local, full = call.results[0].local_shape(call.rank), call.results[0].shape
        by_row = call.node.op in _BY_ROW_BACKWARD
        count = (full[0] if len(full) == 2 else 1) if by_row else math.prod(full)
        if by_row and not math.prod(local):
            fn: Callable[..., Any] = lambda gradient, x, *_, **__: torch.empty_like(x)  # noqa: E731
        else:
            fn = _scaled(call.fn, position, count)
        return replace(call, fn=fn)

    return localise


def _scaled(op: Any, position: int, count: int) -> Callable[..., Any]:
    def run(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        given = (gradient / count, *args)
        if len(given) > position:
            given = (*given[:position], SUM, *given[position + 1 :])
        else:
            kwargs = {**kwargs, "reduction": SUM}
        return op(*given, **kwargs)

    return run
