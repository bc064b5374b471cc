"""What vescale promises of bits, as data, and whether a difference is one that it doesn't promise away.

`docs/consistency.md` says it in words, and is made by measuring these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import OpOverload


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise ops of ATen whose kernels give an element the same bits in a tensor and in any slice of it.
ELEMENTWISE = _names(
    """
    abs acos acosh add addcdiv addcmul angle asin asinh atan bitwise_and bitwise_not bitwise_or
    bitwise_xor ceil clamp clamp_max clamp_min clone copysign cos deg2rad digamma div eq erf erfc erfinv
    exp expm1 floor fmax fmin fmod frac ge gt hardshrink hardsigmoid hardtanh heaviside isfinite isinf
    isnan isneginf isposinf le leaky_relu lerp lgamma log log10 log1p log2 logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mul nan_to_num ne neg reciprocal relu
    relu6 remainder round rsub sgn sigmoid_backward sign signbit sin softshrink sqrt square sub tan tanh
    tanh_backward threshold threshold_backward trunc where xlogy
    """
)

# Elementwise ops whose vector kernel and scalar tail differ: slices have other bits where their ends fall
# elsewhere.
ROUNDED = _names(
    """
    atan2 atanh celu cosh elu exp2 gelu gelu_backward hypot logaddexp logaddexp2 mish pow rsqrt selu
    sigmoid silu silu_backward sinh softplus
    """
)

# Ops that only carry numbers from one place to another, or pick one of them.
MOVES = _names(
    """
    _reshape_alias _to_copy _unsafe_index _unsafe_view alias amax amin any all argmax argmin argsort
    as_strided bernoulli broadcast_to cat constant_pad_nd contiguous copy detach diagonal diagonal_copy
    embedding empty_like expand eye fill flip full full_like gather index index_select lift_fresh
    lift_fresh_copy masked_select max min movedim narrow new_empty new_full new_ones new_zeros nonzero
    ones ones_like permute pixel_shuffle pixel_unshuffle repeat reshape roll scalar_tensor select
    select_backward select_scatter slice slice_backward slice_scatter sort split split_with_sizes
    squeeze stack t tile topk transpose tril triu unbind unfold unsqueeze view zeros zeros_like
    """
)

ORDER = "the sum over a split dim is made in another order than on one device; these bits are not promised"
KERNEL = "the op's kernel gives a slice other bits than the whole; these bits are not promised"

# Units of eps * scale that a kernel's rounding may differ by, where scale is that of what is added up.
ROUNDING = 16.0


def is_exact(op: OpOverload, pending: bool = False) -> bool:
    """Whether the results of an op have the same bits on pieces: nothing is added up or approximated.

    Of operands that are `pending` sums, arithmetic rounds each contribution.
    """
    if op.namespace == "vescale":
        return "backward" not in op.name()
    name = op.name().removeprefix("aten::").split(".")[0]
    return name in MOVES or (name in ELEMENTWISE and not pending)


def excuse(
    op: OpOverload,
    on_sizes: Callable[[], Sequence[object]],
    ours: Tensor,
    expected: Tensor,
    pending: bool,
) -> str:
    """Why a result may have other bits than one device gives, from operands of the same bits; "" if it may
    not.

    `on_sizes` runs the op on the absolute values of its operands: of a sum, that is the size of what was
    added, which rounding goes by when the sum itself cancels. `pending`: each rank has a contribution to a
    sum.
    """
    if is_exact(op, pending) or not (ours.is_floating_point() or ours.is_complex()):
        return ""
    finite = (ours - expected).abs()
    if not bool(finite.isfinite().all()):
        return ""
    apart, scale = float(finite.max()), float(expected.abs().max())
    try:
        sizes = [x.abs() for x in on_sizes() if isinstance(x, Tensor) and x.shape == ours.shape and x.numel()]
        scale = max([scale, *(float(x[x.isfinite()].max()) for x in sizes if bool(x.isfinite().any()))])
    except Exception:  # an op that doesn't take absolute values; its result's own size has to do
        pass
    if apart > ROUNDING * torch.finfo(ours.dtype).eps * scale:
        return ""
    return ORDER if pending else KERNEL


def size_of(value: Any) -> Any:
    """The absolute values of a floating tensor; others as they are."""
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value
