"""Two values that should be equal: where they first differ, and by how much.

Bits are compared, but every NaN is the same NaN, and the two zeros are one unless they are asked to differ: a
sum that is made of parts may end in either. An *ulp* counts the numbers of the dtype that lie between two of
them. It is a poor measure near zero, where a difference of two large numbers may land: `error` is in units of
the spacing at the leaf's largest value, eps * max |expected|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor differs from the one expected, in the first element that does and in all.

    `ulps` is the largest distance (None where a NaN or an infinity stands on one side, or for a dtype
    without ulps), `error` the largest |difference| / (eps * max |expected|).
    """

    index: tuple[int, ...]
    expected: str
    got: str
    ulps: int | None
    error: float
    differing: int
    total: int

    def __str__(self) -> str:
        by = "not a distance" if self.ulps is None else f"{self.ulps:,} ulps at most"
        return (
            f"at {list(self.index)} expected {self.expected}, got {self.got}; {self.differing:,} of "
            f"{self.total:,} elements differ, by {by}, {self.error:.3g} eps of the largest value"
        )


def difference(expected: Tensor, got: Tensor, *, zeros: bool = False) -> Difference | None:
    """How `got` differs from `expected`, of the same shape and dtype; None when it doesn't.

    With `zeros`, -0.0 differs from 0.0.

    >>> print(difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])))
    at [1] expected 0x40000000 (2.0), got 0x40200000 (2.5); 1 of 2 elements differ, by 2,097,152 ulps at most,
    2.1e+06 eps of the largest value
    """
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    if not expected.numel():
        return None
    a, b = _parts(expected), _parts(got)
    unequal = _patterns(a) != _patterns(b)
    if a.is_floating_point():
        unequal &= ~(a.isnan() & b.isnan())
        unequal &= zeros | (a != 0) | (b != 0)
    per_element = unequal.view(expected.numel(), -1)
    flat = per_element.any(1)
    places = flat.nonzero().view(-1)
    if not len(places):
        return None
    first = int(places[0])
    part = first * per_element.shape[1] + int(per_element[first].nonzero()[0])
    index = tuple(int(at) for at in np.unravel_index(first, expected.shape)) if expected.dim() else ()
    ulps, error = _distance(a, b, unequal)
    return Difference(index, _told(a, part), _told(b, part), ulps, error, int(flat.sum()), expected.numel())


def wording(expected: Any, got: Any) -> str | None:
    """How a leaf that differs in kind, shape, dtype or static value does; None when these agree."""
    if isinstance(expected, Tensor) != isinstance(got, Tensor):
        return f"expected a {type(expected).__name__}, got a {type(got).__name__}"
    if isinstance(expected, Tensor):
        if expected.shape != got.shape:
            return f"expected the shape {tuple(expected.shape)}, got {tuple(got.shape)}"
        return None if expected.dtype == got.dtype else f"expected {expected.dtype}, got {got.dtype}"
    same = type(expected) is type(got) and (expected == got or repr(expected) == repr(got))
    return None if same else f"expected {expected!r}, got {got!r}"


def _parts(tensor: Tensor) -> Tensor:
    """Contiguous real numbers: those of a complex tensor two an element."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _patterns(flat: Tensor) -> Tensor:
    return flat.view(_INTEGERS[flat.element_size()])


def _distance(a: Tensor, b: Tensor, unequal: Tensor) -> tuple[int | None, float]:
    wide_a, wide_b = a.double(), b.double()
    scale = float(wide_a[wide_a.isfinite()].abs().max()) if bool(wide_a.isfinite().any()) else 0.0
    apart = (wide_a - wide_b).abs()[unequal]
    if not bool((a[unequal].isfinite() & b[unequal].isfinite()).all()):
        return None, float("inf")
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 1.0
    error = float(apart.max()) / (eps * scale) if scale else (float("inf") if bool(apart.max()) else 0.0)
    if not a.is_floating_point():
        return None, error
    x, y = (_ordered(flat[unequal]) for flat in (a, b))
    low, high = np.minimum(x, y), np.maximum(x, y)
    with np.errstate(over="ignore"):  # two far ends of float64: the difference is right modulo 2**64
        return int((high - low).view(np.uint64).max()), error


def _ordered(flat: Tensor) -> np.ndarray:
    """Integers in the order of the numbers, neighbours one apart; both zeros count."""
    patterns = _patterns(flat).to(torch.int64)
    if flat.element_size() == 1:  # 8-bit floats came as bytes
        patterns = torch.where(patterns > 127, patterns - 256, patterns)
    lowest = -(1 << (8 * flat.element_size() - 1))
    return torch.where(patterns >= 0, patterns, ~patterns + lowest).numpy()


def _told(flat: Tensor, at: int) -> str:
    """The bits of a number in hex, and the number."""
    size = flat.element_size()
    pattern = int(_patterns(flat[at : at + 1])) % (1 << (8 * size))
    return f"0x{pattern:0{2 * size}x} ({flat[at].item()})"
