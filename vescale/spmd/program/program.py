"""Program: everything for one signature. Decisions first; a rank's instructions when it is about to run.

A process hosts some ranks of the mesh: all of them when simulated, one otherwise. Each hosted rank runs
its own straight-line program. Programs without collectives are called; others are generators that stop
at each collective, and the loop here runs it over the hosted ranks together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..._compat import below_autograd
from ..lanes import LaneMesh
from ..layout import AbstractMesh
from ..mapped_call import mapped_call
from ..mesh import Mesh
from ..redistribute import Collective
from ..watch import here
from . import passes
from .binding import Binder
from .cause import REFUSED
from .codegen import generate
from .emit import Call, Instruction, Listing, emit
from .hosting import Hosting, bind_apart, bind_exchanges, host_listing
from .ir import Graph, Ref, TensorMeta, map_args
from .mapped import (
    MappedTrace,
    Variant,
    bind_all,
    collective_name,
    exchanges_of,
    local_instruction,
    same,
)
from .partition import AnyStep, Compute, Draw, Local, Map, Move, Partitioned, Start, Wait, results
from .passes.memory import Memory
from .torch_draws import Source, torch_draw
from .wire import mapped_wires


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """One collective of a program: what moves, how much, and why.

    `bytes` is what one rank receives; `origin` is the module and source line. `reason` says who asks for it,
    one of those listed in `cause`; `remedy` is the line that would ask for what an op asks for, else "".
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    value: str
    cause: str
    origin: str
    reason: str = "called"
    remedy: str = ""

    @property
    def axis(self) -> str:
        """The axis, or several joined by `+`."""
        return "+".join(self.axes)

    @property
    def asked(self) -> bool:
        """Whether the plan asked for it: what `strict=True` lets pass."""
        return self.reason not in REFUSED

    def __str__(self) -> str:
        what = f"{self.kind:<14} {self.axis:<6} {self.bytes:>10,} B  {self.value:<20}"
        return f"{what} {self.reason:<9} {self.cause}  {self.origin}"


class Collectives(tuple[CollectiveInfo, ...]):
    """The collectives of a program in order; prints as a table."""

    def __str__(self) -> str:
        head = f"{'kind':<14} {'axis':<6} {'bytes':>12}  {'value':<20} {'reason':<9} cause"
        return "\n".join([head, *map(str, self)])


def collectives(partitioned: Partitioned) -> Collectives:
    """Every collective of the decisions, in order; bytes are those of rank 0."""
    values, found = partitioned.values, []
    for step in partitioned.steps:
        if isinstance(step, Map):
            found += collectives_of(mapped_call(step.handle).traced)
        for move in _collective_moves(step):
            meta, moved, reason = values[move.source].meta, move.step, move.cause.reason(move.step)
            found.append(
                CollectiveInfo(
                    moved.kind,
                    moved.axes,
                    moved.bytes_moved(0, meta.dtype.itemsize),
                    str(meta),
                    str(move.cause),
                    str(move.origin),
                    reason,
                    move.cause.remedy if reason in REFUSED else "",
                )
            )
    return Collectives(found)


def _collective_moves(step: AnyStep) -> tuple[Move, ...]:
    """The moves that a step does, or starts, by a collective."""
    if isinstance(step, Start):
        return step.moves
    return (step,) if isinstance(step, Move) and step.step.is_collective else ()


def sequence(partitioned: Partitioned, draws: bool = False) -> tuple[str, ...]:
    """The collectives as ranks compare them: with layouts, so that a sum and a maximum never meet.

    With `draws` torch's random ops too, where the ranks that one process hosts stop as well.
    """
    found: list[str] = []
    for step in partitioned.steps:
        if isinstance(step, Map):
            found += map(str, collectives_of(mapped_call(step.handle).traced))
        elif isinstance(step, Wait):
            found.append(f"the end of {_told(step.start.moves, partitioned)}")
        elif isinstance(step, Draw):
            found += [str(step)] if draws else []
        elif moves := _collective_moves(step):
            found.append(_told(moves, partitioned))
    return tuple(found)


def _told(moves: Sequence[Move], partitioned: Partitioned) -> str:
    """One collective, as ranks compare it."""
    told = []
    for move in moves:
        kind, axes = move.step.kind, "+".join(move.step.axes)
        what = f"{kind} over {axes} of {partitioned.values[move.source].meta} for {move.cause}"
        told.append(f"{what}  {move.origin}  {move.step.src.spec} -> {move.step.dst.spec}")
    return "; ".join(told)


