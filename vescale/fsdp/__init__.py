from .blocks import Block, Cuts, Elements, Rows, Tile, Whole, default_block
from .buffer_plan import BufferPlan
from .config import FSDP
from .planner import plan_buckets, plan_buffer
from .spec import TensorSpec
