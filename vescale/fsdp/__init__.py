"""Fully sharded data parallel: where parameters may be cut, and where they lie in flat buffers.

Read in this order: `blocks` (what must not be cut), `spec` (a tensor to place), `planner` (`plan_buffer`,
`plan_buckets`), `buffer_plan` (the result), `padding` (why a plan pads, and when that is too much).
Underneath: `bound` (what counting allows), `search` (which shard sizes are tried), `packing` (whether one
works), `buckets` (which tensors share a buffer).
"""

from .blocks import Block, Cuts, Elements, Rows, Tile, Whole, default_block
from .buffer_plan import BufferPlan
from .padding import Binding, binding, check_padding
from .planner import plan_buckets, plan_buffer
from .spec import TensorSpec

__all__ = [
    "Block",
    "Cuts",
    "Elements",
    "Rows",
    "Tile",
    "Whole",
    "default_block",
    "TensorSpec",
    "BufferPlan",
    "plan_buffer",
    "plan_buckets",
    "Binding",
    "binding",
    "check_padding",
]
