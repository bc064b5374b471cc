"""Layout: mesh + placements + global shape, everything needed to know which elements a rank holds.

Splits are kept in one canonical order, so that two spellings of one layout are one object:

* splits of different dims commute and are ordered by dim;
* even splits of one dim are *digits*. A dim of D elements whose index is written in mixed radix has a
  digit of `size` values with `outer` values to its left; the axis owns that digit. `Shard` is the digit
  with outer = 1, `InterleavedShard(dim, 3)` has outer = 3, a second Shard of the same dim has outer =
  size of the first. Digits commute, and views only move them, so the sharding rules speak of digits;
* uneven splits of one dim keep the order in which they were written, but for axes of one rank, whose
  Shards come first;
* the ragged split comes last, and is a RaggedShard also where it was written as a StridedRaggedShard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .._errors import LayoutError, explain
from .placements import (
    InterleavedShard,
    P,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)

if TYPE_CHECKING:
    import torch

Interval = tuple[int, int]


@dataclass(frozen=True)
class AbstractMesh:
    """Axis names and sizes, without ranks: all that a decision may depend on.

    A plan on one can be lowered and looked at, however many ranks there would be; it can't run.

    >>> AbstractMesh(("dp", "tp"), (2, 4)).coordinate(5)
    {'dp': 1, 'tp': 1}
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def abstract(self) -> AbstractMesh:
        """Itself: what decides may be given a Mesh or an AbstractMesh."""
        return self

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axis_names.index(axis)]

    @lru_cache(maxsize=4096)  # noqa: B019 - meshes are few and live as long as the process
    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each axis; ranks are numbered row-major."""
        coordinate: dict[str, int] = {}
        for axis, size in zip(reversed(self.axis_names), reversed(self.shape), strict=True):
            rank, coordinate[axis] = divmod(rank, size)
        return {axis: coordinate[axis] for axis in self.axis_names}

    def check_axis(self, axis: str, where: str = "") -> None:
        if axis not in self.axis_names:
            raise LayoutError(
                explain(
                    found=f"axis {axis!r}",
                    where=where,
                    rule=f"the mesh has the axes {', '.join(self.axis_names)}",
                    remedy="use one of these",
                )
            )

    def __str__(self) -> str:
        return "x".join(f"{axis}={size}" for axis, size in zip(self.axis_names, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Digit:
    """An even split: the axis owns the digit of `dim` that has `outer` values to its left."""

    dim: int
    outer: int = 1


class Layout:
    """Where the elements of a tensor of `shape` live on `mesh`. Interned: equality is identity.

    >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
    >>> layout = Layout(mesh, P(dp=Shard(0)), (5, 4))
    >>> [layout.local_shape(rank) for rank in range(4)]
    [(3, 4), (3, 4), (2, 4), (2, 4)]
    >>> layout is Layout(mesh, P(tp=Replicate(), dp=Shard(0)), (5, 4))
    True
    """

    __slots__ = ("__weakref__", "digits", "mesh", "partials", "ragged", "shape", "spec")
    mesh: AbstractMesh
    spec: P  # canonical order, without Replicate
    shape: tuple[int, ...]
    digits: Mapping[str, Digit]  # the axes that own a digit
    partials: Mapping[str, str]  # the axes with a pending reduction, and which
    ragged: tuple[str, RaggedShard] | None

    def __new__(cls, mesh: AbstractMesh, spec: P, shape: tuple[int, ...]) -> Layout:
        return _intern(mesh, spec, tuple(shape))

    @classmethod
    def of(
        cls,
        mesh: AbstractMesh,
        shape: tuple[int, ...],
        placed: Mapping[str, Digit | Placement],
    ) -> Layout:
        """From digits and other placements by axis: the form in which rules speak."""
        return _from_digits(mesh, tuple(shape), tuple(placed.items()))

    def placement(self, axis: str) -> Placement:
        """The canonical placement over `axis`."""
        return self.spec[axis]

    def index_sets(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """For each dim the intervals of global indices that `rank` has before the ragged split."""
        coordinate = self.mesh.coordinate(rank)
        return tuple(
            _dim_intervals(
                self.shape[dim],
                tuple(
                    (placement, coordinate[axis], self.mesh.axis_size(axis))
                    for axis, placement in self.spec.items()
                    if getattr(placement, "dim", None) == dim
                ),
            )
            for dim in range(len(self.shape))
        )

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what the splits by dim leave to `rank`: the local shape without a ragged split."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.index_sets(rank))

    def rows(self, rank: int) -> Interval | None:
        """The prefix rows of the piece that the ragged split leaves to `rank`, None without one."""
        if self.ragged is None:
            return None
        axis, ragged = self.ragged
        prefix = math.prod(self.piece_shape(rank)[: len(ragged.dims)])
        return ragged.span(self.mesh.coordinate(rank)[axis], prefix)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor on `rank`."""
        return _local_shape(self, rank)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement an axis, split in the order of the mesh, as torch writes a layout.

        Raises LayoutError for the few that have no such spelling: uneven splits of one dim in another order.

        >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
        >>> Layout(mesh, P(tp=Shard(0), dp=RaggedShard((0,), (3, 1))), (8, 4)).placements
        (StridedRaggedShard((0,), (3, 1), split_factor=2), Shard(0))
        """
        from .mesh_order import mesh_order  # it speaks of layouts itself

        return mesh_order(self)

    def boxes(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """What `rank` holds as the fewest boxes, (start, stop) for each dim, in order of their offsets.

        >>> mesh = AbstractMesh(("dp",), (2,))
        >>> Layout(mesh, P(dp=RaggedShard((0, 1), (5, 7))), (4, 6)).boxes(0)
        (((0, 1), (0, 6)), ((1, 2), (0, 4)))
        """
        from .chunks import chunks  # it speaks of layouts itself

        return tuple(
            tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes))
            for chunk in chunks(self, rank)
        )

    def regions(self, rank: int) -> Iterator[Interval]:
        """The flat row-major global intervals that `rank` holds, in the order of its local elements."""
        sets, strides = self.index_sets(rank), _strides(self.shape)
        rows = self.rows(rank)
        piece = self.piece_shape(rank)
        low, high = 0, math.prod(piece)
        if rows is not None:
            assert self.ragged is not None
            width = math.prod(piece[len(self.ragged[1].dims) :])
            low, high = rows[0] * width, rows[1] * width
        pending: Interval | None = None
        seen = 0
        for start, stop in _boxes(sets, strides):
            length = stop - start
            first, last = max(low - seen, 0), min(high - seen, length)
            if first < last:
                piece_ = (start + first, start + last)
                if pending is not None and pending[1] == piece_[0]:
                    pending = (pending[0], piece_[1])
                else:
                    if pending is not None:
                        yield pending
                    pending = piece_
            seen += length
        if pending is not None:
            yield pending

    def owner(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold the element at the global `index` (all replicas, all partial contributors).

        >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
        >>> Layout(mesh, P(tp=Shard(0)), (4,)).owner((3,))
        (1, 3)
        """
        if len(index) != len(self.shape) or any(not 0 <= i < n for i, n in zip(index, self.shape)):
            raise LayoutError(
                explain(
                    found=f"index {tuple(index)}",
                    where=self,
                    rule="an index counts from 0 in each dim of the global shape",
                    remedy="use an index inside the tensor",
                )
            )
        coordinate: dict[str, int] = {}
        place, piece = list(index), list(self.shape)  # shrink with each split
        for axis, placement in self.spec.items():
            if isinstance(placement, (Shard, InterleavedShard)):
                dim, size = placement.dim, self.mesh.axis_size(axis)
                found = _locate(placement, place[dim], piece[dim], size)
                coordinate[axis], place[dim], piece[dim] = found
        if self.ragged is not None:
            axis, ragged = self.ragged
            row, rows = 0, 1
            for dim in ragged.dims:
                row, rows = row * piece[dim] + place[dim], rows * piece[dim]
            coordinate[axis] = ragged.holder(row, rows)
        ranks = [0]
        for axis, size in zip(self.mesh.axis_names, self.mesh.shape):
            along = (coordinate[axis],) if axis in coordinate else range(size)
            ranks = [rank * size + i for rank in ranks for i in along]
        return tuple(ranks)

    def num_bytes(self, rank: int, dtype: torch.dtype) -> int:
        """Bytes of the local tensor on `rank`."""
        return math.prod(self.local_shape(rank)) * dtype.itemsize

    def __repr__(self) -> str:
        return f"Layout({self.mesh}, {self.spec}, shape={self.shape})"

    def __reduce__(self) -> tuple[type, tuple[AbstractMesh, P, tuple[int, ...]]]:
        return Layout, (self.mesh, self.spec, self.shape)


