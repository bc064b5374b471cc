"""Owners: which rank computes with which matrix, so that all have about as much to do and few bytes move.

    assign(works, ranks) -> Ownership          pure, the same on every rank

Longest processing time first: matrices by falling cost, each to the rank that holds most of it while that
rank has no more to do than the busiest by the plain rule, or `SLACK` of the mean; else to the one with the
least. Matrices of a stack are alike, so a rank gets a number of them, and ranks have theirs in order, one
ragged cut: these stay about where they are. No matrix is split; `Ownership.bound` says what that costs.

Source: Graham, "Bounds on multiprocessing timing anomalies", 1969, for the rule; Martello and Toth, "Lower
bounds and reduction procedures for the bin packing problem", 1990, for the bound.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Run = tuple[int, int]  # rank, how many matrices
_Matrix = tuple[int, list[tuple[int, int]], int]  # cost; (elements, rank) of those who hold some; which work
_NOBODY: list[tuple[int, int]] = []

# The busiest may have so much of the mean to do if fewer elements move then.
SLACK = 1.04


@dataclass(frozen=True)
class Work:
    """`count` matrices of `size` elements that follow one another; each costs `cost`.

    `held` says who has which of their elements: (rank, start, stop), in order; empty when nobody has more
    than another.
    """

    cost: int
    size: int
    count: int = 1
    held: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Ownership:
    """Who owns what: for each work the ranks that own some of it, in order, and how many matrices.

    `fixed` is what each rank has to do besides, in the same unit as the costs.
    """

    works: tuple[Work, ...]
    ranks: int
    owners: tuple[tuple[Run, ...], ...]
    fixed: tuple[int, ...]

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """What each rank has to do."""
        loads = list(self.fixed)
        for work, runs in zip(self.works, self.owners, strict=True):
            for rank, count in runs:
                loads[rank] += work.cost * count
        return tuple(loads)

    @property
    def mean(self) -> float:
        """What each rank would have to do if matrices could be split."""
        return sum(self.loads) / self.ranks

    @property
    def imbalance(self) -> float:
        """What the busiest rank has to do over the mean."""
        return max(self.loads) / self.mean if self.mean else 1.0

    @cached_property
    def bound(self) -> float:
        """No assignment of whole matrices has an imbalance below this."""
        costs = Counter[int]()
        for work in self.works:
            costs[work.cost] += work.count
        costs.update(load for load in self.fixed if load)  # as if it could be anywhere: a bound all the same
        return _least_makespan(costs, self.ranks, max(self.loads)) / self.mean if self.mean else 1.0

    @property
    def moved(self) -> int:
        """Elements that owners receive from others; as many go back."""
        kept = 0
        for work, runs in zip(self.works, self.owners, strict=True):
            held, start = dict[int, list[tuple[int, int]]](), 0
            for rank, first, last in work.held:
                held.setdefault(rank, []).append((first, last))
            for rank, count in runs:
                stop = start + count * work.size
                kept += sum(max(min(stop, b) - max(start, a), 0) for a, b in held.get(rank, ()))
                start = stop
        return sum(work.count * work.size for work in self.works) - kept

    @property
    def least_moved(self) -> int:
        """What would move if each matrix went to the rank that holds most of it, whatever it has to do."""
        return sum(
            work.size - max((part for part, _ in holders), default=0)
            for work in self.works
            for holders in _holders(work)
        )

    def __str__(self) -> str:
        over = self.moved / self.least_moved if self.least_moved else 1.0
        return (
            f"{sum(work.count for work in self.works):,} matrices on {self.ranks} ranks: busiest over mean "
            f"{self.imbalance:.3f} (bound {self.bound:.3f}), {self.moved:,} elements to owners "
            f"({over:.3f} of the least)"
        )


def assign(works: Sequence[Work], ranks: int, fixed: Sequence[int] = ()) -> Ownership:
    """Owners of all matrices of `works` among `ranks` ranks, which have `fixed` to do already.

    >>> ownership = assign([Work(cost=4, size=6), Work(cost=2, size=4, count=3)], ranks=2)
    >>> ownership.loads, ownership.owners
    ((6, 4), (((0, 1),), ((0, 1), (1, 2))))
    """
    works, fixed = tuple(works), tuple(fixed) or (0,) * ranks
    matrices = [
        (work.cost, holders, number)
        for number, work in enumerate(works)
        for holders in (_holders(work) if work.held else [_NOBODY] * work.count)
    ]
    # Among those that cost the same, who is held by one rank most goes there first.
    matrices.sort(key=lambda m: (-m[0], -(m[1][0][0] if m[1] else 0)))
    plain = _place(matrices, ranks, fixed, limit=-1)
    mean = (sum(fixed) + sum(cost for cost, _, _ in matrices)) / ranks
    limit = max(*_loaded(matrices, plain, fixed), int(SLACK * mean))

    # Stacks about where they are: single matrices first go around them, then they give way a little.
    homes = {number: _home(work) for number, work in enumerate(works) if work.count > 1 and work.held}
    single = [matrix for matrix in matrices if matrix[2] not in homes]
    places = _place(single, ranks, _loads(works, homes, fixed), limit)
    stacks = _shifted(works, homes, _loaded(single, places, fixed), limit)
    if max(_loaded(single, places, _loads(works, stacks, fixed))) <= limit:
        return Ownership(works, ranks, _owners(works, single, places, stacks), fixed)
    near = _place(matrices, ranks, fixed, limit)
    places = near if max(_loaded(matrices, near, fixed)) <= limit else _exchanged(matrices, plain)
    return Ownership(works, ranks, _owners(works, matrices, places, {}), fixed)


def _owners(
    works: Sequence[Work],
    matrices: Sequence[_Matrix],
    places: Sequence[int],
    stacks: Mapping[int, Counter[int]],
) -> tuple[tuple[Run, ...], ...]:
    counts = [stacks.get(number, Counter[int]()) for number in range(len(works))]
    for (_, _, number), rank in zip(matrices, places, strict=True):
        counts[number][rank] += 1
    return tuple(tuple(sorted(count.items())) for count in counts)


def _home(work: Work) -> Counter[int]:
    """How many matrices of a stack each rank holds most of."""
    return Counter(holders[0][1] for holders in _holders(work))


def _shifted(
    works: Sequence[Work], homes: Mapping[int, Counter[int]], fixed: Sequence[int], limit: int
) -> dict[int, Counter[int]]:
    """How many matrices of each stack ranks own: as many as are at home there, within `limit` to do.

    Ranks nearby get what is too much: what lies between shifts by as many, as ranks have theirs in order.
    """
    loads, found = list(fixed), dict[int, Counter[int]]()
    for number in sorted(homes, key=lambda number: -works[number].cost * works[number].count):
        cost, counts = works[number].cost, Counter(homes[number])
        for rank, count in homes[number].items() if cost else ():
            over = count - max(limit - loads[rank], 0) // cost
            near = sorted(range(len(loads)), key=lambda other: abs(other - rank)) if over > 0 else ()
            for other in near[1:]:
                moved = min(over, max((limit - loads[other]) // cost - counts[other], 0))
                counts[rank] -= moved
                counts[other] += moved
                over -= moved
                if not over:
                    break
        found[number] = +counts
        for rank, count in counts.items():
            loads[rank] += cost * count
    return found


def _loads(works: Sequence[Work], counts: Mapping[int, Counter[int]], fixed: Sequence[int]) -> list[int]:
    """What ranks have to do with so many matrices of some works each."""
    loads = list(fixed)
    for number, ranks in counts.items():
        for rank, count in ranks.items():
            loads[rank] += works[number].cost * count
    return loads


def _place(matrices: Sequence[_Matrix], ranks: int, fixed: Sequence[int], limit: int) -> list[int]:
    """Each in turn where most of it is, if that rank stays within `limit`; else where least is to do."""
    loads = list(fixed)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    places: list[int] = []
    for cost, holders, _ in matrices:
        rank = next((rank for _, rank in holders if loads[rank] + cost <= limit), None)
        if rank is None:
            while heap[0][0] != loads[heap[0][1]]:  # it got something since
                heapq.heappop(heap)
            least, rank = heap[0]
            rank = next((other for _, other in holders if loads[other] == least), rank)
        loads[rank] += cost
        heapq.heappush(heap, (loads[rank], rank))
        places.append(rank)
    return places


def _loaded(matrices: Sequence[_Matrix], places: Sequence[int], fixed: Sequence[int]) -> list[int]:
    """What ranks have to do with the matrices in their places."""
    loads = list(fixed)
    for (cost, _, _), rank in zip(matrices, places, strict=True):
        loads[rank] += cost
    return loads


def _exchanged(matrices: Sequence[_Matrix], places: Sequence[int]) -> list[int]:
    """The same loads, matrices of one cost exchanged between ranks so that more of them is there already."""
    found = list(places)
    start = 0
    while start < len(matrices):
        stop = start
        while stop < len(matrices) and matrices[stop][0] == matrices[start][0]:
            stop += 1
        free = Counter(places[start:stop])
        left: list[int] = []
        for index in range(start, stop):
            rank = next((rank for _, rank in matrices[index][1] if free[rank]), None)
            if rank is None:
                left.append(index)
            else:
                found[index] = rank
                free[rank] -= 1
        for index, rank in zip(left, free.elements(), strict=True):
            found[index] = rank
        start = stop
    return found


def _holders(work: Work) -> list[list[tuple[int, int]]]:
    """For each matrix (elements, rank) of those who hold some of it, the most first."""
    starts = [start for _, start, _ in work.held]
    found = []
    for number in range(work.count):
        low, high = number * work.size, (number + 1) * work.size
        parts = Counter[int]()
        for rank, start, stop in work.held[max(bisect_right(starts, low) - 1, 0) :]:
            if start >= high:
                break
            if (part := min(stop, high) - max(start, low)) > 0:
                parts[rank] += part
        found.append(sorted(((part, rank) for rank, part in parts.items()), key=lambda p: (-p[0], p[1])))
    return found


def _least_makespan(costs: Counter[int], ranks: int, reached: int) -> int:
    """A lower bound of the busiest rank's load: the least that counting doesn't rule out."""
    low = max(-(-sum(cost * count for cost, count in costs.items()) // ranks), max(costs, default=0))
    high = max(reached, low)
    while low < high:
        middle = (low + high) // 2
        if _bins(costs, middle) > ranks:
            low = middle + 1
        else:
            high = middle
    return low


def _bins(costs: Counter[int], load: int) -> int:
    """So many ranks at least are needed if none may have more than `load` to do.

    For a cost k: those above load - k share a rank with none of k or more; those above the half with no
    other of them, and the rest of k or more fills what they leave, and ranks of its own.
    """
    most = 0
    for least in costs:
        if 2 * least > load:
            continue
        alone = halves = room = rest = 0
        for cost, count in costs.items():
            if cost > load - least:
                alone += count
            elif 2 * cost > load:
                halves += count
                room += count * (load - cost)
            elif cost >= least:
                rest += count * cost
        most = max(most, alone + halves + max(-(-(rest - room) // load), 0))
    return max(most, sum(count for cost, count in costs.items() if 2 * cost > load))
