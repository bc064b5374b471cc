"""Lanes: a mesh whose ranks are hosted several to a rank of another mesh, so that sums don't depend on it.

With `lanes={"dp": 8}` a program is decided for 8 ranks of dp. A mesh of n ranks hosts 8 / n of them each,
next to each other:

    lanes of dp      0   1   2   3   4   5   6   7
    dp = 8           0   1   2   3   4   5   6   7
    dp = 2           0   0   0   0   1   1   1   1
    dp = 1           0   0   0   0   0   0   0   0

A lane computes what a rank of its own would compute, and sums are taken in one tree over the lanes. The lanes
of a rank are a subtree of it, so a rank sends no more than it would without.

A value enters in some layout over the ranks of the mesh, is cut into lanes, and leaves in the layout that
groups what the lanes of each rank hold: `refined` and `grouped`. Here everything is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from .._errors import ArgumentError, LayoutError, explain
from .layout import AbstractMesh, Digit, Layout
from .mesh import Mesh
from .placements import P, Placement, RaggedShard, Shard
from .regions import common_size, region


class LaneMesh(Mesh):
    """A mesh of lanes, and the mesh whose ranks host them: `local_ranks` are the lanes of this process."""

    def __init__(self, hosts: Mesh, lanes: Mapping[str, int]) -> None:
        abstract = lane_axes(hosts.abstract, lanes)
        self.hosts = hosts
        self.abstract, self.device, self.backend = abstract, hosts.device, hosts.backend
        where = [host_of(lane, abstract, hosts.abstract) for lane in range(abstract.size)]
        self.world_ranks = tuple(hosts.world_ranks[host] for host in where)
        self.local_ranks = tuple(lane for lane, host in enumerate(where) if host in hosts.local_ranks)
        self._parts: dict[tuple[str, ...], Mesh] = {}
        self._parent = hosts

    @property
    def reduction(self) -> str:
        """Sums over lanes are taken in the tree, on any device."""
        return "ordered"

    @property
    def rank(self) -> int:
        """There is no one lane of a process."""
        raise ArgumentError(
            explain("rank of a mesh of lanes", rule="a process hosts several", remedy="use mesh.local_ranks")
        )

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The lanes that the sub-mesh of these axes hosts."""
        part = self.hosts[axes]
        if part.axis_names not in self._parts:
            self._parts[part.axis_names] = LaneMesh(
                part, {axis: self.abstract.axis_size(axis) for axis in part.axis_names}
            )
        return self._parts[part.axis_names]

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis}={size}" for axis, size in zip(self.axis_names, self.shape, strict=True))
        return f"LaneMesh({axes}, on {self.hosts})"


def lane_axes(mesh: AbstractMesh, lanes: Mapping[str, int]) -> AbstractMesh:
    """The mesh that a program with these lanes is decided for. Raises ArgumentError."""
    if not isinstance(lanes, Mapping):
        raise ArgumentError(
            explain(
                f"lanes={lanes!r}",
                rule="lanes are said by axis: a mapping from its name to how many it has",
                remedy=f"lanes={{{mesh.axis_names[0]!r}: 8}}",
            )
        )
    for axis, count in lanes.items():
        if axis not in mesh.axis_names:
            found, rule = f"axis {axis!r}", f"the mesh has the axes {', '.join(mesh.axis_names)}"
            remedy = "name one of these"
        elif type(count) is not int or count < 1 or count & (count - 1):
            found, rule = f"{count!r} lanes", "the lanes of an axis are a power of two: the leaves of a tree"
            remedy = f"for example lanes={{{axis!r}: 8}}"
        elif count % mesh.axis_size(axis):
            found = f"{count} lanes on an axis of {mesh.axis_size(axis)} ranks"
            rule = "each rank hosts the same number of lanes"
            remedy = f"a mesh whose {axis} divides {count}, or more lanes"
        else:
            continue
        raise ArgumentError(explain(found, where=f"lanes={dict(lanes)!r}", rule=rule, remedy=remedy))
    return AbstractMesh(
        mesh.axis_names,
        tuple(lanes.get(axis, size) for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)),
    )


def host_of(lane: int, lanes: AbstractMesh, hosts: AbstractMesh) -> int:
    """The rank of `hosts` that hosts a lane.

    >>> host_of(5, AbstractMesh(("dp",), (8,)), AbstractMesh(("dp",), (2,)))
    1
    """
    coordinate, host = lanes.coordinate(lane), 0
    for axis, size in zip(hosts.axis_names, hosts.shape, strict=True):
        host = host * size + coordinate[axis] * size // lanes.axis_size(axis)
    return host


