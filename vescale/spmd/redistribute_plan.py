"""How to get from one layout to another: `plan(src, dst)`, a pure function of the two layouts.

A plan is a tuple of frozen `Step`s, nearly always one, that adds up its bytes. It does not know tensors,
ranks or devices, so it can be printed, compared and tested without any.

What makes a step legal is its *base*. Forgetting the splits over some axes of a layout gives, where it
can be said, a coarser layout: what the ranks of those axes hold together. If both layouts have the same base
over the same axes, each rank finds all that it needs within its group over them, and one
direct exchange there does it; no intermediate layout exists that could be wrong. Stepping axis
by axis instead, from (S(0), R) to (R, S(0)), passes through layouts that hold other elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, combinations

from .._errors import LayoutError, explain
from .layout import Digit, Layout
from .mesh import group_index
from .placements import P, Partial, Placement, RaggedShard, Replicate, Shard
from .regions import common_size, region

COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
LOCAL = ("slice", "view", "to_partial")

# Below this many bytes in all (group size x tensor) an ordered all-reduce is one exchange and the
# whole tree on every rank: more bytes, half the messages. On gloo a message costs what 256 KB do.
GATHER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One move from `src` to `dst`: a collective over the flattened group of `axes`, or local.

    all_gather      ranks of the group put their pieces together; each holds all of them
    all_to_all      each rank gets what it lacks from the ranks of the group that have it
    reduce_scatter  contributions are summed, each rank keeps its piece of the sum; over axes without a
                    pending reduction too, it gets its piece of a contribution from those who have it
    all_reduce      contributions are summed, each rank keeps the sum
    slice           each rank keeps a part of what it has
    view            the same elements in another local shape
    to_partial      one rank of the group keeps an element, the others a zero (sum);
                    or all keep it (avg, max, min)
    """

    kind: str
    axes: tuple[str, ...]
    src: Layout
    dst: Layout

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchange anything."""
        return self.kind in COLLECTIVES

    @property
    def group_size(self) -> int:
        """How many ranks take part in each group."""
        return math.prod(self.src.mesh.axis_size(axis) for axis in self.axes)

    @property
    def reductions(self) -> tuple[tuple[str, str], ...]:
        """The pending reductions that this step makes or completes, (axis, op)."""
        partials = self.dst.partials if self.kind == "to_partial" else self.src.partials
        return tuple((axis, partials[axis]) for axis in self.axes if axis in partials)

    @property
    def contributions(self) -> int:
        """How many contributions the step puts together to each element."""
        return math.prod(self.src.mesh.axis_size(axis) for axis, _ in self.reductions)

    def bytes_moved(self, rank: int, itemsize: int) -> int:
        """Bytes that `rank` receives from others.

        An all_reduce counts as what "ordered" reduction does: a reduce-scatter and a gather, and a gather
        of all contributions where it is small (`GATHER_BYTES`).
        """
        if not self.is_collective:
            return 0
        held = math.prod(self.dst.local_shape(rank))
        others = self.group_size - 1
        if self.kind == "reduce_scatter" and self.contributions == self.group_size:
            return others * held * itemsize
        if self.kind == "all_reduce":
            if self.group_size * held * itemsize <= GATHER_BYTES:
                return others * held * itemsize
            index = group_index(self.src.mesh, self.axes, rank)
            start, stop = chunk(held, self.group_size, index)
            return (others * (stop - start) + held - (stop - start)) * itemsize
        wanted = held * (self.contributions if self.kind == "reduce_scatter" else 1)
        return (wanted - common_size(region(self.src, rank), region(self.dst, rank))) * itemsize

    @property
    def traffic(self) -> int:
        """Elements that all ranks together receive: what plans are compared by.

        One rank can't speak for the others. Who keeps nearly all of a ragged tensor receives more in a
        reduce-scatter than in an all-reduce, which costs all of them together twice as much. What stays
        where it is in an exchange is estimated, on a large mesh, from 64 ranks.
        """
        if not self.is_collective:
            return 0
        others, held = self.group_size - 1, _held(self.dst)
        if self.kind == "reduce_scatter":
            if self.contributions == self.group_size:
                return others * held
            held *= self.contributions
        if self.kind == "all_reduce":
            return 2 * others * held // self.group_size
        if self.kind == "all_gather":
            return held - _held(self.src)
        ranks = range(0, self.src.mesh.size, -(-self.src.mesh.size // 64))
        stays = sum(common_size(region(self.src, rank), region(self.dst, rank)) for rank in ranks)
        return max(held - stays * self.src.mesh.size // len(ranks), 0)

    def __repr__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"Step({self.kind}{over}: {self.src.spec} -> {self.dst.spec})"


class Route(tuple[Step, ...]):
    """The steps of a redistribution in order: what `plan` returns."""

    __slots__ = ()

    def bytes_moved(self, rank: int, itemsize: int = 1) -> int:
        """Bytes that `rank` receives from others in all steps, for elements of `itemsize` bytes."""
        return sum(step.bytes_moved(rank, itemsize) for step in self)

    @property
    def collectives(self) -> tuple[Step, ...]:
        """The steps in which ranks exchange anything."""
        return _collectives(self)


@lru_cache(maxsize=65536)
def plan(src: Layout, dst: Layout) -> Route:
    """The steps that turn `src` into `dst` without changing the global value.

    Without pending reductions it is at most one step, and each rank receives exactly the elements
    that it lacks. A Partial becomes a split by one reduce-scatter, or Replicate by one all-reduce over all
    its axes; splits over other axes change before, after or together with it, whichever moves least.

    Raises LayoutError when the two differ in mesh or shape.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import Shard
    >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
    >>> rows, columns = Layout(mesh, P(dp=Shard(0)), (4, 4)), Layout(mesh, P(dp=Shard(1)), (4, 4))
    >>> plan(rows, columns)
    (Step(all_to_all over dp: P(dp=Shard(0)) -> P(dp=Shard(1))),)
    >>> plan(rows, columns).bytes_moved(0, itemsize=4)
    16
    >>> plan(Layout(mesh, P(dp=Partial(), tp=Shard(1)), (4, 4)), Layout(mesh, P(dp=Shard(0)), (4, 4)))
    ... # doctest: +NORMALIZE_WHITESPACE
    (Step(reduce_scatter over dp: P(tp=Shard(1), dp=Partial('sum')) -> P(dp=Shard(0), tp=Shard(1))),
     Step(all_gather over tp: P(dp=Shard(0), tp=Shard(1)) -> P(dp=Shard(0))))
    """
    if src.mesh != dst.mesh or src.shape != dst.shape:
        raise LayoutError(
            explain(
                f"{src} to {dst}",
                where="redistribute",
                rule="a redistribution keeps the mesh and the global shape",
                remedy="make both layouts for one mesh and shape",
            )
        )
    kept = {axis: op for axis, op in src.partials.items() if dst.partials.get(axis) == op}
    reduced = {axis: op for axis, op in src.partials.items() if axis not in kept}
    made = {axis: op for axis, op in dst.partials.items() if axis not in kept}
    full = _with_partials(dst, kept)  # dst before it is made Partial over `made`
    if made and set(made.values()) == {"sum"}:
        # A split over such an axis can stay: each rank contributes its piece, and nothing moves.
        full = _append(full, src, set(made) - set(reduced)) or full
    steps = _reduce(src, full, reduced) if reduced else _exchange(src, full)
    if made:
        steps += (_step("to_partial", tuple(made), full, dst),)
    return Route(steps)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """The part number `index` of `size` elements cut into `count` ceil-sized parts."""
    step = -(-size // count)
    return min(step * index, size), min(step * (index + 1), size)


# Pending reductions.


def _reduce(src: Layout, dst: Layout, reduced: dict[str, str]) -> tuple[Step, ...]:
    """From a layout with reductions to complete over the axes `reduced` to one without."""
    scattered = tuple(axis for axis in reduced if axis in _split_axes(dst))
    rest = {axis: op for axis, op in reduced.items() if axis not in scattered}
    kept = {axis: op for axis, op in src.partials.items() if axis not in reduced}
    candidates: list[tuple[Step, ...]] = []

    # First the other axes, with all reductions pending; then each rank keeps its piece of the sum.
    before = base(dst, scattered)
    if before is not None:
        pending = _with_partials(before, kept | reduced)
        candidates.append(
            _exchange(src, pending)
            + _finish(pending, _with_partials(dst, kept | rest), scattered)
            + _finish(_with_partials(dst, kept | rest), dst, tuple(rest))
        )
    # Or first the reductions, into splits inside the ones that are there; then the other axes.
    for axes in (scattered, ()):
        into = _append(_with_partials(src, kept), dst, set(axes))
        if into is None:
            continue
        left = {axis: op for axis, op in reduced.items() if axis not in axes}
        candidates.append(
            _finish(src, _with_partials(into, kept | left), axes)
            + _finish(_with_partials(into, kept | left), into, tuple(left))
            + _exchange(into, dst)
        )
    candidates += _reduce_at_once(src, dst, reduced)
    return min(candidates, key=lambda steps: (sum(s.traffic for s in steps), len(_collectives(steps))))


def _collectives(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(step for step in steps if step.is_collective)


def _reduce_at_once(src: Layout, dst: Layout, reduced: dict[str, str]) -> list[tuple[Step, ...]]:
    """All in one exchange: each rank gets every contribution to its elements, and adds them up."""
    if all(src.mesh.axis_size(axis) == 1 for axis in reduced):
        return []
    kept = {axis: op for axis, op in src.partials.items() if axis not in reduced}
    bare = _with_partials(src, kept)
    axes = _meeting_axes(bare, dst)
    return [(_step("reduce_scatter", (*axes, *reduced), src, dst),)]


def _finish(src: Layout, dst: Layout, axes: tuple[str, ...]) -> tuple[Step, ...]:
    """Complete the reductions over `axes`, each rank keeping what `dst` leaves to it."""
    if src is dst:
        return ()
    scatter = any(axis in _split_axes(dst) for axis in axes)
    return (_step("reduce_scatter" if scatter else "all_reduce", axes, src, dst),)


# Splits.


def _exchange(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Between layouts with the same pending reductions: at most one step."""
    if src is dst:
        return ()
    axes = _meeting_axes(src, dst)
    step = _step("all_gather" if base(src, axes) is dst else "all_to_all", axes, src, dst)
    if step.is_collective and _nothing_moves(step):
        step = _step("view", (), src, dst)
    return (step,)


