"""Editing a decided program: a step in another's place, steps before and after those at some positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from ..spmd.layout import Layout
from ..spmd.program.ir import Origin, TensorMeta
from ..spmd.program.partition import (
    AnyStep,
    Compute,
    Local,
    LocalValue,
    Move,
    Partitioned,
    Start,
    Wait,
    live,
    operands,
    results,
)

aten = torch.ops.aten


class Program:
    """A program under change: steps by position, what to put before and after each, and what to drop."""

    def __init__(self, partitioned: Partitioned) -> None:
        self.old = partitioned
        self.steps: list[AnyStep] = list(partitioned.steps)
        self.values = list(partitioned.values)
        self.tickets = count()
        self.gradients = set(partitioned.gradients)

    def ticket(self) -> int:
        """A number for a collective that is started."""
        return next(self.tickets)

    def new(self, shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> int:
        device = self.values[0].meta.device
        self.values.append(LocalValue(TensorMeta(tuple(shape), dtype, device), layout))
        return len(self.values) - 1

    def copy(self, number: int) -> int:
        """A new value that looks like another."""
        self.values.append(self.values[number])
        return len(self.values) - 1

    def like(self, number: int, layout: Layout) -> int:
        """A new value: another layout of the same."""
        self.values.append(replace(self.values[number], layout=layout))
        return len(self.values) - 1

    def made_at(self) -> dict[int, int]:
        """Which step makes each value."""
        return {number: index for index, step in enumerate(self.steps) for number in results(step)}

    def users(self) -> dict[int, list[int]]:
        """The steps that read each value, in order."""
        found: dict[int, list[int]] = {}
        for index, step in enumerate(self.steps):
            for number in dict.fromkeys(operands(step)):
                found.setdefault(number, []).append(index)
        return found

    def edit(
        self,
        before: Mapping[int, Sequence[AnyStep]],
        after: Mapping[int, Sequence[AnyStep]],
        dropped: Iterable[int],
    ) -> None:
        """Put steps before and after those at some positions, and drop others."""
        gone, steps = set(dropped), []
        for index, step in enumerate(self.steps):
            steps += before.get(index, ())
            steps += () if index in gone else (step,)
            steps += after.get(index, ())
        self.steps = steps

    def finished(self) -> Partitioned:
        steps = live(self.steps, self.old.outputs)
        return replace(self.old, steps=steps, values=tuple(self.values), gradients=frozenset(self.gradients))


def renamed(step: AnyStep, names: Mapping[int, int], made: bool = False) -> AnyStep:
    """The step reading other values, and making others with `made`."""
    at = lambda number: names.get(number, number)  # noqa: E731
    if isinstance(step, Move):
        return replace(step, source=at(step.source), target=at(step.target) if made else step.target)
    assert not isinstance(step, (Start, Wait)), step  # none before this pass
    changed = replace(step, operands=tuple(map(at, step.operands)))
    if made:
        changed = replace(changed, results=tuple(None if n is None else at(n) for n in step.results))
    return changed


def origin_of(step: AnyStep) -> Origin:
    """Where a step came from."""
    if isinstance(step, Wait):
        return step.start.origin
    return step.node.origin if isinstance(step, Compute) else step.origin


def is_cast(step: AnyStep) -> bool:
    return isinstance(step, Compute) and step.node.op == aten._to_copy.default and len(step.operands) == 1


def is_view(step: AnyStep) -> bool:
    """Whether a step takes a view of one value."""
    return isinstance(step, Compute) and step.pattern.view


def local(
    name: str,
    make: Callable[[int], Callable[..., Any]],
    operands: tuple[int, ...],
    results: tuple[int, ...],
    origin: Origin,
    *,
    shares: bool = False,
    writes: bool = False,
) -> Local:
    """A step of functions `make(rank)` that return a list of results; they are called `name` in a program."""

    def called(rank: int) -> Callable[..., Any]:
        run = make(rank)
        run.__name__ = name
        return run

    return Local(name, called, operands, results, origin, shares, writes)


def listed(run: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function, with its one result in a list."""
    return lambda *operands: [run(*operands)]
