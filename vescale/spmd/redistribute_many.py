"""`vs.redistribute_many`: several DTensors to other layouts, with one collective for steps of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _compat
from .._errors import ArgumentError, explain
from .dtensor import DTensor
from .layout import Layout
from .mesh_order import as_spec
from .placements import P, Partial
from .redistribute import redistribute_all


def redistribute_many(
    tensors: Sequence[DTensor], placements: P | Sequence[P | Sequence[Any]]
) -> list[DTensor]:
    """`x.redistribute(p)` for each of the tensors, the same bits, in few collectives.

        redistribute_many : [DTensor, ..], P or [P, ..] -> [DTensor, ..]

    Steps of one kind (gather, all-to-all, reduce-scatter, all-reduce) over the same axes, with the same
    reduction and dtype, are one collective, whatever the shapes. `placements` is one P for all tensors,
    or one for each. Gradients come back in the tensors' own layouts, together too.

    Raises ArgumentError when the tensors are not on one mesh, LayoutError when placements don't fit.

    >>> from vescale.spmd.dtensor import distribute_tensor
    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"dp": 2}, backend="simulated")
    >>> rows = [distribute_tensor(torch.ones(n, 2), mesh, P(dp=Shard(0))) for n in (3, 4)]
    >>> [tuple(x.to_local(rank=1).shape) for x in redistribute_many(rows, P(dp=Shard(1)))]
    [(3, 1), (4, 1)]
    """
    tensors = list(tensors)
    if not tensors:
        return []
    _check(tensors, placements)
    bases = [_compat.base_tensor(tensor) for tensor in tensors]
    mesh = bases[0].mesh.abstract
    specs = [placements] * len(tensors) if isinstance(placements, P) else placements
    layouts = [Layout(mesh, as_spec(mesh, spec), tuple(base.shape)) for spec, base in zip(specs, bases)]
    return list(_RedistributeMany.apply(layouts, *tensors))  # pyright: ignore[reportArgumentType]


def _check(tensors: Sequence[Any], placements: Any) -> None:
    bases = [_compat.base_tensor(t) if isinstance(t, torch.Tensor) else t for t in tensors]
    odd = next((i for i, base in enumerate(bases) if not isinstance(base, DTensor)), None)
    apart = next((i for i, base in enumerate(bases) if odd is None and base.mesh is not bases[0].mesh), None)
    if odd is not None:
        found, remedy = f"{type(bases[odd]).__name__} at {odd}", "use distribute_tensor or from_local first"
    elif apart is not None:
        found, remedy = f"{bases[apart].mesh} at {apart}, {bases[0].mesh} at 0", "make a call for each mesh"
    elif not isinstance(placements, P) and len(placements) != len(tensors):
        found = f"{len(placements)} placements for {len(tensors)} tensors"
        remedy = "give one P for all, or one for each tensor"
    else:
        return
    rule = "redistribute_many takes DTensors on one mesh, and one P for all or one for each"
    raise ArgumentError(explain(found, where="redistribute_many", rule=rule, remedy=remedy))


class _RedistributeMany(torch.autograd.Function):
    """Identity on each global value; gradients go back together."""

    @staticmethod
    def forward(layouts: Sequence[Layout], *tensors: DTensor) -> tuple[DTensor, ...]:
        mesh = tensors[0].mesh
        moves = [(x.layout, layout) for x, layout in zip(tensors, layouts, strict=True)]
        moved = redistribute_all([x._locals for x in tensors], moves, mesh)
        return tuple(DTensor(pieces, mesh, layout) for pieces, layout in zip(moved, layouts, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        before = [_compat.base_tensor(x).layout.spec for x in inputs[1:]]
        ctx.specs = [P.of((a, p) for a, p in spec.items() if not isinstance(p, Partial)) for spec in before]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = list(grads)
        there = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        ours = [i for i, grad in there if isinstance(_compat.base_tensor(grad), DTensor)]
        moved = redistribute_many([grads[i] for i in ours], [ctx.specs[i] for i in ours])
        for i, grad in zip(ours, moved, strict=True):
            found[i] = grad
        return None, *found
