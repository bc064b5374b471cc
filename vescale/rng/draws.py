"""Keyed draws of bits and of continuous numbers, in JAX's order of arguments.

The number of element i depends on the key and on i, its row-major index, only. So it doesn't depend
on the device, the mesh or the placement, the draw of a longer shape begins with that of a shorter
one, and a rank computes its own elements alone. Drawing twice from one key gives the same numbers:
`split` it first. The result lives on the key's device.

Traced, a draw is one `vescale::draw` node and what elementwise ops its arguments ask for. None has a
gradient: the bounds are numbers.

>>> from vescale.rng import key
>>> uniform(key(7), (3,))
tensor([0.9546, 0.7502, 0.1142])
>>> torch.equal(normal(key(7), (2, 3)).view(-1), normal(key(7), (6,)))
True
"""

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real

import numpy
import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .inversion import invert_int
from .keys import Key, consumed
from .numbers import draw, normal_from_bits
from .ranges import scale_bits

INTEGERS = {
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32), 32),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32), 32),
    **dict.fromkeys((torch.uint64, torch.int64), 64),
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_shape(shape: int | Sequence[int], where: str) -> tuple[int, ...]:
    """The sizes, or an ArgumentError that names `where`."""
    try:
        sizes = tuple(shape) if isinstance(shape, Sequence) else (operator.index(shape),)
        if all(operator.index(size) >= 0 and not isinstance(size, bool) for size in sizes):
            return sizes
    except TypeError:
        pass
    raise ArgumentError(
        explain(
            repr(shape),
            where=f"{where}(shape=)",
            rule="a shape is sizes of zero or more",
            remedy="pass a tuple of ints, such as (2, 3) or x.shape",
        )
    )


def check_dtype(dtype: torch.dtype, allowed: Sequence[torch.dtype], where: str, hint: str) -> None:
    """An ArgumentError that names `where` unless the dtype is one of `allowed`."""
    if dtype not in allowed:
        raise ArgumentError(
            explain(
                repr(dtype),
                where=f"{where}(dtype=)",
                rule="one of " + ", ".join(str(one).removeprefix("torch.") for one in allowed),
                remedy=hint,
            )
        )


def bits(key: Key, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.int64) -> Tensor:
    """key -> integers of `shape`, every value of `dtype` equally likely.

    Element i is the 64-bit element i of the engine (`philox.py`) for int64 and uint64, else the low
    bits of its 32-bit element i. (The default is signed because torch has hardly any operator for
    uint32 and uint64.)

    Raises ArgumentError for a key that isn't one, a negative size, or a dtype that isn't integer.

    >>> from vescale.rng import key
    >>> bits(key(0), (4,), torch.uint32).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    True
    """
    where = "vs.rng.bits"
    sizes = check_shape(shape, where)
    check_dtype(dtype, tuple(INTEGERS), where, "for floats use uniform or normal")
    drawn = draw(consumed(key, where), sizes, f"bits{INTEGERS[dtype]}")
    return drawn if dtype == torch.int64 else drawn.to(dtype)


def _floats(name: str, key: Key, shape: int | Sequence[int], dtype: torch.dtype, where: str) -> Tensor:
    """Numbers of a kind of `numbers.py`, in the format of the draw: float32, or float64 for float64."""
    sizes = check_shape(shape, where)
    check_dtype(dtype, FLOATS, where, "draw float32 and convert; for integers use bits or randint")
    return draw(consumed(key, where), sizes, f"{name}{64 if dtype == torch.float64 else 32}")


