"""Common collectives: the same step of the same value in a region is done once.

The decisions reuse every layout of a value that they have made, but a value may go by two names: what two
constraints put in one place is moved on from there twice.
"""

from __future__ import annotations

from dataclasses import replace

from ..partition import AnyStep, Compute, Draw, Map, Move, Partitioned


def common_collectives(partitioned: Partitioned) -> Partitioned:
    """The same decisions without repeated moves."""
    results = set(partitioned.outputs)  # each has memory of its own
    same: dict[int, int] = {}  # value -> the one that it repeats
    made: dict[tuple, int] = {}
    steps: list[AnyStep] = []
    for step in partitioned.steps:
        if isinstance(step, Move):
            step = replace(step, source=same.get(step.source, step.source))
            key = (step.step, step.source, step.origin.region)
            if key in made and step.target not in results:
                same[step.target] = made[key]
                continue
            made.setdefault(key, step.target)
        elif isinstance(step, (Compute, Draw, Map)):
            step = replace(step, operands=tuple(same.get(value, value) for value in step.operands))
        steps.append(step)
    return replace(partitioned, steps=tuple(steps))
