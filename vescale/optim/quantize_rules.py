"""Sharding rules of the ops on quantized blocks: they run where their first operand is, and move nothing.

The other operand, and the results, are where that says: codes with the numbers, each scale with its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..spmd.layout import Layout
from ..spmd.program.ir import Node, TensorMeta
from ..spmd.program.partition import whole_pattern
from ..spmd.rules.notation import LocalCall, Pattern, rule
from . import quantize as _quantize  # noqa: F401  (defines the ops)
from .quantize import as_ints
from .quantize_layout import local_tiling, scales_layout

ops = torch.ops.vescale


@rule([ops.quantize_blocks.default, ops.dequantize_blocks.default, ops.zero_blocks.default])
def on_blocks(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    operands = sum(1 for _ in node.refs())
    quantized = node.op is not ops.dequantize_blocks.default
    at = 3 if node.op is not ops.zero_blocks.default else 2  # where the arguments have the grid
    sizes, name = tuple(node.args[at]), node.args[-1]

    def follow(layout: Layout) -> tuple[list[Layout], list[Layout]]:
        scales = scales_layout(layout, sizes, name)
        if quantized:
            return [layout] * operands, [layout, scales]
        return [layout, scales], [layout]

    def own_blocks(call: LocalCall) -> LocalCall:
        layout = call.operands[0]
        call = call.with_arg(at + 1, as_ints(local_tiling(layout, sizes, call.rank)))
        if not quantized:
            return call
        return call.with_arg(at + 2, list(scales_layout(layout, sizes, name).local_shape(call.rank)))

    return replace(whole_pattern(node, metas), follow=follow, local=own_blocks)
