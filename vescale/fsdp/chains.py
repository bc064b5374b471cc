"""Chains: how a program brings the gradient of a parameter to rest, move by move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spmd.layout import Layout
from ..spmd.placements import P, Partial
from ..spmd.program.partition import AnyStep, LocalValue, Move, operands
from ..spmd.program.trace import gradient_of


@dataclass(frozen=True)
class Chain:
    """The moves of one gradient, at positions `at`: from `source`, with sums pending, to `target` at rest."""

    name: str
    at: tuple[int, ...]
    source: int
    target: int


def chains(steps: Sequence[AnyStep], names: Sequence[str], outputs: Sequence[int | None]) -> list[Chain]:
    """Those of some parameters in order; none whose way somebody else uses in between."""
    texts = {gradient_of(name): name for name in names}
    reads: dict[int, int] = {}
    for step in steps:
        for number in operands(step):
            reads[number] = reads.get(number, 0) + 1
    shown = {number for number in outputs if number is not None}
    found: dict[int, Chain] = {}  # by target
    for at, step in enumerate(steps):
        if not isinstance(step, Move) or step.cause.by != "plan" or step.cause.text not in texts:
            continue
        before = found.get(step.source)
        if before is not None and reads[step.source] == 1 and step.source not in shown:
            del found[step.source]
            found[step.target] = Chain(before.name, (*before.at, at), before.source, step.target)
        else:
            found[step.target] = Chain(texts[step.cause.text], (at,), step.source, step.target)
    return sorted(found.values(), key=lambda chain: chain.at)


def pending(layout: Layout, axes: Sequence[str]) -> Layout:
    """The layout with sums pending over some more axes."""
    return Layout(
        layout.mesh, P.of([*layout.spec.items(), *((axis, Partial()) for axis in axes)]), layout.shape
    )


def sums(values: Sequence[LocalValue], number: int, axes: Sequence[str]) -> bool:
    """Whether sums are pending over all of these axes."""
    partials = values[number].layout.partials
    return all(partials.get(axis) == "sum" for axis in axes)
