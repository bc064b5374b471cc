"""Placements: how a tensor relates to one mesh axis, and `P`, placements by axis name.

A placement is a frozen value. It knows nothing of meshes or shapes; `Layout` puts the three together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import index

from .._errors import LayoutError, explain

REDUCTIONS = ("sum", "avg", "max", "min")


class Placement:
    """Base of all placements: frozen, hashable, comparable by value."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole piece.

    >>> Replicate()
    Replicate()
    """


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The piece is cut along `dim` into ceil-sized chunks, as by torch.chunk; the last may be short or empty.

    >>> Shard(0)
    Shard(0)
    """

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self, self.dim)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class InterleavedShard(Placement):
    """Every rank holds its chunk of each section of `dim`.

    `sections` is a count of equal sections or their sizes. A fused qkv weight of shape (3 * d, d),
    sharded by heads over two ranks:

        rows      q0 q1 | k0 k1 | v0 v1
        rank 0    q0      k0      v0
        rank 1       q1      k1      v1

    >>> InterleavedShard(0, 3)
    InterleavedShard(0, sections=3)
    """

    dim: int
    sections: int | tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim(self, self.dim)
        if isinstance(self.sections, int):
            if self.sections < 1:
                raise LayoutError(
                    explain(
                        found=f"sections={self.sections}",
                        rule="sections is a positive count or the sizes of the sections",
                        remedy="say how many equal sections the dim holds, e.g. 3 for fused qkv",
                    )
                )
        else:
            object.__setattr__(self, "sections", tuple(int(size) for size in self.sections))
            if not self.sections or min(self.sections) < 0:
                raise LayoutError(
                    explain(
                        found=f"sections={self.sections}",
                        rule="section sizes are not negative, and there is at least one",
                        remedy="give the size of each section of the dim",
                    )
                )

    def __repr__(self) -> str:
        return f"InterleavedShard({self.dim}, sections={self.sections})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank holds one contribution; the value is their sum (avg, max, min) over the axis.

    >>> Partial()
    Partial('sum')
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise LayoutError(
                explain(
                    found=f"Partial({self.op!r})",
                    rule=f"the reduction is one of {', '.join(REDUCTIONS)}",
                    remedy="use one of these",
                )
            )

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


