"""Normal numbers by inversion: one element's own bits through an inverse CDF, the same everywhere.

torch's log, cos and erfinv differ in the last bit between devices, and between a tensor and its
slices. Everything here is an add, subtract, multiply or divide of floats, a conversion, or an
integer op: IEEE 754 and two's complement fix each result to the bit. (Hence no `alpha=`, addcmul
or lerp either: those may be contracted to a fused multiply-add, or not.)

    v = the element's bits as a signed integer of b bits (b = 32 for float32, 64 for float64)
    x = (v + 1/2) / 2^(b-1)              in (-1, 1), uniform
    y = 1 - x^2 = q (2 - q)              q = 1 - |x|, from the integer: no cancellation
    L = -log2(y)
    z = sqrt(2) erfinv(x) = x P(L)/Q(L)

The factor sqrt(2) erfinv(x)/x depends on x^2 only, and as a function of L it is smooth from L = 0,
where it is sqrt(pi/2), to the last L that b bits reach (31 or 63), where it grows like sqrt(L). So
one rational function does for body and tails, without a branch. That erfinv/x is best approximated
in log(1 - x^2) is from Giles, "Approximating the erfinv function" (GPU Computing Gems 2, 2011), who
uses two polynomials a precision. P and Q are ours: the best in relative error, by Remez exchange in
60-digit arithmetic. All coefficients are positive, so nothing cancels.

L is split by the bits of y into y = 2^e m, m in [sqrt(1/2), sqrt(2)), and
log2(m) = 2/ln(2) (s + s^3/3 + s^5/5 + ...) with s = (m - 1)/(m + 1), |s| < 0.172.

Values reach +-6.34 in float32 (all 32 bits are used) and +-9.16 in float64. Error: float32 within
5 ulp (0.6 on average, 3.6e-7 relative at most; a million points of body and tails against float64
ndtri); float64 within 6 ulp (1 on average; 600 points against 40-digit arithmetic).

>>> invert(torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1]), torch.float32)
tensor([ 2.9181e-10,  6.3380e+00, -6.3380e+00, -2.9181e-10])
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A float format, the integer of its size, and the constants of the method in it."""

    integer: torch.dtype
    mantissa: int  # bits after the leading one
    root_half: int  # the bits of sqrt(1/2)
    log_terms: int  # of the series for log2(m), the first one not counted
    p: tuple[float, ...]  # lowest degree first
    q: tuple[float, ...]

    @property
    def scale(self) -> float:
        """2^-(b-1): the integers' unit as a fraction."""
        return 2.0 ** -(torch.iinfo(self.integer).bits - 1)


FORMATS = {
    # Relative error of P/Q: 1.1e-8 for L <= 32.
    torch.float32: Format(
        integer=torch.int32,
        mantissa=23,
        root_half=0x3F3504F3,
        log_terms=4,
        p=(
            1.25331412,
            0.310232959,
            0.0437671888,
            0.0041786841,
            0.000263627346,
            9.58004728e-06,
            2.16240276e-08,
        ),
        q=(
            1.0,
            0.0660643693,
            0.0166721476,
            0.00077172674,
            5.76993106e-05,
            6.06437804e-07,
        ),
    ),
    # Relative error of P/Q: 6.1e-17 for L <= 64.
    torch.float64: Format(
        integer=torch.int64,
        mantissa=52,
        root_half=0x3FE6A09E667F3BCD,
        log_terms=10,
        p=(
            1.2533141373155003,
            0.3681928105834521,
            0.07439425345095847,
            0.010900217703360667,
            0.00122941200793896,
            0.00011090151992442635,
            8.099913289394731e-06,
            4.828768542562867e-07,
            2.3792670913898076e-08,
            9.82718594768642e-10,
            3.3699296504223495e-11,
            8.519247118575584e-13,
            2.2636618007035855e-14,
            2.550718489701203e-16,
            7.03687187833112e-19,
            2.1342322837673732e-22,
        ),
        q=(
            1.0,
            0.11230985143785496,
            0.03271638061969852,
            0.002934497224652606,
            0.00037547338894827303,
            2.6015685505383216e-05,
            1.8590781287852002e-06,
            9.649069782357319e-08,
            4.3254661910811264e-09,
            1.6813040732251534e-10,
            4.656250447382638e-12,
            1.2646262795510337e-13,
            2.404698633452529e-15,
            1.396212606863405e-17,
            1.5421410219910828e-20,
        ),
    ),
}

_LOG2_E = 1.4426950408889634


def horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """sum of coefficients[i] x^i."""
    *rest, first, last = coefficients
    total = (x * last).add_(first)
    for coefficient in reversed(rest):
        total.mul_(x).add_(coefficient)
    return total


def split_exponent(y: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """m and e of y = 2^e m with m in [sqrt(1/2), sqrt(2)), for normal positive y: by its bits."""
    bits = y.view(form.integer)
    exponent = (bits - form.root_half) >> form.mantissa
    return (bits - (exponent << form.mantissa)).view(y.dtype), exponent


def log2_series(form: Format) -> tuple[float, ...]:
    """Coefficients of -2 atanh(s)/(s ln 2) in s^2."""
    return tuple(-2 * _LOG2_E / (2 * i + 1) for i in range(form.log_terms + 1))


def _minus_log2(y: Tensor, form: Format) -> Tensor:
    """-log2(y) for normal positive y."""
    m, exponent = split_exponent(y, form)
    s = (m - 1).div_(m + 1)
    return horner(s * s, log2_series(form)).mul_(s).sub_(exponent.to(y.dtype))


def invert(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 bits -> standard normals: the definition, all elements at once."""
    form = FORMATS[dtype]
    v = bits.to(form.integer)
    # The count of integers between v and its end of the range: max - v, or v - min.
    from_end = (v ^ (v >> (torch.iinfo(form.integer).bits - 1))).bitwise_xor_(torch.iinfo(form.integer).max)
    q = from_end.to(dtype).add_(0.5).mul_(form.scale)
    minus_log = _minus_log2((2 - q).mul_(q), form)
    x = v.to(dtype).add_(0.5).mul_(form.scale)
    return horner(minus_log, form.p).div_(horner(minus_log, form.q)).mul_(x)


def invert_int(v: int) -> float:
    """`invert` to float64 of one signed 64-bit integer, on Python numbers: they are IEEE too.

    >>> invert_int(2**62) == float(invert(torch.tensor(2**62), torch.float64))
    True
    """
    form = FORMATS[torch.float64]
    q = (float(2**63 - 1 - (v if v >= 0 else ~v)) + 0.5) * form.scale
    m, exponent = math.frexp((2 - q) * q)
    if m < math.sqrt(0.5):
        m, exponent = 2 * m, exponent - 1
    s = (m - 1) / (m + 1)
    length = _horner_float(s * s, log2_series(form)) * s - exponent
    return _horner_float(length, form.p) / _horner_float(length, form.q) * ((float(v) + 0.5) * form.scale)


def _horner_float(x: float, coefficients: tuple[float, ...]) -> float:
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
