"""Normalisation over the last dims, which are whole; statistics follow the leading dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, Ref, TensorMeta
from .notation import Dims, Pattern, operand_metas, rule

aten = torch.ops.aten


def _layer_dims(
    node: Node, shape: tuple[int, ...], normalised: int
) -> tuple[Dims, Dims, Dims, dict[str, int], frozenset[str], frozenset[str]]:
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    leading, last = dims[: len(shape) - normalised], dims[len(shape) - normalised :]
    statistics: Dims = (*leading, *((),) * normalised)
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    return (
        dims,
        last,
        statistics,
        sizes,
        frozenset(name for (name,) in leading),
        frozenset(name for (name,) in last),
    )


@rule(aten.native_layer_norm.default)
def layer_norm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, last, statistics, sizes, _, whole = _layer_dims(
        node, operand_metas(node, metas)[0].shape, len(node.args[1])
    )
    affine = sum(isinstance(arg, Ref) for arg in node.args[2:4])
    return Pattern((dims, *(last,) * affine), (dims, statistics, statistics), sizes, whole=whole)


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, last, statistics, sizes, leading, whole = _layer_dims(
        node, operand_metas(node, metas)[1].shape, len(node.args[2])
    )
    affine = sum(isinstance(arg, Ref) for arg in node.args[5:7])
    results = [dims, last, last]
    return Pattern(
        (dims, dims, statistics, statistics, *(last,) * affine),
        tuple(result for result, out in zip(results, node.outs, strict=True) if out is not None),
        sizes,
        sum=leading,
        whole=whole,
        local=lambda call: replace(call, fn=_with_dense_statistics),
    )


def _with_dense_statistics(gradient: Any, x: Any, shape: Any, mean: Any, deviation: Any, *rest: Any) -> Any:
    """torch reads them as if they were contiguous; a slice of an inner dim isn't."""
    return aten.native_layer_norm_backward(
        gradient, x, shape, mean.contiguous(), deviation.contiguous(), *rest
    )