@dataclass(frozen=True, slots=True, init=False)
class RaggedShard(Placement):
    """The row-major flattening of the leading dims `(0..k-1)` is cut into runs of any size.

    Rank r holds `local_units[r] / sum(local_units)` of the prefix rows; a row is the product of the
    remaining dims, so no cut goes through them. Zero units are legal. Units are reduced by their gcd
    and stored as runs of equal counts, so a placement over 10,240 even ranks is as small as one over two.

    A (4, 6) tensor, `RaggedShard((0,), (3, 1))`: rank 0 holds rows 0 to 2, rank 1 holds row 3.
    `RaggedShard((0, 1), (5, 7))` over the same tensor: elements 0 to 9, and 10 to 23.

    >>> RaggedShard((0,), (2, 4)) == RaggedShard((0,), (1, 2))
    True
    """

    dims: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]  # (units, how many neighbouring ranks hold that many)

    def __init__(self, dims: Sequence[int], local_units: Iterable[int]) -> None:
        try:
            units, dims = [index(unit) for unit in local_units], tuple(dims)
        except TypeError:
            raise LayoutError(
                explain(
                    found=f"RaggedShard({dims!r}, {local_units!r})",
                    rule="dims is a tuple, and units are whole numbers, one for each rank",
                    remedy="for example RaggedShard((0,), (3, 1))",
                )
            ) from None
        self._set(dims, tuple((unit, sum(1 for _ in group)) for unit, group in groupby(units)))

    @classmethod
    def even(cls, size: int, dims: Sequence[int] = (0,)) -> RaggedShard:
        """The same number of units on each of `size` ranks."""
        return cls.from_runs(dims, ((1, size),))

    @classmethod
    def on_rank(cls, rank: int, size: int) -> RaggedShard:
        """The whole tensor, in its own shape, on one of `size` ranks; `(0, *shape[1:])` on the others."""
        if not 0 <= rank < size:
            raise LayoutError(
                explain(
                    found=f"on_rank({rank}, size={size})",
                    rule="the rank lies on the axis",
                    remedy=f"use a rank in 0..{size - 1}",
                )
            )
        return cls.from_runs((), ((0, rank), (1, 1), (0, size - rank - 1)))

    @classmethod
    def from_sizes(cls, dims: Sequence[int], sizes: Iterable[int]) -> RaggedShard:
        """Cuts by the number of prefix rows on each rank: the units are the sizes."""
        return cls(dims, sizes)

    @classmethod
    def chunks(cls, rows: int, size: int) -> RaggedShard:
        """The cut that Shard(0) makes: ceil-sized chunks while there are rows, a short one, then none."""
        chunk = -(-rows // size)
        full, rest = divmod(rows, chunk)
        return cls.from_runs((0,), ((chunk, full), (rest, int(rest > 0)), (0, size - full - (rest > 0))))

    @classmethod
    def from_runs(cls, dims: Sequence[int], runs: Iterable[tuple[int, int]]) -> RaggedShard:
        """From (units, how many neighbouring ranks hold that many): nothing is written out.

        >>> RaggedShard.from_runs((0,), [(2, 1), (3, 10_238), (0, 1)])
        RaggedShard((0,), (2, 3 x 10238, 0))
        """
        self = object.__new__(cls)
        self._set(tuple(dims), tuple((unit, count) for unit, count in runs if count))
        return self

    def _set(self, dims: tuple[int, ...], runs: tuple[tuple[int, int], ...]) -> None:
        if dims != tuple(range(len(dims))):
            raise LayoutError(
                explain(
                    found=f"RaggedShard dims {dims}",
                    rule="ragged dims are a prefix (0, 1, .., k-1), in order",
                    remedy=f"use dims={tuple(range(len(dims)))}, or permute the tensor",
                )
            )
        if any(unit < 0 for unit, _ in runs) or not any(unit for unit, _ in runs):
            raise LayoutError(
                explain(
                    found=f"RaggedShard units ({_units_text(runs)})",
                    rule="units are not negative and their sum is positive",
                    remedy="give each rank the number of units that it holds, 0 for none",
                )
            )
        common = math.gcd(*(unit for unit, _ in runs))
        merged: list[tuple[int, int]] = []
        for unit, count in runs:
            unit //= common
            if merged and merged[-1][0] == unit:
                merged[-1] = (unit, merged[-1][1] + count)
            else:
                merged.append((unit, count))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "runs", tuple(merged))

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units of each rank, written out."""
        return tuple(unit for unit, count in self.runs for _ in range(count))

    @property
    def size(self) -> int:
        """How many ranks the units are for."""
        return sum(count for _, count in self.runs)

    @property
    def total(self) -> int:
        """The sum of all units."""
        return sum(unit * count for unit, count in self.runs)

    def span(self, rank: int, rows: int) -> tuple[int, int]:
        """The half-open range of prefix rows that `rank` holds, of `rows` in all."""
        before = 0
        for unit, count in self.runs:
            if rank < count:
                before += rank * unit
                return before * rows // self.total, (before + unit) * rows // self.total
            before, rank = before + unit * count, rank - count
        raise IndexError(rank)

    def holder(self, row: int, rows: int) -> int:
        """The rank that holds the prefix row `row`, of `rows` in all: the inverse of `span`."""
        unit_number, before = row * self.total // rows, 0
        for unit, count in self.runs:
            if unit_number < unit * count:
                return before + unit_number // unit
            unit_number, before = unit_number - unit * count, before + count
        raise IndexError(row)

    def __repr__(self) -> str:
        if len(self.runs) == 1 and self.size > 1:
            return f"RaggedShard.even({self.size}, dims={self.dims})"
        return f"RaggedShard({self.dims}, ({_units_text(self.runs)}))"


@dataclass(frozen=True, slots=True, init=False)
class StridedRaggedShard(Placement):
    """A RaggedShard that is applied after every other Shard, wherever it stands.

    For lists in the order of the mesh, where the ragged axis comes first. `split_factor` is the product
    of the axis sizes of those Shards: how many pieces there are before the ragged split. On a mesh
    with dp = 2 and tp = 2 these are one layout, FSDP over a tensor-parallel tensor:

        [StridedRaggedShard((0,), (3, 1), split_factor=2), Shard(0)]
        P(tp=Shard(0), dp=RaggedShard((0,), (3, 1)))

        rows of (8, n)    tp 0: 0 1 2 | 3    tp 1: 4 5 6 | 7
                          dp 0        dp 1   dp 0        dp 1

    >>> StridedRaggedShard((0,), (2, 6), split_factor=2)
    StridedRaggedShard((0,), (1, 3), split_factor=2)
    """

    ragged: RaggedShard
    split_factor: int

    def __init__(self, dims: Sequence[int], local_units: Iterable[int], split_factor: int) -> None:
        self._set(RaggedShard(dims, local_units), split_factor)

    @classmethod
    def of(cls, ragged: RaggedShard, split_factor: int) -> StridedRaggedShard:
        """The same cut as `ragged`, after `split_factor` pieces have been made."""
        self = object.__new__(cls)
        self._set(ragged, split_factor)
        return self

    def _set(self, ragged: RaggedShard, split_factor: int) -> None:
        if type(split_factor) is not int or split_factor < 1:
            raise LayoutError(
                explain(
                    found=f"split_factor={split_factor!r}",
                    rule="the split factor is how many pieces the other Shards make, 1 or more",
                    remedy="multiply the sizes of the axes that are sharded",
                )
            )
        object.__setattr__(self, "ragged", ragged)
        object.__setattr__(self, "split_factor", split_factor)

    @property
    def dims(self) -> tuple[int, ...]:
        """The prefix dims of the ragged cut."""
        return self.ragged.dims

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units of each rank, written out."""
        return self.ragged.local_units

    def __repr__(self) -> str:
        units = _units_text(self.ragged.runs)
        return f"StridedRaggedShard({self.dims}, ({units}), split_factor={self.split_factor})"