def replicated(mesh: AbstractMesh, shape: tuple[int, ...]) -> Layout:
    """The layout with the whole tensor on every rank."""
    return Layout(mesh, P(), tuple(shape))


# Construction: from a user's spec (`_intern`) or from digits (`_from_digits`) to the one canonical object.

_layouts: dict[tuple[AbstractMesh, P, tuple[int, ...]], Layout] = {}


@lru_cache(maxsize=65536)
def _intern(mesh: AbstractMesh, spec: P, shape: tuple[int, ...]) -> Layout:
    if any(isinstance(placement, StridedRaggedShard) for _, placement in spec.items()):
        return _intern(mesh, _ragged_last(mesh, spec), shape)
    by_dim: dict[int, list[tuple[str, Shard | InterleavedShard]]] = {}
    partials: dict[str, str] = {}
    ragged: tuple[str, RaggedShard] | None = None
    after_ragged: list[tuple[str, int]] = []
    for axis, placement in spec.items():
        mesh.check_axis(axis, where=f"in {spec}")
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            partials[axis] = placement.op
        elif isinstance(placement, RaggedShard):
            if ragged is not None:
                raise LayoutError(
                    explain(
                        found=f"two RaggedShards, over {ragged[0]!r} and {axis!r}",
                        where=str(spec),
                        rule="a tensor has at most one RaggedShard",
                        remedy=f"shard over {axis!r} with Shard",
                    )
                )
            ragged = axis, placement
        elif isinstance(placement, (Shard, InterleavedShard)):
            if placement.dim >= len(shape):
                raise LayoutError(
                    explain(
                        found=f"{placement} over {axis!r} of a tensor of shape {shape}",
                        where=str(spec),
                        rule=f"the dim is one of the tensor's {len(shape)}",
                        remedy="use a smaller dim, or Replicate",
                    )
                )
            if ragged is not None:
                after_ragged.append((axis, placement.dim))
            by_dim.setdefault(placement.dim, []).append((axis, placement))
        else:
            raise LayoutError(
                explain(
                    found=f"{placement!r} over {axis!r}",
                    where=str(spec),
                    rule="layouts know Replicate, Shard, InterleavedShard, Partial, RaggedShard and "
                    "StridedRaggedShard",
                    remedy="use one of these",
                )
            )

    if len({"sum" if op == "avg" else op for op in partials.values()}) > 1:
        raise LayoutError(
            explain(
                found=f"different reductions, {', '.join(f'{op} over {a!r}' for a, op in partials.items())}",
                where=str(spec),
                rule="pending reductions of one tensor commute: sums and averages, or all max, or all min",
                remedy="complete one of them first",
            )
        )

    digits: dict[str, Digit] = {}
    ordered: list[tuple[str, Placement]] = []
    for dim in sorted(by_dim):
        found = _find_digits(shape[dim], by_dim[dim], mesh)
        if found is None:
            _check_sections(shape[dim], by_dim[dim], mesh, spec)
            idle = [e for e in by_dim[dim] if mesh.axis_size(e[0]) == 1 and isinstance(e[1], Shard)]
            ordered += sorted(idle, key=lambda entry: entry[0])
            ordered += [entry for entry in by_dim[dim] if entry not in idle]
        else:
            digits.update(found)
            ordered += _spell_digits(found, mesh)
    if ragged is not None:
        _check_ragged(mesh, shape, spec, by_dim, ragged, after_ragged)
        ordered.append(ragged)
    ordered += [(axis, Partial(partials[axis])) for axis in mesh.axis_names if axis in partials]

    canonical = P.of(ordered)
    key = (mesh, canonical, shape)
    layout = _layouts.get(key)
    if layout is None:
        layout = object.__new__(Layout)
        layout.mesh, layout.spec, layout.shape = mesh, canonical, shape
        layout.digits, layout.partials, layout.ragged = digits, partials, ragged
        layout = _layouts.setdefault(key, layout)
    return layout


