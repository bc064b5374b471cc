"""Fingerprints: 64 bits that tell values apart, summed up from the parts of ranks without communication.

    fingerprint(x) = sum over the elements i of x, and their words w, of  key(w, i) * x[i, w]   mod 2**64

A word is 32 bits of an element, or all of a smaller one. `key` is an odd number mixed from the word's place
and the element's global index, so a rank sums over the elements that it holds, and the fingerprint of the
global value is the sum over the ranks, whatever the mesh and the layout. Values that differ in one word are
always told apart, since an odd key has an inverse; several differences cancel with odds of 2**-32 or less.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..spmd.bits import in_a_row
from ..spmd.layout import Layout
from ..spmd.locals import flat_indices

_KEPT_BYTES = 256 * 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def fingerprint(local: Tensor, layout: Layout | None = None, rank: int = 0) -> Tensor:
    """The part of a fingerprint that `rank` contributes, a 0-d int64 on its device.

        fingerprint : local tensor of rank, layout -> int64[]

    Without a layout the local tensor is taken for a value of its own.

    >>> from vescale.spmd.layout import AbstractMesh, Layout
    >>> from vescale.spmd.placements import P, Shard
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=Shard(0)), (5,))
    >>> x = torch.randn(5)
    >>> whole = fingerprint(x[:3], layout, 0) + fingerprint(x[3:], layout, 1)
    >>> bool(whole == fingerprint(x))
    True
    """
    with torch.no_grad():
        total = torch.zeros((), dtype=torch.int64, device=local.device)
        for place, words in enumerate(_words(local.detach())):
            keys = _keys.get(tuple(local.shape), layout, rank, place, local.device)
            if local.device.type == "cpu":  # no product in memory; other devices have no dot of integers
                total += torch.dot(words.to(torch.int64), keys)
            else:
                total += (words.to(torch.int64) * keys).sum()
        return total


def first_holder(layout: Layout, rank: int) -> int:
    """The first rank that holds what `rank` holds: the one whose contribution counts.

    >>> from vescale.spmd.layout import AbstractMesh, Layout
    >>> from vescale.spmd.placements import P, Shard
    >>> layout = Layout(AbstractMesh(("dp", "tp"), (2, 2)), P(tp=Shard(0)), (4,))
    >>> [first_holder(layout, rank) for rank in range(4)]
    [0, 1, 0, 1]
    """
    return first_of(
        dict(zip(layout.mesh.axis_names, layout.mesh.shape)), set(dict(layout.spec.items())), rank
    )


def first_of(mesh: dict[str, int], split: set[str], rank: int) -> int:
    """The rank with the coordinates of `rank` on the axes `split`, and 0 on the others."""
    first, stride = 0, 1
    for axis, size in reversed(mesh.items()):
        rank, coordinate = divmod(rank, size)
        first += stride * coordinate if axis in split else 0
        stride *= size
    return first


def _words(local: Tensor) -> Sequence[Tensor]:
    """The words of the elements, flat, as integers.

    A wide element is cut: the sign of a float64 is the top bit of 64, and two of those would cancel.
    """
    flat = in_a_row(local)
    size = flat.dtype.itemsize
    if size <= 4:
        return [flat.view(_INTEGERS[size])]
    return flat.view(torch.int32).view(-1, size // 4).unbind(1)


class _Keys:
    """The keys of parts, flat, the latest kept."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple, Tensor] = OrderedDict()
        self.nbytes = 0

    def get(
        self, shape: tuple[int, ...], layout: Layout | None, rank: int, word: int, device: torch.device
    ) -> Tensor:
        part = shape if layout is None else (layout, first_holder(layout, rank))
        place = (part, word, device)
        if place in self.kept:
            self.kept.move_to_end(place)
            return self.kept[place]
        if layout is None:
            index = torch.arange(math.prod(shape), device=device)
        else:
            index = flat_indices(layout, rank, device).reshape(-1)
        keys = self.kept[place] = _mixed(4 * index + word)
        self.nbytes += keys.nbytes
        while self.nbytes > _KEPT_BYTES and len(self.kept) > 1:
            self.nbytes -= self.kept.popitem(last=False)[1].nbytes
        return keys


def _mixed(index: Tensor) -> Tensor:
    """Odd numbers that look random: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (index + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1


_keys = _Keys()