def drawn_from(partitioned: Partitioned) -> tuple[Source, ...]:
    """The generators of torch's that a program draws from."""
    found: list[Source] = []
    for step in partitioned.steps:
        if isinstance(step, Draw):
            given = (*step.node.args, *step.node.kwargs.values())
            named = [arg for arg in given if isinstance(arg, Source)]
            found += named or [Source(_device_of(step, partitioned))]
    return tuple(dict.fromkeys(found))


def _device_of(step: Draw, partitioned: Partitioned) -> str:
    """Where a draw happens: what nobody reads has no value that tells, but was asked for on a device."""
    for number in results(step):
        return partitioned.values[number].meta.device.type
    return torch.device(step.node.kwargs.get("device") or "cpu").type


def as_lines(partitioned: Partitioned, graph: Graph) -> list[str]:
    """The program as ranks compare it: instructions, without where they came from, and static results."""
    lines = [line.split("  # ")[0] for line in as_text(partitioned).splitlines()]
    return [*lines, f"static results {[out for out in graph.outputs if not isinstance(out, Ref)]}"]


def aliases(partitioned: Partitioned, inputs: set[int]) -> tuple[int, ...]:
    """The outputs that may share memory with some of these inputs."""
    shared = set(inputs)
    for step in partitioned.steps:
        if isinstance(step, Move):
            if not step.step.is_collective and step.source in shared:
                shared.add(step.target)
        elif isinstance(step, (Draw, Start, Wait)):  # what they return is memory of its own
            continue
        elif isinstance(step, Local):
            if (step.shares or step.writes) and shared.intersection(step.operands):
                shared.update(step.results)
        # What a mapped function does with its operands is not looked into.
        elif isinstance(step, Map) or (step.pattern.view and step.operands[0] in shared):
            shared.update(number for number in step.results if number is not None)
    return tuple(index for index, number in enumerate(partitioned.outputs) if number in shared)


def as_text(partitioned: Partitioned) -> str:
    """The decided program, one line an instruction, with layouts: the same for every rank."""
    lines = [
        f"mesh {partitioned.mesh}",
        *(f"input  {_look(number, partitioned)}" for number in partitioned.inputs),
    ]
    for step in partitioned.steps:
        lines += step_lines(step, partitioned)
    outputs = ", ".join(f"v{number}" if number is not None else "-" for number in partitioned.outputs)
    return "\n".join([*lines, f"return {outputs}"])


def _look(number: int | None, partitioned: Partitioned) -> str:
    if number is None:
        return "_"
    value = partitioned.values[number]
    layout = ", ".join(f"{axis}={placement!r}" for axis, placement in value.layout.spec.items())
    return f"v{number}: {value.meta}{f' {{{layout}}}' if layout else ''}"


def step_lines(step: AnyStep, partitioned: Partitioned) -> list[str]:
    """A step of the decisions, in words: one line, and for a mapped function those of what it runs."""

    def shown(numbers: Sequence[int | None]) -> str:
        return ", ".join(_look(number, partitioned) for number in numbers)

    def read(numbers: Sequence[int]) -> str:
        return ", ".join(f"v{number}" for number in numbers)

    if isinstance(step, Move):
        moved = f"{step.step.kind} over {'+'.join(step.step.axes)} (v{step.source})"
        return [f"{shown([step.target])} = {moved}  # {step.cause}"]
    if isinstance(step, Start):
        first = step.moves[0].step
        started = f"start {first.kind} over {'+'.join(first.axes)} ({read(step.sources)})"
        return [f"t{step.ticket} = {started}  # {step.moves[0].cause}"]
    if isinstance(step, Wait):
        return [f"{shown(step.start.targets)} = wait (t{step.start.ticket})"]
    if isinstance(step, Map):
        made = mapped_call(step.handle)
        line = f"{shown(step.results)} = {made.name} mapped ({read(step.operands)})  # {step.origin}"
        return [line, *(f"    {inner}" for inner in made.traced.lines())]
    if isinstance(step, Local):
        return [f"{shown(step.results)} = {step.name} ({read(step.operands)})  # {step.origin}"]
    if isinstance(step, Draw):
        what = f"{step} from {step.node.args[1]}" if step.node.op is torch_draw else _called(step)
        made = f"{shown(step.results)} = " if step.results else ""
        return [f"{made}draw {what}  # {step.node.origin}"]
    return [f"{shown(step.results)} = {_called(step)}  # {step.node.origin}"]


