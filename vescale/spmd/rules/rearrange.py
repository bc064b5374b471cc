"""Dims taken apart: halves that meet, complex numbers as pairs, and elements that are looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .notation import Dims, Pattern, argument, named_dims, operand_metas, result_shapes, rule

aten = torch.ops.aten

FIRST = (frozenset((0,)),)


@rule(aten.glu.default)
def glu(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, halves, sizes = _halves(operand_metas(node, metas)[0].shape, argument(node, 1, "dim", -1))
    return Pattern((halves,), (dims,), sizes, whole=frozenset(("half",)))


@rule(aten.glu_backward.default)
def glu_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, halves, sizes = _halves(operand_metas(node, metas)[1].shape, argument(node, 2, "dim", -1))
    return Pattern((dims, halves), (halves,), sizes, whole=frozenset(("half",)))


def _halves(shape: Sequence[int], dim: int) -> tuple[Dims, Dims, dict[str, int]]:
    dims, sizes = named_dims(shape)
    dim %= len(shape)
    sizes |= {"half": 2, f"d{dim}": shape[dim] // 2}
    return tuple(dims), (*dims[:dim], ("half", f"d{dim}"), *dims[dim + 1 :]), sizes


@rule(aten.view_as_real.default)
def view_as_real(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = named_dims(result_shapes(node, metas)[0])
    whole = frozenset(dims[-1])
    return Pattern((tuple(dims[:-1]),), (tuple(dims),), sizes, whole=whole, linear=FIRST, view=True)


@rule(aten.view_as_complex.default)
def view_as_complex(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = named_dims(operand_metas(node, metas)[0].shape)
    whole = frozenset(dims[-1])
    return Pattern((tuple(dims),), (tuple(dims[:-1]),), sizes, whole=whole, linear=FIRST, view=True)


@rule(aten.isin.Tensor_Tensor)
def look_up(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Each element is looked up among all of the second operand's."""
    shape, others = (meta.shape for meta in operand_metas(node, metas))
    dims, sizes = named_dims(shape)
    names: Dims = tuple((f"o{dim}",) for dim in range(len(others)))
    sizes |= {f"o{dim}": size for dim, size in enumerate(others)}
    whole = frozenset(name for (name,) in names)
    return Pattern((tuple(dims), names), (tuple(dims),), sizes, whole=whole)
