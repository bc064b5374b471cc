"""The least shard size for which a packing is found.

The published heuristic (veScale-FSDP, arXiv 2602.22437) tries multiples of cumulative least common multiples
of the blocks, and places tensors in one order. Here the candidates are multiples of the least common multiple
of any set of block widths, smallest first: a width that no tensor with two boundaries in it has need not
divide the shard. Each is tried in two orders: the hardest tensor that leaves no gap, with small ones to fill
the gaps of large ones, and the order in which they are declared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from .packing import Kind, Run, gap, pack, pack_in_order

# With n widths there are 2^n sets of them. Above this many only the cumulative ones are tried.
MAX_WIDTHS = 6
# How many shard sizes are tried until one works, and how many more to improve on it.
MAX_TRIES, MAX_IMPROVEMENTS = 24, 16


Found = tuple[
    int, list[tuple[Kind, Run]]
]  # shard size, and runs of tensors with the kind they are of, in units


def strides(kinds: Sequence[Kind]) -> list[int]:
    """The distinct numbers that may have to divide the shard, those of the largest tensors first."""
    largest: dict[int, int] = {}
    for kind in kinds:
        if kind.stride:
            largest[kind.stride] = max(largest.get(kind.stride, 0), kind.size)
    return sorted(largest, key=lambda stride: (-largest[stride], stride))


def grains(kinds: Sequence[Kind]) -> set[int]:
    """Least common multiples of sets of strides."""
    widths = strides(kinds)
    if len(widths) > MAX_WIDTHS:
        orders = widths, sorted(widths), sorted(widths, reverse=True)
        sets = [order[:count] for order in orders for count in range(len(order) + 1)]
        sets += [[width] for width in widths]
        return {math.lcm(*chosen) for chosen in sets}
    sizes = range(len(widths) + 1)
    return {math.lcm(*chosen) for size in sizes for chosen in combinations(widths, size)}


def candidates(kinds: Sequence[Kind], bound: int, most: int) -> Iterator[tuple[int, int]]:
    """(shard size, grain) from `bound` to `most`, ascending: steps of each grain that grow."""
    found: dict[int, int] = {}
    for grain in sorted(grains(kinds)):
        first, step = -(-bound // grain), 0
        while (size := (first + step) * grain) < most:
            found[size] = grain
            step = 2 * step or 1
    yield from sorted(found.items())


def estimate(kinds: Sequence[Kind], bound: int) -> int:
    """What the shard comes to, without packing: the bound, rounded up until every tensor fits somewhere."""
    size = bound
    for _ in range(8):
        stuck = [kind.stride for kind in kinds if gap(kind, size, size) is None]
        if not stuck:
            return size
        grain = math.lcm(*(stride for stride in stuck if stride))
        size = -(-(size + (size % grain == 0)) // grain) * grain
    return size


def search(declared: Sequence[Kind], num_shards: int, bound: int, limit: int) -> Found | None:
    """The least shard size that a packing is found for, None when it would be `limit` or more.

    `declared` are the tensors in the order they are declared in, neighbours that are alike together; `bound`
    is the least size to try. A limit above all tensors' size is never reached.
    """
    counts = Counter[tuple[int, int, int]]()
    for kind in declared:
        counts[kind[:3]] += kind.count
    kinds = [Kind(*key, count) for key, count in counts.items()]
    kinds.sort(key=lambda kind: (-kind.size, -kind.block, kind))  # hardest first
    total = sum(kind.size * kind.count for kind in kinds)

    def attempt(size: int) -> Found | None:
        runs, order = pack(kinds, size, num_shards), kinds
        if runs is None:
            runs, order = pack_in_order(declared, size, num_shards), declared
        return None if runs is None else (size, [(order[run.kind], run) for run in runs])

    most, best, below, tries = max(total, bound), None, {}, 0
    for size, grain in candidates(kinds, bound, min(most, limit)):
        if all(gap(kind, size, size) is not None for kind in kinds):
            best = attempt(size)
            tries += 1
            if best is not None or tries == MAX_TRIES:
                break
        below[grain] = size
    if best is None and most <= limit:
        best = attempt(most)  # one shard holds everything; from there down, by steps that suit all tensors
        whole = max(grains(kinds))
        below.setdefault(whole, (bound - 1) // whole * whole)
    if best is None:
        return None
    # Of each grain there are multiples between its last candidate and the best that were not tried.
    tries = 0
    for grain, size in sorted(below.items(), reverse=True):
        low, high = size // grain, (best[0] - 1) // grain
        while low < high and tries < MAX_IMPROVEMENTS:
            middle = (low + high) // 2 if high - low > 2 else low + 1
            better = attempt(middle * grain)
            tries += 1
            if better is not None:
                best, high = better, middle - 1
            else:
                low = middle
    return best