def _called(step: Compute | Draw) -> str:
    numbers = iter(step.operands)
    local = lambda ref: Ref(next(numbers, -1))  # noqa: E731
    args = [str(map_args(arg, local)) for arg in step.node.args]
    named = [f"{name}={map_args(value, local)}" for name, value in step.node.kwargs.items()]
    return f"{step.node.op}({', '.join([*args, *named])})"


class Program:
    """The compiled programs of the ranks that this process hosts, for one signature.

    `listings` are those of `mesh.local_ranks`; `exchanges` are the bound collectives in order, and
    `labels` what errors call them.
    """

    def __init__(
        self,
        mesh: Mesh,
        listings: Sequence[Listing],
        exchanges: Sequence[Collective],
        labels: Sequence[str],
    ) -> None:
        self.mesh, self.exchanges, self.labels = mesh, list(exchanges), tuple(labels)
        self.generated = [
            generate(made.instructions, made.inputs, made.outputs, made.looks) for made in listings
        ]
        self.runs = [made.run for made in self.generated]
        self.sources = [made.source for made in self.generated]
        self.overwritten = frozenset({place for made in listings for place in overwritten_inputs(made)})

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Local inputs of each hosted rank (lists that are emptied) -> local outputs of each.

        The inputs at the places `overwritten` are written to, and their memory is that of results.
        """
        try:
            with below_autograd():
                if not self.exchanges:
                    return [run(values) for run, values in zip(self.runs, inputs, strict=True)]
                return self._lockstep([run(values) for run, values in zip(self.runs, inputs, strict=True)])
        except Exception as error:
            self._say_where(error)
            raise

    def _say_where(self, error: Exception) -> None:
        """Note the user's line and module on an error of an instruction."""
        frames = {made.filename: made.origins for made in self.generated}
        for frame, line in traceback.walk_tb(error.__traceback__):
            origin = frames.get(frame.f_code.co_filename, {}).get(line)
            if origin is not None and str(origin):
                error.add_note(f"in the program's step for {origin}")

    def _lockstep(self, running: Sequence[Any]) -> list[list[Any]]:
        """Runs each rank up to its next collective, runs that for all, and so on to the end."""
        stops = [next(rank) for rank in running]
        results: list[list[Any]] = []
        for number in range(len(self.exchanges)):
            assert all(stop[0] == number for stop in stops)
            # Each rank takes its value out of a box, so that nobody else holds it while the rank goes on.
            here.collective = self.labels, number
            boxes = [[value] for value in self.exchanges[number]([stop[1] for stop in stops])]
            stops = []
            for rank, box in zip(running, boxes, strict=True):
                try:
                    stops.append(rank.send(box))
                except StopIteration as done:
                    results.append(done.value)
        return results


def overwritten_inputs(listing: Listing) -> set[int]:
    """The places of the inputs that the instructions write to."""
    source: dict[int, int] = {}  # a result in the memory of an operand -> that operand
    for instruction in listing.instructions:
        if isinstance(instruction, Call) and instruction.overwrites:
            source.update(
                (out, operand)
                for out, operand in zip(instruction.outs, instruction.overwrites, strict=True)
                if out is not None
            )
    origins = Memory.of(listing).origins
    written = {origin for operand in source.values() for origin in origins[operand]}
    return {place for place, value in enumerate(listing.inputs) if value in written}


def listing(partitioned: Partitioned, rank: int) -> Listing:
    """What a rank of the mesh runs, as decided."""
    values = partitioned.values
    instructions: list[Instruction] = []
    inner: dict[int, TensorMeta] = {}  # values inside mapped functions, at their local shapes
    for step in partitioned.steps:
        if isinstance(step, Map):
            instructions += _inline(step, partitioned.mesh, rank, len(values), inner)
        else:
            instructions.append(emit(step, partitioned, rank))

    def looks(number: int) -> tuple[tuple[int, ...], torch.dtype]:
        if number in inner:
            return inner[number].shape, inner[number].dtype
        return values[number].layout.local_shape(rank), values[number].meta.dtype

    return Listing(
        tuple(instructions),
        partitioned.inputs,
        partitioned.outputs,
        looks,
        partitioned.facts.donated,
        next((value.meta.device.type for value in values), "cpu"),
    )