def _meeting_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """The axes over which each rank finds all that it needs.

    Only axes that src splits have anything to give: their replicas over other axes have it too.
    """
    axes = next(axes for axes in _axis_sets(src, dst) if _same_base(src, dst, axes))
    return tuple(axis for axis in axes if axis in _split_axes(src))


def _nothing_moves(step: Step) -> bool:
    """Whether every rank has all that it needs; one that lacks something is nearly always found at once."""
    src, dst, last = step.src, step.dst, step.src.mesh.size - 1
    axis = next((side.ragged[0] for side in (src, dst) if side.ragged is not None), None)
    if axis is not None and _cuts(src, axis) == _cuts(dst, axis) is not None:
        return True
    turns = (rank for side in (src, dst) for rank in _turns(side))
    return not any(step.bytes_moved(rank, 1) for rank in chain((0, last), turns, range(1, last)))


def _turns(layout: Layout) -> Iterator[int]:
    """Ranks where the ragged cut goes over to another number of units: near them two cuts differ first."""
    if layout.ragged is not None:
        axis, ragged = layout.ragged
        apart = math.prod(layout.mesh.shape[layout.mesh.axis_names.index(axis) + 1 :])
        for before in accumulate((count for _, count in ragged.runs[:-1])):
            yield from ((before - 1) * apart, before * apart)


