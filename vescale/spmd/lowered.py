"""Lowered: a decided program that has not run, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .lanes import widths
from .layout import AbstractMesh
from .program.cost import CostAnalysis, Rates
from .program.memory import MemoryAnalysis, kinds_of, memory_analysis
from .program.partition import Local, Move, Partitioned, Wait, operands, results
from .program.program import Collectives, as_text, collectives, final_listing, source_of
from .program.replay import Replay, replay
from .program.wire import wires


@dataclass(frozen=True)
class Inputs:
    """What is known of a program's inputs: `paths` by value, which are parameters, which are consumed."""

    paths: Mapping[int, str] = field(default_factory=dict)
    parameters: frozenset[int] = frozenset()
    donated: frozenset[int] = frozenset()
    device: torch.device | None = None


class Lowered:
    """What `fn` does on the mesh, for arguments like those given: decided, for all ranks, and not run.

    With lanes these are the ranks that the program is decided for: collectives, costs and memory are those of
    a lane on a rank of its own.

    >>> import torch, vescale as vs
    >>> mesh = vs.AbstractMesh(("dp",), (4096,))
    >>> plan = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))})
    >>> x, w = torch.empty(8192, 64, device="meta"), torch.empty(64, 32, device="meta")
    >>> lowered = vs.parallelize(lambda x, w: (x @ w).sum(), plan).lower(x, w)
    >>> lowered.cost_analysis().flops == 2 * 2 * 64 * 32
    True
    >>> print(lowered.memory_analysis())  # doctest: +ELLIPSIS
    peak of rank 0 ...
    """

    def __init__(
        self, partitioned: Partitioned, inputs: Inputs | None = None, hosts: AbstractMesh | None = None
    ) -> None:
        self._partitioned, self._inputs = partitioned, inputs or Inputs()
        self._hosts = None if hosts == partitioned.mesh else hosts
        self._replays: dict[int, Replay] = {}

    @property
    def buckets(self) -> tuple[Any, ...]:
        """The parameters that are gathered and reduced together, those of `Plan(fsdp=)`."""
        return tuple(self._partitioned.facts.notes.get("buckets", ()))

    def as_text(self) -> str:
        """The program, one instruction a line, with the layout of each value and where it came from."""
        hosted = [] if self._hosts is None else [_lanes(self._partitioned.mesh, self._hosts)]
        return "\n".join([*hosted, *map(str, self.buckets), as_text(self._partitioned)])

    def source(self, rank: int = 0) -> str:
        """The generated Python of a rank of the mesh: with lanes, of all that it hosts."""
        return source_of(self._partitioned, rank, self._hosts)

    def collectives(self) -> Collectives:
        """Each collective in order: kind, axes, bytes that rank 0 receives, cause and source line."""
        return collectives(self._partitioned)

    def cost_analysis(self, rank: int = 0) -> CostAnalysis:
        """What a rank computes, touches and sends: floating-point operations and bytes, by region."""
        return CostAnalysis(rank, self._replay(rank).events)

    def memory_analysis(self, rank: int = 0) -> MemoryAnalysis:
        """What a rank holds, instruction by instruction, and the peak by kind, in bytes."""
        inputs, partitioned = self._inputs, self._partitioned
        kinds = {
            number: "parameters" if number in inputs.parameters else "arguments"
            for number in partitioned.inputs
        }
        gathered = set(inputs.parameters)
        for step in partitioned.steps:
            # A bucket's shard is made of parameters, and its views of what was gathered.
            if set(operands(step)) & gathered and isinstance(step, (Move, Wait, Local)):
                gathered.update(results(step))
        named = dict.fromkeys(gathered - partitioned.gradients, "gathered parameters") | kinds
        kind_of = kinds_of(named, partitioned.gradients, partitioned.outputs)
        return memory_analysis(self._replay(rank), rank, kind_of, inputs.paths)

    def visualize(self, path: str | Path, rank: int = 0, rates: Rates | None = None) -> None:
        """Draw the memory of a rank over time, and what it computes and exchanges, to a PNG or SVG file.

        Times are estimates, by `rates` (operations and bytes a second), which the picture states. Raises
        ArgumentError when matplotlib is not installed.
        """
        from .draw_program import draw

        draw(self.cost_analysis(rank), self.memory_analysis(rank), path, rates or Rates())

    def _replay(self, rank: int) -> Replay:
        if rank not in self._replays:
            made, inputs = final_listing(self._partitioned, rank), self._inputs
            held = [number for number in made.inputs if number not in inputs.donated]
            self._replays[rank] = replay(
                made.instructions,
                made.inputs,
                made.outputs,
                made.looks,
                wires(self._partitioned, rank),
                held=held,
                device=inputs.device,
            )
        return self._replays[rank]


def _lanes(mesh: AbstractMesh, hosts: AbstractMesh) -> str:
    wide = {axis: mesh.axis_size(axis) for axis in widths(mesh, hosts)}
    told = ", ".join(f"{axis}={count}" for axis, count in wide.items())
    return f"lanes {told}, {mesh.size // hosts.size} on each rank of the mesh {hosts}"
