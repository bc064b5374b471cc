"""Fully sharded data parallel: parameters in planned flat buffers, moved a bucket at a time.

Where parameters may be cut, and where they lie: `blocks` (what must not be cut), `spec` (a tensor to
place), `planner` (`plan_buffer`, `plan_buckets`), `buffer_plan` (the result), `padding` (why a plan pads,
and when that is too much); underneath `bound` (what counting allows), `search` (which shard sizes are
tried), `packing` (whether one works), `buckets` (which tensors share a buffer).

What follows for a program: `config` (`FSDP`), `staging` (buckets and layouts at rest), `bucket` (addresses
on a rank), `memory` and `dbuffer` (the buffers themselves); then passes over a decided program, with
`editing` and `chains` underneath: `accumulate`, `recompute`, `schedule` (`reductions`, `gathers`), and
`into_buffer` over a rank's instructions.
"""

from ..spmd.program.passes import DECISIONS, LISTING, Pass, register
from .accumulate import accumulate
from .blocks import Block, Cuts, Elements, Rows, Tile, Whole, default_block
from .bucket import Bucket
from .buffer_plan import BufferPlan
from .config import FSDP
from .dbuffer import DBuffer
from .into_buffer import into_buffer
from .padding import Binding, binding, check_padding
from .planner import plan_buckets, plan_buffer
from .recompute import recompute
from .schedule import schedule
from .spec import TensorSpec

register(Pass("accumulate", DECISIONS, accumulate, rewrites=True), before="owner_waves")
register(Pass("recompute", DECISIONS, recompute), before="owner_waves")
register(Pass("buckets", DECISIONS, schedule, rewrites=True), before="owner_waves")
register(Pass("into_buffer", LISTING, into_buffer), before="fuse_foreach")

__all__ = [
    "Block",
    "Cuts",
    "Elements",
    "Rows",
    "Tile",
    "Whole",
    "default_block",
    "TensorSpec",
    "Bucket",
    "BufferPlan",
    "DBuffer",
    "FSDP",
    "plan_buffer",
    "plan_buckets",
    "Binding",
    "binding",
    "check_padding",
]