def _cuts(layout: Layout, axis: str) -> tuple[Layout, tuple[tuple[int, int], ...]] | None:
    """The innermost cut over `axis` as runs of units of all elements, and the layout that it cuts.

    Two layouts for which this is the same hold the same elements, whatever the cut is called: Shard(0), or a
    RaggedShard with any dims. None where the cut isn't of that kind.
    """
    below = base(layout, (axis,))
    if below is None or below.ragged is not None or not math.prod(below.shape):
        return None
    if layout.ragged is not None:
        return (below, layout.ragged[1].runs) if layout.ragged[0] == axis else None
    last = [a for a, p in layout.spec.items() if getattr(p, "dim", None) == 0][-1:]
    if last != [axis] or layout.placement(axis) != Shard(0):
        return None
    return below, RaggedShard.chunks(below.piece_shape(0)[0], layout.mesh.axis_size(axis)).runs


def _axis_sets(src: Layout, dst: Layout) -> Iterator[tuple[str, ...]]:
    """Sets of axes that are split on either side, those with the smallest groups first."""
    gives = _split_axes(src)
    axes = tuple(axis for axis in src.mesh.axis_names if axis in gives | _split_axes(dst))

    def cost(chosen: tuple[str, ...]) -> tuple[int, int]:
        sizes = (src.mesh.axis_size(axis) for axis in chosen if axis in gives)
        return math.prod(sizes), len(chosen)

    every = [chosen for count in range(len(axes) + 1) for chosen in combinations(axes, count)]
    return iter(sorted(every, key=cost))


