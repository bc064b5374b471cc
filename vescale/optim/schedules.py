"""Schedules: rates as functions of the number of updates already made.

A schedule takes a 0-d tensor, 0 at the first update, and returns a 0-d tensor. It uses torch ops on it
alone, so it works inside a program. All lengths are in updates, all values in the units of what is
scheduled, such as a learning rate. Write your own as a function: `lambda step: 1e-3 / (1 + step).sqrt()`.
"""

import math
from collections.abc import Callable, Sequence

import torch

from .._errors import ArgumentError, explain
from .rates import is_number

Schedule = Callable[[torch.Tensor], torch.Tensor]


def constant(value: float) -> Schedule:
    """The same value at every update.

    >>> constant(0.1)(torch.tensor(7.0, dtype=torch.float64)).item()
    0.1
    """
    return lambda step: torch.full_like(step, value, dtype=torch.float64)


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` at update 0 in a line to `end` at update `steps`, and `end` from there.

    >>> [linear(1.0, 0.0, 4)(torch.tensor(float(n))).item() for n in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _check("linear", {"steps": steps})
    return lambda step: start + (end - start) * _part(step, steps)


def cosine(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """`warmup` updates up to `peak` in a line, then down to `end` along half a cosine, at update `steps`.

    The first update has peak / warmup, so that none is lost on a rate of 0. From update `steps` on it is
    `end`. (Loshchilov and Hutter, 2017, without restarts.)

    >>> rate = cosine(1.0, steps=6, warmup=2)
    >>> [round(rate(torch.tensor(float(n))).item(), 3) for n in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check("cosine", {"steps - warmup": steps - warmup}, {"warmup": warmup})

    def down(step: torch.Tensor) -> torch.Tensor:
        return end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * _part(step, steps - warmup)))

    return joined([_up(peak, warmup), down], [warmup])


def warmup_stable_decay(peak: float, warmup: int, stable: int, decay: int, end: float = 0.0) -> Schedule:
    """`warmup` updates up to `peak`, `stable` updates at it, then `decay` updates down to `end` in a line.

    The first update has peak / warmup; the update after the last of the decay, and those from there on,
    `end`. (Hu et al., MiniCPM, 2024.)

    >>> rate = warmup_stable_decay(1.0, warmup=2, stable=2, decay=2)
    >>> [rate(torch.tensor(float(n))).item() for n in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _check("warmup_stable_decay", {"decay": decay}, {"warmup": warmup, "stable": stable})
    parts = [_up(peak, warmup), constant(peak), linear(peak, end, decay)]
    return joined(parts, [warmup, warmup + stable])


def joined(schedules: Sequence[Schedule], starts: Sequence[int]) -> Schedule:
    """One schedule after the other: all but the first begin, at their own 0, at an update of `starts`.

    >>> rate = joined([constant(1.0), linear(0.5, 0.0, 2)], [2])
    >>> [rate(torch.tensor(float(n))).item() for n in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.0]
    """
    for number, schedule in enumerate(schedules):
        if not callable(schedule):
            rule, remedy = "a function of the step", f"vs.optim.schedules.constant({schedule!r})"
            where = f"vs.optim.schedules.joined, schedule {number}"
            raise ArgumentError(explain(repr(schedule), where=where, rule=rule, remedy=remedy))
    if len(starts) != len(schedules) - 1 or list(starts) != sorted(starts):
        raise ArgumentError(
            explain(
                f"{len(schedules)} schedules, starts {list(starts)}",
                where="vs.optim.schedules.joined",
                rule="a start in ascending order for each schedule but the first",
            )
        )

    def rate(step: torch.Tensor) -> torch.Tensor:
        value = schedules[0](step)
        for start, schedule in zip(starts, schedules[1:], strict=True):
            value = torch.where(step < start, value, schedule(step - start))
        return value

    return rate


def _up(peak: float, steps: int) -> Schedule:
    return lambda step: peak * (step + 1) / max(steps, 1)


def _part(step: torch.Tensor, steps: int) -> torch.Tensor:
    """How much of `steps` updates has passed, from 0 to 1."""
    return (step / steps).clamp(0, 1)


def _check(name: str, positive: dict[str, int], natural: dict[str, int] | None = None) -> None:
    for least, found in ((1, positive), (0, natural or {})):
        for key, value in found.items():
            if not (is_number(value) and value >= least):
                where, rule = f"vs.optim.schedules.{name}", f"a number of updates, at least {least}"
                raise ArgumentError(explain(f"{key}={value!r}", where=where, rule=rule))
