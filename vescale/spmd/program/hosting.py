"""Hosting: the lanes of a rank as one listing, in which they share the values that don't vary between them.

A value that is replicated over the axes of the lanes is one value: what makes it is emitted once, and all
lanes read it. Every other value is there for each lane. So passes see when the last lane has read a value,
and an optimizer of replicated parameters runs once.

Between two exchanges come the instructions for all lanes, then those of the first lane, then the second: what
a lane computes is still in the cache when it is read, and goes before the next lane starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..hosted import begin_lanes, bind_lanes
from ..lanes import LaneMesh, distinct, lanes_of, representative, widths
from ..layout import AbstractMesh
from ..mapped_call import mapped_call
from ..redistribute import Collective
from .binding import Binder
from .draw import BoundDraw, bind_draw
from .emit import (
    Call,
    DrawExchange,
    Exchange,
    Instruction,
    LaneExchange,
    Listing,
    StartExchange,
    WaitExchange,
    emit,
)
from .ir import Ref, map_args
from .mapped import MappedTrace, local_instruction, same
from .partition import AnyStep, Draw, Local, Map, Move, Partitioned, Start, Wait, operands, results
from .torch_draws import draws_from_nothing

Number = int
Lane = int


class Hosting:
    """Which lanes of a rank, `host`, share each value of a program, and the numbers in the rank's listing."""

    def __init__(self, partitioned: Partitioned, hosts: AbstractMesh, host: int) -> None:
        self.partitioned, self.mesh, self.hosts, self.host = partitioned, partitioned.mesh, hosts, host
        self.lanes = lanes_of(host, self.mesh, hosts)
        self.wide = widths(self.mesh, hosts)
        self.untold = _untold(partitioned) & set(self.wide)
        self.inputs = frozenset(partitioned.inputs)
        self.numbers: dict[Any, int] = {}
        self.looked: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.maps = 0  # mapped functions so far

    def varies(self, value: Number) -> set[str]:
        """The axes over which the lanes of a rank hold different pieces of a value."""
        told = {axis for axis in self.partitioned.values[value].layout.spec if axis in self.wide}
        return told if value in self.inputs else told | self.untold

    def first(self, value: Number, lane: Lane) -> Lane:
        """The first of the lanes that share a value with this one."""
        return self._first(lane, self.varies(value))

    def sharing(self, values: Sequence[Number]) -> list[Lane]:
        """The first lanes of those for which all these values are the same."""
        axes = set[str]().union(*map(self.varies, values))
        return list(dict.fromkeys(self._first(lane, axes) for lane in self.lanes))

    def _first(self, lane: Lane, axes: set[str]) -> Lane:
        return representative(lane, axes, self.mesh, self.wide)

    def number(self, value: Number, lane: Lane) -> int:
        """The number of a value, as a lane has it, in the listing."""
        lane = self.first(value, lane)
        if (value, lane) not in self.numbers:
            found = self.partitioned.values[value]
            self.new((value, lane), found.layout.local_shape(lane), found.meta.dtype)
        return self.numbers[value, lane]

    def new(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """A new number, for what `key` stands for."""
        if key not in self.numbers:
            self.numbers[key] = len(self.looked)
            self.looked.append((shape, dtype))
        return self.numbers[key]

    def given(self, value: Number, lane: Lane) -> int | None:
        """The number of a value that this lane is the first to have, None for the others."""
        return self.number(value, lane) if self.first(value, lane) == lane else None

    def needed(self, values: Sequence[Number]) -> list[tuple[int, int]]:
        """(which lane, which value) of results of an exchange that are kept, in order."""
        return [
            (at, index)
            for at, lane in enumerate(self.lanes)
            for index, value in enumerate(values)
            if self.first(value, lane) == lane
        ]


def host_listing(hosting: Hosting) -> Listing:
    """What a rank runs for all its lanes."""
    partitioned, looked = hosting.partitioned, hosting.looked
    inputs = [
        hosting.number(value, lane) for value in partitioned.inputs for lane in _outside(hosting, value)
    ]
    donated = frozenset(
        hosting.number(value, lane) for value in partitioned.facts.donated for lane in hosting.lanes
    )
    outputs: list[int | None] = []
    segments = _Segments()
    for step in partitioned.steps:
        _emit(step, hosting, segments)
    for value in partitioned.outputs:
        if value is None:
            outputs.append(None)
        else:
            outputs += [hosting.number(value, lane) for lane in _outside(hosting, value)]
    return Listing(
        tuple(segments.done()),
        tuple(inputs),
        tuple(outputs),
        looked.__getitem__,
        donated,
        next((value.meta.device.type for value in partitioned.values), "cpu"),
    )


def _outside(hosting: Hosting, value: Number) -> tuple[int, ...]:
    layout = hosting.partitioned.values[value].layout
    return distinct(layout, hosting.hosts, hosting.host)


class _Segments:
    """Instructions in order, those between two exchanges lane by lane."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.shared: list[Instruction] = []
        self.of_lanes: dict[Lane, list[Instruction]] = {}
        self.made: set[int] = set()  # by lanes, in this segment

    def add(self, instruction: Instruction, lane: Lane | None) -> None:
        """For one lane, or for all (None)."""
        if lane is None:
            if not self.made.isdisjoint(instruction.reads()):
                self.flush()
            self.shared.append(instruction)
        else:
            self.of_lanes.setdefault(lane, []).append(instruction)
            self.made.update(instruction.makes())

    def exchange(self, instruction: Instruction) -> None:
        self.flush()
        self.instructions.append(instruction)

    def flush(self) -> None:
        self.instructions += self.shared
        for lane in sorted(self.of_lanes):
            self.instructions += self.of_lanes[lane]
        self.shared, self.of_lanes, self.made = [], {}, set()

    def done(self) -> list[Instruction]:
        self.flush()
        return self.instructions


def _emit(step: AnyStep, hosting: Hosting, segments: _Segments) -> None:
    """The instructions of a step for all lanes of the rank."""
    lanes = hosting.lanes
    if isinstance(step, Map):
        _inline(step, hosting, segments)
    elif isinstance(step, Wait):
        start = step.start
        taken = tuple(hosting.number(value, lane) for lane in lanes for value in start.sources)
        kept = tuple(hosting.number(start.targets[i], lanes[at]) for at, i in hosting.needed(start.targets))
        segments.exchange(WaitExchange(start.ticket, taken, kept, start.origin))
    elif isinstance(step, Start):
        taken = tuple(hosting.number(value, lane) for lane in lanes for value in step.sources)
        segments.exchange(StartExchange(taken, step.ticket, step.origin))
    elif isinstance(step, Draw):
        made = [value for value in step.results if value is not None]
        taken = tuple(hosting.number(value, lane) for lane in lanes for value in step.operands)
        kept = tuple(hosting.number(made[i], lanes[at]) for at, i in hosting.needed(made))
        segments.exchange(DrawExchange(str(step), taken, kept, step.origin))
    elif isinstance(step, Move) and step.step.is_collective:
        taken = tuple(hosting.number(step.source, lane) for lane in lanes)
        kept = tuple(hosting.number(step.target, lanes[at]) for at, _ in hosting.needed([step.target]))
        segments.exchange(LaneExchange(f"{step.step.kind}", taken, kept, step.origin))
    else:
        values = [*operands(step), *results(step)]
        firsts = hosting.sharing(values)
        for lane in firsts:
            instruction = emit(step, hosting.partitioned, lane)
            assert isinstance(instruction, Call)
            segments.add(_renamed(instruction, hosting, lane), None if len(firsts) == 1 else lane)


def _inline(step: Map, hosting: Hosting, segments: _Segments) -> None:
    """A mapped function, which each lane runs for itself."""
    traced = mapped_call(step.handle).traced
    at = hosting.maps = hosting.maps + 1
    running = [_mapped(step, hosting, traced, lane, at) for lane in hosting.lanes]
    while running:
        stops = []
        for lane, instructions in zip(hosting.lanes, running, strict=True):
            for instruction in instructions:
                if isinstance(instruction, Exchange):
                    stops.append(instruction)
                    break
                segments.add(instruction, lane)
        if not stops:
            return
        taken, kept = tuple(stop.source for stop in stops), tuple(stop.target for stop in stops)
        segments.exchange(LaneExchange("mapped", taken, kept, stops[0].origin))


def _mapped(step: Map, hosting: Hosting, traced: MappedTrace, lane: Lane, at: int) -> Iterator[Instruction]:
    """What one lane runs of a mapped function."""
    graph = traced.variant(lane).graph
    inputs = (*graph.inputs, *(value for value, _ in graph.hidden))
    entered = dict(zip(inputs, step.operands, strict=True))

    def number(value: int) -> int:
        if value in entered:
            return hosting.number(entered[value], lane)
        meta = graph.metas[value]
        return hosting.new((at, lane, value), meta.shape, meta.dtype)

    rename: Callable[[Ref], Ref] = lambda ref: Ref(number(ref.id))  # noqa: E731
    for node in graph.nodes:
        moved = replace(
            node,
            args=map_args(node.args, rename),
            kwargs={name: map_args(value, rename) for name, value in node.kwargs.items()},
            outs=tuple(None if out is None else number(out) for out in node.outs),
        )
        yield local_instruction(moved, hosting.mesh, lane)
    outputs = [output for output in graph.outputs if isinstance(output, Ref)]
    for output, result in zip(outputs, step.results, strict=True):
        if result is not None and (kept := hosting.given(result, lane)) is not None:
            yield Call(same, (rename(output),), {}, (kept,), False, step.origin)


def _renamed(call: Call, hosting: Hosting, lane: Lane) -> Call:
    rename: Callable[[Ref], Ref] = lambda ref: Ref(hosting.number(ref.id, lane))  # noqa: E731
    return replace(
        call,
        args=map_args(call.args, rename),
        kwargs={name: map_args(value, rename) for name, value in call.kwargs.items()},
        outs=tuple(None if out is None else hosting.given(out, lane) for out in call.outs),
        overwrites=tuple(hosting.number(value, lane) for value in call.overwrites),
    )


def _untold(partitioned: Partitioned) -> set[str]:
    """Axes over which values differ although their layouts don't say so: in buffers of parameters.

    The layout of a buffer speaks of the axis over which it is gathered. What is put into it may be split
    over others.
    """
    found: set[str] = set()
    for step in partitioned.steps:
        if isinstance(step, Local):
            taken = set[str]().union(*(partitioned.values[value].layout.spec for value in step.operands))
            for value in step.results:
                found |= taken - set(partitioned.values[value].layout.spec)
    return found


# Exchanges: what lanes pass and get, bound to the ranks that host them.


def bind_exchanges(partitioned: Partitioned, mesh: LaneMesh, hostings: Sequence[Hosting]) -> list[Collective]:
    """The exchanges of the steps in order: for each rank here the values of its lanes, before -> after."""
    return [bound for step in _Lanes(partitioned, mesh, hostings).steps() for bound in step]


def bind_apart(partitioned: Partitioned, mesh: LaneMesh) -> list[list[Collective]]:
    """What lanes do together at each step, where every lane has values of its own: see `bind_steps`."""
    return _Apart(partitioned, mesh).steps()


class _Apart(Binder):
    """Lanes as ranks."""

    mesh: LaneMesh

    def __init__(self, partitioned: Partitioned, mesh: LaneMesh) -> None:
        super().__init__(partitioned, mesh)
        self.untold = frozenset(_untold(partitioned)) & set(widths(mesh.abstract, mesh.hosts.abstract))

    def move(self, step: Move) -> Collective:
        run = bind_lanes((step.step,), self.mesh, untold=self.untold)
        return lambda values: run([values])[0]

    def halves(self, step: Start) -> tuple[Collective, Collective]:
        """All of an exchange is done at its start: who looks at values has no use for overlap."""
        run = bind_lanes(tuple(move.step for move in step.moves), self.mesh, untold=self.untold)

        def start(values: Any) -> Any:
            results = list(zip(*run(list(zip(*values, strict=True))), strict=True))
            return [results] * len(values)

        def wait(tickets: Any) -> Any:
            return tickets[0]

        return start, wait


class _Lanes(Binder):
    """Goes from what the ranks here yield to values by lane, and back to what each rank keeps."""

    mesh: LaneMesh

    def __init__(self, partitioned: Partitioned, mesh: LaneMesh, hostings: Sequence[Hosting]) -> None:
        super().__init__(partitioned, mesh)
        self.hostings = hostings
        self.untold = frozenset(axis for hosting in hostings for axis in hosting.untold)
        place = {lane: at for at, lane in enumerate(mesh.local_ranks)}
        self.places = [[place[lane] for lane in hosting.lanes] for hosting in hostings]

    def by_lane(self, values: Sequence[Sequence[Any]], each: int) -> list[Sequence[Any]]:
        """`each` values of every lane, in the order of `mesh.local_ranks`."""
        found: list[Sequence[Any]] = [()] * len(self.mesh.local_ranks)
        for places, given in zip(self.places, values, strict=True):
            for at, place in enumerate(places):
                found[place] = given[at * each : (at + 1) * each]
        return found

    def kept(self, numbers: Sequence[Number]) -> list[list[tuple[int, int]]]:
        """Of each rank (place of the lane, which value) of what it keeps."""
        return [
            [(places[at], index) for at, index in hosting.needed(numbers)]
            for places, hosting in zip(self.places, self.hostings, strict=True)
        ]

    def one(self, run: Collective, target: Number | None) -> Collective:
        """An exchange of one value a lane; all results are kept where there is no `target`."""
        kept = self.places if target is None else [[at for at, _ in of] for of in self.kept([target])]

        def exchange(values: Any) -> Any:
            results = run([value for (value,) in self.by_lane(values, 1)])
            return [[results[at] for at in places] for places in kept]

        return exchange

    def mapped(self, run: Collective) -> Collective:
        return self.one(run, None)

    def move(self, step: Move) -> Collective:
        together = bind_lanes((step.step,), self.mesh, untold=self.untold, apart=False)
        return self.one(lambda values: together([values])[0], step.target)

    def halves(self, step: Start) -> tuple[Collective, Collective]:
        moves, each = tuple(move.step for move in step.moves), len(step.moves)
        kept = self.kept(step.targets)
        reduces = moves[0].kind == "all_reduce"
        run = bind_lanes(moves, self.mesh, untold=self.untold, apart=False) if reduces else None
        begin = begin_lanes(moves, self.mesh, untold=self.untold, apart=False) if not reduces else None

        def start(values: Any) -> Any:
            by_step = list(zip(*self.by_lane(values, each), strict=True))
            if run is not None:
                results = run(by_step)
                return [lambda: results] * len(values)
            assert begin is not None
            return [begin(by_step)] * len(values)

        def wait(tickets: Any) -> Any:
            results = tickets[0]()
            return [[results[index][at] for at, index in of] for of in kept]

        return start, wait

    def draw(self, step: Draw) -> BoundDraw:
        """A draw, of which lanes that share a result make it once."""
        firsts = {
            (value, lane)
            for hosting in self.hostings
            for value in results(step)
            for lane in hosting.sharing([value])
        }
        drawn = bind_draw(step, self.partitioned, self.mesh, lambda value, lane: (value, lane) in firsts)
        wanted, each = self.kept(results(step)), len(step.operands)
        named = [index for index, value in enumerate(step.results) if value is not None]
        some = draws_from_nothing(step.node)  # then results are those that have a number

        def run(values: Any) -> Any:
            made = drawn(self.by_lane(values, each))
            return [[made[at][index if some else named[index]] for at, index in of] for of in wanted]

        return BoundDraw(run)
