"""The boxes of a global tensor that local tensors hold, as checkpoints want them.

A box is offsets and sizes in the global tensor; a local tensor that is not one box is several: one
for each run of an interleaved split, and up to 2 * dims - 1 for a ragged one. There are as few as can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from torch import Tensor

from .layout import Layout
from .regions import Sets, count_below, flat_boxes, region, strides


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


@lru_cache(maxsize=65536)  # DCP asks for them once an item
def chunks(layout: Layout, rank: int) -> tuple[Chunk, ...]:
    """The boxes that `rank` holds.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, RaggedShard
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=RaggedShard((0, 1), (5, 7))), (4, 6))
    >>> [(chunk.offsets, chunk.sizes) for chunk in chunks(layout, 0)]
    [((0, 0), (1, 6)), ((1, 0), (1, 4))]
    """
    held = region(layout, rank)
    piece = layout.piece_shape(rank)
    if not math.prod(piece):
        return ()
    runs = []  # of each dim: (start, stop, where it starts in the piece)
    for intervals in held.sets:
        starts = accumulate((stop - start for start, stop in intervals), initial=0)
        runs.append([(start, stop, at) for (start, stop), at in zip(intervals, starts)])
    found = []
    # No box reaches over the gap between two runs, so each product of runs is cut on its own; there the
    # region is a flat interval.
    for cell in product(*runs):
        sizes = tuple(stop - start for start, stop, _ in cell)
        sets: Sets = tuple(((start, stop),) for start, stop, _ in cell)
        first, last = (count_below(sets, layout.shape, flat) for flat in (held.low, held.high))
        for box in flat_boxes(sizes, first, last):
            offsets = tuple(start + low for (start, _, _), (low, _) in zip(cell, box))
            inside = (at + low for (_, _, at), (low, _) in zip(cell, box))
            at = sum(i * stride for i, stride in zip(inside, strides(piece))) - held.skip
            found.append(Chunk(rank, offsets, tuple(b - a for a, b in box), at, strides(piece)))
    return tuple(sorted(found, key=lambda chunk: chunk.offsets))
