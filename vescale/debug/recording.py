"""Recordings, read: the files that `record` wrote, of one process or of many, as one run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from .._errors import ArgumentError, explain
from .fingerprint import first_of
from .record import FORMAT

Place = tuple[int, int]  # which instruction, and which of its results


@dataclass(frozen=True)
class Graph:
    """What was traced, without constraints, its values numbered as they come: the same for every plan."""

    nodes: list[dict[str, Any]]
    numbers: Mapping[int, int]  # of a value, as it was traced
    operands: list[list[int]]
    results: list[list[int]]
    lines: list[str]

    @classmethod
    def of(cls, inputs: list[int], nodes: list[dict[str, Any]]) -> Graph:
        numbers = {value: number for number, value in enumerate(inputs)}
        kept, operands, results, lines = [], [], [], []
        count = len(inputs)
        for node in nodes:
            outs = [out and out[0] for out in node["results"]]
            if node["op"] == "vescale.constrain.default":
                numbers[outs[0]] = numbers[node["operands"][0]]
                continue
            made = []
            for out in outs:
                if out is not None:
                    numbers[out] = count
                    made.append(count)
                    count += 1
            kept.append(node)
            operands.append([numbers[value] for value in node["operands"]])
            results.append(made)
            arguments = re.sub(r"\bv(\d+)\b", lambda m: f"v{numbers[int(m[1])]}", node["arguments"])
            looks = ", ".join(f"v{numbers[out[0]]}: {out[1]}" if out else "_" for out in node["results"])
            lines.append(f"{looks} = {node['op']}({arguments})")
        return cls(kept, numbers, operands, results, lines)


@dataclass(frozen=True)
class Program:
    """A program of a run: the graph and the instructions."""

    head: dict[str, Any]
    nodes: list[dict[str, Any]]
    instructions: list[dict[str, Any]]
    known_holders: dict[frozenset[str], dict[int, int]] = field(
        default_factory=dict
    )  # by the axes that split

    @property
    def mesh(self) -> dict[str, int]:
        return self.head["mesh"]

    @property
    def mesh_text(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @cached_property
    def graph(self) -> Graph:
        return Graph.of(self.head["inputs"], self.nodes)

    @cached_property
    def places(self) -> list[Place]:
        """Where each fingerprint of a call belongs."""
        return [
            (at, which)
            for at, instruction in enumerate(self.instructions)
            for which, value in enumerate(instruction["results"])
            if value["recorded"]
        ]

    def identity(self, at: int) -> tuple[Any, ...]:
        """What tells an instruction from the others: ranks may run other ones inside a mapped function."""
        return tuple(self.instructions[at][name] for name in ("step", "inner", "op", "line"))

    @cached_property
    def named(self) -> dict[tuple[Any, ...], int]:
        """The instructions by identity."""
        return {self.identity(at): at for at in range(len(self.instructions))}

    @cached_property
    def makers(self) -> dict[int, Place]:
        """The instruction that makes each value of the program."""
        return {
            value["value"]: (at, which)
            for at, instruction in enumerate(self.instructions)
            for which, value in enumerate(instruction["results"])
        }

    @cached_property
    def wholes(self) -> dict[int, list[Place]]:
        """The places at which each value of the graph is seen without a pending reduction, in order."""
        found: dict[int, list[Place]] = {}
        for place in self.places:
            value = self.value(place)
            if value["source"] in self.graph.numbers and value["layout"] is not None and not value["pending"]:
                found.setdefault(self.graph.numbers[value["source"]], []).append(place)
        for value, base in self.viewed.items():
            if value not in found and base in found and value in self.reshaped:
                found[value] = found[base]
        return found

    @cached_property
    def reshaped(self) -> frozenset[int]:
        """The values of the graph that have the fingerprint of what they are views of, of the same order."""
        found = set()
        for number, place in self.makers.items():
            while (at := self.makers.get(number)) and self.instructions[at[0]]["reshape"]:
                number = self.instructions[at[0]]["operands"][0]
            source = self.value(place)["source"]
            if number == self.seen(number) and source in self.graph.numbers:
                found.add(self.graph.numbers[source])
        return frozenset(found)

    def seen(self, number: int) -> int:
        """The value whose fingerprint tells of a value: of what it is a view, through views."""
        while (place := self.makers.get(number)) and self.instructions[place[0]]["view"]:
            number = self.instructions[place[0]]["operands"][0]
        return number

    @cached_property
    def viewed(self) -> dict[int, int]:
        """Of values of the graph that are views, the one whose fingerprint tells of them."""
        found = {}
        for number, place in self.makers.items():
            source = self.value(place)["source"]
            base = self.makers.get(self.seen(number))
            if base is not None and base != place and source in self.graph.numbers:
                other = self.value(base)["source"]
                if other in self.graph.numbers:
                    found[self.graph.numbers[source]] = self.graph.numbers[other]
        return found

    @cached_property
    def text(self) -> list[str]:
        """The instructions as far as they decide bits: not where they came from."""
        kept = ("op", "operands", "results", "inner")
        return [
            json.dumps(
                [
                    instruction[name]
                    if name != "results"
                    else [[value[k] for k in ("value", "look", "layout")] for value in instruction["results"]]
                    for name in kept
                ]
            )
            for instruction in self.instructions
        ]

    def value(self, place: Place) -> dict[str, Any]:
        return self.instructions[place[0]]["results"][place[1]]

    def name(self, place: Place) -> str:
        """What to call a result: the argument's path, or its number and what made it."""
        value, instruction = self.value(place), self.instructions[place[0]]
        if instruction["step"] < 0:
            first = len(instruction["results"]) - self.head["constants"]
            return value["name"] or f"closed-over tensor {place[1] - first}"
        return f"v{value['value']} of {instruction['op']}"

    def holders(self, place: Place) -> dict[int, int]:
        """Of each rank the first one that holds the same part; none for a pending or a local value."""
        value = self.value(place)
        if value["split"] is None or value["pending"]:
            return {}
        split = frozenset(value["split"])
        if split not in self.known_holders:
            ranks = range(math.prod(self.mesh.values()))
            self.known_holders[split] = {rank: first_of(self.mesh, set(split), rank) for rank in ranks}
        return self.known_holders[split]


