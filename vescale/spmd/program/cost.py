"""Cost: what a rank computes, touches and sends, from its instructions; and an estimate of the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby

from .replay import Event


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind over one axis (several joined by `+`); bytes of the rank."""

    kind: str
    axis: str
    count: int
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What some instructions of a rank cost. A collective's bytes are on the wire, not in bytes_accessed."""

    instructions: int
    flops: int
    bytes_accessed: int
    collectives: int
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second: operations, bytes of memory, bytes on the wire; seconds to start.

    The defaults are round numbers near those of one accelerator of 2024 in bfloat16. They are an
    assumption, stated in what is drawn with them, and no measurement.
    """

    flops: float = 4e14
    memory: float = 3e12
    wire: float = 2e11
    latency: float = 5e-6

    def seconds(self, event: Event) -> float:
        """The longer of computing and touching memory, or the time on the wire."""
        if event.wire is not None:
            return self.latency + max(event.wire.received, event.wire.sent) / self.wire
        return max(event.flops / self.flops, event.bytes_accessed / self.memory)

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e12:g} Tflop/s, memory {self.memory / 1e9:g} GB/s, "
            f"wire {self.wire / 1e9:g} GB/s + {self.latency * 1e6:g} us"
        )


REGIONS = ("forward", "backward", "update", "other")


@dataclass(frozen=True, slots=True)
class CostAnalysis:
    """What a program costs one rank, in all, by region and on the wire; prints as a table.

    `flops` are those of matmuls, convolutions and attention by formula (torch.utils.flop_counter), a
    multiplication and an addition each; what else there is goes by the bytes that it reads and writes.
    `received` and `sent` are bytes on the wire, with "ordered" reductions.
    """

    rank: int
    events: tuple[Event, ...]

    @property
    def total(self) -> Cost:
        """Of all instructions."""
        return _cost(self.events)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self.total.flops

    @property
    def bytes_accessed(self) -> int:
        """Bytes of memory that are read or written by other than collectives."""
        return self.total.bytes_accessed

    @property
    def regions(self) -> dict[str, Cost]:
        """By region: forward, backward, update (behind a backward), other."""
        found = {name: [event for event in self.events if event.region == name] for name in REGIONS}
        return {name: _cost(tuple(events)) for name, events in found.items() if events}

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives by kind and axis."""
        moved = [event.wire for event in self.events if event.wire is not None]
        moved.sort(key=lambda wire: (wire.kind, wire.axis))
        found = []
        for (kind, axis), group in groupby(moved, key=lambda wire: (wire.kind, wire.axis)):
            wires = list(group)
            sums = sum(wire.received for wire in wires), sum(wire.sent for wire in wires)
            found.append(Traffic(kind, axis, len(wires), *sums))
        return tuple(found)

    def seconds(self, rates: Rates | None = None) -> float:
        """An estimate: each instruction by the rates, one after the other."""
        return sum(map((rates or Rates()).seconds, self.events))

    def __str__(self) -> str:
        names = [field.name for field in fields(Cost)]
        rows = [[f"rank {self.rank}", *names]]
        for name, cost in {**self.regions, "all": self.total}.items():
            rows.append([name, *(f"{getattr(cost, field):,}" for field in names)])
        wires = [["collective", "axis", "count", "received", "sent"]]
        for entry in self.traffic:
            counts = (f"{number:,}" for number in (entry.count, entry.received, entry.sent))
            wires.append([entry.kind, entry.axis, *counts])
        return "\n".join([*_table(rows, 1), *(_table(wires, 2) if len(wires) > 1 else [])])


def _cost(events: tuple[Event, ...]) -> Cost:
    wires = [event.wire for event in events if event.wire is not None]
    return Cost(
        len(events),
        sum(event.flops for event in events),
        sum(event.bytes_accessed for event in events if event.wire is None),
        len(wires),
        sum(wire.received for wire in wires),
        sum(wire.sent for wire in wires),
    )


def _table(rows: list[list[str]], words: int) -> Iterator[str]:
    """Lines of columns as wide as they need to be; the first `words` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            cell.ljust(width) if at < words else cell.rjust(width) for at, (cell, width) in enumerate(cells)
        ).rstrip()
