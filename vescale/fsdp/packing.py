"""Can these tensors be placed in shards of this size? A greedy answer, in time that grows with tensors alone.

All counts are in collective units (16 bytes), so that alignment is exact integer arithmetic. Tensors that are
alike in size and cuts make a `Kind`, and are placed together where they can be.

What limits a tensor is how many shard boundaries it crosses. None: it may start anywhere. One: it starts so
that the boundary falls on a cut, which costs a gap of less than a block. Two or more: the cuts also have to
repeat with the boundaries, so the shard is a multiple of the block (of the period, where blocks count anew).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """`count` tensors of one size and one pattern of cuts; `block >= size` where there is no cut."""

    size: int
    block: int
    period: int
    count: int

    @property
    def stride(self) -> int:
        """What a shard is a multiple of when many boundaries cross such a tensor; 0 where none may."""
        return 0 if self.block >= self.size else self.period or self.block


class Run(NamedTuple):
    """`count` tensors of the kind number `kind`, one after the other from `start`."""

    kind: int
    start: int
    count: int


def whole_blocks(kind: Kind) -> int:
    """How many blocks of full size such a tensor has."""
    size, block, period, _ = kind
    return size // block if not period else size // period * (period // block) + size % period // block


def gap(kind: Kind, shard: int, room: int) -> int | None:
    """The least gap before such a tensor when `room` is left in the shard, None where it fits nowhere.

    >>> gap(Kind(size=12, block=4, period=0, count=1), shard=8, room=6)  # cut after 4, then after 12
    2
    """
    size, block, period, _ = kind
    if size <= room:
        return 0
    for skipped, left in ((0, room), (room, shard)):
        if size <= left:
            return skipped
        first = left // block * block if not period else _last_cut(left, block, period)
        if first and _cuts_repeat(kind, shard, first):
            return skipped + left - first
    return None


def pack(kinds: Sequence[Kind], shard: int, num_shards: int) -> list[Run] | None:
    """Places for all tensors in `num_shards` shards, or None where this order finds none.

    `kinds` come hardest first. At every step the hardest tensor that leaves no gap is placed, else the one
    with the least gap. Tensors that fit anywhere are kept for gaps that they fill.
    """
    left = [kind.count for kind in kinds]
    remaining = sum(kind.size * kind.count for kind in kinds)
    position, end = 0, shard * num_shards
    alive = [number for number, kind in enumerate(kinds) if kind.count]
    # In step: every boundary that falls on a cut is followed by others that do. Most are; it saves a call.
    in_step = [kind.size <= shard if not kind.stride else _in_step(kind, shard) for kind in kinds]
    runs: list[Run] = []
    while alive:
        if position + remaining > end:
            return None
        room = shard - position % shard
        least, chosen = end + 1, -1
        for number in alive:
            kind = kinds[number]
            if kind.size <= room:
                skipped = 0
            else:
                skipped = room % kind.block if in_step[number] else gap(kind, shard, room)
            if skipped is None or skipped >= least:
                continue
            if not skipped and chosen >= 0 and least < kind.size <= room:
                continue  # it would only push the harder ones out of step
            least, chosen = skipped, number
            if not skipped:
                break
        if chosen < 0:
            return None
        kind = kinds[chosen]
        position += least
        room = shard - position % shard
        count = _how_many(kind, shard, room, left[chosen], alone=len(alive) == 1)
        runs.append(Run(chosen, position, count))
        position += count * kind.size
        remaining -= count * kind.size
        left[chosen] -= count
        if not left[chosen]:
            alive.remove(chosen)
    return runs if position <= end else None


def pack_in_order(kinds: Sequence[Kind], shard: int, num_shards: int) -> list[Run] | None:
    """Places for the tensors in the order given, each at its earliest start, or None."""
    position, end = 0, shard * num_shards
    runs: list[Run] = []
    for number, kind in enumerate(kinds):
        left = kind.count
        while left:
            skipped = gap(kind, shard, shard - position % shard)
            if skipped is None:
                return None
            position += skipped
            count = _how_many(kind, shard, shard - position % shard, left, alone=True)
            runs.append(Run(number, position, count))
            position += count * kind.size
            left -= count
            if position > end:
                return None
    return runs


def _how_many(kind: Kind, shard: int, room: int, left: int, alone: bool) -> int:
    """How many of these go one after the other without a gap and without another look."""
    if kind.size <= room:
        return min(left, room // kind.size)
    if (alone or kind.size > shard) and kind.size % kind.block == 0 and _in_step(kind, shard):
        return left
    return 1


def _in_step(kind: Kind, shard: int) -> bool:
    return kind.stride > 0 and not kind.period and shard % kind.block == 0


def _last_cut(room: int, block: int, period: int) -> int:
    whole, rest = divmod(room, period)
    return whole * period + rest // block * block


def _cuts_repeat(kind: Kind, shard: int, first: int) -> bool:
    """Whether the boundaries after the first, which falls after `first`, fall on cuts too."""
    size, block, period, _ = kind
    if size - first <= shard or shard % (period or block) == 0:
        return True
    if not period:
        return False
    # Off the period the cuts repeat until a boundary first passes the end of a matrix: a few steps.
    while (first := first + shard) < size:
        if first % period % block:
            return False
    return True
