"""Scaled dot product attention: batch and heads are sharded, sequence and head dims are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..._errors import ShardingError, explain
from ..program.ir import Node, Ref, TensorMeta
from .notation import Dims, LocalCall, Pattern, argument, operand_metas, rule

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
    return Pattern(
        tuple(dims),
        tuple(names[name] for name in results),
        sizes,
        whole=frozenset(whole),
        local=_unless_empty,
    )


def _unless_empty(call: LocalCall) -> LocalCall:
    """A rank may have no heads or no rows left; torch's kernels divide by their number."""
    if all(math.prod(layout.local_shape(call.rank)) for layout in call.operands[:2]):
        return call
    backward = call.node.op is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return replace(call, fn=_no_gradients if backward else _no_attention)


def _no_attention(query: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


def _no_gradients(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    return torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)


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
