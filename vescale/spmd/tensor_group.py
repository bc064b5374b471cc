"""TensorGroup: DTensors that are worked on together, a few calls for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._errors import ArgumentError, explain
from .dtensor import DTensor
from .layout import Layout
from .mesh import Mesh
from .placements import P, Partial, Replicate
from .redistribute import redistribute

aten = torch.ops.aten


class TensorGroup(Mapping[str, DTensor]):
    """DTensors of one mesh by name, and what is done to all of them at once.

    In-place operations take a few calls for the group, and the norm one reduction, whatever the placements
    are. Members may differ in dtype; each keeps its own. Raises ArgumentError for members of several meshes,
    or that are no DTensors.

    >>> from vescale.spmd.dtensor import distribute_tensor
    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import Shard
    >>> mesh = make_mesh({"dp": 2})
    >>> group = TensorGroup({"w": distribute_tensor(torch.ones(4), mesh, P(dp=Shard(0)))})
    >>> group.scale_(2.0).norm()
    tensor(4.)
    """

    def __init__(self, tensors: Mapping[str, DTensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                raise ArgumentError(
                    explain(
                        f"{type(tensor).__name__}",
                        where=f"TensorGroup, {name!r}",
                        rule="members are DTensors",
                        remedy="place it first, with vs.distribute_tensor",
                    )
                )
        meshes = {id(tensor.mesh): tensor.mesh for tensor in tensors.values()}
        if len(meshes) != 1:
            raise ArgumentError(
                explain(
                    f"{len(meshes)} meshes",
                    where="TensorGroup",
                    rule="a group has members, and they live on one mesh object",
                    remedy="make one group for each mesh",
                )
            )
        self._tensors = dict(tensors)
        (self.mesh,) = meshes.values()

    def __getitem__(self, name: str) -> DTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def zero_(self) -> TensorGroup:
        """Every element becomes 0."""
        for pieces in self._each_rank():
            aten._foreach_zero_(pieces)
        return self

    def scale_(self, factor: float) -> TensorGroup:
        """Every element is multiplied by `factor`."""
        for pieces in self._each_rank():
            aten._foreach_mul_(pieces, factor)
        return self

    def add_(self, other: TensorGroup, alpha: float = 1.0) -> TensorGroup:
        """Each member grows by `alpha` times that of the same name, which has the same layout."""
        self._check_alike(other)
        for pieces, more in zip(self._each_rank(), other._each_rank(), strict=True):
            aten._foreach_add_(pieces, more, alpha=alpha)
        return self

    def cast(self, dtype: torch.dtype) -> TensorGroup:
        """The members in another dtype, in memory of their own."""
        return TensorGroup(
            {
                name: DTensor(
                    [piece.to(dtype, copy=True) for piece in tensor.locals], self.mesh, tensor.layout
                )
                for name, tensor in self.items()
            }
        )

    def norm(self, order: float = 2.0) -> torch.Tensor:
        """The 2-norm of all elements together, equal on all ranks: one all-reduce of a scalar.

        With `order=inf` it is the largest magnitude. Elements that several ranks hold count once. Sums are
        in float32, or in float64 for float64 members. Raises ArgumentError for pending reductions and other
        orders.
        """
        if order not in (2, math.inf):
            raise ArgumentError(explain(f"order={order}", where="TensorGroup.norm", rule="2 or inf"))
        dtypes = {tensor.dtype for tensor in self.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return norm(self.values(), self.mesh, dtype, order)

    def _each_rank(self) -> list[list[torch.Tensor]]:
        """The pieces of the members, a list for each rank that lives here."""
        ranks = range(len(self.mesh.local_ranks))
        return [[tensor.locals[rank] for tensor in self.values()] for rank in ranks]

    def _check_alike(self, other: TensorGroup) -> None:
        if list(other) != list(self) or any(other[name].layout is not self[name].layout for name in self):
            raise ArgumentError(
                explain(
                    f"{len(other)} members, {len(self)} here",
                    where="TensorGroup.add_",
                    rule="both groups have the same names, in the same layouts",
                    remedy="redistribute one of them first",
                )
            )


def norm(tensors: Any, mesh: Mesh, dtype: torch.dtype, order: float = 2.0) -> torch.Tensor:
    """The norm of the elements of DTensors together: see `TensorGroup.norm`."""
    norms = lambda pieces: torch.stack(list(aten._foreach_norm(pieces, order, dtype)))  # noqa: E731
    if math.isinf(order):
        return reduced(tensors, mesh, lambda pieces: norms(pieces).amax(), "max", dtype)
    return reduced(tensors, mesh, lambda pieces: norms(pieces).square().sum(), "sum", dtype).sqrt()


def reduced(
    tensors: Any,
    mesh: Mesh,
    each: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    op: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`each` of a rank's pieces, a 0-d tensor of `dtype`, reduced over the mesh: one all-reduce of a scalar.

    A piece that several ranks hold is given to the first of them, an empty one to none. A rank that has no
    piece brings a 0, so `op` is "sum", or "max" of what isn't negative. The result is equal on all ranks.
    """
    tensors, totals = list(tensors), []
    for place, rank in enumerate(mesh.local_ranks):
        mine = [t.locals[place] for t in tensors if speaks_for(t.layout, rank) and t.locals[place].numel()]
        totals.append((each(mine) if mine else torch.zeros((), dtype=dtype)).to(mesh.device))
    pending = Layout(mesh.abstract, P.of((axis, Partial(op)) for axis in mesh.axis_names), ())
    return redistribute(totals, pending, Layout(mesh.abstract, P(), ()), mesh)[0]


def speaks_for(layout: Layout, rank: int) -> bool:
    """Whether `rank` is the first of those that hold the same piece."""
    if layout.partials:
        raise ArgumentError(
            explain(
                f"a tensor with pending reductions, {layout.spec}",
                where="norm",
                rule="a norm is one of values, not of contributions",
                remedy="x.redistribute(...) to a layout without Partial first",
            )
        )
    coordinate = layout.mesh.coordinate(rank)
    return all(
        coordinate[axis] == 0 for axis in layout.mesh.axis_names if layout.placement(axis) == Replicate()
    )
