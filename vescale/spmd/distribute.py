"""`vs.distribute`: a tree of global tensors to DTensors, as a plan says."""

from __future__ import annotations

from typing import Any

from .. import _tree
from .._errors import ArgumentError, explain
from .dtensor import DTensor, distribute_tensor
from .plan import Plan


def distribute(tree: Any, plan: Plan) -> Any:
    """Each tensor of the parameter tree `tree`, placed at rest as `plan.params` says.

    Tensors are global values, equal on all ranks; DTensors are moved. With `plan.fsdp` the parameters of
    a bucket share one buffer. Raises PlanError as `plan.resolve` does, ArgumentError for what is no plan.

    >>> import torch
    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"dp": 2}, backend="simulated")
    >>> tree = distribute({"w": torch.ones(4)}, Plan(mesh, params={"w": P(dp=Shard(0))}))
    >>> tree["w"].to_local(0)
    tensor([1., 1.])
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(
            explain(
                f"a plan that is a {type(plan).__name__}",
                where="vs.distribute",
                rule="the tree of tensors comes first, then the plan",
                remedy="vs.distribute(params, plan)",
            )
        )
    mesh = plan.hosted("vs.distribute")
    leaves, spec = _tree.flatten(tree)
    resolved = plan.resolve(tree)
    placed: dict[str, DTensor] = {}
    for leaf, entry in zip(leaves, resolved, strict=True):
        if isinstance(leaf, DTensor):
            placed[entry.path] = leaf.redistribute(entry.rest.spec)
        else:
            placed[entry.path] = distribute_tensor(leaf, mesh, entry.rest.spec)
    if plan.fsdp:
        placed |= plan.fsdp.store(resolved.buckets, placed)
    return _tree.unflatten(spec, placed.values())
