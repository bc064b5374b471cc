"""Softmax and cross entropy. Over a sharded class dim: small reductions, never a gather of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .embedding import check_range
from .notation import Dims, LocalCall, Pattern, operand_metas, rule

aten = torch.ops.aten


def log_softmax_apart(x: Any, dim: int, half_to_float: bool = False) -> Any:
    """x - max - log(sum(exp(x - max))): each reduction on its own."""
    if half_to_float:
        x = x.float()
    shifted = x - torch.amax(x, dim, keepdim=True)
    return shifted - torch.sum(torch.exp(shifted), dim, keepdim=True).log()


def softmax_apart(x: Any, dim: int, half_to_float: bool = False) -> Any:
    """exp(x - max) / sum(exp(x - max)): each reduction on its own."""
    if half_to_float:
        x = x.float()
    powers = torch.exp(x - torch.amax(x, dim, keepdim=True))
    return powers / torch.sum(powers, dim, keepdim=True)


def log_softmax_backward_apart(gradient: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    result = gradient - torch.exp(output) * torch.sum(gradient, dim, keepdim=True)
    return result if result.dtype == input_dtype else result.to(input_dtype)


def softmax_backward_apart(gradient: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    weighted = gradient * output
    result = weighted - output * torch.sum(weighted, dim, keepdim=True)
    return result if result.dtype == input_dtype else result.to(input_dtype)


_APART = {
    aten._log_softmax.default: (1, log_softmax_apart),
    aten._softmax.default: (1, softmax_apart),
    aten._log_softmax_backward_data.default: (2, log_softmax_backward_apart),
    aten._softmax_backward_data.default: (2, softmax_backward_apart),
}


@rule(list(_APART))
def softmax(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    position, apart = _APART[node.op]
    operands = operand_metas(node, metas)
    shape = operands[0].shape
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    if not shape:
        return Pattern((dims,) * len(operands), (dims,), sizes)
    dim = node.args[position] % len(shape)
    if not shape[dim]:  # nothing has no maximum
        return Pattern((dims,) * len(operands), (dims,), sizes, whole=frozenset((f"d{dim}",)))
    expand = {f"d{dim}": apart}
    return Pattern((dims,) * len(operands), (dims,), sizes, expand=expand, ragged=1)


# Cross entropy: logits (n c), targets (n). A mean divides by the number of targets that count, a global one.

MEAN, SUM = 1, 2


def _mean_apart(log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    total, _ = aten.nll_loss_forward(log_probs, target, weight, SUM, ignore_index)
    count = (target != ignore_index).sum().to(log_probs.dtype)  # of the targets alone: classes may be sharded
    return total / count, count


def _own_classes(call: LocalCall) -> LocalCall:
    """On a rank with some of the classes: other ranks' targets are ignored here."""
    log_probs = call.operands[0]
    first, count = _class_range(log_probs, call.rank)
    if count == log_probs.shape[-1]:
        return call
    return replace(call, fn=_nll_forward_own, args=(*call.args, first, count, log_probs.shape[-1]))


def _nll_forward_own(
    log_probs: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    first: int,
    count: int,
    classes: int,
) -> Any:
    """The loss of the rank's own classes, and how many targets they are: both are contributions to a sum."""
    check_range(torch.where(target == ignore_index, 0, target), classes, "a target class")
    if not count:
        return log_probs.new_zeros(()), log_probs.new_zeros(())
    own = target - first
    mine = (own >= 0) & (own < count) & (target != ignore_index)
    picked = torch.gather(log_probs, -1, torch.where(mine, own, 0).unsqueeze(-1)).squeeze(-1)
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    picked = torch.where(mine, picked, zero)
    return -picked.sum(), mine.sum().to(log_probs.dtype)


def _class_range(layout: Any, rank: int) -> tuple[int, int]:
    ((start, stop), *rest) = layout.index_sets(rank)[-1] or ((0, 0),)
    assert not rest, "the rule offers contiguous classes only"
    return start, stop - start