@lru_cache(maxsize=65536)
def _from_digits(
    mesh: AbstractMesh,
    shape: tuple[int, ...],
    placed: tuple[tuple[str, Digit | Placement], ...],
) -> Layout:
    by_dim: dict[int, dict[str, Digit]] = {}
    others: list[tuple[str, Placement]] = []
    for axis, placement in placed:
        if isinstance(placement, Digit):
            by_dim.setdefault(placement.dim, {})[axis] = placement
        else:
            others.append((axis, placement))
    spelled = [entry for dim in sorted(by_dim) for entry in _spell_digits(by_dim[dim], mesh)]
    return Layout(
        mesh,
        P.of(spelled + sorted(others, key=lambda entry: isinstance(entry[1], RaggedShard))),
        shape,
    )


def _ragged_last(mesh: AbstractMesh, spec: P) -> P:
    """The spec with each StridedRaggedShard as a RaggedShard after all other splits."""
    sharded = [axis for axis, p in spec.items() if isinstance(p, (Shard, InterleavedShard))]
    for axis in spec:
        mesh.check_axis(axis, where=f"in {spec}")
    factor = math.prod(mesh.axis_size(axis) for axis in sharded)
    strided = [(axis, p) for axis, p in spec.items() if isinstance(p, StridedRaggedShard)]
    for axis, placement in strided:
        if placement.split_factor != factor:
            listed = ", ".join(f"{a}={mesh.axis_size(a)}" for a in sharded) or "none"
            raise LayoutError(
                explain(
                    found=f"{placement} over {axis!r}",
                    where=str(spec),
                    rule=f"split_factor is the product of the sizes of the sharded axes ({listed}): {factor}",
                    remedy=f"use split_factor={factor}, or write {axis}=RaggedShard(...) last",
                )
            )
    others = [entry for entry in spec.items() if entry not in strided]
    return P.of([*others, *((axis, placement.ragged) for axis, placement in strided)])


