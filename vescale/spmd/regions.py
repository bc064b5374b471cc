"""Regions: which elements a rank holds, in closed form, and what two ranks have in common.

A rank holds the product of one index set a dim (what the splits by dim leave), of which a ragged
split keeps a range. Local elements stand in ascending order of their global row-major index, so the
range is an interval of global indices too:

    region = (set of dim 0) x (set of dim 1) x ..  and  low <= global flat index < high

Regions are closed under intersection, and their size and the address of an element are computed
from a few intervals: nothing here walks over elements or ranks. What two ranks have in common is
described by `Block`s, strided pieces of both local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from .layout import Interval, Layout

Sets = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True, slots=True)
class Region:
    """What a rank holds: `low <= flat index < high`, and each index in its dim's set.

    `skip` is how many elements of the product lie below `low`: the local tensor starts after them.
    """

    shape: tuple[int, ...]
    sets: Sets
    low: int
    high: int
    skip: int


@dataclass(frozen=True, slots=True)
class Block:
    """The same elements as a strided piece of the sender's and of the receiver's contiguous memory."""

    sizes: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@lru_cache(maxsize=65536)
def region(layout: Layout, rank: int) -> Region:
    """The region of `rank`.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, RaggedShard
    >>> mesh = AbstractMesh(("dp",), (2,))
    >>> region(Layout(mesh, P(dp=RaggedShard((0, 1), (5, 7))), (4, 6)), 1)
    Region(shape=(4, 6), sets=(((0, 4),), ((0, 6),)), low=10, high=24, skip=10)
    """
    sets = layout.index_sets(rank)
    sizes = _sizes(sets)
    low, high, skip = 0, math.prod(layout.shape), 0
    rows = layout.rows(rank)
    if rows is not None and math.prod(sizes):
        assert layout.ragged is not None
        width = math.prod(sizes[len(layout.ragged[1].dims) :])
        skip, stop = rows[0] * width, rows[1] * width
        low, high = _flat_of(sets, layout.shape, skip), _flat_of(sets, layout.shape, stop)
    return Region(layout.shape, sets, low, high, skip)


def common_size(a: Region, b: Region) -> int:
    """How many elements both regions hold."""
    sets = tuple(
        tuple((start, stop) for start, stop, _, _ in _common(p, q))
        for p, q in zip(a.sets, b.sets, strict=True)
    )
    low, high = max(a.low, b.low), min(a.high, b.high)
    if low >= high or not math.prod(_sizes(sets)):
        return 0
    return count_below(sets, a.shape, high) - count_below(sets, a.shape, low)


@lru_cache(maxsize=65536)
def overlap(src: Region, dst: Region) -> tuple[Block, ...]:
    """What both hold, as pieces of the local tensors of the one and the other.

    >>> whole = Region((4, 6), (((0, 4),), ((0, 6),)), 0, 24, 0)
    >>> half = Region((4, 6), (((0, 4),), ((3, 6),)), 0, 24, 0)  # Shard(1), second of two
    >>> overlap(whole, half)
    (Block(sizes=(4, 3), src_offset=3, src_strides=(6, 1), dst_offset=0, dst_strides=(3, 1)),)
    """
    common = tuple(_common(p, q) for p, q in zip(src.sets, dst.sets, strict=True))
    sets: Sets = tuple(tuple((start, stop) for start, stop, _, _ in dim) for dim in common)
    sizes = _sizes(sets)
    low, high = max(src.low, dst.low), min(src.high, dst.high)
    if low >= high or not math.prod(sizes):
        return ()
    first, last = count_below(sets, src.shape, low), count_below(sets, src.shape, high)
    if first >= last:
        return ()
    src_strides, dst_strides = strides(_sizes(src.sets)), strides(_sizes(dst.sets))

    # One run on both sides: most gathers along dim 0, and nearly everything that is ragged.
    ends = [
        [_position(dim, index) for dim, index in zip(common, _unravel(at, sizes), strict=True)]
        for at in (first, last - 1)
    ]
    src_ends, dst_ends = (
        [sum(e[side] * s for e, s in zip(end, by, strict=True)) for end in ends]
        for side, by in ((0, src_strides), (1, dst_strides))
    )
    count = last - first
    if src_ends[1] - src_ends[0] == dst_ends[1] - dst_ends[0] == count - 1:
        return (Block((count,), src_ends[0] - src.skip, (1,), dst_ends[0] - dst.skip, (1,)),)

    blocks: list[Block] = []
    for box in flat_boxes(sizes, first, last):
        for parts in product(*(_progressions(dim, *side) for dim, side in zip(common, box))):
            shape: list[int] = []
            by_src: list[int] = []
            by_dst: list[int] = []
            src_offset, dst_offset = -src.skip, -dst.skip
            for part, src_stride, dst_stride in zip(parts, src_strides, dst_strides, strict=True):
                src_offset += part.src * src_stride
                dst_offset += part.dst * dst_stride
                if part.count > 1:
                    shape.append(part.count)
                    by_src.append(part.src_step * src_stride)
                    by_dst.append(part.dst_step * dst_stride)
                shape.append(part.length)
                by_src.append(src_stride)
                by_dst.append(dst_stride)
            blocks.append(Block(tuple(shape), src_offset, tuple(by_src), dst_offset, tuple(by_dst)))
    return tuple(blocks)


def flat_boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[Interval, ...]]:
    """A row-major flat interval of a tensor as the fewest boxes, in order.

    >>> list(flat_boxes((3, 4), 2, 12))
    [((0, 1), (2, 4)), ((1, 3), (0, 4))]
    """
    if low >= high:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    whole = tuple((0, size) for size in shape[1:])
    (top, start), (bottom, stop) = divmod(low, inner), divmod(high, inner)
    if top == bottom:
        for rest in flat_boxes(shape[1:], start, stop):
            yield ((top, top + 1), *rest)
        return
    if start:
        for rest in flat_boxes(shape[1:], start, inner):
            yield ((top, top + 1), *rest)
        top += 1
    if top < bottom:
        yield ((top, bottom), *whole)
    for rest in flat_boxes(shape[1:], 0, stop):
        yield ((bottom, bottom + 1), *rest)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _Progression:
    """`count` runs of `length` indices, equally spaced in the pieces of both sides."""

    src: int
    src_step: int
    dst: int
    dst_step: int
    count: int
    length: int


@lru_cache(maxsize=65536)
def _common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Intervals in both sets, each with its place in a and in b: (start, stop, in a, in b)."""
    found: list[tuple[int, int, int, int]] = []
    i = j = before_a = before_b = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop, before_a + start - a[i][0], before_b + start - b[j][0]))
        if a[i][1] <= b[j][1]:
            before_a += a[i][1] - a[i][0]
            i += 1
        else:
            before_b += b[j][1] - b[j][0]
            j += 1
    return tuple(found)