@rule(aten.nll_loss_forward.default)
def nll_loss(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    weight, reduction = node.args[2], node.args[3]
    dims: Dims = tuple((name,) for name in "nc"[2 - len(shape) :])
    sizes = dict(zip("nc"[2 - len(shape) :], shape, strict=True))
    target: Dims = dims[:-1]
    operands = (dims, target) if weight is None else (dims, target, dims[-1:])
    if reduction not in (MEAN, SUM) or len(shape) == 1:
        results: tuple[Dims, ...] = (target if reduction == 0 else (), ())
        return Pattern(operands, results, sizes, whole=frozenset(sizes) if reduction else frozenset("c"))
    if weight is not None:  # the weight of each target is looked up: classes are whole
        expand = {"n": _weighted_mean_apart} if reduction == MEAN else {}
        return Pattern(operands, ((), ()), sizes, sum=frozenset("n"), whole=frozenset("c"), expand=expand)
    expand = {"n": _mean_apart, "c": _mean_apart} if reduction == MEAN else {}
    return Pattern(
        operands,
        ((), ()),
        sizes,
        sum=frozenset("nc"),
        expand=expand,
        contiguous=frozenset("c"),
        local=_own_classes,
    )


def _weighted_mean_apart(log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    op = aten.nll_loss_forward if log_probs.dim() == 2 else aten.nll_loss2d_forward
    total, weights = op(log_probs, target, weight, SUM, ignore_index)
    return total / weights, weights


@rule(aten.nll_loss2d_forward.default)
def nll_loss2d(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """A target a pixel: (n c y x), (n y x). Classes are whole."""
    dims, sizes = _pixels(operand_metas(node, metas)[0].shape)
    weight, reduction = node.args[2], node.args[3]
    rows = (dims[0], *dims[2:])
    operands = (dims, rows) if weight is None else (dims, rows, dims[1:2])
    if reduction == 0:
        return Pattern(operands, (rows, ()), sizes, whole=frozenset("c"))
    some = frozenset("nyx")
    expand = dict.fromkeys(some, _weighted_mean_apart) if reduction == MEAN else {}
    return Pattern(operands, ((), ()), sizes, sum=some, whole=frozenset("c"), expand=expand)


@rule(aten.nll_loss2d_backward.default)
def nll_loss2d_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = _pixels(operand_metas(node, metas)[1].shape)
    weight, reduction = node.args[3], node.args[4]
    rows = (dims[0], *dims[2:])
    weights = () if weight is None else (dims[1:2],)
    gradient: Dims = rows if reduction == 0 else ()
    return Pattern((gradient, dims, rows, *weights, ()), (dims,), sizes, whole=frozenset("c"))


def _pixels(shape: tuple[int, ...]) -> tuple[Dims, dict[str, int]]:
    return tuple((name,) for name in "ncyx"), dict(zip("ncyx", shape, strict=True))


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[1].shape
    weight, reduction = node.args[3], node.args[4]
    dims: Dims = tuple((name,) for name in "nc"[2 - len(shape) :])
    sizes = dict(zip("nc"[2 - len(shape) :], shape, strict=True))
    gradient: Dims = dims[:-1] if reduction == 0 else ()
    weights = () if weight is None else (dims[-1:],)
    return Pattern((gradient, dims, dims[:-1], *weights, ()), (dims,), sizes, whole=frozenset("c"))


# The two backward ops of a cross entropy as one: of its gradient the sum over the classes is known, so
# that a sharded class dim needs no reduction for it. Whole classes run the two ops, with their bits.

_library = torch.library.Library("vescale", "FRAGMENT")
_library.define(
    "cross_entropy_backward(Tensor gradient, Tensor log_probs, Tensor target, int reduction, "
    "int ignore_index, Tensor total_weight) -> Tensor"
)


def cross_entropy_backward(
    gradient: Any, log_probs: Any, target: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    """d loss / d logits from log-probabilities: (exp(log_probs) - one_hot(target)) gradient / weight."""
    inner = aten.nll_loss_backward(gradient, log_probs, target, None, reduction, ignore_index, total_weight)
    return aten._log_softmax_backward_data(inner, log_probs, -1, log_probs.dtype)


_library.impl("cross_entropy_backward", cross_entropy_backward, "CompositeExplicitAutograd")
_library.impl("cross_entropy_backward", lambda gradient, log_probs, *_: torch.empty_like(log_probs), "Meta")


def _backward_own_classes(call: LocalCall) -> LocalCall:
    log_probs = call.operands[1]
    first, count = _class_range(log_probs, call.rank)
    if count == log_probs.shape[-1]:
        return call
    return replace(call, fn=_cross_entropy_backward_own, args=(*call.args, first, count))


def _cross_entropy_backward_own(
    gradient: Any,
    log_probs: Any,
    target: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
    first: int,
    count: int,
) -> Any:
    result = torch.exp(log_probs)
    if not count:
        return result
    own = target - first
    mine = (own >= 0) & (own < count)
    one = torch.ones((), dtype=result.dtype, device=result.device)
    result.scatter_add_(
        -1, torch.where(mine, own, 0).unsqueeze(-1), torch.where(mine, -one, 0 * one).unsqueeze(-1)
    )
    scale = gradient / total_weight if reduction == MEAN else gradient
    nothing = torch.zeros(
        (), dtype=result.dtype, device=result.device
    )  # an ignored row is 0, whatever the scale
    return result * torch.where(target != ignore_index, scale, nothing).unsqueeze(-1)


rule(
    torch.ops.vescale.cross_entropy_backward.default,
    ", n c, n,  -> n c",
    contiguous="c",
    local=_backward_own_classes,
)