def _same_base(src: Layout, dst: Layout, axes: tuple[str, ...]) -> bool:
    below = base(src, axes)
    return below is not None and below is base(dst, axes)


@lru_cache(maxsize=65536)
def base(layout: Layout, axes: tuple[str, ...]) -> Layout | None:
    """What the ranks along `axes` hold together, as a layout without splits over them.

    None where no layout says it: under an uneven split of the same dim that is cut further over an axis
    that stays, or under a ragged split whose cuts go through what is put together.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import Shard
    >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
    >>> base(Layout(mesh, P(dp=Shard(0), tp=Shard(0)), (8,)), ("dp",)).spec
    P(tp=InterleavedShard(0, sections=2))
    >>> base(Layout(mesh, P(dp=Shard(0), tp=Shard(0)), (5,)), ("dp",)) is None
    True
    """
    spec, mesh = layout.spec, layout.mesh
    digits = {axis: digit for axis, digit in layout.digits.items() if axis not in axes}
    kept: list[tuple[str, Digit | Placement]] = list(digits.items())
    uneven: dict[int, list[str]] = {}  # by dim, outermost first
    for axis, placement in spec.items():
        if axis in layout.digits or (axis in axes and isinstance(placement, (Partial, RaggedShard))):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            kept.append((axis, placement))
            continue
        uneven.setdefault(dim, []).append(axis)
        if axis in axes:
            continue
        if any(a in axes and mesh.axis_size(a) > 1 for a in uneven[dim]):
            return None
        kept.append((axis, placement))
    if layout.ragged is not None and layout.ragged[0] not in axes:
        dims, total = layout.ragged[1].dims, layout.ragged[1].total
        piece = layout.piece_shape(0)[: len(dims)]
        for axis in axes:
            dim = getattr(spec[axis], "dim", None)
            if dim is None or dim >= len(dims) or mesh.axis_size(axis) == 1:
                continue
            # Cuts that are whole in dims[dim:] are cuts of the dims before it, and stay where they are.
            inner = math.prod(piece[dim:])
            if dim == 0 or (inner and (math.prod(piece) // total) % inner):
                return None
    return Layout.of(mesh, layout.shape, dict(kept))


def _append(layout: Layout, other: Layout, axes: set[str]) -> Layout | None:
    """`layout` cut further over `axes` as `other` cuts there; None where that isn't a refinement."""
    axes = {axis for axis in axes if axis in _split_axes(other)}
    if not axes:
        return layout
    items = list(layout.spec.items()) + [e for e in other.spec.items() if e[0] in axes]
    ragged = [entry for entry in items if isinstance(entry[1], RaggedShard)]
    spec = P.of([entry for entry in items if entry not in ragged] + ragged)
    try:
        finer = Layout(layout.mesh, spec, layout.shape)
    except LayoutError:
        return None
    return finer if base(finer, tuple(axes)) is layout else None


def _with_partials(layout: Layout, partials: dict[str, str]) -> Layout:
    """The splits of `layout` with these pending reductions."""
    spec = [entry for entry in layout.spec.items() if not isinstance(entry[1], Partial)]
    spec += [(axis, Partial(op)) for axis, op in partials.items()]
    return Layout(layout.mesh, P.of(spec), layout.shape)


def _held(layout: Layout) -> int:
    """Elements that all ranks together hold: each as often as there are ranks along unsplit axes."""
    parts = math.prod(layout.mesh.axis_size(axis) for axis in _split_axes(layout))
    return math.prod(layout.shape) * layout.mesh.size // parts


def _split_axes(layout: Layout) -> frozenset[str]:
    return frozenset(axis for axis, p in layout.spec.items() if not isinstance(p, (Replicate, Partial)))


def _step(kind: str, axes: tuple[str, ...], src: Layout, dst: Layout) -> Step:
    """A step over those of `axes` that have more than one rank; local when none has."""
    mesh = src.mesh
    axes = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.axis_size(axis) > 1)
    if not axes:
        parts = [math.prod(mesh.axis_size(axis) for axis in _split_axes(side)) for side in (src, dst)]
        kind = "view" if parts[0] == parts[1] else "slice"
    return Step(kind, axes, src, dst)
