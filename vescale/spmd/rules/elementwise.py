"""Elementwise ops with broadcasting: every dim is a factor, and any cut of the elements commutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.ir import Node, Ref, TensorMeta
from .notation import (
    ALL_DIMS,
    Pattern,
    broadcast_dims,
    named_dims,
    operand_metas,
    overloads,
    result_shapes,
    rule,
    rule_for_tag,
)

aten = torch.ops.aten


def broadcast_pattern(node: Node, metas: Sequence[TensorMeta], **options: Any) -> Pattern:
    """Right-aligned dims; a dim of size 1 against a longer one has no factor."""
    (shape, *_) = result_shapes(node, metas)
    whole, sizes = named_dims(shape)
    return Pattern(
        broadcast_dims([meta.shape for meta in operand_metas(node, metas)], shape),
        tuple(tuple(whole) for out in node.outs if out is not None),
        sizes,
        ragged=ALL_DIMS,
        pointwise=True,
        **options,
    )


# What torch tags as pointwise has this rule (see `find_rule`); these it forgot to tag, or tags in part.
_FORWARD = (aten.rsub, aten.floor_divide, aten.log_sigmoid_forward, aten.hardswish, aten.real, aten.imag)
_FORWARD += (aten.complex, aten.polar, aten.fill, aten.copy, aten._prelu_kernel)
_BACKWARD = (aten.elu_backward, aten.hardshrink_backward, aten.hardsigmoid_backward)
_BACKWARD += (aten.hardswish_backward, aten.hardtanh_backward, aten.leaky_relu_backward)
_BACKWARD += (aten.infinitely_differentiable_gelu_backward, aten.log_sigmoid_backward, aten.mish_backward)
_BACKWARD += (aten._prelu_kernel_backward, aten.softplus_backward, aten.softshrink_backward)


@rule(overloads(*_FORWARD, *_BACKWARD))
def elementwise(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)


rule_for_tag(torch.Tag.pointwise, elementwise)


@rule(overloads(aten.add, aten.sub, aten.lerp))
def linear_together(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    # A Python scalar is added once, not once a rank: then nothing passes. lerp with a tensor weight neither.
    operands = list(node.refs())
    both = isinstance(node.args[0], Ref) and isinstance(node.args[1], Ref) and len(operands) == 2
    return broadcast_pattern(node, metas, linear=(frozenset((0, 1)),) if both else ())


@rule(overloads(aten.mul))
def linear_in_either(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(
        node, metas, linear=tuple(frozenset((index,)) for index in range(len(list(node.refs()))))
    )


@rule([aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default, aten.contiguous.default])
def linear_in_first(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    first = isinstance(node.args[0], Ref)
    return broadcast_pattern(node, metas, linear=(frozenset((0,)),) if first else ())


@rule([aten.div.Tensor_mode, aten.div.Scalar_mode])
def rounded_division(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)


@rule(
    [
        *(aten.detach.default, aten.detach_copy.default, aten.alias.default, aten.alias_copy.default),
        *(aten.lift_fresh.default, aten.lift_fresh_copy.default),
    ]
)
def identity(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas, linear=(frozenset((0,)),), view=True)


@rule([aten._to_copy.default])
def cast(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    # Only a cast that keeps every bit of a contribution may come before the sum of the contributions.
    if not isinstance(node.args[0], Ref):  # vmap makes tensors of numbers so
        return broadcast_pattern(node, metas)
    source, target = operand_metas(node, metas)[0].dtype, metas[node.outs[0] or 0].dtype
    exact = target == source or (
        source.is_floating_point
        and target.is_floating_point
        and torch.finfo(target).bits > torch.finfo(source).bits
    )
    return broadcast_pattern(node, metas, linear=(frozenset((0,)),) if exact else ())


@rule(overloads(aten.where))
def where(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    operands = len(list(node.refs()))
    return broadcast_pattern(node, metas, linear=(frozenset((1, 2)),) if operands == 3 else ())


@rule([*overloads(aten.masked_fill)])
def masked_fill(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)
