"""The attention kernels of cuda: batch and heads are free, sequences and head dims are whole.

Their random state is that of dropout, which is refused; it and what says where sequences start are alike
on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..._errors import ShardingError, explain
from ..program.ir import Node, Ref, TensorMeta
from .batched import along, unless_empty
from .notation import Dim, Dims, Pattern, rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """What the arguments and results of an op are, and the position of its dropout.

    `q`, `k` and `v` stand for those, for what has their dims, and for gradients; `bias` is (b h t s), `rows`
    is (b h ...), and `-` whatever else there is.
    """

    arguments: str
    results: str
    dropout: int


_KERNELS = {
    aten._scaled_dot_product_flash_attention.default: Kernel("q k v", "q rows - - - - - - -", 3),
    aten._scaled_dot_product_efficient_attention.default: Kernel("q k v bias", "q rows - -", 5),
    aten._scaled_dot_product_cudnn_attention.default: Kernel("q k v bias", "q rows - - - - - - -", 5),
    aten._scaled_dot_product_flash_attention_backward.default: Kernel(
        "q q k v q rows - - - - - - - -", "q k v", 10
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: Kernel(
        "q q k v bias q rows - - - - -", "q k v bias", 9
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: Kernel(
        "q q k v q rows - - bias - - - - - -", "q k v", 13
    ),
}


@rule(list(_KERNELS))
def attention(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    kernel = _KERNELS[node.op]
    if len(node.args) > kernel.dropout and node.args[kernel.dropout]:
        raise ShardingError(
            explain(
                f"attention with dropout {node.args[kernel.dropout]}",
                where=node.origin.line,
                rule="random attention masks are not sharded yet",
                remedy="set the attention's dropout to 0",
            )
        )
    operands = [
        (name, metas[arg.id].shape)
        for name, arg in zip(kernel.arguments.split(), node.args, strict=False)
        if isinstance(arg, Ref)
    ]
    results = [
        (name, metas[out].shape)
        for name, out in zip(kernel.results.split(), node.outs, strict=True)
        if out is not None
    ]
    shapes = dict(operands)
    batch, heads = shapes["q"][:2]
    shared = shapes["k"][1]  # of grouped queries, the heads of a group share a key
    sizes = {"b": batch, "h": shared}
    of_query: Dim = ("h",)
    if heads != shared:
        sizes["g"] = heads // shared
        of_query = ("h", "g")
    lists: list[Dims] = []

    def dims(name: str, shape: Sequence[int]) -> Dims:
        """Batch and heads are factors that all share, the other dims the tensor's own."""
        first: Dims = () if name == "-" else (("b",), ("h",) if name in ("k", "v") else of_query)
        if name == "bias":  # broadcast against (b h t s)
            first = first[4 - len(shape) :]
            first = tuple(() if size == 1 else dim for dim, size in zip(first, shape, strict=False))
        own = [f"w{len(lists)}.{dim}" for dim in range(len(first), len(shape))]
        sizes.update(zip(own, shape[len(first) :], strict=True))
        return (*first, *((name,) for name in own))

    for name, shape in (*operands, *results):
        lists.append(dims(name, shape))
    alike = frozenset(place for place, (name, _) in enumerate(results) if name == "-")
    return Pattern(
        tuple(lists[: len(operands)]),
        tuple(lists[len(operands) :]),
        sizes,
        whole=frozenset(name for name in sizes if name not in ("b", "h")),
        alike={"b": alike, "h": alike},
        local=unless_empty(node, metas),
    )


@rule(aten._safe_softmax.default)
def safe_softmax(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """The softmax of attention made of other ops: a row that is masked throughout is zero."""
    return along(node, metas, [node.args[1]], ragged=1)