@lru_cache(maxsize=65536)
def lanes_of(host: int, lanes: AbstractMesh, hosts: AbstractMesh) -> tuple[int, ...]:
    """The lanes that a rank of `hosts` hosts, in order.

    >>> lanes_of(1, AbstractMesh(("dp", "tp"), (4, 2)), AbstractMesh(("dp", "tp"), (2, 2)))
    (1, 3)
    """
    coordinate, along = hosts.coordinate(host), []
    for axis, size in zip(hosts.axis_names, hosts.shape, strict=True):
        each = lanes.axis_size(axis) // size
        along.append(range(coordinate[axis] * each, (coordinate[axis] + 1) * each))
    ranks = []
    for place in product(*along):
        rank = 0
        for index, size in zip(place, lanes.shape, strict=True):
            rank = rank * size + index
        ranks.append(rank)
    return tuple(ranks)


# Layouts.


@lru_cache(maxsize=65536)
def grouped(layout: Layout, hosts: AbstractMesh) -> Layout | None:
    """The layout in which a rank of `hosts` holds what its lanes hold; None where no placements say it.

    >>> lanes, hosts = AbstractMesh(("dp",), (4,)), AbstractMesh(("dp",), (2,))
    >>> grouped(Layout(lanes, P(dp=Shard(0)), (8, 2)), hosts).spec
    P(dp=Shard(0))
    >>> grouped(Layout(lanes, P(dp=RaggedShard((0,), (3, 1, 0, 4))), (8, 2)), hosts).spec
    P(dp=RaggedShard.even(2, dims=(0,)))
    >>> grouped(Layout(lanes, P(dp=Shard(0)), (5, 2)), hosts).spec  # chunks of 2, 2, 1 and 0
    P(dp=RaggedShard((0,), (4, 1)))
    """
    return next((found for found in _coarser(layout, hosts) if _same(layout, found)), None)


@lru_cache(maxsize=65536)
def refined(layout: Layout, lanes: AbstractMesh) -> Layout | None:
    """The layout over lanes that a layout of their hosts is cut into; None where its pieces can't be.

    Ragged pieces are cut evenly.

    >>> lanes, hosts = AbstractMesh(("dp",), (4,)), AbstractMesh(("dp",), (2,))
    >>> refined(Layout(hosts, P(dp=Shard(1)), (3, 8)), lanes).spec
    P(dp=Shard(1))
    >>> refined(Layout(hosts, P(dp=RaggedShard((0,), (3, 1))), (8, 2)), lanes).spec
    P(dp=RaggedShard((0,), (3 x 2, 1 x 2)))
    >>> refined(Layout(hosts, P(dp=Shard(0)), (5, 2)), lanes) is None  # 3 and 2, where lanes have 4 and 1
    True
    """
    for finer in _finer(layout, lanes):
        if grouped(finer, layout.mesh) is layout:
            return finer
    return None


