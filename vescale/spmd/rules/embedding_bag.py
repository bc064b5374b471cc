"""Bags of embeddings: the width is free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .batched import unless_empty
from .notation import Dims, Pattern, operand_metas, result_shapes, rule

aten = torch.ops.aten


@rule(
    [
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._embedding_bag_backward.default,
        aten._embedding_bag_dense_backward.default,
    ]
)
def embedding_bag(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Dim 1 is the width, also of the largest indices of a bag; the other results don't depend on it."""
    width = operand_metas(node, metas)[0].shape[1]
    sizes = {"d": width}
    lists: list[Dims] = []
    alike: set[int] = set()
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    count = len(shapes)
    for number, shape in enumerate([*shapes, *result_shapes(node, metas)]):
        names = [f"w{number}.{dim}" for dim in range(len(shape))]
        sizes |= dict(zip(names, shape, strict=True))
        if len(shape) == 2 and shape[1] == width:
            names[1] = "d"
        elif number >= count:
            alike.add(number - count)
        lists.append(tuple((name,) for name in names))
    return Pattern(
        tuple(lists[:count]),
        tuple(lists[count:]),
        sizes,
        whole=frozenset(sizes) - {"d"},
        alike={"d": frozenset(alike)},
        local=unless_empty(node, metas),
    )
