"""Scaled dot product attention: batch and heads are sharded, sequence and head dims are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._errors import ShardingError, explain
from ..program.ir import Node, Ref, TensorMeta
from .notation import Dims, Pattern, argument, operand_metas, rule

aten = torch.ops.aten


def _attention(
    node: Node,
    query: TensorMeta,
    key: TensorMeta,
    operands: list[str],
    results: list[str],
    dropout: float,
    mask: Any,
    metas: Sequence[TensorMeta],
) -> Pattern:
    if dropout:
        raise ShardingError(
            explain(
                f"attention with dropout {dropout}",
                where=node.origin.line,
                rule="random attention masks are not sharded yet",
                remedy="set the attention's dropout to 0",
            )
        )
    batch, heads, length, width = query.shape
    key_heads, key_length = key.shape[1:3]
    sizes = {"b": batch, "h": heads, "t": length, "s": key_length, "e": width}
    whole = {"t", "s", "e"}
    names: dict[str, Dims] = {
        "query": (("b",), ("h",), ("t",), ("e",)),
        "key": (("b",), ("h",), ("s",), ("e",)),
        "row": (("b",), ("h",), ("t",)),
    }
    if key_heads != heads:  # grouped queries: the heads of a group share a key
        sizes |= {"h": key_heads, "g": heads // key_heads}
        whole.add("g")
        names |= {"query": (("b",), ("h", "g"), ("t",), ("e",)), "row": (("b",), ("h", "g"), ("t",))}
    dims = [names[name] for name in operands]
    if isinstance(mask, Ref):
        shape = metas[mask.id].shape
        full = (*names["row"], ("s",))[4 - len(shape) :]
        dims.append(tuple(() if size == 1 else dim for size, dim in zip(shape, full, strict=True)))
    return Pattern(tuple(dims), tuple(names[name] for name in results), sizes, whole=frozenset(whole))


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def cpu_attention(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    query, key = operand_metas(node, metas)[:2]
    return _attention(
        node,
        query,
        key,
        ["query", "key", "key"],
        ["query", "row"],
        argument(node, 3, "dropout_p", 0.0),
        argument(node, 5, "attn_mask"),
        metas,
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def cpu_attention_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    query, key = operand_metas(node, metas)[1:3]
    return _attention(
        node,
        query,
        key,
        ["query", "query", "key", "key", "query", "row"],
        ["query", "key", "key"],
        argument(node, 6, "dropout_p", 0.0),
        argument(node, 8, "attn_mask"),
        metas,
    )