def uniform(
    key: Key,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """key -> floats of `shape`, uniform over [minval, maxval).

        u = (bits >> 8) / 2^24      float32, 24 of 32 bits
        u = (bits >> 11) / 2^53     float64, 53 of 64 bits (an unsigned shift)
        u * (maxval - minval) + minval      each op rounded once; at most the last float below maxval

    bfloat16 and float16 are the float32 draw rounded to nearest, again at most the last number
    below maxval (and at least minval, rounded likewise).

    Raises ArgumentError for a key that isn't one, a negative size, a dtype other than float32,
    float64, bfloat16, float16, and for bounds that aren't finite numbers or hold no number of that
    dtype between them.

    >>> from vescale.rng import key
    >>> uniform(key(7), (2,), minval=-1, maxval=1)
    tensor([0.9092, 0.5003])
    """
    where = "vs.rng.uniform"
    check_dtype(dtype, FLOATS, where, "for integers use bits or randint")
    start, span, last = _bounds(minval, maxval, dtype, where)
    fraction = _floats("uniform", key, shape, dtype, where)
    if (start, span) == (0.0, 1.0) and dtype == fraction.dtype:
        return fraction  # below 1 as it is
    return (fraction * span + start).to(dtype).clamp(max=last)


def _bounds(low: float, high: float, dtype: torch.dtype, where: str) -> tuple[float, float, float]:
    """low and high - low in the format of the draw, and the last number of `dtype` below high."""
    rule = "minval and maxval are numbers, not tensors"
    if isinstance(low, Real) and isinstance(high, Real):
        wide = numpy.float64 if dtype == torch.float64 else numpy.float32
        with numpy.errstate(over="ignore"):
            start, stop = wide(low), wide(high)
            span = stop - start
        rule = f"minval, maxval and their difference are finite in {dtype}"
        top = torch.finfo(dtype).max
        if all(abs(bound) <= top for bound in (start, stop, span)):
            last = _last_below(float(stop), dtype)
            rule = f"[minval, maxval) holds a number of {dtype}"
            if start <= last:
                return float(start), float(span), last
    raise ArgumentError(
        explain(
            f"minval={low!r}, maxval={high!r}",
            where=f"{where}(minval=, maxval=)",
            rule=rule,
            remedy="draw over [0, 1) and scale and shift the result yourself",
        )
    )


def _last_below(stop: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` less than `stop`.

    In Python because under fake tensors torch's nextafter has no value to give.
    """
    form = torch.finfo(dtype)
    fraction, exponent = math.frexp(stop)
    if fraction == 0.5:  # a power of two: the numbers below it are twice as close
        exponent -= 1
    least = math.frexp(form.smallest_normal)[1]
    exponent = max(exponent, least) if stop else least
    spacing = math.ldexp(form.eps, exponent - 1)
    return (math.ceil(stop / spacing) - 1) * spacing


def _round_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` that is not more than `value`."""
    below = math.nextafter(value, math.inf)
    return _last_below(below, dtype) if math.isfinite(below) else value


def normal(key: Key, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """key -> floats of `shape`, standard normal (mean 0, variance 1).

    By inversion of the element's own bits, 32 for float32 and 64 for float64, with operations that
    are the same to the bit on every device (`inversion.py` has the equations and the accuracy).
    bfloat16 and float16 are the float32 draw rounded to nearest.

    Raises ArgumentError for a key that isn't one, a negative size, or a dtype other than float32,
    float64, bfloat16, float16.

    >>> from vescale.rng import key
    >>> normal(key(7), (2,))
    tensor([-0.1141, -0.6740])
    """
    return _floats("normal", key, shape, dtype, "vs.rng.normal").to(dtype)


def exponential(key: Key, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """key -> floats of `shape`, exponentially distributed with mean 1: -ln(u), never 0.

    By inversion of the element's own bits with operations that are the same to the bit on every
    device (`logarithm.py`). bfloat16 and float16 are the float32 draw rounded to nearest.

    Raises ArgumentError for a key that isn't one, a negative size, or a dtype other than float32,
    float64, bfloat16, float16.

    >>> from vescale.rng import key
    >>> exponential(key(7), (2,))
    tensor([0.0465, 0.2875])
    """
    return _floats("exponential", key, shape, dtype, "vs.rng.exponential").to(dtype)


def gumbel(key: Key, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """key -> floats of `shape` of the standard Gumbel distribution: -ln(-ln(u)).

    By inversion of the element's own bits with operations that are the same to the bit on every
    device (`logarithm.py`). bfloat16 and float16 are the float32 draw rounded to nearest.

    Raises ArgumentError for a key that isn't one, a negative size, or a dtype other than float32,
    float64, bfloat16, float16.

    >>> from vescale.rng import key
    >>> gumbel(key(7), (2,))
    tensor([3.0690, 1.2466])
    """
    return _floats("gumbel", key, shape, dtype, "vs.rng.gumbel").to(dtype)


def truncated_normal(
    key: Key,
    lower: float,
    upper: float,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """key -> floats of `shape`, standard normal under the condition lower <= x <= upper.

    Of the 2^64 float64 normals in order (those that `normal` draws), one between the bounds, each as
    likely (`ranges.py`); then rounded to `dtype`, and not out of [lower, upper]. So narrow intervals
    and tails are as good as the middle: for every dtype 64 bits an element are used. A bound may be
    infinite. Numbers beyond +-9.16 don't occur.

    Raises ArgumentError for a key that isn't one, a negative size, a dtype other than float32,
    float64, bfloat16, float16, for bounds that aren't numbers, and for an interval that holds no
    normal number, or none of that dtype.

    >>> from vescale.rng import key
    >>> truncated_normal(key(7), -2, 2, (3,))
    tensor([ 0.6396, -1.2563,  0.7785])
    >>> truncated_normal(key(7), 5, 6, (3,))
    tensor([5.2592, 5.0172, 5.2951])
    """
    where = "vs.rng.truncated_normal"
    sizes = check_shape(shape, where)
    check_dtype(dtype, FLOATS, where, "draw float32 and convert")
    rule = "lower and upper are numbers, not tensors"
    if isinstance(lower, Real) and isinstance(upper, Real):
        first, last = -_round_down(-float(lower), dtype), _round_down(float(upper), dtype)
        low, high = _between(float(lower), float(upper))
        rule = f"[lower, upper] holds a normal number, and one of {dtype}"
        if low <= high and first <= last:
            drawn = scale_bits(draw(consumed(key, where), sizes, "bits64"), None, low, high - low)
            return normal_from_bits(drawn).to(dtype).clamp(min=first, max=last)
    raise ArgumentError(
        explain(
            f"lower={lower!r}, upper={upper!r}",
            where=f"{where}(lower=, upper=)",
            rule=rule,
            remedy="pass two numbers, lower < upper, within +-9",
        )
    )


@lru_cache(maxsize=256)
def _between(lower: float, upper: float) -> tuple[int, int]:
    """The signed 64-bit integers whose normals lie in [lower, upper]: the first and the last.

    Found by bisection, with the same operations as the draw: no library's erf takes part.
    """

    def count(inside) -> int:
        """How many of the integers, in order, come before the first that is `inside`."""
        low, high = 0, 2**64
        while low < high:
            middle = (low + high) // 2
            if inside(invert_int(middle - 2**63)):
                high = middle
            else:
                low = middle + 1
        return low

    return count(lambda z: z >= lower) - 2**63, count(lambda z: not z <= upper) - 2**63 - 1
