"""Timeline: when each instruction of a program began and ended, by rank, as it ran and by a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .._compat import below_autograd
from .._errors import ArgumentError, explain
from ..spmd.agree import exchange
from ..spmd.mesh import Mesh
from ..spmd.observe import prepare, ranks_of
from ..spmd.parallelize import Entry, drawing
from ..spmd.program.cost import Rates
from ..spmd.program.emit import EXCHANGES, Call, DrawExchange, Listing
from ..spmd.program.last_use import last_uses
from ..spmd.program.program import bind_steps, final_listing
from ..spmd.program.replay import Event, replay
from ..spmd.program.stepwise import call, together
from ..spmd.program.wire import wires

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """An instruction of a rank: seconds from the start of the call. `lane` is "compute" or an axis.

    `kind` is the region of an instruction (forward, backward, update, other), or what a collective does;
    `received` the bytes that it brings the rank.
    """

    rank: int
    lane: str
    name: str
    kind: str
    start: float
    seconds: float
    where: str
    received: int = 0

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Timeline:
    """The `spans` of a call as measured, and those that the `rates` give, `modelled`; prints as a table."""

    mesh: str
    spans: tuple[Span, ...]
    modelled: tuple[Span, ...]
    rates: Rates
    clock: str  # how it was measured

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were seen."""
        return tuple(dict.fromkeys(span.rank for span in self.spans))

    @property
    def seconds(self) -> float:
        """From the start of the call to the end of the last instruction of any rank."""
        return max((span.end for span in self.spans), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace (`.json`) or a picture (`.png`, `.svg`).

        A trace is for chrome://tracing or ui.perfetto.dev. In processes every
        rank has all spans: save on one. Raises ArgumentError for another ending, and for a picture when
        matplotlib is not installed.
        """
        ending = Path(path).suffix
        if ending == ".json":
            Path(path).write_text(json.dumps(self.as_chrome_trace()))
        elif ending in (".png", ".svg"):
            from .timeline_picture import draw

            draw(self, path)
        else:
            raise ArgumentError(
                explain(
                    f"save({str(path)!r})",
                    where="a timeline",
                    rule="a timeline is saved as a .json, .png or .svg",
                )
            )

    def as_chrome_trace(self) -> dict[str, Any]:
        """In the Trace Event Format: a process a rank, a thread a lane, complete events in microseconds."""
        events: list[dict[str, Any]] = []
        count = max(self.ranks, default=-1) + 1
        for base, note, spans in ((0, "", self.spans), (count, ", modelled", self.modelled)):
            lanes = _lanes(spans)
            for rank in dict.fromkeys(span.rank for span in spans):
                events.append(_named("process_name", base + rank, 0, f"rank {rank}{note}"))
                events += [_named("thread_name", base + rank, at, lane) for at, lane in enumerate(lanes)]
            for span in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.kind,
                        "ts": span.start * 1e6,
                        "dur": span.seconds * 1e6,
                        "pid": base + span.rank,
                        "tid": lanes.index(span.lane),
                        "args": {"where": span.where, "received": span.received},
                    }
                )
        other = {"mesh": self.mesh, "clock": self.clock, "rates": str(self.rates)}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def __str__(self) -> str:
        lanes = _lanes(self.spans)
        rows = [["", *lanes, "end"]]
        for rank in self.ranks:
            own = [span for span in self.spans if span.rank == rank]
            sums = [sum(span.seconds for span in own if span.lane == lane) for lane in lanes]
            times = [*sums, max(span.end for span in own)]
            rows.append([f"rank {rank}", *(f"{1e3 * seconds:.3f} ms" for seconds in times)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join([f"{self.mesh}: {self.clock}", *lines])


def _lanes(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys([COMPUTE, *(span.lane for span in spans)]))


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def timeline(step: Any, *args: Any, repeats: int = 3, rates: Rates | None = None, **kwargs: Any) -> Timeline:
    """When each instruction of `step(*args, **kwargs)` begins and ends: the program with all its passes.

    The call is made once to warm up and then `repeats` times. Nothing is donated: what the program overwrites
    is copied before, outside of the measurement. Generators move as in one call.

    * In processes the quickest run is shown. Each rank reads its own clock, set when all are ready to start.
      A collective lasts from when the rank comes to it until it goes on, waiting for others included. Every
      rank makes this call, and all get all spans.
    * Simulated ranks take turns on one device, so each has a clock of its own: an instruction takes the
      shortest time that it took, a collective begins when the last rank has come to it, and takes its share
      of the time that it took for all ranks. There is no network in it.

    `rates` are for the modelled timeline, one instruction after the other. On cpu only: kernels of other
    devices run later than they are called. Raises ArgumentError there, and for a step that is no program.
    """
    entry, leaves, hidden = prepare(step, args, kwargs)
    mesh: Mesh = step._mesh
    if mesh.device.type != "cpu":
        raise ArgumentError(
            explain(
                f"timeline on {mesh.device.type}",
                rule="clocks are read on the cpu, and kernels there run later than they are called",
                remedy="use torch.profiler, which records the device",
            )
        )
    if ranks_of(step) is not mesh:
        raise ArgumentError(
            explain(
                f"timeline of {step._name} on {ranks_of(step)}",
                rule="an instruction belongs to a rank, and here each rank runs those of several lanes",
                remedy="leave out lanes=, or take a mesh with a rank for each lane",
            )
        )
    measured = _Measured(entry, mesh)
    inputs = step._enter(entry.decision, leaves, hidden)
    runs: list[list[_Times]] = []
    with drawing(entry, leaves):
        sources = [source.find() for source in entry.decision.sources]
        states = [generator.get_state() for generator in sources]
        for _ in range(1 + max(repeats, 1)):
            for generator, state in zip(sources, states):
                generator.set_state(state)
            own = _copies(inputs, measured.overwritten)
            if not mesh.is_simulated and mesh.local_ranks:
                exchange(mesh, "vs.debug.timeline", None)
            runs.append(measured.run(own))
    if mesh.is_simulated:
        spans = measured.in_turn([_shortest(each) for each in zip(*runs[1:])])
    else:
        spans = _quickest(mesh, [measured.spans(run) for run in runs[1:]])
    rates = rates or Rates()
    modelled = [span for rank in mesh.local_ranks for span in _modelled(measured.events[rank], rank, rates)]
    clock = "simulated ranks, a clock each" if mesh.is_simulated else "processes, by their own clocks"
    return Timeline(str(mesh.abstract), tuple(spans), tuple(modelled), rates, clock)


_Times = list[tuple[float, float]]  # of the instructions of a rank: seconds from the start, and seconds


def _shortest(runs: Sequence[_Times]) -> _Times:
    """The instructions of a rank, each as long as it took when it took the shortest."""
    return [min(each, key=lambda times: times[1]) for each in zip(*runs)]


def _quickest(mesh: Mesh, runs: Sequence[list[Span]]) -> list[Span]:
    """The run whose last rank was done first: the spans of all ranks."""
    if not mesh.local_ranks:
        return []
    ends = [max((span.end for span in spans), default=0.0) for spans in runs]
    slowest = [max(each) for each in zip(*exchange(mesh, "vs.debug.timeline", ends))]
    best = runs[slowest.index(min(slowest))]
    told = exchange(mesh, "vs.debug.timeline", [asdict(span) for span in best])
    return [Span(**fields) for record in told for fields in record]


class _Measured:
    """The program of an entry, timed instruction by instruction for the ranks that are hosted here."""

    def __init__(self, entry: Entry, mesh: Mesh) -> None:
        partitioned = entry.decision.partitioned
        self.mesh = mesh
        self.listings = {rank: final_listing(partitioned, rank) for rank in mesh.local_ranks}
        self.exchanges = [one for step in bind_steps(partitioned, mesh) for one in step]
        self.overwritten: frozenset[int] = entry.program.overwritten
        self.events = {
            rank: replay(
                made.instructions,
                made.inputs,
                made.outputs,
                made.looks,
                wires(partitioned, rank),
                device=mesh.device,
            ).events
            for rank, made in self.listings.items()
        }
        self.dead = {rank: _dead_after(made) for rank, made in self.listings.items()}

    def run(self, inputs: Sequence[list[Tensor]]) -> list[_Times]:
        """When each instruction of each rank began, and how long it took. The lists are emptied."""
        values: dict[int, dict[Any, Any]] = {}
        for (rank, made), own in zip(self.listings.items(), inputs, strict=True):
            values[rank] = dict(zip(made.inputs, own, strict=True))
            own.clear()
        times: dict[int, _Times] = {rank: [] for rank in self.listings}
        zero = time.perf_counter()
        for meeting in (*self.exchanges, None):
            for rank, made in self.listings.items():
                while (at := len(times[rank])) < len(made.instructions):
                    instruction = made.instructions[at]
                    if not isinstance(instruction, Call):
                        break
                    begin = time.perf_counter()
                    with below_autograd():
                        call(instruction, values[rank])
                    times[rank].append((begin - zero, time.perf_counter() - begin))
                    self.drop(rank, at, values[rank])
            if meeting is not None:
                at_exchange = {rank: len(own) for rank, own in times.items()}
                instructions = [self.listings[rank].instructions[at] for rank, at in at_exchange.items()]
                begin = time.perf_counter()
                together(meeting, instructions, list(values.values()))
                took = time.perf_counter() - begin
                for rank, at in at_exchange.items():
                    times[rank].append((begin - zero, took))
                    self.drop(rank, at, values[rank])
        return list(times.values())

    def spans(self, times: Sequence[_Times]) -> list[Span]:
        """The spans of a run, at the times at which they were."""
        return [
            self.span(rank, at, start, seconds)
            for rank, own in zip(self.listings, times)
            for at, (start, seconds) in enumerate(own)
        ]

    def in_turn(self, times: Sequence[_Times]) -> list[Span]:
        """The spans of ranks that took turns, as if each had run by itself up to the next exchange."""
        spans: dict[int, list[Span]] = {rank: [] for rank in self.listings}
        clocks = dict.fromkeys(self.listings, 0.0)

        def add(rank: int, start: float, seconds: float) -> None:
            spans[rank].append(self.span(rank, len(spans[rank]), start, seconds))
            clocks[rank] = start + seconds

        for meeting in (*self.exchanges, None):
            for (rank, made), own in zip(self.listings.items(), times):
                while (at := len(spans[rank])) < len(own) and isinstance(made.instructions[at], Call):
                    add(rank, clocks[rank], own[at][1])
            if meeting is not None:
                start = max(clocks.values())
                for rank, own in zip(self.listings, times):
                    add(rank, start, own[len(spans[rank])][1] / len(times))
        return [span for own in spans.values() for span in own]

    def drop(self, rank: int, at: int, values: dict[Any, Any]) -> None:
        """Let go of the values that the instruction was the last to read."""
        for number in self.dead[rank][at]:
            values.pop(number, None)

    def span(self, rank: int, position: int, start: float, seconds: float) -> Span:
        instruction = self.listings[rank].instructions[position]
        event = self.events[rank][position]
        lane, kind, received = _lane(event)
        if (
            isinstance(instruction, EXCHANGES)
            and not isinstance(instruction, DrawExchange)
            and not event.wire
        ):
            lane, kind = "wait", "wait"
        return Span(rank, lane, event.name, kind, start, seconds, str(event.origin), received)


def _dead_after(made: Listing) -> list[tuple[int, ...]]:
    """The values that each instruction is the last to read."""
    last = last_uses(made.instructions, made.outputs)
    dead: list[list[int]] = [[] for _ in made.instructions]
    for number, at in last.items():
        if at < len(dead):
            dead[at].append(number)
    return [tuple(numbers) for numbers in dead]


def _lane(event: Event) -> tuple[str, str, int]:
    if event.wire is None:
        return COMPUTE, event.region, 0
    return event.wire.axis, event.wire.kind, event.wire.received


def _modelled(events: Sequence[Event], rank: int, rates: Rates) -> Iterator[Span]:
    at = 0.0
    for event in events:
        lane, kind, received = _lane(event)
        seconds = rates.seconds(event)
        yield Span(rank, lane, event.name, kind, at, seconds, str(event.origin), received)
        at += seconds


def _copies(inputs: Sequence[Sequence[Tensor]], places: frozenset[int]) -> list[list[Tensor]]:
    """The inputs of each rank, those at `places` in memory of their own: what lay together still does."""
    copied: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in copied:
            flat = tensor.new_empty(0)
            flat.set_(storage.clone())
            copied[key] = flat
        return copied[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    pick: Callable[[int, Tensor], Tensor] = lambda at, tensor: copy(tensor) if at in places else tensor  # noqa: E731
    return [[pick(at, tensor) for at, tensor in enumerate(own)] for own in inputs]


__all__ = ["Span", "Timeline", "timeline"]