@dataclass
class Call:
    """A call of a run, by place and rank: fingerprints, and statistics where they were asked for."""

    program: int
    generators: dict[str, str]
    marks: dict[Place, dict[int, str]] = field(default_factory=dict)
    figures: dict[Place, dict[int, tuple[float, float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The recording in a directory."""

    directory: Path
    programs: list[Program]
    calls: list[Call]

    def whole(self, call: Call, place: Place) -> str | None:
        """The fingerprint of a global value; None where it is pending, or a rank's part is not there."""
        holders, marks = self.programs[call.program].holders(place), call.marks.get(place, {})
        owners = set(holders.values())
        if not owners or not owners <= set(marks):
            return None
        return f"{sum(int(marks[rank], 16) for rank in owners) % 2**64:016x}"

    def figures(self, call: Call, place: Place) -> tuple[float, float, float] | None:
        """The statistics of a global value, likewise: (norm, largest magnitude, elements not finite)."""
        holders, rows = self.programs[call.program].holders(place), call.figures.get(place, {})
        owners = set(holders.values())
        if not owners or not owners <= set(rows):
            return None
        squares, largest, odd = zip(*(rows[rank] for rank in owners))
        return sum(squares) ** 0.5, max(largest), sum(odd)

    def strays(self, call: Call, place: Place) -> tuple[int, ...]:
        """The ranks that hold other bits than the first rank that holds the same part."""
        marks = call.marks.get(place, {})
        holders = self.programs[call.program].holders(place)
        return tuple(
            rank
            for rank, first in holders.items()
            if marks.get(rank, "") != marks.get(first, "") and rank in marks and first in marks
        )


def read(directory: str | Path) -> Run:
    """The recording in `directory`. Raises ArgumentError when there is none, or one of another format."""
    where = Path(directory)
    paths = sorted(where.glob("rank-*.index.jsonl"), key=lambda path: int(path.name[5:].split(".")[0]))
    if not paths:
        raise ArgumentError(
            explain(
                f"no recording in {where}",
                rule="a recording is rank-*.index.jsonl and rank-*.calls.jsonl",
                remedy="vs.debug.record(step, directory), and calls of what it returns",
            )
        )
    programs: list[Program] = []
    calls: list[Call] = []
    for path in paths:
        own = list(_programs(path))
        programs = programs or own
        for number, line in enumerate(_lines(Path(str(path).replace(".index.", ".calls.")))):
            if number == len(calls):
                calls.append(Call(line["program"], line["generators"]))
            call, program = calls[number], own[line["program"]]
            known = programs[line["program"]].named
            for name, into in (("fingerprints", call.marks), ("statistics", call.figures)):
                for place, row in zip(program.places, line.get(name, ())):
                    at = known.get(program.identity(place[0]))
                    if at is not None:
                        into.setdefault((at, place[1]), {}).update(zip(program.value(place)["ranks"], row))
    return Run(where, programs, calls)


def _programs(path: Path) -> Iterator[Program]:
    for _, group in groupby(_lines(path), key=lambda line: line["program"]):
        head, *lines = group
        if head.get("format") != FORMAT:
            raise ArgumentError(
                explain(
                    f"{path}, of format {head.get('format')}",
                    rule=f"this version reads format {FORMAT}",
                    remedy="record the run again",
                )
            )
        nodes = [line for line in lines if "instruction" not in line]
        yield Program(head, nodes, [line for line in lines if "instruction" in line])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open() as file:
            yield from map(json.loads, file)
