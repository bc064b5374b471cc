"""The dynamic maps of 8-bit optimizers, and the code of a number in them.

A map is 256 numbers in ascending order: those of dynamic tree quantization, in Dettmers et al., "8-bit
Optimizers via Block-wise Quantization" (2022). Of 7 bits of a code the leading zeros count powers of ten, a
one ends them, and the rest is a fraction: the middles of equal parts of [0.1, 1]. The eighth bit is the
sign, or for numbers that have none one more bit of the fraction. Two codes have no one among the 7 bits: 0
and 1.

    signed      + or -  10^-e  times the middles of 2^(6-e) parts, e = 0..6; and 0, and 1
    unsigned            10^-e  times the middles of 2^(7-e) parts, e = 0..6; and 0, and 1

So a signed map begins at -0.99296875, not at -1.

The code of v is the nearest number's, of two equally near ones the lower. A binary search takes 8 dependent
steps. Here the upper 16 bits of v, as a float32, are looked up: they leave at most one threshold to compare
with, which took a fifteenth of the time of torch.bucketize.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SIGNED, UNSIGNED = "signed", "unsigned"


@lru_cache(maxsize=8)
def dynamic_map(kind: str) -> Tensor:
    """float32 (256,): the numbers of the codes.

    >>> dynamic_map("signed")[[0, 126, 127, 128, 255]]
    tensor([-9.9297e-01, -5.5000e-07,  0.0000e+00,  5.5000e-07,  1.0000e+00])
    >>> dynamic_map("unsigned")[[0, 1, 2, 254, 255]]
    tensor([0.0000e+00, 3.2500e-07, 7.7500e-07, 9.9648e-01, 1.0000e+00])
    """
    bits = 6 if kind == SIGNED else 7
    positive = [
        10.0**-power * (0.1 + 0.9 * (part + 0.5) / 2 ** (bits - power))
        for power in range(7)
        for part in range(2 ** (bits - power))
    ]
    negative = [-number for number in positive] if kind == SIGNED else []
    return torch.tensor(sorted([*negative, 0.0, *positive, 1.0]), dtype=torch.float64).float()


def zero_code(kind: str) -> int:
    """The code of 0."""
    return dynamic_map(kind).tolist().index(0.0)


@dataclass(frozen=True, eq=False)
class _Search:
    """How many of ascending thresholds are at most v, by the upper 16 bits of v.

    `below[b]` are certainly at most v, and one more when v is at least `threshold[b]`. nan and infinities
    count as `nan` says.
    """

    below: Tensor  # uint8 (65536,)
    threshold: Tensor  # float32 (65536,)

    @classmethod
    def of(cls, thresholds: Tensor, nan: int) -> _Search:
        upper = torch.arange(1 << 16, dtype=torch.int32)
        ends = torch.stack([upper << 16, upper << 16 | 0xFFFF]).view(torch.float32)
        first, last = ends.nan_to_num(nan=0.0).aminmax(dim=0)
        count, most = (torch.searchsorted(thresholds, end.contiguous(), right=True) for end in (first, last))
        is_nan = ends.isnan().any(0)
        assert bool(((most - count <= 1) | is_nan).all())
        after = torch.cat([thresholds, torch.tensor([torch.inf])])[count]
        never = torch.full_like(after, torch.nan)  # no number is at least nan
        count = torch.where(is_nan, nan, count)
        return cls(count.to(torch.uint8), torch.where((most > count) & ~is_nan, after, never))

    def to(self, device: torch.device) -> _Search:
        return _Search(self.below.to(device), self.threshold.to(device))

    def __call__(self, v: Tensor) -> Tensor:
        """float32 (n,) -> uint8 (n,)."""
        upper = (v.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        return self.below.index_select(0, upper).add_(v >= self.threshold.index_select(0, upper))


@dataclass(frozen=True, eq=False)
class _Tables:
    numbers: Tensor  # float32 (256,)
    gaps: Tensor  # from each number to the next; after the last, inf
    nearest: _Search
    lower: _Search  # the greatest number that is at most v, or the first


@lru_cache(maxsize=16)
def _tables(kind: str, device: torch.device) -> _Tables:
    numbers = dynamic_map(kind)
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2  # exact
    # What is in the middle has the lower code: the thresholds are the least float32s above.
    rounded = middles.float()
    above = torch.where(rounded > middles, rounded, rounded.nextafter(torch.tensor(torch.inf)))
    nearest = _Search.of(above, zero_code(kind))
    lower = _Search.of(numbers[1:].contiguous(), zero_code(kind))
    gaps = torch.cat([numbers.diff(), torch.tensor([torch.inf])])
    return _Tables(numbers.to(device), gaps.to(device), nearest.to(device), lower.to(device))


def encode(v: Tensor, kind: str, noise: Tensor | None = None) -> Tensor:
    """float32, in [-1, 1] -> uint8 codes of the same shape.

    With `noise`, numbers u in [0, 1) of that shape, the code is one of the two around v, and the higher one
    where u < (v - lower) / (higher - lower): between the first and the last number of the map its expectation
    is v. What lies outside the map has the code of its end; nan and infinities have that of 0.

    >>> encode(torch.tensor([-1.0, 0.0, 0.5, 1.0, torch.nan]), "signed")
    tensor([  0, 127, 219, 255, 127], dtype=torch.uint8)
    """
    tables, flat = _tables(kind, v.device), v.reshape(-1)
    if noise is None:
        return tables.nearest(flat).view(v.shape)
    code = tables.lower(flat)
    index = code.int()
    rest = (flat - tables.numbers.index_select(0, index)).div_(tables.gaps.index_select(0, index))
    return code.add_(noise.reshape(-1) < rest).view(v.shape)


def decode(codes: Tensor, kind: str) -> Tensor:
    """uint8 -> the float32 numbers of the codes.

    >>> decode(torch.tensor([127, 255], dtype=torch.uint8), "signed")
    tensor([0., 1.])
    """
    numbers = _tables(kind, codes.device).numbers
    return numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)
