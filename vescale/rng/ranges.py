"""From random bits to an integer of any range, without the bias of a remainder.

Random bits B, of which there are 2^w, become low + floor(B n / 2^w) (a multiplication and a shift;
Lemire, "Fast random integer generation in an interval", ACM TOMACS 2019, without his rejection, which
would make the work depend on the numbers). Each of the n integers gets floor(2^w / n) or one more of the
values of B, so its probability differs from 1/n by less than 2^-w:

    n <= 2^32    w = 64     less than 2^-64, and 2^-32 of 1/n: seen in no fewer than 2^64 draws
    n > 2^32     w = 128    less than 2^-128, and 2^-64 of 1/n

    vescale::scale_bits(Tensor bits, Tensor? more, int low, int last) -> Tensor     elementwise, one node

with n = last + 1 (last as a two's complement) and B = bits, or bits * 2^64 + more.

>>> scale_bits(torch.tensor([0, 2**62, -1]), None, 10, 5).tolist()  # -1 stands for 2^64 - 1
[10, 11, 15]
"""

import torch
from torch import Tensor

from .native import kernel
from .philox import MASK, library

_SIGN = -(2**63)


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _high(value: Tensor) -> Tensor:
    """The upper 32 of 64 bits, as an unsigned number."""
    return (value >> 32).bitwise_and_(MASK)


def _product(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of x n, all unsigned; 0 <= n < 2^64."""
    low, high = x & MASK, _high(x)
    n_low, n_high = n & MASK, n >> 32
    cross, other = high * n_low, low * n_high
    middle = _high(low * n_low).add_(cross & MASK).add_(other & MASK)
    upper = (high * n_high).add_(_high(cross)).add_(_high(other)).add_(_high(middle))
    return upper, x * _signed(n)


def scale(bits: Tensor, more: Tensor | None, low: int, last: int) -> Tensor:
    """The definition of `scale_bits`, in torch ops."""
    n = last % 2**64 + 1
    if n == 2**64:
        return bits + low
    upper, lower = _product(bits, n)
    if more is not None:
        carried = lower + _product(more, n)[0]
        upper += (carried ^ _SIGN) < (lower ^ _SIGN)  # an unsigned comparison: the sum wrapped
    return upper.add_(low)


def _scale_bits(bits: Tensor, more: Tensor | None, low: int, last: int) -> Tensor:
    compiled = kernel(bits.numel()) if bits.device.type == "cpu" else None
    return (compiled.scale if compiled else scale)(bits, more, low, last)


library.define(
    "scale_bits(Tensor bits, Tensor? more, int low, int last) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)
library.impl("scale_bits", _scale_bits, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::scale_bits", lib=library)
def _(bits: Tensor, more: Tensor | None, low: int, last: int) -> Tensor:
    return bits.new_empty(bits.shape)


def _map_scale(info, in_dims, bits: Tensor, more: Tensor | None, low: int, last: int):
    # Both are draws from one key: mapped together, or not at all.
    if more is not None:
        more = more.movedim(in_dims[1], in_dims[0])
    return scale_bits(bits, more, low, last), in_dims[0]


torch.library.register_vmap("vescale::scale_bits", _map_scale, lib=library)


def scale_bits(bits: Tensor, more: Tensor | None, low: int, last: int) -> Tensor:
    """int64 random bits -> int64 integers of [low, low + last], each as likely as the others.

    `more` is another 64 bits an element; low and last are taken modulo 2^64.
    """
    return torch.ops.vescale.scale_bits.default(bits, more, _signed(low), _signed(last))
