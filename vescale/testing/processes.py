"""Runs of `assert_consistent` on real ranks: what is sent to them, what comes back, and where they part.

Real ranks must have the bits of simulated ones, instruction by instruction: both observe the same program.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.mesh import Mesh, make_mesh
from ..spmd.observe import Observation, observe
from ..spmd.plan import Plan
from .compare import Difference, difference, wording
from .pool import RankPool
from .running import Fn, Mode, axes_of, own_generators, run


@dataclass(frozen=True)
class _Recipe:
    """A mode without its mesh, which can't be sent."""

    axes: tuple[tuple[str, int], ...]
    parts: tuple[Any, ...]
    name: str
    static: bool
    donate: tuple[str, ...]
    lanes: dict[str, int] | None

    @classmethod
    def of(cls, mode: Mode) -> _Recipe:
        plan = mode.plan
        parts = plan.params, plan.inputs, plan.outputs, plan.activations, plan.fsdp, plan.params_arg
        lanes = None if mode.lanes is None else dict(mode.lanes)
        return cls(tuple(axes_of(plan).items()), parts, mode.name, mode.static, mode.donate, lanes)

    def mode(self) -> Mode:
        params, inputs, outputs, activations, fsdp, own = self.parts
        mesh = mesh_here(self.axes)
        plan = Plan(mesh, params, inputs, outputs, activations, fsdp=fsdp, params_arg=own)
        return Mode(self.name, plan, self.static, self.donate, self.lanes)


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


@dataclass(frozen=True)
class Seen:
    """What an instruction left on the ranks of a process: local tensors by value and rank."""

    op: str
    line: str
    locals: dict[int, dict[int, Tensor]]


def first_unlike(
    pool: RankPool, fn: Fn, mode: Mode, args: tuple[Any, ...], before: Tensor
) -> tuple[Seen, int, Difference] | None:
    """The first instruction after which a real rank has other bits than the simulated one, that rank, and
    how."""
    here = observed(fn, mode, args, before)
    there = pool.run(_observe_here, fn, _Recipe.of(mode), args, before)[: mode.plan.mesh.abstract.size]
    return first_unlike_seen(here, there)


def first_unlike_seen(
    here: Sequence[Seen], there: Sequence[Sequence[Seen]]
) -> tuple[Seen, int, Difference] | None:
    """The same of two runs of one program; `there` is what each process saw of its ranks."""
    for number, seen in enumerate(here):
        for instructions in there:
            for value, locals in seen.locals.items():
                for rank, found in instructions[number].locals[value].items():
                    if wording(locals[rank], found) is None:
                        apart = difference(locals[rank], found, zeros=True)
                        if apart is not None:
                            return seen, rank, apart
    return None


def _observe_here(fn: Fn, recipe: _Recipe, args: tuple[Any, ...], before: Tensor) -> list[Seen]:
    mode = recipe.mode()
    if not mode.plan.hosted("assert_consistent").local_ranks:
        return []
    return observed(fn, mode, args, before)


def observed(fn: Fn, mode: Mode, args: tuple[Any, ...], before: Tensor) -> list[Seen]:
    """What each instruction of a call leaves on the ranks that are here."""
    found: list[Seen] = []

    def watch(seen: Observation) -> None:
        if seen.inner is None:
            whole = [value for value in seen.results if not value.is_filling]
            locals = {v.number: {rank: piece.clone() for rank, piece in v.locals.items()} for v in whole}
            found.append(Seen(seen.name, str(seen.origin), locals))

    state = torch.get_rng_state()
    torch.set_rng_state(before)
    observe(mode.on_mesh(fn), own_generators(args), {}, watch)
    torch.set_rng_state(state)
    return found


__all__ = ["first_unlike", "first_unlike_seen", "observed", "run_on"]
