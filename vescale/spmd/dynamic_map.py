"""A mapped function run op by op on real values: `vs.shard_map(..., static=False)`.

For functions whose Python control flow depends on values, for prints and breakpoints. Simulated ranks run on
threads, one at a time, and meet at collectives; a process runs its own rank. Collectives are those of the
static mode, with the same bits. Before each of them the ranks compare what they are about to do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat import TorchDispatchMode
from .agree import exchange
from .collective_ops import OPS
from .mesh import Mesh, group_ranks
from .program.emit import Call
from .program.ir import Graph, Node, Origin, Ref, TensorMeta
from .program.mapped import LOCAL, bind_node, group_mesh, local_instruction, member_index
from .program.torch_draws import is_effect, refuse_in_shard_map
from .program.trace import user_line
from .varying import Lockstep, Mapped, within
from .watch import here

T = TypeVar("T")


def run_dynamic(
    fn: Callable[[list[Tensor]], Sequence[Any]],
    mesh: Mesh,
    axes: tuple[str, ...],
    inputs: Sequence[list[Tensor]],
    varying: Sequence[frozenset[str]],
) -> tuple[list[list[Any]], list[frozenset[str]]]:
    """The flat local results of each hosted rank, and the axes over which each result varies."""
    places = [mesh.abstract.coordinate(rank) for rank in mesh.local_ranks]
    lockstep = Lockstep(places)
    types: list[list[frozenset[str]]] = []

    def run(rank: int, tensors: list[Tensor]) -> list[Any]:
        mapped = _Dynamic(mesh.abstract, axes, mesh.abstract.coordinate(rank), lockstep, given=varying)
        mapped.world, mapped.rank, mapped.line = mesh, rank, user_line
        mapped.inputs(tensors)
        with _Runner(mapped):
            results = list(within(mapped, lambda: fn(tensors)))
        types.append([mapped.over(r) if isinstance(r, Tensor) else frozenset() for r in results])
        return results

    calls = [
        lambda rank=rank, tensors=tensors: run(rank, tensors)
        for rank, tensors in zip(mesh.local_ranks, inputs, strict=True)
    ]
    results = lockstep.run(calls)
    return results, [frozenset[str]().union(*each) for each in zip(*types, strict=True)]


class _Dynamic(Mapped):
    """A rank that runs now: what it asks of the others, it asks them."""

    world: Mesh
    rank: int

    def meet(self, axes: Sequence[str], what: str, value: T) -> list[T]:
        if self.world.is_simulated:
            return super().meet(axes, what, value)
        if self.size(axes) == 1:
            return [value]
        # Through the store: under torch.func a tensor made for the exchange would be wrapped.
        said = exchange(self.world[tuple(axes)], what, pickle.dumps(value).hex())
        # The group is in the order of the mesh, the answer in the order in which the axes are named.
        members = group_ranks(self.mesh, tuple(axes), self.rank)
        by_place = {member_index(self.mesh, axes, rank): said[i] for i, rank in enumerate(members)}
        return [pickle.loads(bytes.fromhex(by_place[index])) for index in range(len(said))]


class _Runner(TorchDispatchMode):
    """Runs collectives, and types what every op returns."""

    def __init__(self, mapped: _Dynamic) -> None:
        super().__init__()
        self.mapped = mapped
        self.alive: list[Any] = []  # types go by identity: nothing that has one may be forgotten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and is_effect(func):
            raise refuse_in_shard_map(func, self.mapped.line())
        name = func.overloadpacket.__name__
        collective = func.namespace == "vescale" and name in OPS
        result = self.collective(func, name, args) if collective else func(*args, **(kwargs or {}))
        outs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        self.mapped.call(func, (*args, *(kwargs or {}).values()), outs)
        self.alive.append(outs)
        return result

    def collective(self, func: Any, name: str, args: tuple[Any, ...]) -> Tensor:
        mapped, (x, *rest) = self.mapped, args
        arguments = (tuple(a) if isinstance(a, list) else a for a in rest)
        node = Node(func, (Ref(0), *arguments), {}, (1,), Origin())
        if name in LOCAL:
            call = local_instruction(node, mapped.mesh, mapped.rank)
            assert isinstance(call, Call)
            return call.fn(*[x if isinstance(arg, Ref) else arg for arg in call.args], **call.kwargs).clone()
        axes = tuple(rest[0])
        graph = Graph((0,), (), (node,), (Ref(1),), (TensorMeta.of(x), TensorMeta.of(x)))
        if not mapped.world.is_simulated:
            here.collective = lambda: f"{name} over {', '.join(axes)} at {mapped.line()}"
            mapped.meet(axes, f"{name} over {', '.join(axes)}", None)
            return bind_node(node, graph, mapped.world[axes])([x])[0]
        values = mapped.lockstep.meet(mapped.place, f"{name} over {', '.join(axes)}", x, mapped.line())
        members = group_ranks(mapped.mesh, axes, mapped.rank)
        inside = group_mesh(mapped.mesh, axes)
        parts = [values[tuple(mapped.mesh.coordinate(member).items())] for member in members]
        return bind_node(node, graph, inside)(parts)[members.index(mapped.rank)]


__all__ = ["run_dynamic"]
