"""Elementwise ops with broadcasting: every dim is a factor, and any cut of the elements commutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.ir import Node, Ref, TensorMeta
from .notation import ALL_DIMS, Dims, Pattern, operand_metas, overloads, result_shapes, rule

aten = torch.ops.aten


def broadcast_pattern(node: Node, metas: Sequence[TensorMeta], **options: Any) -> Pattern:
    """Right-aligned dims; a dim of size 1 against a longer one has no factor."""
    (shape, *_) = result_shapes(node, metas)
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    whole: Dims = tuple((name,) for name in sizes)

    def dims(meta: TensorMeta) -> Dims:
        offset = len(shape) - len(meta.shape)
        return tuple(
            () if size == 1 and shape[offset + dim] != 1 else (f"d{offset + dim}",)
            for dim, size in enumerate(meta.shape)
        )

    return Pattern(
        tuple(dims(meta) for meta in operand_metas(node, metas)),
        tuple(whole for out in node.outs if out is not None),
        sizes,
        ragged=ALL_DIMS,
        pointwise=True,
        **options,
    )


@rule(
    overloads(
        *(
            aten.abs,
            aten.acos,
            aten.asin,
            aten.atan,
            aten.atan2,
            aten.ceil,
            aten.clamp,
            aten.clamp_max,
            aten.clamp_min,
            aten.cos,
            aten.cosh,
            aten.erf,
            aten.erfinv,
            aten.exp,
            aten.expm1,
        ),
        *(
            aten.floor,
            aten.fmod,
            aten.frac,
            aten.log,
            aten.log10,
            aten.log1p,
            aten.log2,
            aten.logit,
            aten.pow,
            aten.reciprocal,
            aten.remainder,
            aten.round,
            aten.rsqrt,
            aten.rsub,
            aten.sigmoid,
        ),
        *(
            aten.sign,
            aten.sin,
            aten.sinh,
            aten.sqrt,
            aten.tan,
            aten.tanh,
            aten.trunc,
            aten.relu,
            aten.gelu,
            aten.silu,
            aten.elu,
            aten.leaky_relu,
            aten.hardtanh,
            aten.softplus,
            aten.mish,
        ),
        *(
            aten.gelu_backward,
            aten.silu_backward,
            aten.tanh_backward,
            aten.sigmoid_backward,
            aten.threshold_backward,
            aten.elu_backward,
            aten.leaky_relu_backward,
            aten.softplus_backward,
        ),
        *(
            aten.eq,
            aten.ne,
            aten.lt,
            aten.le,
            aten.gt,
            aten.ge,
            aten.isnan,
            aten.isinf,
            aten.isfinite,
            aten.maximum,
            aten.minimum,
            aten.floor_divide,
        ),
        *(
            aten.logical_and,
            aten.logical_or,
            aten.logical_not,
            aten.logical_xor,
            aten.bitwise_and,
            aten.bitwise_or,
            aten.bitwise_not,
            aten.bitwise_xor,
            aten.bitwise_left_shift,
            aten.bitwise_right_shift,
        ),
        *(
            aten.addcmul,
            aten.addcdiv,
            aten.square,
            aten.sgn,
            aten.nan_to_num,
            aten.copysign,
            aten.hypot,
            aten.erfc,
        ),
        *(aten.exp2, aten.lgamma, aten.digamma, aten.log_sigmoid_forward, aten.asinh, aten.acosh, aten.atanh),
        *(
            aten.signbit,
            aten.real,
            aten.imag,
            aten.xlogy,
            aten.hardsigmoid,
            aten.hardswish,
            aten.fmax,
            aten.fmin,
        ),
    )
)
def elementwise(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)


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


@rule(overloads(aten.fill))
def fill(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)


@rule([aten.div.Tensor_mode, aten.div.Scalar_mode])
def rounded_division(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)


@rule([aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default])
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
