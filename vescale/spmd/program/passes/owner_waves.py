"""Owner waves: matrices that go to owners move together, and while others are computed with.

What an optimizer on whole matrices (`rules.matrices`) leaves is, for each matrix, a move to its owner, the
computing there, and a move back. The first operand moves, and the first result; what else the computing reads
and makes is kept at the owner. They become waves of about equal work, each with one collective to the
owners and one back (one for each dtype and set of axes); two waves are in memory at a time:

    a' = all_to_all(a)                      t0 = start all_to_all (a, b)
    x = orthogonalize(a')                   t1 = start all_to_all (c, d)
    y = all_to_all(x)                       a', b' = wait (t0)
    b' = all_to_all(b)                      x = orthogonalize(a');  ..
    ...                                     t2 = start all_to_all (x, ..)
                                            c', d' = wait (t1)
                                            ...

The collectives begin in the order: to owners 0, to owners 1, back 0, to owners 2, back 1, ..
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...rules.matrices import on_matrices
from ..partition import AnyStep, Compute, LocalValue, Move, Partitioned, Start, Wait, operands, results

# What a wave brings to an owner at most, but for one matrix that is larger: two such are held at a time.
WAVE_BYTES = 128 << 20


@dataclass(frozen=True)
class _Visit:
    """One value whose matrices are computed with: positions of that, and of its moves to owners and back."""

    there: int | None  # None where its matrices are whole already
    compute: int
    back: tuple[int, ...]
    ready: int  # the position behind which it can be sent
    wanted: int  # the position before which it must be back


def owner_waves(partitioned: Partitioned) -> Partitioned:
    """The same decisions with the moves of whole matrices in waves."""
    steps = partitioned.steps
    dropped: set[int] = set()
    before: dict[int, list[AnyStep]] = {}
    tickets = max((step.ticket for step in steps if isinstance(step, Start)), default=-1) + 1
    for group in _groups(_visits(steps)):
        waves = [_wave(steps, wave) for wave in _waves(partitioned, group)]
        if not waves:
            continue
        here = [steps[visit.compute] for visit in group if visit.there is None]
        schedule = _schedule(partitioned.values, waves, here, tickets)
        tickets += sum(isinstance(step, Start) for step in schedule)
        for visit in group:
            dropped.update((visit.compute, *visit.back, *(() if visit.there is None else (visit.there,))))
        before.setdefault(max(visit.ready for visit in group) + 1, []).extend(schedule)
    if not dropped:
        return partitioned
    changed: list[AnyStep] = []
    for at in range(len(steps) + 1):
        changed += before.get(at, ())
        changed += () if at in dropped or at == len(steps) else (steps[at],)
    return replace(partitioned, steps=tuple(changed))


def _visits(steps: Sequence[AnyStep]) -> list[_Visit]:
    makers: dict[int, int] = {}
    users: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        makers.update((value, at) for value in results(step))
        for value in dict.fromkeys(operands(step)):
            users.setdefault(value, []).append(at)
    found = []
    for at, step in enumerate(steps):
        if not isinstance(step, Compute) or step.node.op not in on_matrices:
            continue
        source, *kept = step.operands
        result, *made = results(step)
        there, ready = None, makers.get(source, -1)
        move = steps[ready] if ready >= 0 else None
        if isinstance(move, Move) and move.step.is_collective and users[source] == [at]:
            there, ready = ready, makers.get(move.source, -1)
        ready = max([ready, *(makers.get(value, -1) for value in kept)])
        back, wanted = list[int](), [user for value in made for user in users.get(value, ())]
        for user in users.get(result, ()):
            returns = steps[user]
            if there is not None and isinstance(returns, Move) and returns.step.is_collective:
                back.append(user)
                wanted += users.get(returns.target, ())
            else:
                wanted.append(user)
        found.append(_Visit(there, at, tuple(back), ready, min(wanted, default=len(steps))))
    return found


def _groups(visits: Iterable[_Visit]) -> list[list[_Visit]]:
    """Those of which all can be sent before one is wanted back."""
    groups: list[list[_Visit]] = []
    ready, wanted = -1, 0
    for visit in visits:
        ready, wanted = max(ready, visit.ready), min(wanted, visit.wanted)
        if not groups or ready >= wanted:
            groups.append([])
            ready, wanted = visit.ready, visit.wanted
        groups[-1].append(visit)
    return groups


def _waves(partitioned: Partitioned, group: Sequence[_Visit]) -> list[list[_Visit]]:
    """Each owner's matrices from the most work to the least, as many in a wave as the wave may bring it."""
    values = partitioned.values
    brought: dict[_Visit, list[tuple[int, int]]] = {}
    for visit in group:
        if visit.there is not None:
            move = partitioned.steps[visit.there]
            assert isinstance(move, Move)
            brought[visit] = _brought(values[move.target])
    order = sorted(brought, key=lambda visit: -max((size for _, size in brought[visit]), default=0))
    filled: dict[int, tuple[int, int]] = {}  # rank -> its last wave, and what that brings it
    waves: list[list[_Visit]] = []
    for visit in order:
        number = 0
        for rank, size in brought[visit]:
            last, full = filled.get(rank, (0, 0))
            number = max(number, last + (full > 0 and full + size > WAVE_BYTES))
        for rank, size in brought[visit]:
            last, full = filled.get(rank, (0, 0))
            filled[rank] = (number, size + (full if last == number else 0))
        while len(waves) <= number:
            waves.append([])
        waves[number].append(visit)
    return [sorted(wave, key=lambda visit: visit.compute) for wave in waves if wave]


