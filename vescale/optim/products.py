"""Updates that are products: added to parameters with one rounding, as torch's optimizers do.

`p.add_(u, alpha=a)` of torch is a fused multiply-add: p + d doesn't have the same bits, with d = a u rounded.
`scaled` makes d, right to one rounding more, and notes on that tensor of what it is the product; `added`
looks for the note. Whatever is done to d makes another tensor, without one, and writing to it voids it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NOTE = "vescale_product"


@dataclass(frozen=True)
class _Product:
    factor: Tensor
    by: float | Tensor
    version: int


def scaled(factor: Tensor, by: float | Tensor) -> Tensor:
    """T[...], number or 0-d tensor -> T[...]: their product, for `added`.

    >>> scaled(torch.tensor([1.0, 2.0]), -0.5)
    tensor([-0.5000, -1.0000])
    """
    product = factor * by
    setattr(product, _NOTE, _Product(factor, by, _version(product)))
    return product


def added(base: Tensor, delta: Tensor) -> Tensor:
    """base + delta: T[...], T[...] -> T[...], rounded once where delta comes from `scaled`."""
    note = getattr(delta, _NOTE, None)
    # The kernel of 16-bit types rounds once in whole vectors and twice at their end: a shard has other bits.
    if note is None or note.version != _version(delta) or base.dtype.itemsize < 4:
        return base + delta
    if not isinstance(note.by, Tensor):
        return torch.add(base, note.factor, alpha=note.by)
    return torch.addcmul(base, note.factor, note.by)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
