"""Boundary: global values on one side of a program, the local tensors of the hosted ranks on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from .dtensor import DTensor, remember, wrap
from .layout import AbstractMesh, Layout
from .locals import in_memory, local_slice
from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Static:
    """A result that is no tensor."""

    value: Any


def enter(
    mesh: Mesh,
    leaves: Sequence[Any],
    layouts: Sequence[Layout | None],
    hidden: Sequence[torch.Tensor],
    mismatch: Callable[[int, DTensor, Layout], Exception],
    strided: bool = False,
) -> list[list[torch.Tensor]]:
    """The local inputs of each hosted rank. Plain tensors, also the closed-over ones, are global values.

    Leaves whose layout is None are static. `mismatch(index, leaf, layout)` words the error for a DTensor
    that is not in the layout that the program was made for. With `strided` pieces need not be contiguous.
    """
    inputs: list[list[torch.Tensor]] = [[] for _ in mesh.local_ranks]
    only = inputs[0] if len(inputs) == 1 else None
    for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if layout is None:
            continue
        if isinstance(leaf, DTensor):
            if leaf.layout is not layout or leaf.mesh is not mesh:
                raise mismatch(index, leaf, layout)
            if only is not None:
                local = leaf._locals[0]
                only.append(local if local.is_contiguous() else local.contiguous())
                continue
            for values, local in zip(inputs, leaf._locals, strict=True):
                values.append(local if strided or local.is_contiguous() else local.contiguous())
        else:
            for values, rank in zip(inputs, mesh.local_ranks, strict=True):
                values.append(local_slice(leaf.detach(), layout, rank).contiguous())
    for tensor in hidden:
        for values in inputs:
            values.append(in_memory(tensor.detach()).contiguous())
    return inputs


class Boundary:
    """How values get into programs and out: here a rank of the mesh is what programs call a rank."""

    def __init__(self, mesh: Mesh | AbstractMesh) -> None:
        self.mesh = mesh

    @property
    def hosted(self) -> Mesh:
        """The mesh of values outside, where it has ranks."""
        assert isinstance(self.mesh, Mesh)
        return self.mesh

    def inside(self, layout: Layout, wanted: Layout | None, likely: Layout | None) -> Layout | None:
        """The layout in a program of a DTensor in `layout`, None where it doesn't come in the `wanted` one.

        `likely` is that of the parameter whose path the DTensor's ends with.
        """
        return layout if wanted is None or wanted is layout else None

    def outside(self, layout: Layout) -> Layout | None:
        """The layout of a result that a program leaves in `layout`, None where no placements say it."""
        return layout

    def nearest(self, layout: Layout) -> Layout:
        """For one that has none outside, a layout that has."""
        return layout

    def places(self, layouts: Sequence[Layout | None]) -> list[range]:
        """Where values in these layouts are among the inputs or results of a rank; None has one place too."""
        return [range(at, at + 1) for at in range(len(layouts))]

    def enter(
        self,
        leaves: Sequence[Any],
        layouts: Sequence[Layout | None],
        hidden: Sequence[torch.Tensor],
        mismatch: Callable[[int, DTensor, Layout], Exception],
    ) -> list[list[torch.Tensor]]:
        """See `enter`."""
        return enter(self.hosted, leaves, layouts, hidden, mismatch)

    def each(self, inputs: list[list[torch.Tensor]], layouts: Sequence[Layout]) -> list[list[torch.Tensor]]:
        """What `enter` made, for each rank that programs speak of: with lanes for each lane."""
        return inputs

    def kept(self, results: Sequence[list[Any]], layouts: Sequence[Layout | Static]) -> Sequence[list[Any]]:
        """The results of each rank that programs speak of, as `leave` takes them."""
        return results

    def leave(
        self,
        results: Sequence[Sequence[Any]],
        layouts: Sequence[Layout | Static],
        kinds: Sequence[Any] | None = None,
    ) -> list[Any]:
        """See `leave`."""
        return leave(self.hosted, results, layouts, kinds)


class Apart:
    """Gives the inputs at some places memory of their own where they share it with another one, of any rank.

    A program that overwrites an input would otherwise change the other: a tensor passed twice, a view of one.
    What was found apart is not looked at again while it stays where it is, as what is updated in place does.
    """

    def __init__(self, places: frozenset[int]) -> None:
        self.places = places
        self._apart: list[int] = []  # where the inputs of all ranks began when they were last looked at

    def __call__(self, inputs: Sequence[list[torch.Tensor]]) -> None:
        starts = [value.data_ptr() for values in inputs for value in values]
        if starts == self._apart:
            return
        self._apart = starts
        where = [(values, place) for values in inputs for place in range(len(values))]
        end, holder, shared = -1, -1, set[int]()
        for at in sorted(range(len(where)), key=starts.__getitem__):
            values, place = where[at]
            size = values[place].nbytes
            if size and starts[at] < end:
                shared |= {at, holder}
            if size and starts[at] + size > end:
                end, holder = starts[at] + size, at
        for values, place in (where[at] for at in shared):
            if place in self.places:
                values[place] = values[place].clone()
                self._apart = []


def own(results: Sequence[list[Any]], shared: Sequence[int]) -> Sequence[list[Any]]:
    """Results with memory of their own: what a caller may write to is nobody else's."""
    for values in results:
        for index in shared:
            values[index] = values[index].clone()
    return results


def leave(
    mesh: Mesh,
    results: Sequence[Sequence[Any]],
    layouts: Sequence[Layout | Static],
    kinds: Sequence[Any] | None = None,
) -> list[Any]:
    """The outputs of the hosted ranks as DTensors, and static results as they are.

    `kinds` are those of `kind_of`, where they are known.
    """
    remember(mesh)
    outputs: list[Any] = []
    for layout, kind, *pieces in zip(layouts, kinds or repeat(None, len(layouts)), *results, strict=True):
        if isinstance(layout, Layout):
            outputs.append(wrap(pieces, mesh, layout, pieces[0].dtype, kind))
        else:
            outputs.append(layout.value)
    return outputs
