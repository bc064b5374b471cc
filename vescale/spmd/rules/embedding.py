"""Embedding: a sharded vocabulary looks up its own rows, masks the others, and leaves a Partial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import LocalCall, Pattern, bind, operand_metas, result_shapes, rule

aten = torch.ops.aten


def check_range(indices: Any, size: int, what: str) -> None:
    """An index that no rank has is an error, as it is on one device: masked, it would be a silent zero."""
    inside = ((indices >= 0) & (indices < size)).all()
    aten._assert_async.msg(inside, f"{what} is out of range: there are {size}")


def _own_rows(call: LocalCall) -> LocalCall:
    weight = call.operands[0]
    ((first, stop), *rest) = weight.index_sets(call.rank)[0] or ((0, 0),)
    if stop - first == weight.shape[0]:
        return call
    assert not rest, "the rule offers contiguous rows only"
    return replace(
        call, fn=_lookup_own, args=(*call.args[:2], first, stop - first, weight.shape[0]), kwargs={}
    )


def _lookup_own(weight: Any, indices: Any, first: int, count: int, rows: int) -> Any:
    check_range(indices, rows, "an index into an embedding")
    if not count:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    own = indices - first
    mine = (own >= 0) & (own < count)
    found = torch.embedding(weight, torch.where(mine, own, 0))
    return found.masked_fill_(~mine.unsqueeze(-1), 0)


rule(aten.embedding.default, "v d, ... -> ... d", sum="v", linear=([0],), contiguous="v", local=_own_rows)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Each row of the weight sums what arrived at its own index; rows of other ranks are left out."""
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    apart = not node.args[4]  # scaled by how often an index occurs, a row needs all of them
    made = bind(
        "... d, ... -> v d",
        shapes,
        result_shapes(node, metas),
        sum=["..."] if apart else [],
        whole=[] if apart else ["...", "v"],
        linear=(frozenset((0,)),),
        contiguous=frozenset("v"),
        local=_own_gradient,
    )
    return replace(made, whole=made.whole - {"v"}) if apart else made


def _own_gradient(call: LocalCall) -> LocalCall:
    weight = call.results[0]
    ((first, stop), *rest) = weight.index_sets(call.rank)[0] or ((0, 0),)
    if stop - first == weight.shape[0]:
        return call
    assert not rest, "the rule offers contiguous rows only"
    gradient, indices, _, padding, _ = call.args
    return replace(call, fn=_sum_own, args=(gradient, indices, first, stop - first, padding), kwargs={})


def _sum_own(gradient: Any, indices: Any, first: int, count: int, padding: int) -> Any:
    own = indices - first
    mine = (own >= 0) & (own < count) & (indices != padding)
    rows = torch.where(mine, own, count)  # one row more, for what belongs to others
    return aten.embedding_dense_backward(gradient, rows, count + 1, -1, False)[:count]
