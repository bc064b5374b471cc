"""At owners: work on whole matrices that are cut at rest, done where they are brought together.

    where = decide(layouts, matrices, cost)             pure: for each value a layout, None where it can stay
    results = at_owners(values, names, back, where, compute)

A layout in `where` has each matrix on one rank of the axis that cuts it, an owner, with loads in balance (see
`owners`): `RaggedShard.on_rank` for one matrix, a ragged cut between matrices for several. Matrices that are
whole on a rank stay, but where others are exchanged over that axis and their rank would have the most to do.
What other axes do stays if it cuts no matrix; else their ranks share a batch of matrices that divides among
them, and of others, as of what is replicated, all compute the same.

All values are sent before the first is computed with, and return after the last: the pass `owner_waves`
makes a few collectives of it that overlap the computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from .._compat import base_tensor
from .._errors import LayoutError
from ..spmd.dtensor import DTensor
from ..spmd.layout import AbstractMesh, Layout
from ..spmd.matrices import Matrices
from ..spmd.placements import P, Placement, RaggedShard, Shard
from ..spmd.redistribute_many import redistribute_many
from ..spmd.redistribute_plan import plan
from ..spmd.transforms import marks_of, pinned
from .beside import is_whole
from .owners import Ownership, Run, Work, assign

Cost = Callable[[int, int], int]  # rows, columns -> what one matrix costs
Split = tuple[str, Placement]  # axis, placement


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
    for index, (layout, how) in enumerate(zip(layouts, matrices, strict=True)):
        if layout is not None:
            cut = _cut(layout, how)
            stays = [split for split in layout.spec.items() if split in cut.kept or split[0] == cut.axis]
            where[index] = Layout(layout.mesh, P.of(stays), layout.shape)
    for axis, owned in ownerships(layouts, matrices, cost).items():
        for (index, cut), runs in zip(owned.values.items(), owned.ownership.owners, strict=True):
            layout = layouts[index]
            assert layout is not None
            units = _units(runs, owned.ownership.ranks)
            placed = RaggedShard.from_runs(cut.dims if len(runs) > 1 else (), units)
            where[index] = Layout(layout.mesh, P.of([*cut.kept, (axis, placed)]), layout.shape)
    return [
        None if layout is None or there is None or _stays(layout, there, how) else there
        for layout, there, how in zip(layouts, where, matrices, strict=True)
    ]


def _stays(layout: Layout, there: Layout, matrices: Matrices) -> bool:
    return layout is there or (_is_whole(layout, matrices) and not plan(layout, there).collectives)


def _units(runs: Sequence[Run], ranks: int) -> list[tuple[int, int]]:
    """What each rank owns, (units, how many neighbouring ranks)."""
    found, before = list[tuple[int, int]](), 0
    for rank, count in runs:
        found += [(0, rank - before), (count, 1)]
        before = rank + 1
    return [*found, (0, ranks - before)]


@dataclass(frozen=True)
class Cut:
    """What a layout does to matrices: the splits that stay, and the axis along which matrices get owners.

    `whole`: that axis cuts none of them. `dims` are the leading dims that a cut between matrices cuts,
    `count` how many matrices a piece has; 1 when they don't follow one another, which keeps them together.
    """

    kept: tuple[Split, ...]
    axis: str | None
    whole: bool = True
    dims: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Owned:
    """Values whose matrices have owners along one axis, by number in the order of `ownership.works`."""

    values: dict[int, Cut]
    ownership: Ownership


def ownerships(
    layouts: Sequence[Layout | None], matrices: Sequence[Matrices], cost: Cost
) -> dict[str, Owned]:
    """Who owns what along each axis that cuts matrices."""
    values: dict[str, dict[int, Cut]] = {}
    works: dict[str, list[Work]] = {}
    cutting: dict[str, int] = {}  # axis -> ranks
    for index, (layout, how) in enumerate(zip(layouts, matrices, strict=True)):
        if layout is None or (cut := _cut(layout, how)).axis is None:
            continue
        if not cut.whole:
            cutting[cut.axis] = layout.mesh.axis_size(cut.axis)
        number, rows, columns = how.grid(layout.shape)
        pieces = math.prod(layout.mesh.axis_size(axis) for axis, _ in cut.kept)
        together = number // pieces // cut.count
        size = rows * columns * together
        held = _held(layout, cut.axis, size * cut.count)
        values.setdefault(cut.axis, {})[index] = cut
        works.setdefault(cut.axis, []).append(Work(cost(rows, columns) * together, size, cut.count, held))
    return {axis: Owned(values[axis], assign(works[axis], ranks)) for axis, ranks in cutting.items()}


@lru_cache(maxsize=65536)
def _cut(layout: Layout, matrices: Matrices) -> Cut:
    mesh, shape = layout.mesh, layout.shape
    splits = [(axis, placed) for axis, placed in layout.spec.items() if mesh.axis_size(axis) > 1]
    ragged = [split for split in splits if isinstance(split[1], RaggedShard)]
    kept: list[Split] = []
    for split in splits:
        if split not in ragged and _is_whole(_legal(mesh, [*kept, split], shape), matrices):
            kept.append(split)
    cutting = [axis for axis, _ in splits if axis not in dict(kept)]
    if not math.prod(shape) or not cutting:
        return Cut(layout.spec.items(), None)
    whole = bool(ragged) and _is_whole(_legal(mesh, [*kept, *ragged], shape), matrices)
    # The more ranks can be owners, the fewer all compute the same.
    preferred = [*(axis for axis, _ in ragged), *reversed(cutting)]
    axis = preferred[0] if whole else max(preferred, key=mesh.axis_size)
    if not _is_even(Layout(mesh, P.of(kept), shape)):  # a ragged cut needs equal pieces
        kept = []
    for other in cutting if matrices.follow else ():  # ranks of other axes share the batch, where it divides
        shared = _legal(mesh, [*kept, (other, Shard(0))], shape) if other != axis else None
        if shared is not None and _is_even(shared) and _is_whole(shared, matrices):
            kept, whole = [*kept, (other, Shard(0))], False
    batch = [dim for dim, names in enumerate(matrices.dims) if {*names} & {*matrices.batch}]
    pieces = math.prod(mesh.axis_size(other) for other, _ in kept)
    count = matrices.grid(shape)[0] // pieces if matrices.follow else 1
    return Cut(tuple(kept), axis, whole, tuple(range(max(batch, default=0) + 1)), count)


def _legal(mesh: AbstractMesh, splits: Sequence[Split], shape: tuple[int, ...]) -> Layout | None:
    try:
        return Layout(mesh, P.of(splits), shape)
    except LayoutError:
        return None


def _is_whole(layout: Layout | None, matrices: Matrices) -> bool:
    return layout is not None and is_whole(layout, matrices)


def _is_even(layout: Layout) -> bool:
    """Whether all pieces have one shape."""
    return layout.digits.keys() == {*layout.spec}


def _held(layout: Layout, axis: str, elements: int) -> tuple[tuple[int, int, int], ...]:
    """Which of so many elements its ranks hold, (rank, start, stop); nothing where each holds as much of all.

    Exact where no other axis splits the value, else in proportion.
    """
    placed = layout.spec[axis]
    if not isinstance(placed, RaggedShard):
        if getattr(placed, "dim", None) != 0 or len(layout.spec.items()) > 1:
            return ()
        placed = RaggedShard.chunks(layout.shape[0], layout.mesh.axis_size(axis))
    held, rank, before = list[tuple[int, int, int]](), 0, 0
    for units, ranks in placed.runs:
        for number in range(ranks if units else 0):
            ends = (before + number * units, before + (number + 1) * units)
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
    sent = to_owners(values, names, where)
    return from_owners([run(value) for run, value in zip(compute, sent, strict=True)], names, back, where)


def to_owners(values: Sequence[Tensor], names: Sequence[str], where: Sequence[Layout | None]) -> list[Tensor]:
    """The values in the layouts of `where`; those with None as they are."""
    return _moved(values, where, [f"{name} to its owner" for name in names])


def from_owners(
    values: Sequence[Tensor],
    names: Sequence[str],
    back: Sequence[Layout | None],
    where: Sequence[Layout | None],
) -> list[Tensor]:
    """`to_owners` backwards: what is in a layout of `where`, in that of `back`."""
    targets = [None if there is None else layout for layout, there in zip(back, where, strict=True)]
    return _moved(values, targets, [f"{name} from its owner" for name in names])


def _moved(values: Sequence[Tensor], layouts: Sequence[Layout | None], causes: Sequence[str]) -> list[Tensor]:
    moved = list(values)
    moving = [(index, layout) for index, layout in enumerate(layouts) if layout is not None]
    if all(isinstance(base_tensor(values[index]), DTensor) for index, _ in moving):
        by_mesh: dict[Any, list[tuple[int, Layout]]] = {}
        for index, layout in moving:
            by_mesh.setdefault(base_tensor(values[index]).mesh, []).append((index, layout))
        for own in by_mesh.values():
            given: list[Any] = [values[index] for index, _ in own]
            there = redistribute_many(given, [layout.spec for _, layout in own])
            for (index, _), value in zip(own, there, strict=True):
                moved[index] = value
    else:
        for index, layout in moving:
            moved[index] = pinned(values[index], layout, causes[index])
    return moved