def _inline(
    step: Map, mesh: AbstractMesh, rank: int, base: int, inner: dict[int, TensorMeta]
) -> Iterator[Instruction]:
    """The instructions of a mapped function in the place of its step; `base` numbers its values."""
    graph = mapped_call(step.handle).traced.variant(rank).graph
    operands = (*graph.inputs, *(value for value, _ in graph.hidden))
    numbers = dict(zip(operands, step.operands, strict=True))
    tensors = [output for output in graph.outputs if isinstance(output, Ref)]
    start = base + len(inner)
    for value, meta in enumerate(graph.metas):
        if value not in numbers:
            numbers[value] = start + value
        inner.setdefault(start + value, meta)  # one number a value, used or not: the next step starts after

    def rename(ref: Ref) -> Ref:
        return Ref(numbers[ref.id])

    for node in graph.nodes:
        kwargs = {name: map_args(value, rename) for name, value in node.kwargs.items()}
        outs = tuple(None if out is None else numbers[out] for out in node.outs)
        moved = replace(node, args=map_args(node.args, rename), kwargs=kwargs, outs=outs)
        yield local_instruction(moved, mesh, rank)
    for output, number in zip(tensors, step.results, strict=True):
        yield Call(same, (rename(output),), {}, (number,), False, step.origin)


def final_listing(partitioned: Partitioned, rank: int) -> Listing:
    """What a rank of the mesh runs, after all passes."""
    return passes.apply(passes.LISTING, listing(partitioned, rank))


def source_of(partitioned: Partitioned, rank: int, hosts: AbstractMesh | None = None) -> str:
    """The generated Python of a rank of the mesh, or of one of `hosts`, with all its lanes."""
    if hosts is None:
        made = final_listing(partitioned, rank)
    else:
        made = passes.apply(passes.LISTING, host_listing(Hosting(partitioned, hosts, rank)))
    return generate(made.instructions, made.inputs, made.outputs, made.looks).source


def bind_steps(partitioned: Partitioned, mesh: Mesh, reduction: str | None = None) -> list[list[Collective]]:
    """What the hosted ranks do together at each step, in order: most steps have none.

    On a mesh of lanes these are the ranks, each with values of its own.
    """
    if isinstance(mesh, LaneMesh):
        return bind_apart(partitioned, mesh)
    return Binder(partitioned, mesh, reduction).steps()


def compile_partitioned(
    partitioned: Partitioned, mesh: Mesh, *, optimise: bool = False, reduction: str | None = None
) -> Program:
    """The program of decisions, for the ranks that `mesh` hosts here.

    With `optimise` the passes run over them; a program of one op gains nothing from that. `reduction` is
    "ordered" or "native", by default the mesh's.
    """
    if isinstance(mesh, LaneMesh):
        hostings = [Hosting(partitioned, mesh.hosts.abstract, host) for host in mesh.hosts.local_ranks]
        found = [passes.apply(passes.LISTING, host_listing(hosting)) for hosting in hostings]
        bound = bind_exchanges(partitioned, mesh, hostings)
        return Program(mesh.hosts, found, bound, sequence(partitioned, draws=True))
    exchanges = [bound for step in bind_steps(partitioned, mesh, reduction) for bound in step]
    made = final_listing if optimise else listing
    listings = [made(partitioned, rank) for rank in mesh.local_ranks]
    return Program(mesh, listings, exchanges, sequence(partitioned, draws=True))


# Mapped functions: nothing is decided, the function says what it communicates.


def collectives_of(traced: MappedTrace, rank: int = 0) -> Collectives:
    """The collectives of a mapped function as a table."""
    graph = traced.variant(rank).graph
    found = []
    for node, wire in zip(exchanges_of(graph), mapped_wires(traced, rank), strict=True):
        value = str(graph.metas[node.args[0].id])
        found.append(CollectiveInfo(wire.kind, wire.axes, wire.received, value, "called", str(node.origin)))
    return Collectives(found)


def compile_mapped(
    traced: MappedTrace, mesh: Mesh, graphs: Callable[[Variant], Graph] = lambda variant: variant.graph
) -> Program:
    """The program of the ranks that `mesh` hosts; `graphs` may choose a part of each variant."""

    def listing(rank: int) -> Listing:
        graph = graphs(traced.variant(rank))
        inputs = (*graph.inputs, *(value for value, _ in graph.hidden))
        instructions = tuple(local_instruction(node, mesh.abstract, rank) for node in graph.nodes)
        outputs = tuple(output.id if isinstance(output, Ref) else None for output in graph.outputs)
        metas = graph.metas
        return Listing(instructions, inputs, outputs, lambda value: (metas[value].shape, metas[value].dtype))

    labels = [
        f"{collective_name(node)} over {', '.join(node.args[1])} at {node.origin}"
        for node in exchanges_of(graphs(traced.first))
    ]
    return Program(mesh, [listing(rank) for rank in mesh.local_ranks], bind_all(traced, mesh, graphs), labels)
