"""Keyed draws: bits, uniform and normal numbers, in JAX's order of arguments.

The number of element i depends on the key and on i, its row-major index, only. So it doesn't depend
on the device, the mesh or the placement, the draw of a longer shape begins with that of a shorter
one, and a rank computes its own elements alone. Drawing twice from one key gives the same numbers:
`split` it first. The result lives on the key's device.

Traced, a draw is one `vescale::random_bits` node and elementwise ops after it.

>>> from vescale.rng import key
>>> uniform(key(7), (3,))
tensor([0.9546, 0.7502, 0.1142])
>>> torch.equal(normal(key(7), (2, 3)).view(-1), normal(key(7), (6,)))
True
"""

import math
import operator
from collections.abc import Sequence
from numbers import Real

import numpy
import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .inversion import normal_from_bits
from .keys import Key, key_data
from .philox import random_bits

_INTEGERS = {
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32), 32),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32), 32),
    **dict.fromkeys((torch.uint64, torch.int64), 64),
}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _shape(shape: int | Sequence[int], where: str) -> tuple[int, ...]:
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


def _check_dtype(dtype: torch.dtype, allowed: Sequence[torch.dtype], where: str, hint: str) -> None:
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

    Element i is the 64-bit element i of `philox.random_bits` for int64 and uint64, else the low
    bits of its 32-bit element i. (The default is signed because torch has hardly any operator for
    uint32 and uint64.)

    Raises ArgumentError for a key that isn't one, a negative size, or a dtype that isn't integer.

    >>> from vescale.rng import key
    >>> bits(key(0), (4,), torch.uint32).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    True
    """
    data = key_data(key, "vs.rng.bits(key)")
    sizes = _shape(shape, "vs.rng.bits")
    _check_dtype(dtype, tuple(_INTEGERS), "vs.rng.bits", "for floats use uniform or normal")
    return random_bits(data, sizes, _INTEGERS[dtype]).to(dtype)


def uniform(
    key: Key,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """key -> floats of `shape`, uniform over [low, high).

        u = (bits >> 8) / 2^24      float32, 24 of 32 bits
        u = (bits >> 11) / 2^53     float64, 53 of 64 bits (an unsigned shift)
        u * (high - low) + low      each op rounded once; at most the last float below high

    bfloat16 and float16 are the float32 draw rounded to nearest, again at most the last number
    below high (and at least low, rounded likewise). No gradient: low and high are numbers.

    Raises ArgumentError for a key that isn't one, a negative size, a dtype other than float32,
    float64, bfloat16, float16, and for bounds that aren't finite numbers or hold no number of that
    dtype between them.

    >>> from vescale.rng import key
    >>> uniform(key(7), (2,), low=-1, high=1)
    tensor([0.9092, 0.5003])
    """
    where = "vs.rng.uniform"
    data = key_data(key, f"{where}(key)")
    sizes = _shape(shape, where)
    _check_dtype(dtype, _FLOATS, where, "for integers use bits")
    start, span, last = _bounds(low, high, dtype, where)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if wide == torch.float64:
        high_bits = torch.bitwise_right_shift(random_bits(data, sizes, 64), 11)
        fraction = torch.bitwise_and(high_bits, 2**53 - 1).to(wide) * 2.0**-53
    else:
        fraction = torch.bitwise_right_shift(random_bits(data, sizes, 32), 8).to(wide) * 2.0**-24
    if (start, span) == (0.0, 1.0) and dtype == wide:
        return fraction  # below 1 as it is
    return (fraction * span + start).to(dtype).clamp(max=last)


def _bounds(low: float, high: float, dtype: torch.dtype, where: str) -> tuple[float, float, float]:
    """low and high - low in the format of the draw, and the last number of `dtype` below high."""
    rule = "low and high are numbers, not tensors"
    if isinstance(low, Real) and isinstance(high, Real):
        wide = numpy.float64 if dtype == torch.float64 else numpy.float32
        with numpy.errstate(over="ignore"):
            start, stop = wide(low), wide(high)
            span = stop - start
        rule = f"low, high and high - low are finite in {dtype}"
        top = torch.finfo(dtype).max
        if all(abs(bound) <= top for bound in (start, stop, span)):
            last = _last_below(float(stop), dtype)
            rule = f"[low, high) holds a number of {dtype}"
            if start <= last:
                return float(start), float(span), last
    raise ArgumentError(
        explain(
            f"low={low!r}, high={high!r}",
            where=f"{where}(low=, high=)",
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
    where = "vs.rng.normal"
    data = key_data(key, f"{where}(key)")
    sizes = _shape(shape, where)
    _check_dtype(dtype, _FLOATS, where, "draw float32 and convert")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    width = 64 if wide == torch.float64 else 32
    return normal_from_bits(random_bits(data, sizes, width), wide).to(dtype)
