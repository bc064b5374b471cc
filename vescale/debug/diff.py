"""Diff: where two recorded runs part, or the replicas of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import ArgumentError, explain
from .recording import Call, Place, Program, Run, read


@dataclass(frozen=True)
class Operand:
    """An operand of what differs: what it is called, and whether it is "equal", "other" or "not seen"."""

    name: str
    state: str


@dataclass(frozen=True)
class Divergence:
    """The first thing that differs, and why it is the origin.

    `instruction` is a line of the index of run `a`, None where functions differ. Its `op` made `value`, of
    which `ranks` hold other bits (none are named where meshes differ: the global value does). `line`,
    `module` and `region` are those of the op in run `a`. `a` and `b` are fingerprints, or statistics where a
    tolerance was given.
    """

    call: int
    instruction: int | None
    op: str
    value: str
    look: str
    line: str
    module: str
    region: str
    ranks: tuple[int, ...]
    a: str
    b: str
    operands: tuple[Operand, ...]
    reason: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.region, self.module, self.line) if part)
        who = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        at = f", instruction {self.instruction}" if self.instruction is not None else ""
        rows = [
            f"call {self.call}{at}: {self.value} differs{who}",
            f"  made by   {self.op}",
            *([f"  at        {where}"] if where else []),
            *([f"  is        {self.look}"] if self.look else []),
            f"  a         {self.a}",
            f"  b         {self.b}",
            *(f"  operand   {operand.name}: {operand.state}" for operand in self.operands),
            f"  so        {self.reason}",
        ]
        return "\n".join(rows)


@dataclass(frozen=True)
class Diff:
    """What a comparison found: true when there is a `divergence`. Prints as a report.

    `compared` counts the values that were compared, `matched` says how they were matched, and `notes` what
    could not be.
    """

    a: str
    b: str
    calls: int
    compared: int
    matched: str
    divergence: Divergence | None
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.divergence is not None

    def __str__(self) -> str:
        head = f"a: {self.a}\nb: {self.b}" if self.b else f"replicas of {self.a}"
        what = f"{self.compared:,} values of {self.calls} calls, matched by {self.matched}"
        found = str(self.divergence) if self.divergence is not None else f"no difference in {what}"
        return "\n".join([head, found, *(f"note: {note}" for note in self.notes)])


def diff(
    a: str | Path, b: str | Path | None = None, *, tolerance: float | None = None, absolute: float = 0.0
) -> Diff:
    """The first divergence of two recordings, of one run on other meshes or machines, or of two versions.

        diff : (directory, directory) -> Diff

    Runs of the same program on the same mesh are compared instruction by instruction and rank by rank, others
    by the nodes of the traced graph: the global value of each, where no reduction is pending. Of graphs that
    differ the part before the first difference is compared. Bits are compared; with `tolerance`
    instead the norm, the largest magnitude and the number of elements that aren't finite, which agree within
    `tolerance` times the larger one plus `absolute`, for sums that were done in another order.

    With one directory: the first value of which two ranks hold different replicas.

    Raises ArgumentError for a directory without a recording, and for a tolerance of runs that were
    recorded without statistics.
    """
    if b is None:
        return _replicas(read(a))
    runs = read(a), read(b)
    if tolerance is not None:
        for run in runs:
            if any(call.marks and not call.figures for call in run.calls):
                raise ArgumentError(
                    explain(
                        f"{run.directory}, recorded without statistics",
                        where=f"diff(tolerance={tolerance})",
                        rule="a tolerance is for norms and largest magnitudes",
                        remedy="vs.debug.record(step, directory, statistics=True)",
                    )
                )
    return _Comparison(*runs, tolerance, absolute).run()


class _Comparison:
    def __init__(self, a: Run, b: Run, tolerance: float | None, absolute: float) -> None:
        self.a, self.b, self.tolerance, self.absolute = a, b, tolerance, absolute
        self.compared = 0
        self.matched = "instruction"
        self.notes: dict[str, None] = {}

    def run(self) -> Diff:
        count, found = min(len(self.a.calls), len(self.b.calls)), None
        if len(self.a.calls) != len(self.b.calls):
            self.notes[f"a has {len(self.a.calls)} calls, b has {len(self.b.calls)}"] = None
        for number in range(count):
            found = self.compare(number, self.a.calls[number], self.b.calls[number])
            if found is not None:
                break
        names = f"{self.a.directory}", f"{self.b.directory}"
        return Diff(*names, count, self.compared, self.matched, found, tuple(self.notes))

    def compare(self, number: int, a: Call, b: Call) -> Divergence | None:
        ours, theirs = self.a.programs[a.program], self.b.programs[b.program]
        same = (
            ours.mesh == theirs.mesh and ours.text == theirs.text and ours.graph.lines == theirs.graph.lines
        )
        if same:
            return self.by_instruction(number, a, b, ours)
        self.matched = "node of the graph"
        return self.by_node(number, a, b, ours, theirs)

    # The same program: place by place, rank by rank.

    def by_instruction(self, number: int, a: Call, b: Call, program: Program) -> Divergence | None:
        states: dict[Place, str] = {}
        for place in program.places:
            ranks = self.ranks(a, b, place)
            states[place] = "other" if ranks else "equal"
            self.compared += 1
            if not ranks:
                continue
            instruction = program.instructions[place[0]]
            operands = tuple(self.operands(program, instruction["operands"], states))
            reason = self.reason(instruction, operands, a, b, number)
            strays = self.strays(a, b, place)
            shown = [self.shown(run, call, place, ranks[0]) for run, call in ((self.a, a), (self.b, b))]
            return _divergence(number, program, place, ranks, shown, operands, reason + strays)
        return None

    def ranks(self, a: Call, b: Call, place: Place) -> tuple[int, ...]:
        """The ranks whose local values differ."""
        if self.tolerance is None:
            ours, theirs = a.marks.get(place, {}), b.marks.get(place, {})
            return tuple(rank for rank, mark in ours.items() if rank in theirs and mark != theirs[rank])
        rows, others = a.figures.get(place, {}), b.figures.get(place, {})
        return tuple(
            rank
            for rank, row in rows.items()
            if rank in others and not self.close(_rooted(row), _rooted(others[rank]))
        )

    def operands(
        self, program: Program, numbers: Sequence[int], states: dict[Place, str]
    ) -> Iterator[Operand]:
        for number in numbers:
            place = program.makers.get(number)
            if place is None:
                yield Operand(f"v{number}", "not seen")
            else:
                seen = program.makers.get(program.seen(number), place)
                yield Operand(program.name(place), states.get(seen, "not seen"))

    # Other programs: node by node.

    def by_node(self, number: int, a: Call, b: Call, ours: Program, theirs: Program) -> Divergence | None:
        until = _first_other_node(ours, theirs)
        inputs = range(min(len(program.head["inputs"]) for program in (ours, theirs)))
        values = [*inputs, *(value for made in ours.graph.results[:until] for value in made)]
        states: dict[int, str] = {}
        for value in values:
            found = self.strayed(number, a, b, ours, theirs, value, states)
            found = found or self.one_value(number, a, b, ours, theirs, value, states)
            if found is not None:
                return found
        return None if until is None else self.functions(number, ours, theirs, until)

    def functions(self, number: int, ours: Program, theirs: Program, at: int) -> Divergence:
        """The runs are of functions that differ, and nothing differed before."""
        shown = [p.graph.lines[at] if at < len(p.graph.lines) else "the end" for p in (ours, theirs)]
        node = next((p.graph.nodes[at] for p in (ours, theirs) if at < len(p.graph.nodes)), None)
        if shown[0] == shown[1]:
            shown = [f"{len(p.head['inputs'])} tensors given and closed over" for p in (ours, theirs)]
        line, module, region = (node[key] if node is not None else "" for key in ("line", "module", "region"))
        reason = "the functions differ here, and nothing did before; what comes after was not compared"
        op = node["op"] if node is not None else "the caller"
        what = f"node {at} of the graph"
        return Divergence(
            number, None, op, what, "", line, module, region, (), shown[0], shown[1], (), reason
        )

    def strayed(
        self,
        number: int,
        a: Call,
        b: Call,
        ours: Program,
        theirs: Program,
        value: int,
        states: dict[int, str],
    ) -> Divergence | None:
        """The divergence of replicas of one value of the graph, in either run."""
        if self.tolerance is not None:
            return None
        for whose, run, call, program in (("a", self.a, a, ours), ("b", self.b, b, theirs)):
            for place in program.wholes.get(value, ()):
                if ranks := run.strays(call, place):
                    marks, first = call.marks[place], program.holders(place)[ranks[0]]
                    operands = tuple(self.graph_operands(program, value, states))
                    reason = f"in {whose} replicas differ: rank {first} has {marks[first]}"
                    shown = [marks[ranks[0]] if name == whose else "replicas are equal" for name in "ab"]
                    return _divergence(number, program, place, ranks, shown, operands, reason)
        return None

    def one_value(
        self,
        number: int,
        a: Call,
        b: Call,
        ours: Program,
        theirs: Program,
        value: int,
        states: dict[int, str],
    ) -> Divergence | None:
        """The divergence at the global value of one value of the graph, if there is one."""
        here, there = ours.wholes.get(value, ()), theirs.wholes.get(value, ())
        if not here or not there:
            states[value] = "not seen"
            return None
        equal = self.equal(a, b, here[0], there[0])
        self.compared += equal is not None
        if equal or equal is None:
            states[value] = "equal" if equal else "not seen"
            return None
        made = ours.graph.numbers[ours.value(here[0])["source"]]  # not `value`, where that is a view of it
        operands = tuple(self.graph_operands(ours, made, states))
        instruction = ours.instructions[here[0][0]]
        reason = self.reason(instruction, operands, a, b, number)
        if self.tolerance is None and ours.mesh != theirs.mesh:
            reason += (
                f"; the meshes are {ours.mesh_text} and {theirs.mesh_text}: where sums are done in another "
                "order bits may differ, and diff(tolerance=) looks beyond that"
            )
        shown = [self.shown(self.a, a, here[0]), self.shown(self.b, b, there[0])]
        return _divergence(number, ours, here[0], (), shown, operands, reason)

    def equal(self, a: Call, b: Call, here: Place, there: Place) -> bool | None:
        """Whether a global value is the same in both; None when it is not all there."""
        if self.tolerance is None:
            ours, theirs = self.a.whole(a, here), self.b.whole(b, there)
            return None if ours is None or theirs is None else ours == theirs
        rows, others = self.a.figures(a, here), self.b.figures(b, there)
        return None if rows is None or others is None else self.close(rows, others)

    def graph_operands(self, program: Program, value: int, states: dict[int, str]) -> Iterator[Operand]:
        graph = program.graph
        at = next((at for at, made in enumerate(graph.results) if value in made), None)
        for operand in () if at is None else dict.fromkeys(graph.operands[at]):
            places = program.wholes.get(operand)
            name = program.name(places[0]) if places else f"value {operand} of the graph"
            state = states.get(operand, "not seen")
            if state == "not seen" and operand in program.viewed:
                state = states.get(program.viewed[operand], state)
            yield Operand(name, state)

    # Both.

    def close(self, ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
        assert self.tolerance is not None
        *sizes, odd = zip(ours, theirs)
        near = all(abs(x - y) <= self.tolerance * max(abs(x), abs(y)) + self.absolute for x, y in sizes)
        return near and odd[0] == odd[1]

    def shown(self, run: Run, call: Call, place: Place, rank: int | None = None) -> str:
        if self.tolerance is None:
            return call.marks[place][rank] if rank is not None else run.whole(call, place) or "?"
        row = _rooted(call.figures[place][rank]) if rank is not None else run.figures(call, place)
        assert row is not None
        return f"norm {row[0]:.9g}, largest {row[1]:.9g}, not finite {row[2]:g}"

    def reason(
        self, instruction: dict[str, Any], operands: Sequence[Operand], a: Call, b: Call, number: int
    ) -> str:
        if instruction["step"] < 0:
            before = f", and all that call {number - 1} made was equal" if number else ""
            return f"the runs were given other values{before}"
        if instruction["op"].startswith("draw "):
            moved = [name for name, state in a.generators.items() if b.generators.get(name) != state]
            if moved:
                return f"{', '.join(moved)} starts the call in another state"
            return "it draws from a generator that was in the same state when the call began"
        if not operands:
            return "it reads no value, and makes another one"
        if all(operand.state == "equal" for operand in operands):
            return "every operand is equal in both, and the result is not: it begins here"
        return "no operand differs as far as seen: it begins here, or in one that is not seen"

    def strays(self, a: Call, b: Call, place: Place) -> str:
        told = ""
        for whose, run, call in (("a", self.a, a), ("b", self.b, b)):
            if ranks := run.strays(call, place):
                first = run.programs[call.program].holders(place)[ranks[0]]
                who = ", ".join(map(str, ranks))
                told += f"; in {whose} rank {who} holds other bits than rank {first}, of the same elements"
        return told


def _first_other_node(ours: Program, theirs: Program) -> int | None:
    """The first node in which two graphs differ; None when they are the same."""
    a, b = ours.graph.lines, theirs.graph.lines
    if len(ours.head["inputs"]) != len(theirs.head["inputs"]):
        return 0
    shorter = min(len(a), len(b))
    return next((at for at in range(shorter) if a[at] != b[at]), None if len(a) == len(b) else shorter)


def _rooted(row: Sequence[float]) -> tuple[float, ...]:
    squares, *rest = row
    return (squares**0.5, *rest)


def _divergence(
    number: int,
    program: Program,
    place: Place,
    ranks: tuple[int, ...],
    shown: Sequence[str],
    operands: tuple[Operand, ...],
    reason: str,
) -> Divergence:
    instruction, value = program.instructions[place[0]], program.value(place)
    layout = f" {value['layout']}" if value["layout"] is not None else ", local to each rank"
    return Divergence(
        number,
        place[0],
        "the caller" if instruction["step"] < 0 else instruction["op"],
        program.name(place),
        f"{value['look']}{layout} on {program.mesh_text}",
        instruction["line"],
        instruction["module"],
        instruction["region"],
        ranks,
        shown[0],
        shown[1],
        operands,
        reason,
    )


def _replicas(run: Run) -> Diff:
    """One run against itself: the first value whose replicas differ."""
    compared = 0
    for number, call in enumerate(run.calls):
        program = run.programs[call.program]
        for place in program.places:
            compared += 1
            if not (ranks := run.strays(call, place)):
                continue
            first, marks = program.holders(place)[ranks[0]], call.marks[place]
            operands = tuple(
                Operand(program.name(at), "equal")  # or it would have been found before
                for at in map(program.makers.get, program.instructions[place[0]]["operands"])
                if at is not None
            )
            shown = [f"{marks[first]} on rank {first}", f"{marks[ranks[0]]} on rank {ranks[0]}"]
            reason = "ranks that hold the same elements hold other bits; before this all were equal"
            found = _divergence(number, program, place, ranks, shown, operands, reason)
            return Diff(str(run.directory), "", len(run.calls), compared, "rank", found)
    return Diff(str(run.directory), "", len(run.calls), compared, "rank", None)


__all__ = ["Diff", "Divergence", "Operand", "diff"]