def _find_digits(
    length: int, splits: list[tuple[str, Shard | InterleavedShard]], mesh: AbstractMesh
) -> dict[str, Digit] | None:
    """The digits that the splits of one dim own; None when one of them is uneven."""
    factors: list[tuple[int, str | None]] = [(length, None)]  # mixed radix of the dim, outermost first
    for axis, placement in splits:
        outer = placement.sections if isinstance(placement, InterleavedShard) else 1
        size = mesh.axis_size(axis)
        if not isinstance(outer, int):
            return None
        position = 0
        while outer > 1 and position < len(factors):  # walk past `outer` values of what is still unowned
            factor, owner = factors[position]
            if owner is None:
                if factor % outer == 0 and factor != outer:
                    factors[position : position + 1] = [(outer, None), (factor // outer, None)]
                    outer = 1
                elif outer % factor == 0:
                    outer //= factor
                else:
                    return None
            position += 1
        while position < len(factors) and (factors[position][1] is not None or factors[position][0] == 1):
            position += 1
        if position == len(factors):
            if size > 1 or outer > 1:
                return None
            factors.append((1, None))
        factor, _ = factors[position]
        if outer > 1 or factor % size:
            return None
        factors[position : position + 1] = [(size, axis), (factor // size, None)]
    digits, outer = {}, 1
    for factor, owner in factors:
        if owner is not None:
            # A digit of one value stands at any place: at the front, for one spelling.
            digits[owner] = Digit(splits[0][1].dim, outer if mesh.axis_size(owner) > 1 else 1)
        outer *= factor
    return digits


def _spell_digits(digits: Mapping[str, Digit], mesh: AbstractMesh) -> list[tuple[str, Placement]]:
    """The placements, outermost first, that mean these digits of one dim."""
    spelled: list[tuple[str, Placement]] = []
    owned = 1
    # Axes of size 1 own a digit of one value, which stands at any place: before its equals, by name.
    for axis, digit in sorted(
        digits.items(), key=lambda entry: (entry[1].outer, mesh.axis_size(entry[0]), entry[0])
    ):
        sections, rest = divmod(digit.outer, owned)
        assert rest == 0, (digits, mesh)
        spelled.append((axis, Shard(digit.dim) if sections == 1 else InterleavedShard(digit.dim, sections)))
        owned *= mesh.axis_size(axis)
    return spelled


def _check_sections(
    length: int, splits: list[tuple[str, Shard | InterleavedShard]], mesh: AbstractMesh, spec: P
) -> None:
    """Sections must fit each of the pieces that the splits before them leave."""
    pieces = {length}
    for axis, placement in splits:
        if isinstance(placement, InterleavedShard):
            sections = placement.sections
            for piece in sorted(pieces):
                if isinstance(sections, int) and piece % sections:
                    raise LayoutError(
                        explain(
                            found=f"{placement} over {axis!r} of a dim of {piece}",
                            where=str(spec),
                            rule="equal sections divide the dim",
                            remedy="give the sizes of the sections",
                        )
                    )
                if not isinstance(sections, int) and sum(sections) != piece:
                    raise LayoutError(
                        explain(
                            found=f"{placement} over {axis!r} of a dim of {piece}",
                            where=str(spec),
                            rule="section sizes sum to the dim",
                            remedy="give the size of every section",
                        )
                    )
        size = mesh.axis_size(axis)
        pieces = {
            sum(stop - start for start, stop in _dim_intervals(piece, ((placement, index, size),)))
            for piece in pieces
            for index in _turns(placement, piece, size)
        }


def _turns(placement: Shard | InterleavedShard, length: int, size: int) -> set[int]:
    """Coordinates that among them have pieces of every length: full chunks, a short one, empty ones."""
    turns = {0, size - 1}
    for section in set(_sections(placement, length)):
        last = section // -(-section // size) if section else 0
        turns |= {last, last + 1}
    return {index for index in turns if index < size}


def _check_ragged(
    mesh: AbstractMesh,
    shape: tuple[int, ...],
    spec: P,
    by_dim: Mapping[int, list[tuple[str, Shard | InterleavedShard]]],
    ragged: tuple[str, RaggedShard],
    after: list[tuple[str, int]],
) -> None:
    axis, placement = ragged
    size = mesh.axis_size(axis)
    if not shape:
        raise LayoutError(
            explain(
                found=f"{placement} over {axis!r} of a 0-d tensor",
                where=str(spec),
                rule="0-d tensors are never ragged",
                remedy="use Replicate",
            )
        )
    if placement.size != size:
        raise LayoutError(
            explain(
                found=f"{placement} has units for {placement.size} ranks",
                where=str(spec),
                rule=f"there is one entry a rank, and axis {axis!r} has {size}",
                remedy=f"give {size} units",
            )
        )
    if len(placement.dims) > len(shape):
        raise LayoutError(
            explain(
                found=f"{placement} of a tensor of shape {shape}",
                where=str(spec),
                rule=f"ragged dims are among the tensor's {len(shape)}",
                remedy="use fewer dims",
            )
        )
    prefix, earlier = 1, []  # earlier: the piece that the ragged split cuts, before later splits
    for dim in placement.dims:
        splits = by_dim.get(dim, [])
        pieces = _lengths(shape[dim], splits, mesh)
        if len(pieces) > 1:
            raise LayoutError(
                explain(
                    found=f"{placement} over {axis!r} under an uneven split of dim {dim}, "
                    f"pieces of {sorted(pieces)}",
                    where=str(spec),
                    rule="what a ragged split cuts has the same size on every rank",
                    remedy=f"split dim {dim} evenly, or not at all",
                )
            )
        prefix *= pieces.pop()
        before = [entry for entry in splits if (entry[0], dim) not in after]
        earlier.append(max(_lengths(shape[dim], before, mesh)))
    if placement.dims and prefix % placement.total:
        raise LayoutError(
            explain(
                found=f"{prefix} prefix rows for {placement.total} units "
                f"({placement} over {axis!r}, shape {shape})",
                where=str(spec),
                rule="the units divide the prefix rows of the piece that earlier splits leave",
                remedy="choose units whose sum divides the rows, or give the rows of each rank: "
                "RaggedShard.from_sizes(dims, rows)",
            )
        )
    for other, dim in after:
        # Ragged first, then Shard(dim > 0): the two commute when every ragged cut is whole in dims[dim:].
        unit_rows, inner = math.prod(earlier) // placement.total, math.prod(earlier[dim:])
        if dim == 0 or (dim in placement.dims and inner and unit_rows % inner):
            raise LayoutError(
                explain(
                    found=f"{placement} over {axis!r} before a split of dim {dim} over {other!r}",
                    where=str(spec),
                    rule="a ragged split comes last unless its cuts are whole in the dims from the "
                    "later split on",
                    remedy=f"write {other} before {axis} in P, or say StridedRaggedShard in a list by axis",
                )
            )


def _lengths(length: int, splits: list[tuple[str, Shard | InterleavedShard]], mesh: AbstractMesh) -> set[int]:
    """How long the pieces of a dim are: all the lengths where there is one, else two of them or more."""
    sizes = [mesh.axis_size(axis) for axis, _ in splits]
    found = set()
    for index in _coordinates(sizes):
        taken = tuple((p, i, size) for (_, p), i, size in zip(splits, index, sizes))
        found.add(sum(stop - start for start, stop in _dim_intervals(length, taken)))
    return found


def _coordinates(sizes: list[int]) -> Iterator[tuple[int, ...]]:
    # First and last rank of each axis are enough: torch's chunks are all full but the last ones.
    if not sizes:
        yield ()
        return
    for rest in _coordinates(sizes[1:]):
        for index in {0, sizes[0] - 1}:
            yield (index, *rest)


@lru_cache(maxsize=65536)
def _local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    piece = layout.piece_shape(rank)
    if layout.ragged is None:
        return piece
    dims = layout.ragged[1].dims
    rows = layout.rows(rank)
    assert rows is not None
    if not dims:
        return piece if rows[1] > rows[0] else (0, *piece[1:])
    return (rows[1] - rows[0], *piece[len(dims) :])


@lru_cache(maxsize=65536)
def _dim_intervals(
    length: int, splits: tuple[tuple[Shard | InterleavedShard, int, int], ...]
) -> tuple[Interval, ...]:
    """The global index intervals of one dim left by (placement, coordinate, axis size) in turn."""
    intervals: tuple[Interval, ...] = ((0, length),)
    for placement, coordinate, size in splits:
        here = sum(stop - start for start, stop in intervals)
        taken: list[Interval] = []
        base = 0
        for section in _sections(placement, here):
            low, high = _chunk(section, size, coordinate)
            taken += _take(intervals, base + low, base + high)
            base += section
        intervals = _merge(taken)
    return intervals


def _sections(placement: Shard | InterleavedShard, length: int) -> tuple[int, ...]:
    """The sizes of the sections that a split cuts, one for a Shard."""
    sections = placement.sections if isinstance(placement, InterleavedShard) else 1
    return (length // sections,) * sections if isinstance(sections, int) else sections


def _chunk(length: int, size: int, coordinate: int) -> Interval:
    """torch's chunks: each is the ceiling of length / size long while there is any left."""
    chunk = -(-length // size)
    return min(chunk * coordinate, length), min(chunk * (coordinate + 1), length)


def _locate(placement: Shard | InterleavedShard, index: int, length: int, size: int) -> tuple[int, int, int]:
    """Who has the index after a split of `length`: (coordinate, index in the piece, length of the piece)."""
    sections = _sections(placement, length)
    number, rest = 0, index
    while rest >= sections[number]:
        rest -= sections[number]
        number += 1
    coordinate = rest // -(-sections[number] // size)
    chunks = [_chunk(section, size, coordinate) for section in sections]
    held = [stop - start for start, stop in chunks]
    return coordinate, sum(held[:number]) + rest - chunks[number][0], sum(held)


def _take(intervals: tuple[Interval, ...], low: int, high: int) -> Iterator[Interval]:
    """Positions low..high of the concatenated intervals."""
    seen = 0
    for start, stop in intervals:
        first, last = max(low - seen, 0), min(high - seen, stop - start)
        if first < last:
            yield start + first, start + last
        seen += stop - start


def _merge(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _boxes(sets: tuple[tuple[Interval, ...], ...], strides: tuple[int, ...]) -> Iterator[Interval]:
    """Flat intervals of the product of the index sets, row-major."""
    if not sets:
        yield 0, 1
        return
    if len(sets) == 1:
        yield from sets[0]
        return
    inner = list(_boxes(sets[1:], strides[1:])) if sets[0] else []
    if not inner:
        return
    whole = len(inner) == 1 and inner[0] == (0, strides[0])
    for start, stop in sets[0]:
        if whole:
            yield start * strides[0], stop * strides[0]
            continue
        for index in range(start, stop):
            for low, high in inner:
                yield index * strides[0] + low, index * strides[0] + high
