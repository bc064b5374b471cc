"""Which tensors share a buffer, when one buffer for all would pad too much.

A shard size suits the tensors whose strides divide it. So a buffer is opened with a size that is a multiple
of the least common multiple of some strides, and filled with tensors that it suits until it is full; the rest
goes to further buffers. Tensors of one width may end up in two of them, where the space that one width leaves
is of use to another. Few such choices matter, so they are searched with a beam, by cost estimates; the
cheapest splits are then packed. All counts are in collective units, as in `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from .packing import Kind, whole_blocks
from .search import estimate, grains

# Buffers for one bucket, partial splits that are followed up, and complete ones that are packed.
MAX_BUFFERS, BEAM, MAX_PACKED = 4, 6, 4


class Buffer(NamedTuple):
    """A shard size, and how many tensors of each kind the buffer holds."""

    shard: int
    counts: tuple[int, ...]


class Split(NamedTuple):
    """Buffers for all tensors at an estimated cost, which includes the charge for each of them."""

    cost: float
    buffers: tuple[Buffer, ...]


def splits(kinds: Sequence[Kind], num_shards: int, charge: float) -> list[Split]:
    """The most promising ways to split, cheapest first, none of them a single buffer."""
    start = tuple(kind.count for kind in kinds)
    beam = [_State(0.0, 0.0, (), start)]
    found: dict[tuple[Buffer, ...], float] = {}
    for _ in range(MAX_BUFFERS - 1):
        partial: dict[tuple[int, ...], _State] = {}
        for state in beam:
            parts = _by_stride(kinds, state.rest, num_shards, charge)
            cost = state.spent + sum(part.shard + charge for part in parts)
            found[(*state.buffers, *parts)] = cost
            for buffer in _openings(kinds, state.rest, num_shards):
                rest = tuple(have - used for have, used in zip(state.rest, buffer.counts))
                if not any(rest):
                    continue
                spent = state.spent + buffer.shard + charge
                last = _buffer(kinds, rest, num_shards)
                found[(*state.buffers, buffer, last)] = spent + last.shard + charge
                bound = bound_of(_present(kinds, rest), num_shards)
                new = _State(spent + bound + charge, spent, (*state.buffers, buffer), rest)
                if rest not in partial or new < partial[rest]:
                    partial[rest] = new
        least = min(found.values())
        beam = sorted(state for state in partial.values() if state.hope + charge < least)[:BEAM]
    cheapest = sorted(Split(cost, buffers) for buffers, cost in found.items() if len(buffers) > 1)
    return cheapest[:MAX_PACKED]


class _State(NamedTuple):
    """A split that isn't complete: what it may come to, what it costs so far, what is in no buffer yet."""

    hope: float
    spent: float
    buffers: tuple[Buffer, ...]
    rest: tuple[int, ...]


def _present(kinds: Sequence[Kind], counts: Sequence[int]) -> list[Kind]:
    return [kind._replace(count=count) for kind, count in zip(kinds, counts) if count]


def _buffer(kinds: Sequence[Kind], counts: tuple[int, ...], num_shards: int) -> Buffer:
    """One buffer for these, of the size that is estimated."""
    present = _present(kinds, counts)
    return Buffer(estimate(present, bound_of(present, num_shards)), counts)


def _by_stride(
    kinds: Sequence[Kind], counts: tuple[int, ...], num_shards: int, charge: float
) -> tuple[Buffer, ...]:
    """A buffer for each stride, then two of them made one as long as that is cheaper."""
    strides = sorted({kind.stride for kind, count in zip(kinds, counts) if count})
    parts = [
        _buffer(kinds, tuple(c * (kind.stride == stride) for kind, c in zip(kinds, counts)), num_shards)
        for stride in strides
    ]
    while True:
        merges = []
        for one, other in combinations(parts, 2):
            both = _buffer(kinds, tuple(map(sum, zip(one.counts, other.counts))), num_shards)
            merges.append((both.shard - one.shard - other.shard, both, one, other))
        if not merges or min(merges)[0] >= charge:
            return tuple(parts)
        _, both, one, other = min(merges)
        parts = [part for part in parts if part not in (one, other)] + [both]


def bound_of(kinds: Sequence[Kind], num_shards: int) -> int:
    """The counting bound of `bound.counting_bound`, in units and of blocks that end at units."""
    least = -(-sum(kind.size * kind.count for kind in kinds) // num_shards)
    blocks = 0
    for kind in sorted(kinds, key=lambda kind: -kind.block):
        blocks += kind.count * whole_blocks(kind)
        least = max(least, -(-blocks // num_shards) * kind.block)
    return least


def _openings(kinds: Sequence[Kind], counts: Sequence[int], num_shards: int) -> Iterator[Buffer]:
    """Buffers that hold some of the tensors: of each grain, as large as the kinds that it suits come to."""
    present = [number for number, count in enumerate(counts) if count]
    total = sum(kinds[number].size * counts[number] for number in present)
    by_block = sorted(present, key=lambda number: (-kinds[number].block, number))
    by_total = sorted(present, key=lambda number: (kinds[number].size * counts[number], number))
    seen = set()
    for grain in sorted(grains([kinds[number] for number in present])):
        for order in (by_block, by_total):
            suited = [
                number for number in order if not kinds[number].stride or grain % kinds[number].stride == 0
            ]
            sizes, need = {total // num_shards // grain * grain}, 0
            for number in suited:
                need += _space(kinds[number]) * counts[number] + kinds[number].stride
                sizes.add(-(-need // (num_shards * grain)) * grain)
            for shard in sorted(sizes):
                if shard:
                    buffer = _fill(kinds, counts, order, shard, num_shards)
                    if buffer not in seen and any(buffer.counts):
                        seen.add(buffer)
                        yield buffer


def _fill(
    kinds: Sequence[Kind], counts: Sequence[int], order: Sequence[int], shard: int, num_shards: int
) -> Buffer:
    """As many tensors as fit of those that repeat with the shard or never meet two boundaries."""
    room, taken = shard * num_shards, [0] * len(kinds)
    for number in order:
        kind = kinds[number]
        fits = kind.size <= shard if not kind.stride else shard % kind.stride == 0
        if fits and room > kind.stride:
            taken[number] = min(counts[number], (room - kind.stride) // _space(kind))
            room -= taken[number] * _space(kind) + (kind.stride if taken[number] else 0)
    return Buffer(shard, tuple(taken))


def _space(kind: Kind) -> int:
    """What a tensor takes with its last block made whole."""
    return -(-kind.size // kind.block) * kind.block if not kind.period else kind.size