def _units_text(runs: tuple[tuple[int, int], ...]) -> str:
    """Units as an error or a repr shows them: equal neighbours counted, long lists cut short."""
    parts = [f"{unit}" if count == 1 else f"{unit} x {count}" for unit, count in runs]
    return ", ".join(parts if len(parts) <= 12 else [*parts[:8], "..", *parts[-2:]])


class P:
    """Placements by axis name, in the order in which the splits are applied (first = outermost).

    `P(tp=Shard(0), dp=Shard(0))` cuts dim 0 over tp first, then each piece over dp. Axes that are not
    mentioned are `Replicate`. The positional spelling is JAX's PartitionSpec, one entry a dim:
    `P("dp", None, ("pp", "tp"))`. The two are not mixed.

    >>> P(dp=Shard(0))
    P(dp=Shard(0))
    >>> P("dp", None) == P(dp=Shard(0))
    True
    """

    __slots__ = ("_items",)
    _items: tuple[tuple[str, Placement], ...]

    def __init__(self, *dims: str | tuple[str, ...] | None, **axes: Placement) -> None:
        if dims and axes:
            raise LayoutError(
                explain(
                    found=f"P{dims} mixed with {', '.join(axes)}=",
                    rule="P takes one entry a dim (JAX's spelling) or placements by axis name, not both",
                    remedy="write all of it as axis=placement",
                )
            )
        for dim, entry in enumerate(dims):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                if axis in axes:
                    raise LayoutError(
                        explain(
                            found=f"axis {axis!r} twice in P{dims}",
                            rule="an axis splits a tensor once",
                            remedy="name it for one dim",
                        )
                    )
                axes[axis] = Shard(dim)
        for axis, placement in axes.items():
            if not isinstance(placement, Placement):
                raise LayoutError(
                    explain(
                        found=f"P({axis}={placement!r})",
                        rule="a placement is Replicate, Shard, InterleavedShard, Partial, RaggedShard or "
                        "StridedRaggedShard",
                        remedy=f"for example P({axis}=vs.Shard(0))",
                    )
                )
        self._items = tuple(axes.items())

    @classmethod
    def of(cls, items: Iterable[tuple[str, Placement]]) -> P:
        """From (axis, placement) pairs, in the order of the splits."""
        return cls(**dict(items))

    def items(self) -> tuple[tuple[str, Placement], ...]:
        """The (axis, placement) pairs, outermost split first."""
        return self._items

    def __iter__(self) -> Iterator[str]:
        return (axis for axis, _ in self._items)

    def __getitem__(self, axis: str) -> Placement:
        return dict(self._items).get(axis, Replicate())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"P({', '.join(f'{axis}={placement!r}' for axis, placement in self._items)})"


def _check_dim(placement: Placement, dim: int) -> None:
    if not isinstance(dim, int) or dim < 0:
        name = type(placement).__name__
        raise LayoutError(
            explain(
                found=f"{name} of dim {dim!r}",
                rule="a dim counts from the front, 0 or more: a placement has no shape to count back from",
                remedy="count the dim from the front",
            )
        )
