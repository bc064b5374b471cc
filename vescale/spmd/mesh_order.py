"""The other spelling of a layout: one placement an axis, split in the order of the mesh, as torch writes it.

`P` keeps the order in which the splits were written. In mesh order an axis that was split later but comes
first in the mesh takes its chunk of each section that the others leave: an InterleavedShard. A ragged split
that comes first in the mesh and doesn't commute with the others is a StridedRaggedShard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed import tensor as torch_tensor

from .._errors import LayoutError, explain
from .layout import AbstractMesh, Layout
from .placements import InterleavedShard, P, Partial, Placement, Replicate, Shard, StridedRaggedShard


def as_spec(mesh: AbstractMesh, placements: P | Sequence[Any]) -> P:
    """`P` as it is, or a list of placements in the order of the mesh as one.

    >>> as_spec(AbstractMesh(("dp", "tp"), (2, 2)), [Replicate(), Shard(1)])
    P(dp=Replicate(), tp=Shard(1))
    """
    if isinstance(placements, P):
        return placements
    if isinstance(placements, Sequence) and not isinstance(placements, str):
        return from_mesh_order(mesh, placements)
    raise LayoutError(
        explain(
            f"{placements!r}",
            rule="a layout is P(axis=placement), or a list of placements, one an axis of the mesh",
            remedy=f"for example P({mesh.axis_names[0]}=vs.Shard(0))",
        )
    )


def from_mesh_order(mesh: AbstractMesh, placements: Sequence[Any]) -> P:
    """Placements by axis, from one an axis; torch's are taken too."""
    if len(placements) != len(mesh.axis_names):
        raise LayoutError(
            explain(
                f"{len(placements)} placements for the axes {', '.join(mesh.axis_names)}",
                rule="there is one placement an axis, in the order of the mesh",
                remedy="write P(axis=placement) and leave replicated axes out",
            )
        )
    return P.of(zip(mesh.axis_names, map(_from_torch, placements)))


def _from_torch(placement: Any) -> Placement:
    if isinstance(placement, Placement):
        return placement
    # Exact types: torch's strided shard, a subclass in some versions, is not a Shard.
    if type(placement) is torch_tensor.Replicate:
        return Replicate()
    if type(placement) is torch_tensor.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_tensor.Partial:
        return Partial(placement.reduce_op)
    raise LayoutError(
        explain(
            f"{placement!r}",
            rule="placements are torch's Replicate, Shard and Partial, or ours",
            remedy="redistribute to one of these first",
        )
    )


def to_torch_placement(placement: Placement, layout: Layout) -> Any:
    """torch's spelling of one of the placements of `mesh_order(layout)`."""
    if isinstance(placement, Replicate):
        return torch_tensor.Replicate()
    if isinstance(placement, Shard):
        return torch_tensor.Shard(placement.dim)
    if isinstance(placement, Partial):
        return torch_tensor.Partial(placement.op)
    raise LayoutError(
        explain(
            f"{placement!r} in {layout}",
            where="to_torch",
            rule="torch's DTensor knows Replicate, Shard and Partial, split in the order of the mesh",
            remedy="redistribute to such a layout first",
        )
    )


def mesh_order(layout: Layout) -> tuple[Placement, ...]:
    """The placements that mean `layout` when the splits are applied in the order of the mesh."""
    mesh, placements = layout.mesh, []
    for position, axis in enumerate(mesh.axis_names):
        digit = layout.digits.get(axis)
        if digit is None:
            placements.append(layout.placement(axis))
            continue
        # Values of the dim to the left of this digit that no axis before it has taken.
        left = math.prod(
            mesh.axis_size(other)
            for other in mesh.axis_names[:position]
            if other in layout.digits
            and layout.digits[other].dim == digit.dim
            and layout.digits[other].outer < digit.outer
        )
        sections = digit.outer // left
        placements.append(Shard(digit.dim) if sections == 1 else InterleavedShard(digit.dim, sections))
    if _means(placements, layout):
        return tuple(placements)
    if layout.ragged is not None:
        axis, ragged = layout.ragged
        sharded = [a for a, p in layout.spec.items() if isinstance(p, (Shard, InterleavedShard))]
        factor = math.prod(mesh.axis_size(a) for a in sharded)
        placements[mesh.axis_names.index(axis)] = StridedRaggedShard.of(ragged, factor)
        if _means(placements, layout):
            return tuple(placements)
    raise LayoutError(
        explain(
            f"{layout.spec}",
            rule="no placements in the order of the mesh mean this layout",
            remedy="use x.layout.spec, which keeps the order of the splits",
        )
    )


def _means(placements: Sequence[Placement], layout: Layout) -> bool:
    """Whether the placements, split in the order of the mesh, are this layout."""
    try:
        return Layout(layout.mesh, P.of(zip(layout.mesh.axis_names, placements)), layout.shape) is layout
    except LayoutError:
        return False
