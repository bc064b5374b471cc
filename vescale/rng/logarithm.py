"""Exponential and Gumbel numbers by inversion, the same to the bit everywhere.

Like `inversion.py`, and for its reasons, this has no log of a library: each op is an IEEE one.

    h = the element's bits as an integer of b bits (b = 32 for float32, 64 for float64)
    u = (h + 1/2) / 2^b                  in (0, 1), uniform
    exponential = -ln(u)
    gumbel      = -ln(-ln(u))
    ln(2^e m)   = e ln(2) + 2 (s + s^3/3 + s^5/5 + ...)     s = (m - 1)/(m + 1), |s| < 0.172

Close to 1, where u itself would be rounded, m - 1 is -(1 - u), and 1 - u comes from the integer. So
small exponential numbers are as exact as large ones: from 1.2e-10 to 22.9 in float32, 2.7e-20 to
45.1 in float64, never 0. Gumbel numbers reach from -3.1 to 22.9, and from -3.8 to 45.1.
"""

import math

import torch
from torch import Tensor

from .inversion import FORMATS, Format, horner, split_exponent


def ln_series(form: Format) -> tuple[float, ...]:
    """Coefficients of -2 atanh(s)/s in s^2."""
    return tuple(-2 / (2 * i + 1) for i in range(form.log_terms + 1))


def _minus_ln(numerator: Tensor, m: Tensor, exponent: Tensor, form: Format) -> Tensor:
    """-ln(2^exponent m), where numerator is m - 1."""
    s = numerator / (m + 1)
    return horner(s * s, ln_series(form)).mul_(s).sub_(exponent.to(m.dtype).mul_(math.log(2)))


def exponential_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 bits of any shape -> exponential numbers of mean 1.

    >>> exponential_from_bits(torch.tensor([0, 2**31, 2**32 - 1]), torch.float32)
    tensor([2.2874e+01, 6.9315e-01, 1.1642e-10])
    """
    form = FORMATS[dtype]
    v = bits.to(form.integer)
    sign = v >> (torch.iinfo(form.integer).bits - 1)
    p = (v ^ sign).to(dtype).add_(0.5).mul_(form.scale / 2)  # the smaller of u and 1 - u
    upper = sign.bool()
    m, exponent = split_exponent(torch.where(upper, 1 - p, p), form)
    close = upper.logical_and_(exponent == 0)
    return _minus_ln(torch.where(close, -p, m - 1), m, exponent, form)


def gumbel_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 bits of any shape -> standard Gumbel numbers.

    >>> gumbel_from_bits(torch.tensor([0, 2**31, 2**32 - 1]), torch.float32)
    tensor([-3.1300,  0.3665, 22.8739])
    """
    form = FORMATS[dtype]
    m, exponent = split_exponent(exponential_from_bits(bits, dtype), form)
    return _minus_ln(m - 1, m, exponent, form)