def widths(lanes: AbstractMesh, hosts: AbstractMesh) -> dict[str, int]:
    """How many lanes a host has along each axis on which that isn't one."""
    pairs = zip(lanes.axis_names, lanes.shape, hosts.shape, strict=True)
    return {axis: size // ranks for axis, size, ranks in pairs if size != ranks}


def _coarser(layout: Layout, hosts: AbstractMesh) -> Iterator[Layout]:
    wide = widths(layout.mesh, hosts)
    if any(axis in wide for axis in layout.partials):
        return
    placed: dict[str, Digit | Placement] = {}
    for axis, placement in layout.spec.items():
        if axis in wide and isinstance(placement, RaggedShard):
            placement = _grouped_units(placement, wide[axis])
        placed[axis] = layout.digits.get(axis, placement)
    yield from _legal(hosts, layout.shape, placed)
    for axis, placement in layout.spec.items():
        if axis in wide and placement == Shard(0) and layout.shape[0]:
            # Chunks of lanes that, taken together, aren't chunks of ranks.
            rows = RaggedShard.chunks(layout.shape[0], layout.mesh.axis_size(axis))
            others = {name: entry for name, entry in placed.items() if name != axis}
            yield from _legal(hosts, layout.shape, {**others, axis: _grouped_units(rows, wide[axis])})


def _finer(layout: Layout, lanes: AbstractMesh) -> Iterator[Layout]:
    wide = widths(lanes, layout.mesh)
    if any(axis in wide for axis in layout.partials):
        return
    if layout.ragged is not None and layout.ragged[0] in wide:
        axis, ragged = layout.ragged
        runs = [(unit, count * wide[axis]) for unit, count in ragged.runs]
        for placement in (RaggedShard.from_runs(ragged.dims, runs), Shard(0)):
            items = [*((a, p) for a, p in layout.spec.items() if a != axis), (axis, placement)]
            yield from _legal(lanes, layout.shape, dict(items))
        return
    digits = {axis: layout.digits.get(axis, placement) for axis, placement in layout.spec.items()}
    if _fits(digits, lanes):
        yield from _legal(lanes, layout.shape, digits)
    # One rank's piece is cut by its lanes after all other cuts.
    last = [axis for axis in layout.spec if axis in wide and layout.mesh.axis_size(axis) == 1]
    order = [*(axis for axis in layout.spec if axis not in last), *last]
    yield from _legal(lanes, layout.shape, {axis: layout.spec[axis] for axis in order})


def _fits(placed: Mapping[str, Digit | Placement], mesh: AbstractMesh) -> bool:
    """Whether the digits of a dim lie beside each other."""
    owned: dict[int, int] = {}
    digits = [(entry.outer, axis, entry.dim) for axis, entry in placed.items() if isinstance(entry, Digit)]
    for outer, axis, dim in sorted(digits):
        if outer % owned.setdefault(dim, 1):
            return False
        owned[dim] *= mesh.axis_size(axis)
    return True


def _grouped_units(ragged: RaggedShard, each: int) -> RaggedShard:
    units = ragged.local_units
    sums = [sum(units[at : at + each]) for at in range(0, len(units), each)]
    return RaggedShard(ragged.dims, sums)


def _legal(mesh: AbstractMesh, shape: tuple[int, ...], placed: Mapping[str, Any]) -> Iterator[Layout]:
    try:
        if any(isinstance(entry, Digit) for entry in placed.values()):
            yield Layout.of(mesh, shape, placed)
        else:
            yield Layout(mesh, P.of(placed.items()), shape)
    except LayoutError:
        return


def _same(lanes: Layout, hosts: Layout) -> bool:
    """Whether each rank holds exactly what its lanes hold."""
    for host in range(hosts.mesh.size):
        inside = distinct(lanes, hosts.mesh, host)
        held = [common_size(region(lanes, lane), region(hosts, host)) for lane in inside]
        sizes = [common_size(region(lanes, lane), region(lanes, lane)) for lane in inside]
        if held != sizes or sum(sizes) != common_size(region(hosts, host), region(hosts, host)):
            return False
    return True


def representative(lane: int, axes: Collection[str], lanes: AbstractMesh, wide: Mapping[str, int]) -> int:
    """The first lane of the same host with this one's places on `axes`; `wide` as of `widths`."""
    coordinate, rank = lanes.coordinate(lane), 0
    for axis, size in zip(lanes.axis_names, lanes.shape, strict=True):
        index = coordinate[axis]
        rank = rank * size + (index if axis in axes else index - index % wide.get(axis, 1))
    return rank


@lru_cache(maxsize=65536)
def distinct(layout: Layout, hosts: AbstractMesh, host: int) -> tuple[int, ...]:
    """The lanes of a host that hold different pieces: of those that hold the same, the first.

    >>> lanes, hosts = AbstractMesh(("dp",), (8,)), AbstractMesh(("dp",), (2,))
    >>> distinct(Layout(lanes, P(dp=Shard(0)), (8,)), hosts, 1)
    (4, 5, 6, 7)
    >>> distinct(Layout(lanes, P(), (8,)), hosts, 1)
    (4,)
    """
    wide = widths(layout.mesh, hosts)
    inside, split = lanes_of(host, layout.mesh, hosts), frozenset(layout.spec)
    return tuple(dict.fromkeys(representative(lane, split, layout.mesh, wide) for lane in inside))


def not_in_lanes(path: str, layout: Layout, lanes: AbstractMesh, where: str) -> str:
    """The error for a DTensor whose pieces can't be cut into lanes."""
    wide = widths(lanes, layout.mesh)
    over = next((axis for axis in wide if axis in layout.spec), next(iter(wide)))
    count = lanes.axis_size(over)
    return explain(
        f"{path}, {layout.spec} of shape {layout.shape}, with {count} lanes over {over!r}",
        where=where,
        rule="a piece is cut into as many lanes as its rank hosts, so that they are the chunks that "
        f"{count} ranks would hold; ragged pieces evenly; a sum that is pending can't be cut",
        remedy=f"a size that divides by {count}, x.full_tensor() for a global value, or what "
        "vs.distribute(x, step.plan) gives",
    )


__all__ = [
    "LaneMesh",
    "distinct",
    "grouped",
    "host_of",
    "lane_axes",
    "lanes_of",
    "not_in_lanes",
    "refined",
    "representative",
    "widths",
]
