"""Pooling: the dims that windows slide over are whole, batch and channels are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .batched import FIRST, trailing
from .notation import LocalCall, Pattern, rule

aten = torch.ops.aten

# Linear in the image, or in the gradient, with one result.
_AVERAGES = {
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.max_unpool2d.default: 2,
    aten.max_unpool3d.default: 3,
}
# Indices count within one image and channel, so they don't depend on the rank.
_MAXIMA = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}


@rule([*_AVERAGES, *_MAXIMA])
def pooling(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    linear = FIRST if node.op in _AVERAGES else ()
    local = _dense_indices if node.op is aten.adaptive_max_pool3d_backward.default else None
    return trailing(node, metas, {**_AVERAGES, **_MAXIMA}[node.op], linear=linear, ragged=1, local=local)


def _dense_indices(call: LocalCall) -> LocalCall:
    """torch 2.13 reads the indices of this op as if they were contiguous; a slice of channels isn't."""
    return replace(call, fn=_with_dense_indices)


def _with_dense_indices(gradient: Any, x: Any, indices: Any) -> Any:
    return aten.adaptive_max_pool3d_backward(gradient, x, indices.contiguous())
