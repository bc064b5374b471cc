"""At owners: work on whole matrices that are cut at rest, done where they are brought together.

    where = decide(layouts, matrices, cost)             pure: for each value a layout, None where it can stay
    results = at_owners(values, names, where, back, compute)

A layout in `where` has each matrix on one rank of the axis that cuts it, an owner, with loads in balance (see
`owners`): `RaggedShard.on_rank` for one matrix, a ragged cut between matrices for several. What other axes do
stays if that cuts no matrix; else the value is whole over them. Ranks of these and of axes over which the
value is replicated all compute the same.

All values are sent before the first is computed with, and return after the last: the pass `owner_waves`
makes a few collectives of it that overlap the computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._compat import base_tensor
from .._errors import LayoutError
from ..spmd.dtensor import DTensor
from ..spmd.layout import AbstractMesh, Layout
from ..spmd.matrices import Matrices
from ..spmd.placements import P, Placement, RaggedShard
from ..spmd.program.candidates import carry
from ..spmd.redistribute_many import redistribute_many
from ..spmd.rules.matrices import cuts_between, matrix_pattern
from ..spmd.transforms import marks_of, pinned
from .owners import Ownership, Run, Work, assign

Cost = Callable[[int, int], int]  # rows, columns -> what one matrix costs


def layouts_at_rest(leaves: Sequence[Any]) -> list[Layout | None]:
    """Where parameters are: as the plan of the running trace says, or as DTensors; None for plain tensors."""
    bases = [base_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [
        mark.rest if mark is not None else base.layout if isinstance(base, DTensor) else None
        for mark, base in zip(marks_of(leaves), bases, strict=True)
    ]


def decide(layouts: Sequence[Layout | None], matrices: Sequence[Matrices], cost: Cost) -> list[Layout | None]:
    """For each value where its matrices are whole, in balance; None where they are whole as it is.

    >>> from ..spmd.placements import Shard
    >>> rows = Layout(AbstractMesh(("dp",), (2,)), P(dp=Shard(0)), (4, 6))
    >>> [where.spec for where in decide([rows, rows], [Matrices.of("r c -> r c")] * 2, lambda r, c: r * c)]
    [P(dp=RaggedShard((), (1, 0))), P(dp=RaggedShard((), (0, 1)))]
    """
    where: list[Layout | None] = [None] * len(layouts)
    for axis, owned in ownerships(layouts, matrices, cost).items():
        for index, runs in zip(owned.values, owned.ownership.owners, strict=True):
            layout = layouts[index]
            assert layout is not None
            cut = owned.cuts[index]
            placed = RaggedShard.from_runs(cut.dims if len(runs) > 1 else (), _units(runs, owned.ranks))
            where[index] = Layout(layout.mesh, P.of([*cut.kept, (axis, placed)]), layout.shape)
    for index, (layout, how) in enumerate(zip(layouts, matrices, strict=True)):
        if layout is not None and where[index] is None:
            kept = P.of(_cut(layout, how).kept)
            where[index] = None if kept == layout.spec else Layout(layout.mesh, kept, layout.shape)
    return where


def _units(runs: Sequence[Run], ranks: int) -> list[tuple[int, int]]:
    """What each rank owns, (units, how many neighbouring ranks)."""
    found, before = list[tuple[int, int]](), 0
    for rank, count in runs:
        found += [(0, rank - before), (count, 1)]
        before = rank + 1
    return [*found, (0, ranks - before)]


@dataclass(frozen=True)
class Owned:
    """The values whose matrices get owners along one axis, by number, and who these are."""

    values: tuple[int, ...]
    cuts: dict[int, Cut]
    ranks: int
    ownership: Ownership


@dataclass(frozen=True)
class Cut:
    """What a layout does to matrices: the splits that can stay, and the axis along which they get owners.

    `dims` are the leading dims that a cut between matrices cuts, `count` how many matrices a piece has; 1 when
    they don't follow one another, which keeps them together.
    """

    kept: tuple[tuple[str, Placement], ...]
    axis: str | None
    dims: tuple[int, ...]
    count: int


def ownerships(
    layouts: Sequence[Layout | None], matrices: Sequence[Matrices], cost: Cost
) -> dict[str, Owned]:
    """Who owns what along each axis that cuts matrices."""
    cuts = {index: _cut(layout, matrices[index]) for index, layout in enumerate(layouts) if layout is not None}
    found: dict[str, Owned] = {}
    for axis in dict.fromkeys(cut.axis for cut in cuts.values() if cut.axis is not None):
        mesh = next(layout for layout in layouts if layout is not None).mesh
        ranks = mesh.axis_size(axis)
        fixed, values, works = [0] * ranks, list[int](), list[Work]()
        for index, cut in cuts.items():
            layout = layouts[index]
            assert layout is not None
            number, rows, columns = matrices[index].grid(layout.shape)
            if cut.axis == axis:
                pieces = math.prod(mesh.axis_size(other) for other, _ in cut.kept)
                together = number // pieces // cut.count
                work = Work(cost(rows, columns) * together, rows * columns * together, cut.count)
                values.append(index)
                works.append(Work(work.cost, work.size, work.count, _held(layout, axis, work)))
            elif layout.ragged is not None and layout.ragged[0] == axis and number:
                for rank, start, stop in _held(layout, axis, Work(0, 1, number * rows * columns)):
                    fixed[rank] += cost(rows, columns) * (stop - start) // (rows * columns)
        found[axis] = Owned(tuple(values), cuts, ranks, assign(works, ranks, fixed))
    return found


def _cut(layout: Layout, matrices: Matrices) -> Cut:
    splits = [(axis, placed) for axis, placed in layout.spec.items() if layout.mesh.axis_size(axis) > 1]
    number, rows, columns = matrices.grid(layout.shape)
    kept: list[tuple[str, Placement]] = []
    if not number * rows * columns or _is_whole(layout, matrices):
        return Cut(layout.spec.items(), None, (), 1)
    for split in splits:
        if not isinstance(split[1], RaggedShard):
            if _is_whole(Layout(layout.mesh, P.of([*kept, split]), layout.shape), matrices):
                kept.append(split)
    ragged = [split for split in splits if isinstance(split[1], RaggedShard)]
    if ragged and len(splits) > len(kept) + 1:  # another axis cuts matrices; this one may not
        together = _legal(layout.mesh, [*kept, *ragged], layout.shape)
        if together is not None and _is_whole(together, matrices):
            return Cut((*kept, *ragged), None, (), 1)
    cutting = [axis for axis, placed in splits if (axis, placed) not in kept]
    axis = ragged[0][0] if ragged else max(reversed(cutting), key=layout.mesh.axis_size)
    if _pieces_differ(Layout(layout.mesh, P.of(kept), layout.shape)):
        kept = []
    follow = [dim for dim, names in enumerate(matrices.dims) if {*names} & {*matrices.batch}]
    pieces = math.prod(layout.mesh.axis_size(other) for other, _ in kept)
    count = number // pieces if matrices.follow else 1
    return Cut(tuple(kept), axis, tuple(range(max(follow, default=0) + 1)), count)


def _is_whole(layout: Layout, matrices: Matrices) -> bool:
    """Whether no rank has a part of a matrix."""
    pattern = matrix_pattern(matrices, layout.shape)
    carried = carry(pattern, layout.mesh, layout, 0, layout.shape)
    return carried is layout and cuts_between(matrices, layout)


def _legal(mesh: AbstractMesh, splits: Sequence[tuple[str, Placement]], shape: tuple[int, ...]) -> Layout | None:
    try:
        return Layout(mesh, P.of(splits), shape)
    except LayoutError:
        return None


def _pieces_differ(layout: Layout) -> bool:
    return any(
        size % math.prod(layout.mesh.axis_size(axis) for axis, digit in layout.digits.items() if digit.dim == dim)
        for dim, size in enumerate(layout.shape)
    ) or len(layout.digits) < len(layout.spec.items())


def _held(layout: Layout, axis: str, work: Work) -> tuple[tuple[int, int, int], ...]:
    """Which elements of what gets owners along the axis its ranks hold, where that differs."""
    placed = layout.spec[axis]
    if not isinstance(placed, RaggedShard):
        if getattr(placed, "dim", None) != 0 or len(list(layout.spec)) > 1:
            return ()
        placed = RaggedShard.chunks(layout.shape[0], layout.mesh.axis_size(axis))
    elements, held, rank, before = work.size * work.count, list[tuple[int, int, int]](), 0, 0
    for units, ranks in placed.runs:
        for number in range(ranks if units else 0):
            ends = before + number * units, before + (number + 1) * units
            start, stop = (end * elements // placed.total for end in ends)
            held.append((rank + number, start, stop))
        rank, before = rank + ranks, before + units * ranks
    return tuple(held)


def at_owners(
    values: Sequence[Tensor],
    names: Sequence[str],
    back: Sequence[Layout | None],
    where: Sequence[Layout | None],
    compute: Sequence[Callable[[Tensor], Tensor]],
) -> list[Tensor]:
    """`compute[i](values[i])` with each value in its layout of `where`, in its layout of `back` again.

    With None, and in plain torch, a value stays where it is.
    """
    sent = _moved(values, where, [f"{name} to its owner" for name in names])
    done = [run(value) for run, value in zip(compute, sent, strict=True)]
    targets = [None if there is None else layout for layout, there in zip(back, where, strict=True)]
    return _moved(done, targets, [f"{name} from its owner" for name in names])


def _moved(values: Sequence[Tensor], layouts: Sequence[Layout | None], causes: Sequence[str]) -> list[Tensor]:
    moved = list(values)
    moving = [index for index, layout in enumerate(layouts) if layout is not None]
    if moving and all(isinstance(base_tensor(values[index]), DTensor) for index in moving):
        specs = [layouts[index].spec for index in moving]  # type: ignore[union-attr]
        there = redistribute_many([values[index] for index in moving], specs)  # type: ignore[arg-type]
        for index, value in zip(moving, there, strict=True):
            moved[index] = value
        return moved
    for index in moving:
        moved[index] = pinned(values[index], layouts[index], causes[index])  # type: ignore[arg-type]
    return moved
