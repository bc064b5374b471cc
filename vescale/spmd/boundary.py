"""Boundary: global values on one side of a program, the local tensors of the hosted ranks on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dtensor import DTensor
from .layout import Layout
from .locals import local_slice
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
    for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if layout is None:
            continue
        if isinstance(leaf, DTensor):
            if leaf.layout is not layout or leaf.mesh is not mesh:
                raise mismatch(index, leaf, layout)
            for values, local in zip(inputs, leaf._locals, strict=True):
                values.append(local if strided or local.is_contiguous() else local.contiguous())
        else:
            for values, rank in zip(inputs, mesh.local_ranks, strict=True):
                values.append(local_slice(leaf.detach(), layout, rank).contiguous())
    for tensor in hidden:
        for values in inputs:
            values.append(tensor.detach().contiguous())
    return inputs


def own(results: Sequence[list[Any]], shared: Sequence[int]) -> Sequence[list[Any]]:
    """Results with memory of their own: what a caller may write to is nobody else's."""
    for values in results:
        for index in shared:
            values[index] = values[index].clone()
    return results


def leave(mesh: Mesh, results: Sequence[Sequence[Any]], layouts: Sequence[Layout | Static]) -> list[Any]:
    """The outputs of the hosted ranks as DTensors, and static results as they are."""
    return [
        DTensor([values[index] for values in results], mesh, layout)
        if isinstance(layout, Layout)
        else layout.value
        for index, layout in enumerate(layouts)
    ]
