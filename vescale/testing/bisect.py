"""Which instruction of a program is the first whose output differs from plain torch, and whether it may.

The program of a call is run step by step beside the plain run of its graph. Of each step two things are
known: what the graph's value is (`first`: where bits part for the first time), and what the op makes of the
values that this very step read (`fault`: a step that doesn't do what it says). A sum in another order makes
everything behind it differ, and so hides a fault from the first comparison, but not from the second. Where
every step is right the passes over each rank's listing are looked at, then the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from ..spmd.observe import entered, ranks_of
from ..spmd.parallelize import Decision, Entry, Parallelized, drawing
from ..spmd.program import passes
from ..spmd.program.emit import EXCHANGES, Call, Listing
from ..spmd.program.ir import Node, Ref
from ..spmd.program.partition import Compute, Draw, Map, Move, Wait
from ..spmd.program.plain import PlainNode, run_node, run_plainly
from ..spmd.program.program import as_lines, bind_steps, listing, step_lines
from ..spmd.program.replay import name_of
from ..spmd.program.stepwise import Observation, Stepwise, Value, call, together
from .compare import Difference, difference, wording
from .divergence import Divergence
from .op_by_op import first_op
from .promises import ROUNDING, excuse, size_of
from .running import Fn, Mode, Step, own_generators, replicas

SEVERAL = "a value that is pending on several axes is reduced axis by axis; these bits are not promised"


def first_divergence(fn: Fn, mode: Mode, on_mesh: Parallelized, plain: Step) -> Divergence | None:
    """Where the last call of `on_mesh` parted from the plain step `plain`; None when nothing can be told."""
    state = torch.get_rng_state()
    try:
        torch.set_rng_state(plain.before)
        if not mode.static:
            return first_op(on_mesh, plain)
        return _Static(on_mesh, plain).look()
    finally:
        torch.set_rng_state(state)


class _Found(Exception):
    """A fault: the rest of the program needs no look."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence


class _Static:
    """One look at the program that a call ran."""

    def __init__(self, on_mesh: Parallelized, plain: Step) -> None:
        self.on_mesh, self.plain = on_mesh, plain
        self.entry: Entry = on_mesh._cache.last()
        self.decision: Decision = self.entry.decision
        self.graph, self.partitioned = self.decision.graph, self.decision.partitioned
        self.signature = on_mesh._arguments.bind(plain.args, {})
        self.hidden = [get() for get in self.entry.closed_over]
        self.values: dict[int, Tensor] = {}  # of the graph, plainly
        self.aliases = {
            out: node.args[0].id
            for node in self.graph.nodes
            if node.op.name() == "vescale::constrain"
            for out in node.outs
            if out is not None
        }
        self.locals: dict[int, dict[int, Tensor]] = {}  # by value and rank, as each step left them
        self.keys: dict[int, int] = {}  # which value of the graph a value of the program is
        self.first: Divergence | None = None

    def look(self) -> Divergence | None:
        outputs = self.run_graph()
        try:
            self.run_steps()
        except _Found as found:
            return found.divergence
        unlike = self.unlike_fn(outputs)
        if unlike is not None:
            return unlike
        return self.first or self.after_passes() or self.stale()

    # What the graph's values are.

    def leaves(self) -> list[Any]:
        """The leaves of the call, generators in the state that the call found them in."""
        return own_generators(self.signature.leaves)

    def run_graph(self) -> list[Any]:
        leaves = self.leaves()
        inputs = [leaves[index].detach() for index in self.signature.tensors()]
        given = (*self.graph.inputs, *(value for value, _ in self.graph.hidden))
        self.values.update(zip(given, (*inputs, *self.hidden), strict=True))

        def note(node: PlainNode) -> None:
            self.values.update((number, value.clone()) for number, value in node.results.items())

        before = torch.get_rng_state()
        with drawing(self.entry, leaves):
            outputs = run_plainly(self.graph, inputs, self.hidden, note)
        torch.set_rng_state(before)
        return outputs

    def source(self, number: int | None) -> int | None:
        """The value of the graph, constraints looked through."""
        while number in self.aliases:
            number = self.aliases[number]
        return number

    # The steps.

    def run_steps(self) -> None:
        leaves, mesh = self.leaves(), ranks_of(self.on_mesh)
        inputs = entered(self.on_mesh, self.entry, leaves, self.hidden)
        stepwise = Stepwise(self.partitioned, mesh, self.graph)
        before = torch.get_rng_state()
        with drawing(self.entry, leaves):
            stepwise(inputs, self.watch)
        torch.set_rng_state(before)
        for output, number in zip(self.graph.outputs, self.partitioned.outputs, strict=True):
            if number is None or not isinstance(output, Ref):
                continue
            returned = self.keys.get(number)
            if returned is not None and returned != self.source(output.id):
                why = f"it returns the graph's value v{returned}, where the function returns v{output.id}"
                raise _Found(Divergence("return", "", f"return v{number}", why))

    def watch(self, seen: Observation) -> None:
        if seen.inner is not None:  # a local value of a mapped function: its results are looked at
            return
        self.follow(seen)
        for place, value in enumerate(seen.results):
            if value.is_filling or value.layout is None:
                continue
            if self.partitioned.values[value.number].source is None and value.number not in self.keys:
                continue  # a buffer: memory of a rank's, and no value of the function's
            self.locals[value.number] = {rank: local.clone() for rank, local in value.locals.items()}
            self.check_form(seen, value)
            self.check_value(seen, place, value)

    def follow(self, seen: Observation) -> None:
        """Which of the graph's values the results are, and that the step reads those which its node reads."""
        step = seen.step
        if isinstance(step, (Move, Wait)):
            made = {move.target: self.keys.get(move.source) for move in _moves(step)}
            self.keys.update((target, key) for target, key in made.items() if key is not None)
        elif isinstance(step, Compute):
            node = step.node
            read, meant = [self.keys.get(value.number) for value in seen.operands], list(node.refs())
            pairs = zip(read, map(self.source, meant))
            if len(read) == len(meant) and any(a is not None and a != b for a, b in pairs):
                why = f"it reads the graph's values {read}, where the function has {meant}"
                raise _Found(self.told(seen, why))
            # A node that was put in the place of another one has values that the graph doesn't know.
            if not set(self.made(node)) <= self.values.keys() and set(meant) <= self.values.keys():
                self.values.update(self.made(node, run_node(node, self.values)))
            results = zip(step.results, node.outs)
            self.keys.update((n, out) for n, out in results if n is not None and out is not None)
        else:
            found = {value.number: self.source(value.source) for value in seen.results}
            self.keys.update((number, key) for number, key in found.items() if key is not None)

    @staticmethod
    def made(node: Node, results: Sequence[Any] = ()) -> dict[int, Any]:
        """The values that a node makes, by number."""
        return {out: one for out, one in zip_longest(node.outs, results) if out is not None}

    def check_form(self, seen: Observation, value: Value) -> None:
        """That every rank has a piece of the shape and dtype that were decided, and replicas one value."""
        assert value.layout is not None
        for rank, local in value.locals.items():
            shape, dtype = value.layout.local_shape(rank), value.meta.dtype
            if tuple(local.shape) != shape or local.dtype != dtype:
                held = f"rank {rank} has {local.dtype}{list(local.shape)}"
                raise _Found(self.told(seen, f"{held}, where {dtype}{list(shape)} was decided"))
        if (unlike := replicas(value.whole(), value.layout, value.locals)) is not None:
            rank, apart = unlike
            raise _Found(self.told(seen, f"rank {rank} has not what the layout says: replicas differ", apart))

    def check_value(self, seen: Observation, place: int, value: Value) -> None:
        expected, ours = self.values.get(self.keys.get(value.number, -1)), value.whole()
        if self.first is None and expected is not None and wording(expected, ours) is None:
            apart = difference(expected, ours)
            if apart is not None:
                self.first = self.judged(
                    seen, value, expected, apart, "its operands are those of plain torch"
                )
        if self.first is None:
            return
        if not self.first.excused:
            raise _Found(self.first)
        # Rounding is under way: what remains to be seen is whether the step does what it says.
        own = self.own_result(seen, place)
        if own is not None and wording(own, ours) is None and (apart := difference(own, ours)) is not None:
            judged = self.judged(seen, value, own, apart, "expected is what it makes of what it read")
            if not judged.excused:
                raise _Found(judged)

    def judged(
        self, seen: Observation, value: Value, expected: Tensor, apart: Difference, given: str
    ) -> Divergence:
        """The difference of a result from the one expected of what the step read, and whether it may be."""
        step, excused = seen.step, ""
        if isinstance(step, Compute):
            refs, node = list(step.node.refs()), step.node
            sizes = {ref: size_of(value.whole()) for ref, value in zip(refs, seen.operands)}
            pending = [
                value for value in (*seen.operands, *seen.results) if value.layout and value.layout.partials
            ]
            excused = excuse(node.op, lambda: run_node(node, sizes), value.whole(), expected, bool(pending))
        elif isinstance(step, (Move, Wait)):
            several = any(value.layout and len(value.layout.partials) > 1 for value in seen.operands)
            excused = SEVERAL if several and apart.error <= ROUNDING else ""
            given = f"{given}; moving a value keeps its bits"
        elif isinstance(step, Draw):
            given = "a draw has the bits of one device"
        elif step is None:
            given = f"{value.name or 'a closed-over tensor'} is not placed as it is"
        return self.told(seen, given, apart, excused)

    def own_result(self, seen: Observation, place: int) -> Tensor | None:
        """What the step's op makes of the values that the step read."""
        step = seen.step
        if isinstance(step, (Move, Wait)):
            return seen.operands[place].whole()
        if not isinstance(step, (Compute, Map)) or any(value.layout is None for value in seen.operands):
            return None
        node = step.node if isinstance(step, Compute) else self.graph.nodes[seen.node or 0]
        refs = list(node.refs())
        if len(refs) != len(seen.operands) or not refs:
            return None
        made = run_node(node, dict(zip(refs, (value.whole() for value in seen.operands))))
        return [one for one, number in zip(made, step.results) if number is not None][place]

    def told(
        self, seen: Observation, why: str, apart: Difference | None = None, excused: str = ""
    ) -> Divergence:
        text = "" if seen.step is None else step_lines(seen.step, self.partitioned)[0].split("  # ")[0]
        return Divergence(seen.name, str(seen.origin), text, why, excused, apart)

    # Behind the steps.

    def unlike_fn(self, outputs: Sequence[Any]) -> Divergence | None:
        """Where the graph itself computes something else than the function: a stale program, or a trace gone
        wrong."""
        leaves = _tree.leaves(self.plain.result)
        paths = _tree.paths(self.plain.result)
        if len(leaves) != len(outputs):
            return self.stale()
        for path, expected, got, output in zip(paths, leaves, outputs, self.graph.outputs, strict=True):
            apart = None
            if (found := wording(expected, got)) is None and isinstance(expected, Tensor):
                apart = difference(expected.detach(), got)
            if found is None and (apart is None or apart.error <= 64):
                continue
            stale = self.stale()
            if stale is not None:
                return replace(stale, difference=apart)
            maker = next(
                (n for n in self.graph.nodes if isinstance(output, Ref) and output.id in n.outs), None
            )
            why = (
                f"the traced graph gives the result {path or 'of the function'} other bits, run on one device"
            )
            return Divergence(
                "the trace" if maker is None else str(maker.op),
                "" if maker is None else str(maker.origin),
                "",
                why if found is None else f"{why}: {found}",
                "",
                apart,
            )
        return None

    def stale(self) -> Divergence | None:
        """Whether the program that is kept for the call isn't the one that is decided for it now."""
        fresh = self.on_mesh._decide(self.signature)
        kept, now = (as_lines(one.partitioned, one.graph) for one in (self.decision, fresh))
        for old, new in zip([*kept, "nothing"], [*now, "nothing"]):
            if old != new:
                why = f"a stale program: the cache keeps one for this call in which this is {new!r}"
                why = f"a stale program: decided now, this instruction of the kept program would be: {new}"
                return Divergence("the program cache", "", old, why)
        return None

    def after_passes(self) -> Divergence | None:
        """The first instruction of a rank's listing that has other results than its step, and the pass that
        made it."""
        plain = [listing(self.partitioned, rank) for rank in ranks_of(self.on_mesh).local_ranks]
        for name, after in _one_by_one(plain):
            found = self.run_listings(after)
            if found is not None:
                return replace(
                    found, why=f"the pass {name!r} over the listing of each rank made it so: {found.why}"
                )
        return None

    def run_listings(self, listings: Sequence[Listing]) -> Divergence | None:
        mesh, leaves = ranks_of(self.on_mesh), self.leaves()
        inputs = entered(self.on_mesh, self.entry, leaves, self.hidden)
        ranks = [
            {number: value.clone() for number, value in zip(made.inputs, values, strict=True)}
            for made, values in zip(listings, inputs, strict=True)
        ]
        exchanges = [bound for step in bind_steps(self.partitioned, mesh) for bound in step]
        before = torch.get_rng_state()
        try:
            with drawing(self.entry, leaves), torch.no_grad():
                for instructions in _abreast(listings):
                    if isinstance(instructions[0], EXCHANGES):
                        together(exchanges.pop(0), instructions, ranks)  # type: ignore[arg-type]
                    else:
                        for rank, instruction in enumerate(instructions):
                            if instruction is not None:
                                call(instruction, ranks[rank])  # type: ignore[arg-type]
                    for rank, instruction in enumerate(instructions):
                        if instruction is not None and (
                            found := self.unlike_step(instruction, rank, ranks[rank])
                        ):
                            return found
        finally:
            torch.set_rng_state(before)
        return None

    def unlike_step(self, instruction: Any, rank: int, values: Mapping[int, Tensor]) -> Divergence | None:
        for number in instruction.makes():
            expected = self.locals.get(number, {}).get(rank)
            if expected is None or wording(expected, values[number]) is not None:
                continue
            apart = difference(expected, values[number])
            if apart is not None:
                op = name_of(instruction.fn) if isinstance(instruction, Call) else type(instruction).__name__
                return Divergence(op, str(instruction.origin), "", f"v{number} on rank {rank}", "", apart)
        return None


def _moves(step: Move | Wait) -> Sequence[Move]:
    return [step] if isinstance(step, Move) else step.start.moves


def _one_by_one(listings: Sequence[Listing]) -> Iterator[tuple[str, list[Listing]]]:
    """The listings after each pass more."""
    names = passes.names(passes.LISTING)
    for count, name in enumerate(names, 1):
        with passes.without(*names[count:]):
            yield name, [passes.apply(passes.LISTING, made) for made in listings]


def _abreast(listings: Sequence[Listing]) -> Iterator[list[Any]]:
    """The instructions of all ranks side by side: at exchanges all stop together."""
    at = [0] * len(listings)
    while any(place < len(made.instructions) for place, made in zip(at, listings)):
        row: list[Any] = []
        for place, made in zip(at, listings):
            one = made.instructions[place] if place < len(made.instructions) else None
            row.append(None if isinstance(one, EXCHANGES) else one)
        if all(one is None for one in row):
            row = [made.instructions[place] for place, made in zip(at, listings)]
        at = [place + (one is not None) for place, one in zip(at, row)]
        yield row
