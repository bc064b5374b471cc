"""What no plan can do better than: the counting bound of the shard size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .blocks import Cuts


class Floor(NamedTuple):
    """A shard of at least `size` elements, because of blocks of `block` elements (0: of all elements)."""

    size: int
    block: int


def whole_blocks(elements: int, cuts: Cuts) -> int:
    """How many blocks of full size a tensor has.

    >>> whole_blocks(60, Cuts(8, 20)), whole_blocks(60, Cuts(8))
    (6, 7)
    """
    block, period = cuts
    if not period:
        return elements // block
    return elements // period * (period // block) + elements % period // block


def counting_bound(tensors: Mapping[tuple[int, Cuts], int], num_shards: int, grain: int) -> Floor:
    """The least shard size that counting allows, a multiple of `grain` elements.

    From how many tensors there are of each (elements, cuts). With S the shard size and m shards, `m * S`
    holds all elements, and for each block size g the `m * floor(S / g)` places for blocks of that size hold
    all whole blocks of size g or more.

    >>> counting_bound(
    ...     {(30, Cuts(10)): 1, (8, Cuts(4)): 2}, num_shards=2, grain=4
    ... )  # two of three blocks on a rank
    Floor(size=24, block=0)
    >>> counting_bound({(30, Cuts(10)): 1}, num_shards=2, grain=4)
    Floor(size=20, block=10)
    """
    elements = sum(size * count for (size, _), count in tensors.items())
    floors = [Floor(_ceil(elements, num_shards), 0)]
    counts: dict[int, int] = {}
    for (size, cuts), count in tensors.items():
        if size:
            block = min(cuts.block, size)
            counts[block] = counts.get(block, 0) + count * whole_blocks(size, Cuts(block, cuts.period))
    blocks = 0
    for block in sorted(counts, reverse=True):
        blocks += counts[block]
        floors.append(Floor(_ceil(blocks, num_shards) * block, block))
    size, block = max(floors, key=lambda floor: (floor.size, -floor.block))
    return Floor(_ceil(size, grain) * grain, block)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
