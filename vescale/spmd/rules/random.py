"""Keyed draws: each rank computes its own elements only, from their global indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ... import rng as _rng  # noqa: F401  (defines the ops)
from ...rng.numbers import compressed
from ..layout import Layout
from ..program.ir import Node, TensorMeta
from .elementwise import broadcast_pattern
from .notation import LocalCall, Pattern, rule, source

ops = torch.ops.vescale


def _own_numbers(call: LocalCall) -> LocalCall:
    key, _, kind = call.args
    (layout,) = call.results
    if not layout.spec.items():
        return call
    return replace(call, fn=own_draw(layout, call.rank, kind), args=(key,), kwargs={})


@lru_cache(maxsize=1024)
def own_draw(layout: Layout, rank: int, kind: str) -> Callable[[Any], Any]:
    """key -> the elements of a draw that `rank` has; which those are is worked out here, once."""
    runs, shape, draw_at = compressed(layout.regions(rank)), layout.local_shape(rank), ops.draw_at.default

    def draw_own(key: Any) -> Any:
        return draw_at(key, runs, shape, kind)

    return draw_own


source([ops.draw.default], _own_numbers)
rule(ops.derive_keys.default, "w, ... -> ... w", whole="w")


@rule([ops.normal_from_bits.default, ops.scale_bits.default])
def from_bits(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return broadcast_pattern(node, metas)