def _brought(value: LocalValue) -> list[tuple[int, int]]:
    """The owners of a value, by their place along the ragged axis, and the bytes that each has."""
    layout, itemsize = value.layout, value.meta.dtype.itemsize
    if layout.ragged is None:
        return [(-1, math.prod(layout.local_shape(0)) * itemsize)]
    piece = math.prod(layout.piece_shape(0)) * itemsize
    _, ragged = layout.ragged
    return [(place, piece * units // ragged.total) for place, units in enumerate(ragged.local_units) if units]


@dataclass(frozen=True)
class _Wave:
    """The moves and the computing of a wave."""

    there: tuple[Move, ...]
    compute: tuple[AnyStep, ...]
    back: tuple[Move, ...]


def _wave(steps: Sequence[AnyStep], visits: Sequence[_Visit]) -> _Wave:
    back = [at for visit in visits for at in visit.back]
    return _Wave(
        _moves(steps, [visit.there for visit in visits if visit.there is not None]),
        tuple(steps[visit.compute] for visit in visits),
        _moves(steps, back),
    )


def _moves(steps: Sequence[AnyStep], places: Sequence[int]) -> tuple[Move, ...]:
    return tuple(step for at in places if isinstance(step := steps[at], Move))


def _schedule(
    values: Sequence[LocalValue], waves: Sequence[_Wave], here: Sequence[AnyStep], ticket: int
) -> list[AnyStep]:
    """In two slots: the next wave is on its way to its owners, and the last one back, while one is computed.

    What is computed `here`, with matrices that don't move, is while the first wave is on its way.
    """
    made: list[AnyStep] = []

    def start(moves: Sequence[Move]) -> list[Wait]:
        """One collective for the moves of one kind, over the same axes, of one dtype."""
        together: dict[object, list[Move]] = {}
        for move in moves:
            key = move.step.kind, move.step.axes, move.step.reductions, values[move.source].meta.dtype
            together.setdefault(key, []).append(move)
        first = ticket + sum(isinstance(step, Start) for step in made)
        starts = [Start(tuple(some), number) for number, some in enumerate(together.values(), first)]
        made.extend(starts)
        return [Wait(begun) for begun in starts]

    arriving, returning = start(waves[0].there), list[Wait]()
    made += here
    for number, wave in enumerate(waves):
        following = start(waves[number + 1].there) if number + 1 < len(waves) else []
        made += [*arriving, *wave.compute, *returning]
        arriving, returning = following, start(wave.back)
    return [*made, *returning]
