"""Runs of `assert_consistent` on real ranks: what is sent to them, and what comes back."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.mesh import Mesh, make_mesh
from ..spmd.plan import Plan
from .pool import RankPool
from .running import Fn, Mode, axes_of, run


@dataclass(frozen=True)
class _Recipe:
    """A mode without its mesh, which can't be sent."""

    axes: tuple[tuple[str, int], ...]
    parts: tuple[Any, ...]
    name: str
    static: bool
    donate: tuple[str, ...]

    @classmethod
    def of(cls, mode: Mode) -> _Recipe:
        plan = mode.plan
        parts = plan.params, plan.inputs, plan.outputs, plan.activations, plan.fsdp, plan.params_arg
        return cls(tuple(axes_of(plan).items()), parts, mode.name, mode.static, mode.donate)

    def mode(self) -> Mode:
        params, inputs, outputs, activations, fsdp, own = self.parts
        mesh = mesh_here(self.axes)
        plan = Plan(mesh, params, inputs, outputs, activations, fsdp=fsdp, params_arg=own)
        return Mode(self.name, plan, self.static, self.donate)


@cache
def mesh_here(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """The mesh of this process and its peers: process groups are made once."""
    return make_mesh(dict(axes), backend="processes")


def run_on(
    pool: RankPool, fn: Fn, args: tuple[Any, ...], mode: Mode, steps: int, before: Tensor
) -> list[Any]:
    """By rank and step, the leaves that the ranks of the pool hold. Raises ArgumentError for what can't be
    sent."""
    job = fn, args, _Recipe.of(mode), steps, before
    try:
        pickle.dumps(job)
    except Exception as error:
        raise ArgumentError(
            explain(
                f"{getattr(fn, '__qualname__', fn)}: {error}",
                where="assert_consistent(..., processes=)",
                rule="real ranks get the function by its name and the arguments by pickle",
                remedy="define the function at the top of a module, and bind what it closes over with "
                "functools.partial",
            )
        ) from None
    return pool.run(_run_here, *job)


def _run_here(fn: Fn, args: tuple[Any, ...], recipe: _Recipe, steps: int, before: Tensor) -> list[list[Any]]:
    mode = recipe.mode()
    if not mode.plan.hosted("assert_consistent").local_ranks:
        return []
    found = []
    for step in run(mode.on_mesh(fn), args, steps, before):
        leaves = _tree.leaves(step.result)
        # Copies: the next step may write where this one's results are.
        found.append(
            [leaf.to_local().detach().clone() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        )
    return found


__all__ = ["mesh_here", "run_on"]
