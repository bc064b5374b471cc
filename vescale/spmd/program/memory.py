"""Memory: how many bytes a rank holds while its program runs, by kind; a function of its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .ir import Origin
from .replay import Buffer, Event, Replay

# In the order in which they are drawn, the lasting ones first.
KINDS = (
    "parameters",
    "arguments",
    "gathered parameters",
    "gradients",
    "results",
    "activations",
    "temporaries",
    "collective buffers",
)


@dataclass(frozen=True, slots=True)
class Held:
    """One piece of memory at the peak."""

    nbytes: int
    kind: str
    name: str
    origin: Origin

    def __str__(self) -> str:
        return f"{self.nbytes:>15,} B  {self.kind:<20} {self.name}  {self.origin}".rstrip()


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """The memory of one rank, instruction by instruction, in bytes; prints as a table.

    parameters           arguments that the plan's `params` rules speak of, at rest
    arguments            other arguments and closed-over tensors
    gathered parameters  parameters in the layout in use, where that is another one
    gradients            of parameters, before and after their reduction
    results              what the call returns
    activations          made in the forward pass and read in the backward pass
    temporaries          all else, and what an instruction holds while it runs
    collective buffers   packed copies to send, and what is received where that isn't the result

    Values go after their last use. A view keeps its base; arguments stay until the end, unless they are
    donated. Not counted: workspaces inside a kernel (of a matmul, or of a random draw), what an allocator
    keeps or rounds up, what the backend of the collectives holds, the caller's global tensor from which a
    plain argument is cut, and, where a result shares memory with a plain argument, the copy that is made
    of it; what the last collective received, which is held until the next one where that comes later than
    its last use. On a simulated mesh all ranks' memory is in one process.
    """

    rank: int
    timeline: tuple[int, ...]  # after each instruction
    peaks: tuple[int, ...]  # while it runs
    kinds: Mapping[str, tuple[int, ...]]  # while it runs, by kind; they sum to `peaks`
    events: tuple[Event, ...]
    largest: tuple[Held, ...]  # at the peak

    @property
    def at(self) -> int:
        """The instruction at the peak."""
        return max(range(len(self.peaks)), key=self.peaks.__getitem__, default=0)

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.peaks, default=0)

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What is held at the peak; the kinds sum to it."""
        return {kind: series[self.at] for kind, series in self.kinds.items() if self.peaks}

    @property
    def peak_origin(self) -> Origin:
        """Module and source line of the instruction at the peak."""
        return self.events[self.at].origin if self.events else Origin()

    def __str__(self) -> str:
        lines = [f"peak of rank {self.rank}{self.peak:>24,} B"]
        lines += [f"  {kind:<20}{count:>15,} B" for kind, count in self.peak_by_kind.items() if count]
        if self.events:
            event = self.events[self.at]
            lines.append(f"at instruction {self.at} of {len(self.events)}: {event.name}  {event.origin}")
        return "\n".join([*lines, "the largest then:", *map(str, self.largest)])


def memory_analysis(
    replayed: Replay, rank: int, kind_of: Mapping[int, str], names: Mapping[int, str], largest: int = 8
) -> MemoryAnalysis:
    """The memory of a replayed rank. `kind_of` and `names` say what is known of its values."""
    events, count = replayed.events, len(replayed.events)
    backward = [at for at, event in enumerate(events) if event.region == "backward"]
    kinds = [_kind(buffer, kind_of, events, backward) for buffer in replayed.buffers]
    running: dict[str, tuple[int, ...]] = {}
    after = [0] * count
    for kind in KINDS:
        mine = [buffer for buffer, other in zip(replayed.buffers, kinds, strict=True) if other == kind]
        while_it_runs = _series(((b.nbytes, max(b.born, 0), b.dies + 1) for b in mine), count)
        left = _series(((b.nbytes, max(b.born, 0), b.dies) for b in mine), count)
        after = [total + more for total, more in zip(after, left, strict=True)]
        running[kind] = tuple(
            held + (event.scratch if kind == _scratch_kind(event) else 0)
            for held, event in zip(while_it_runs, events, strict=True)
        )
    peaks = tuple(map(sum, zip(*running.values(), strict=True)))
    at = max(range(count), key=peaks.__getitem__, default=-1)
    there = [(b, k) for b, k in zip(replayed.buffers, kinds, strict=True) if b.born <= at <= b.dies]
    there.sort(key=lambda pair: -pair[0].nbytes)
    held = tuple(_held(buffer, kind, events, names) for buffer, kind in there[:largest])
    return MemoryAnalysis(rank, tuple(after), peaks, running, events, held)


def _series(spans: Sequence[tuple[int, int, int]] | object, count: int) -> list[int]:
    """The sum at each instruction of (bytes, first, behind the last)."""
    change = [0] * (count + 1)
    for nbytes, start, stop in spans:  # type: ignore[attr-defined]
        if start < stop:
            change[min(start, count)] += nbytes
            change[min(stop, count)] -= nbytes
    return list(accumulate(change))[:count]


def _scratch_kind(event: Event) -> str:
    return "collective buffers" if event.wire is not None else "temporaries"


def _kind(
    buffer: Buffer, kind_of: Mapping[int, str], events: Sequence[Event], backward: Sequence[int]
) -> str:
    known = {kind_of[value] for value in buffer.values if value in kind_of}
    for kind in ("parameters", "arguments", "gradients", "gathered parameters", "results"):
        if kind in known:
            return kind
    read_later = bool(backward) and backward[0] <= buffer.dies
    made_before = 0 <= buffer.born < len(events) and events[buffer.born].region == "forward"
    return "activations" if made_before and read_later else "temporaries"


def _held(buffer: Buffer, kind: str, events: Sequence[Event], names: Mapping[int, str]) -> Held:
    name = next((names[value] for value in buffer.values if value in names), "")
    if buffer.born < 0:
        return Held(buffer.nbytes, kind, name or f"v{buffer.values[0]}", Origin())
    event = events[buffer.born]
    return Held(buffer.nbytes, kind, f"{name} {event.name}".strip(), event.origin)


def kinds_of(
    inputs: Mapping[int, str], gradients: Counter[int] | frozenset[int], results: Sequence[int | None]
) -> dict[int, str]:
    """The kinds of values by number, where they are known; what an input is goes first."""
    found = {value: "results" for value in results if value is not None}
    found |= dict.fromkeys(gradients, "gradients")
    return found | dict(inputs)