def _progressions(common: tuple[tuple[int, int, int, int], ...], low: int, high: int) -> list[_Progression]:
    """The common indices number low..high of one dim; equal runs at equal distances are one entry."""
    found: list[_Progression] = []
    seen = 0
    for start, stop, in_src, in_dst in common:
        first, last = max(low - seen, 0), min(high - seen, stop - start)
        seen += stop - start
        if first >= last:
            continue
        src, dst, length = in_src + first, in_dst + first, last - first
        if found and found[-1].length == length:
            p = found[-1]
            src_step, dst_step = src - p.src, dst - p.dst
            if p.count > 1:
                src_step, dst_step = p.src_step, p.dst_step
            if (src, dst) == (p.src + p.count * src_step, p.dst + p.count * dst_step):
                found[-1] = _Progression(p.src, src_step, p.dst, dst_step, p.count + 1, length)
                continue
        found.append(_Progression(src, 0, dst, 0, 1, length))
    return found


def _position(common: tuple[tuple[int, int, int, int], ...], index: int) -> tuple[int, int]:
    """Where the common index number `index` of a dim stands in the two pieces."""
    for start, stop, in_src, in_dst in common:
        if index < stop - start:
            return in_src + index, in_dst + index
        index -= stop - start
    raise IndexError(index)


def _sizes(sets: Sets) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in intervals) for intervals in sets)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))


def _flat_of(sets: Sets, shape: tuple[int, ...], position: int) -> int:
    """The global flat index of the element number `position` of the product."""
    sizes = _sizes(sets)
    if position == math.prod(sizes):
        return math.prod(shape)
    flat = 0
    for intervals, index, stride in zip(sets, _unravel(position, sizes), strides(shape)):
        flat += _position(tuple((a, b, a, a) for a, b in intervals), index)[0] * stride
    return flat


def count_below(sets: Sets, shape: tuple[int, ...], flat: int) -> int:
    """How many elements of the product of index sets have a global flat index below `flat`."""
    sizes = _sizes(sets)
    total = 0
    for dim, (intervals, stride) in enumerate(zip(sets, strides(shape))):
        index, flat = divmod(flat, stride)
        below = sum(min(stop, index) - start for start, stop in intervals if start < index)
        total += below * math.prod(sizes[dim + 1 :])
        if not any(start <= index < stop for start, stop in intervals):
            return total
    return total + flat  # a 0-d tensor has its one element at 0, and nothing has divided `flat`
