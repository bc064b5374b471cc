"""JAX-style functional SPMD on torch.

Names only; each is documented where it is defined. Read in this order: meshes and placements,
layouts and tensors, plans, programs and modules, functions on local shards, transforms; then parameters
in flat buffers, random numbers and optimizers, checkpoints. `vs.debug` and `vs.testing` are loaded when first
used.
"""

import importlib as _importlib
import typing as _typing

__version__ = "0.1.0"

# isort: off
from ._errors import PeerError, VescaleError

# meshes and placements
from .spmd.mesh import Mesh, make_mesh
from .spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)

# layouts and tensors
from .spmd.layout import AbstractMesh, Layout
from .spmd.dtensor import DTensor, distribute_tensor, from_local, from_torch
from .spmd.tensor_group import TensorGroup
from .spmd.redistribute_many import redistribute_many
from .spmd.program.dispatch import no_implicit_redistribute
from .spmd.visualize import visualize

# plans
from .spmd.plan import Plan, Staged
from .spmd import plans
from .spmd.distribute import distribute

# programs and modules
from .spmd.parallelize import parallelize
from .spmd.functional import functional
from .spmd.init import init
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

# transforms
from .spmd.transforms import constrain, grad, remat, value_and_grad, vmap

# parameters in flat buffers
from . import fsdp
from .fsdp import FSDP, Elements, Rows, Tile, Whole

# random numbers and optimizers
from . import optim, rng

# what is kept on disk
from . import checkpoint

if _typing.TYPE_CHECKING:
    from . import debug as debug, testing as testing


def __getattr__(name: str) -> _typing.Any:
    if name in ("debug", "testing"):
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "PeerError",
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
    "checkpoint",
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
