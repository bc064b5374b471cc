"""Emit: the decisions of a partition as the instructions of one rank, with its local shapes and offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..redistribute import bind_local
from ..rules.notation import LocalCall
from .ir import Origin, Ref, map_args, refs_of
from .partition import Compute, Draw, Local, Move, Partitioned, Start, Wait


@dataclass(frozen=True, slots=True)
class Call:
    """A local call. `outs` number its results (None: unused); `unpack` when it returns several.

    `overwrites` is empty, or says for each result of which operand it takes the memory: the call writes
    there, and the operand is no value any more. `fresh`: results are known to have memory of their own.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    unpack: bool
    origin: Origin
    overwrites: tuple[int, ...] = ()
    fresh: bool = False

    def reads(self) -> Iterator[int]:
        """The values that the call reads, in the order of its arguments."""
        yield from refs_of(self.args)
        yield from refs_of(tuple(self.kwargs.values()))

    def makes(self) -> list[int]:
        """The values that the call makes."""
        return [out for out in self.outs if out is not None]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective step; every rank of the mesh has the same one at the same place."""

    source: int
    target: int
    origin: Origin

    def reads(self) -> Iterator[int]:
        yield self.source

    def makes(self) -> list[int]:
        return [self.target]


@dataclass(frozen=True, slots=True)
class StartExchange:
    """Begin a collective for several values; the rank goes on before it is done."""

    sources: tuple[int, ...]
    ticket: int
    origin: Origin

    def reads(self) -> Iterator[int]:
        yield from self.sources

    def makes(self) -> list[int]:
        return []


@dataclass(frozen=True, slots=True)
class WaitExchange:
    """The results of the collective that was started with this ticket.

    It counts as a reader of the sources: nothing overwrites or frees them while they may be being sent.
    """

    ticket: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    origin: Origin

    def reads(self) -> Iterator[int]:
        yield from self.sources

    def makes(self) -> list[int]:
        return list(self.targets)


@dataclass(frozen=True, slots=True)
class DrawExchange:
    """A draw of torch's, or what is done to its generator: the ranks that a process hosts share one."""

    name: str
    sources: tuple[int, ...]
    targets: tuple[int | None, ...]
    origin: Origin

    def reads(self) -> Iterator[int]:
        yield from self.sources

    def makes(self) -> list[int]:
        return [target for target in self.targets if target is not None]


@dataclass(frozen=True, slots=True)
class LaneExchange(DrawExchange):
    """A collective in which several lanes of a rank take part, see `hosting`: the value of each, and what of
    the results is kept."""


Instruction = Call | Exchange | StartExchange | WaitExchange | DrawExchange
EXCHANGES = (Exchange, StartExchange, WaitExchange, DrawExchange)  # where a rank stops for the others

Looks = Callable[[int], tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Listing:
    """What one rank runs: instructions over numbered values.

    `looks` tells the local shape and dtype of a value; `donated` are the inputs that may be overwritten;
    `device` is the type of device.
    """

    instructions: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    looks: Looks
    donated: frozenset[int] = frozenset()
    device: str = "cpu"


def emit(
    step: Compute | Draw | Move | Local | Start | Wait, partitioned: Partitioned, rank: int
) -> Instruction:
    """The instruction of `rank` for a step."""
    if isinstance(step, Local):
        taken = tuple(Ref(number) for number in step.operands)
        overwrites = step.operands[:1] if step.writes else ()
        fresh = not (step.shares or step.writes)
        return Call(step.make(rank), taken, {}, step.results, True, step.origin, overwrites, fresh)
    if isinstance(step, Start):
        return StartExchange(step.sources, step.ticket, step.origin)
    if isinstance(step, Wait):
        return WaitExchange(step.start.ticket, step.start.sources, step.start.targets, step.start.origin)
    if isinstance(step, Draw):
        return DrawExchange(str(step), step.operands, step.results, step.origin)
    if isinstance(step, Move):
        if step.step.is_collective:
            return Exchange(step.source, step.target, step.origin)
        return Call(bind_local(step.step, rank), (Ref(step.source),), {}, (step.target,), False, step.origin)
    node, values = step.node, partitioned.values
    numbers = iter(step.operands)
    read = len(step.operands)

    def local(ref: Ref) -> Any:
        number = next(numbers, None)  # a factory reads none of its tensors
        return None if number is None else Ref(number)

    args = map_args(node.args, local)
    kwargs = {name: map_args(value, local) for name, value in node.kwargs.items()}
    operands = tuple(values[number].layout for number in step.operands)
    results = tuple(values[number].layout for number in step.results if number is not None)
    call = LocalCall(
        node,
        node.op,
        args,
        kwargs,
        operands,
        results,
        values[next(number for number in step.results if number is not None)].meta,
        rank,
    )
    sharded = any(layout.spec.items() for layout in (*operands, *results))
    reads_less = read < sum(1 for _ in node.refs())
    if step.pattern.local is not None and (sharded or reads_less):
        call = step.pattern.local(call)
    return Call(call.fn, call.args, dict(call.kwargs), step.results, node.returns_list, node.origin)
