"""Values among zeros: pads, and the gradients of slices and selections. The dims that grow are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import Dim, Pattern, argument, operand_metas, result_shape_arg, result_shapes, rule

aten = torch.ops.aten


@rule(aten.slice_backward.default)
def slice_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _grown(node, metas, local=result_shape_arg(1))


@rule(aten.select_backward.default)
def select_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    (shape,) = result_shapes(node, metas)
    dim = node.args[2] % len(shape)
    dims: list[Dim] = [(f"d{place}",) for place in range(len(shape))]
    sizes = {f"d{place}": size for place, size in enumerate(shape)}
    return Pattern(
        (tuple(dims[:dim] + dims[dim + 1 :]),),
        (tuple(dims),),
        sizes,
        whole=frozenset((f"d{dim}",)),
        linear=(frozenset((0,)),),
        local=result_shape_arg(1),
    )


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    zeros = argument(node, 2, "value", 0) == 0  # another constant would be added once a rank
    return _grown(node, metas, linear=zeros)


def _grown(node: Node, metas: Sequence[TensorMeta], linear: bool = True, local: Any = None) -> Pattern:
    """Dims of one size on both sides are sharded, others are not."""
    source, target = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    sizes: dict[str, int] = {}
    sides: tuple[list[Dim], list[Dim]] = ([], [])
    for dim, both in enumerate(zip(source, target, strict=True)):
        same = both[0] == both[1]
        for side, size, dims in zip("io", both, sides, strict=True):
            name = f"d{dim}" if same else f"{side}{dim}"
            sizes[name] = size
            dims.append((name,))
    return Pattern(
        (tuple(sides[0]),),
        (tuple(sides[1]),),
        sizes,
        whole=frozenset(name for name in sizes if not name.startswith("d")),
        linear=(frozenset((0,)),) if linear else (),
        local=local,
    )
