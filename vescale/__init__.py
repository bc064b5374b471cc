"""JAX-style functional SPMD on torch.

Names only; each is documented where it is defined. Read in this order: meshes and placements,
layouts and tensors, plans, programs, transforms; then random numbers and optimizers.
"""

__version__ = "0.1.0"

# isort: off
# random numbers and optimizers
from . import fsdp, optim, rng
from ._errors import VescaleError
from .spmd.distribute import distribute
from .spmd.dtensor import DTensor, distribute_tensor, from_local, from_torch
from .spmd.tensor_group import TensorGroup
from .spmd.redistribute_many import redistribute_many
from .spmd.program.dispatch import no_implicit_redistribute

# layouts and tensors
from .spmd.functional import functional
from .spmd.init import init
from .spmd.layout import AbstractMesh, Layout
from .spmd.visualize import visualize

# meshes and placements
from .spmd.mesh import Mesh, make_mesh
from .spmd.parallelize import parallelize
from .spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)

# plans and programs
from .spmd import plans
from .spmd.plan import Plan, Staged
from .spmd.estimate import estimate

# functions on local shards, and what they communicate
from .spmd.shard_map import shard_map
from .spmd.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pvary,
)
from .spmd.ragged_collectives import all_gather_ragged, all_to_all_ragged, psum_scatter_ragged

# parameters in flat buffers
from .fsdp import FSDP, Elements, Rows, Tile, Whole

# transforms
from .spmd.transforms import constrain, grad, remat, value_and_grad, vmap

__all__ = [
    "AbstractMesh",
    "DTensor",
    "Elements",
    "FSDP",
    "InterleavedShard",
    "Layout",
    "Mesh",
    "P",
    "Partial",
    "Plan",
    "RaggedShard",
    "Replicate",
    "Rows",
    "Shard",
    "Staged",
    "StridedRaggedShard",
    "TensorGroup",
    "Tile",
    "VescaleError",
    "Whole",
    "all_gather",
    "all_gather_ragged",
    "all_to_all",
    "all_to_all_ragged",
    "axis_index",
    "axis_size",
    "broadcast",
    "constrain",
    "distribute",
    "distribute_tensor",
    "estimate",
    "from_local",
    "from_torch",
    "fsdp",
    "functional",
    "grad",
    "init",
    "make_mesh",
    "no_implicit_redistribute",
    "optim",
    "parallelize",
    "plans",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "psum_scatter_ragged",
    "pvary",
    "redistribute_many",
    "remat",
    "rng",
    "shard_map",
    "value_and_grad",
    "visualize",
    "vmap",
]
