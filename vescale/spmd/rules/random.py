"""Keyed draws: each rank computes the bits of its own elements only, from their global indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import rng as _rng  # noqa: F401  (defines the ops)
from ..._errors import ShardingError, explain
from ..layout import Layout
from ..locals import flat_indices
from ..program.ir import Node, TensorMeta
from .elementwise import broadcast_pattern
from .notation import LocalCall, Pattern, rule, source

ops = torch.ops.vescale


def refused(node: Node) -> ShardingError:
    """The error for torch's own random ops, whose generator each rank would advance on its own."""
    return ShardingError(
        explain(
            f"{node.op}, a random op of torch",
            where=node.origin,
            rule="torch's own random ops are not sharded yet",
            remedy="draw with a key: vs.rng.normal(key, shape), vs.rng.uniform(key, shape)",
        )
    )


def _own_bits(call: LocalCall) -> LocalCall:
    key, _, width = call.args
    (layout,) = call.results
    if not layout.spec.items():
        return call
    return replace(call, fn=_bits_at, args=(key, layout, call.rank, width), kwargs={})


def _bits_at(key: Any, layout: Layout, rank: int, width: int) -> Any:
    return ops.random_bits_at(key, flat_indices(layout, rank), width)


source([ops.random_bits.default], _own_bits)
rule(ops.derive_keys.default, "1, ... -> ... 1".replace("1", "w"), whole="w")


@rule([ops.normal_from_bits.default])
def normal_from_bits(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)
