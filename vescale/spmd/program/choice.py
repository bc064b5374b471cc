"""Choice: which candidate a node takes over each mesh axis, for operands that exist in these layouts.

The candidate that moves the fewest bytes wins; ties go to the fewest moves, the fewest Partials made, and
the least memory. Pure: what the node's neighbours do is the partition's concern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..._errors import LayoutError
from ..layout import AbstractMesh, Digit, Layout
from ..placements import Partial
from ..rules.notation import Pattern
from .candidates import (
    ANY,
    Candidate,
    Cut,
    Deferred,
    Factor,
    Impossible,
    State,
    candidates,
    charge,
    digit_of,
    layout_from,
    state_of,
)
from .ir import TensorMeta


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that a node reads, the layouts in which it costs nothing, and whether it is made as asked."""

    meta: TensorMeta
    layouts: tuple[Layout, ...]
    deferred: bool
    pinned: bool


def choose(
    mesh: AbstractMesh,
    axes: Sequence[str],
    pattern: Pattern,
    operands: Sequence[Operand],
    results: Sequence[TensorMeta],
    wishes: Sequence[Layout | None] = (),
) -> tuple[dict[str, Candidate], float]:
    """The best candidate of each axis, one axis after the other, and the bytes that all of them move.

    `wishes` are layouts that the results will be moved to: factors that only results have are proposed for
    these.
    """
    chosen: dict[str, Candidate] = {}
    cost = 0.0
    split = {
        axis
        for operand in operands
        for layout in operand.layouts
        for axis, placement in layout.spec.items()
        if not isinstance(placement, Partial)
    }
    for axis in axes:
        taken = frozenset(candidate.name for candidate in chosen.values() if isinstance(candidate, Factor))
        states: list[list[tuple[State | Deferred, float]]] = [
            [
                *(
                    (state_of(layout, axis), _share(mesh, operand.meta, layout, axis, split))
                    for layout in operand.layouts
                ),
                *([(ANY, operand.meta.nbytes)] if operand.deferred else []),
            ]
            for operand in operands
        ]
        wished = [
            (None, 0.0) if wish is None else (state_of(wish, axis), _share(mesh, meta, wish, axis, set()))
            for meta, wish in zip(results, wishes)
        ]
        asked = frozenset(
            name
            for dims, (state, _) in zip(pattern.results, wished)
            if isinstance(state, Digit)
            for name in dims[state.dim]
            if digit_of(name, dims, pattern) == state
        )
        possible = candidates(
            pattern, mesh.axis_size(axis), [[state for state, _ in found] for found in states], taken, asked
        )
        scored = [
            (score, candidate)
            for candidate in possible
            if (score := _score(mesh.axis_size(axis), candidate, pattern, operands, states, results, wished))
            is not None
        ]
        best, chosen[axis] = next(
            (score, candidate)
            for score, candidate in sorted(scored, key=lambda entry: entry[0])
            if _legal(mesh, {**chosen, axis: candidate}, pattern, operands, results)
        )
        cost += best[0]
    return chosen, cost


def _legal(
    mesh: AbstractMesh,
    chosen: Mapping[str, Candidate],
    pattern: Pattern,
    operands: Sequence[Operand],
    results: Sequence[TensorMeta],
) -> bool:
    """Whether there are layouts with all of these states: not every piece can be cut raggedly."""
    if not any(isinstance(candidate, Cut) for candidate in chosen.values()):
        return True
    try:
        for index, operand in enumerate(operands):
            states = {axis: candidate.operand(pattern, index) for axis, candidate in chosen.items()}
            layout = layout_from(mesh, operand.meta.shape, states)
            if pattern.between is not None and not pattern.between(layout):
                return False
        for place, meta in enumerate(results):
            states = {axis: candidate.result(pattern, place) for axis, candidate in chosen.items()}
            layout_from(mesh, meta.shape, states)
    except LayoutError:
        return False
    return True


def _score(
    size: int,
    candidate: Candidate,
    pattern: Pattern,
    operands: Sequence[Operand],
    states: Sequence[Sequence[tuple[State | Deferred, float]]],
    results: Sequence[TensorMeta],
    wished: Sequence[tuple[State, float]],
) -> tuple[float, int, int, int] | None:
    """(bytes moved, moves, Partials made, bytes of the results); None when the node can't do that.

    For a result that is to be split count the bytes that splitting it so moves, unless it is whole.
    """
    cost, moves = 0.0, 0
    try:
        for index, operand in enumerate(operands):
            need = candidate.operand(pattern, index)
            extra, moved = min(
                charge(state, need, nbytes, size, operand.pinned) for state, nbytes in states[index]
            )
            cost, moves = cost + extra, moves + moved
    except Impossible:
        return None
    partials = memory = 0
    for place, meta in enumerate(results):
        result = candidate.result(pattern, place)
        partials += isinstance(result, Partial)
        wish, nbytes = wished[place] if wished else (None, 0.0)
        if isinstance(wish, Digit) and result not in (None, wish):
            cost += nbytes * (size - 1) / size / (size if isinstance(result, Digit) else 1)
        memory += meta.nbytes // (1 if result is None or isinstance(result, Partial) else size)
    return cost, moves, partials, memory


def _share(mesh: AbstractMesh, meta: TensorMeta, layout: Layout, axis: str, split: set[str]) -> float:
    """Bytes that a rank would hold with the value whole over `axis`.

    A value that the axis doesn't split would have to be cut, and gathered back, in the company of operands
    that the axes `split` do: then it is as small as if they split it too.
    """
    others = {other for other, placement in layout.spec.items() if not isinstance(placement, Partial)}
    if axis not in others:
        others |= split
    return meta.nbytes / math.prod(mesh.axis_size(other) for other in others - {axis})
