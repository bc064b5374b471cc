"""JAX-style functional SPMD on torch.

Names only; each is documented where it is defined. Read in this order: meshes and placements,
layouts and tensors, plans, programs, transforms; then random numbers and optimizers.
"""

__version__ = "0.1.0"

# isort: off  (reading order)
# random numbers and optimizers
from . import optim, rng
from ._errors import VescaleError
from .spmd.distribute import distribute
from .spmd.dtensor import DTensor, distribute_tensor, from_local

# layouts and tensors
from .spmd.layout import Layout

# meshes and placements
from .spmd.mesh import Mesh, make_mesh
from .spmd.parallelize import parallelize
from .spmd.placements import InterleavedShard, P, Partial, RaggedShard, Replicate, Shard

# plans and programs
from .spmd.plan import Plan, Staged

# transforms
from .spmd.transforms import constrain, grad, value_and_grad

__all__ = [
    "DTensor",
    "InterleavedShard",
    "Layout",
    "Mesh",
    "P",
    "Partial",
    "Plan",
    "RaggedShard",
    "Replicate",
    "Shard",
    "Staged",
    "VescaleError",
    "constrain",
    "distribute",
    "distribute_tensor",
    "from_local",
    "grad",
    "make_mesh",
    "optim",
    "parallelize",
    "rng",
    "value_and_grad",
]
