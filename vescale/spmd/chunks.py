"""The boxes of a global tensor that local tensors hold, as checkpoints want them.

A box is offsets and sizes in the global tensor; a local tensor that is not one box is several: one
for each run of an interleaved split, and up to 2 * dims - 1 for a ragged one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from .layout import Layout
from .regions import flat_boxes, strides


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the global tensor, and where its elements stand in the local memory of `rank`."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The view of a contiguous local tensor."""
        assert local.is_contiguous()
        offset = local.storage_offset() + self.local_offset
        return local.as_strided(self.sizes, self.local_strides, offset)


def chunks(layout: Layout, rank: int) -> tuple[Chunk, ...]:
    """The boxes that `rank` holds.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, RaggedShard
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=RaggedShard((0, 1), (5, 7))), (4, 6))
    >>> [(chunk.offsets, chunk.sizes) for chunk in chunks(layout, 0)]
    [((0, 0), (1, 6)), ((1, 0), (1, 4))]
    """
    piece = layout.piece_shape(rank)
    low, high = 0, math.prod(piece)
    rows = layout.rows(rank)
    if rows is not None:
        assert layout.ragged is not None
        width = math.prod(piece[len(layout.ragged[1].dims) :])
        low, high = rows[0] * width, rows[1] * width
    sets, by = layout.index_sets(rank), strides(piece)
    found = []
    for box in flat_boxes(piece, low, high):
        runs = []  # of each dim: (global start, start in the piece, length)
        for intervals, (first, last) in zip(sets, box, strict=True):
            seen, dim = 0, []
            for start, stop in intervals:
                a, b = max(first, seen), min(last, seen + stop - start)
                if a < b:
                    dim.append((start + a - seen, a, b - a))
                seen += stop - start
            runs.append(dim)
        for parts in product(*runs):
            at = sum(part[1] * stride for part, stride in zip(parts, by, strict=True)) - low
            offsets, sizes = tuple(p[0] for p in parts), tuple(p[2] for p in parts)
            found.append(Chunk(rank, offsets, sizes, at, by))
    return tuple(found)
