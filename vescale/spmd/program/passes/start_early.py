"""Start early: collectives of some kinds begin where their sources are made, and are waited for where needed.

Not in the default list: what is under way needs memory for longer. A package that knows which ones are worth
it registers `start_early` with its choice. Starts keep the order of the collectives: none passes another.

    v2 = all_gather(v1)          t2 = start all_gather (v1)
    v3 = exp(v0)            ->   v3 = exp(v0)
    v4 = mm(v3, v2)              v2 = wait (t2)
                                 v4 = mm(v3, v2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..partition import AnyStep, Map, Move, Partitioned, Start, Wait, operands, results


def start_early(partitioned: Partitioned, kinds: Sequence[str] = ("all_gather",)) -> Partitioned:
    """The same decisions, with the collectives of these kinds in two halves."""
    return _wait_late(_start_early(partitioned, kinds))


def _start_early(partitioned: Partitioned, kinds: Sequence[str]) -> Partitioned:
    """Starts right behind what makes their sources, or behind the collective before them."""
    steps: list[AnyStep] = []
    for step in partitioned.steps:
        if isinstance(step, Move) and step.step.is_collective and step.step.kind in kinds:
            start = Start((step,), step.target)
            place = len(steps)
            while place and not _stops(steps[place - 1], step.source):
                place -= 1
            steps.insert(place, start)
            steps.append(Wait(start))
        else:
            steps.append(step)
    return replace(partitioned, steps=tuple(steps))


def _wait_late(partitioned: Partitioned) -> Partitioned:
    """Waits right before the first reader of a target; what nobody reads is waited for at the end."""
    steps: list[AnyStep] = []
    waiting: dict[int, Wait] = {}
    for step in partitioned.steps:
        if isinstance(step, Wait):
            waiting.update(dict.fromkeys(step.start.targets, step))
            continue
        for value in operands(step):
            if value in waiting:
                wait = waiting[value]
                steps.append(wait)
                for target in wait.start.targets:
                    del waiting[target]
        steps.append(step)
    return replace(partitioned, steps=(*steps, *dict.fromkeys(waiting.values())))


def _stops(step: AnyStep, source: int) -> bool:
    """Whether a start of `source` has to stay behind this step."""
    if isinstance(step, (Start, Map)) or (isinstance(step, Move) and step.step.is_collective):
        return True
    return source in results(step)
