"""Stepwise: a decided program, run one step at a time with every value in sight.

The generated program runs the same instructions after the passes over listings, which fuse, reorder and
overwrite; here they run as they were decided, so that each node's result is seen. The bits are the same.

    run = Stepwise(partitioned, mesh)
    outputs = run(inputs, watch)      # watch(observation) after each step

Between two steps all hosted ranks are at the same place. Memory is that of the program without updates in
place; a value goes when it was read for the last time, so whoever wants to keep one copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..._compat import below_autograd
from ..._errors import ArgumentError, explain
from ..bits import in_a_row
from ..layout import Layout, replicated
from ..locals import assemble, local_slice
from ..mapped_call import mapped_call
from ..mesh import Mesh
from ..redistribute import Collective, redistribute
from .emit import EXCHANGES, Call, DrawExchange, Exchange, Instruction, StartExchange, WaitExchange
from .ir import Graph, Origin, TensorMeta, map_args
from .last_use import last_uses
from .mapped import collective_name, exchanges_of
from .partition import AnyStep, Compute, Draw, Local, Map, Move, Partitioned, Start, Wait, operands, results
from .program import bind_steps, listing
from .replay import name_of


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a program, as the ranks that are hosted here hold it.

    `source` is the value of the traced graph that it is, None for what was put in. `layout` is None where
    values are local and no part of a global one: inside a mapped function, and of a bucket's buffer.
    `is_filling`: not all of it is written yet; what is not has any bits.
    """

    number: int
    meta: TensorMeta
    layout: Layout | None
    locals: Mapping[int, Tensor]  # by rank
    mesh: Mesh
    source: int | None = None
    name: str = ""  # the argument path of an input
    is_filling: bool = False

    def whole(self) -> Tensor:
        """The global value, with pending reductions done. In processes every rank makes this call.

        Raises ArgumentError for a local value, which has none.
        """
        if self.layout is None:
            raise ArgumentError(
                explain(
                    f"the whole of v{self.number}",
                    rule="inside shard_map, and in a bucket's buffer, each rank has its own",
                    remedy="look at `locals`",
                )
            )
        if self.mesh.is_simulated:
            return assemble(self.locals, self.layout)
        target = replicated(self.layout.mesh, self.layout.shape)
        whole, *_ = redistribute(list(self.locals.values()), self.layout, target, self.mesh)
        return whole

    def strays(self) -> tuple[int, ...]:
        """The hosted ranks whose part is not, bit for bit, their part of the global value.

        Replicas that differ: of several the first rank's counts. None where a reduction is pending.
        """
        if self.layout is None or self.layout.partials:
            return ()
        whole = self.whole()
        return tuple(
            rank
            for rank, local in self.locals.items()
            if not same_bits(local, local_slice(whole, self.layout, rank))
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits, NaNs and zeros too.

    >>> same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    True
    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(in_a_row(a).view(torch.uint8), in_a_row(b).view(torch.uint8))


@dataclass(frozen=True, slots=True)
class Observation:
    """What was just done: a step of the program, or one instruction (`inner`) of a mapped function.

    `index` numbers the steps; the first observation, of the arguments, has index -1 and no step. `node` is
    the node of the traced graph that the step runs, by number: None for a move, and for what passes put in.
    Values of `operands` are as they were before, but for the first of a step that `overwrites` it.
    """

    index: int
    step: AnyStep | None
    name: str
    origin: Origin
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    node: int | None = None
    inner: int | None = None
    overwrites: bool = False

    def __str__(self) -> str:
        return f"{self.name}  {self.origin}".rstrip()


Watch = Callable[[Observation], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """A step, with where its instructions are in the listing of each hosted rank, and what it exchanges."""

    step: AnyStep
    at: tuple[tuple[int, int], ...]
    exchanges: tuple[Collective, ...]


class Stepwise:
    """Runs decisions step by step for the ranks that `mesh` hosts here.

    `graph` is what was decided; with it observations say which of its nodes they are. A call takes the local
    inputs of each hosted rank, and returns the local outputs of each; inputs are not written to.
    """

    def __init__(self, partitioned: Partitioned, mesh: Mesh, graph: Graph | None = None) -> None:
        self.partitioned, self.mesh, self.graph = partitioned, mesh, graph
        self._listings = [listing(partitioned, rank) for rank in mesh.local_ranks]
        self._last = [last_uses(made.instructions, made.outputs) for made in self._listings]
        self._parts = list(self._cut(bind_steps(partitioned, mesh)))
        self._filling = {
            step.operands[0] for step in partitioned.steps if isinstance(step, Local) and step.writes
        }
        nodes = graph.nodes if graph is not None else ()
        self._nodes = {id(node): number for number, node in enumerate(nodes)}
        self._makers = {out: number for number, node in enumerate(nodes) for out in node.outs}

    def __call__(self, inputs: Sequence[Sequence[Tensor]], watch: Watch) -> list[list[Any]]:
        numbers = self.partitioned.inputs
        ranks = [dict[Any, Any](zip(numbers, values, strict=True)) for values in inputs]
        watch(Observation(-1, None, "arguments", Origin(), (), self._values(numbers, ranks)))
        for index, part in enumerate(self._parts):
            if isinstance(part.step, Map):
                self._run_mapped(index, part, ranks, watch)
            else:
                try:
                    with below_autograd():
                        self._run(part, ranks)
                except Exception as error:
                    error.add_note(f"in the program's step for {origin_of(part.step)}")
                    raise
            watch(self._observed(index, part.step, ranks))
            self._drop(part, ranks)
        outputs = self.partitioned.outputs
        return [[None if number is None else values[number] for number in outputs] for values in ranks]

    # A step.

    def _cut(self, bound: Sequence[Sequence[Collective]]) -> Iterator[_Part]:
        starts = [0] * len(self._listings)
        for step, exchanges in zip(self.partitioned.steps, bound, strict=True):
            counts = [1] * len(starts)
            if isinstance(step, Map):
                traced = mapped_call(step.handle).traced
                graphs = [traced.variant(rank).graph for rank in self.mesh.local_ranks]
                counts = [len(graph.nodes) + len(step.results) for graph in graphs]
            ends = [start + count for start, count in zip(starts, counts)]
            yield _Part(step, tuple(zip(starts, ends)), tuple(exchanges))
            starts = ends

    def _run(self, part: _Part, ranks: Sequence[dict[Any, Any]]) -> None:
        instructions = [
            made.instructions[start] for made, (start, _) in zip(self._listings, part.at, strict=True)
        ]
        if part.exchanges:
            (exchange,) = part.exchanges
            together(exchange, instructions, ranks)
            return
        for instruction, values in zip(instructions, ranks, strict=True):
            assert isinstance(instruction, Call), instruction
            call(instruction, values)

    def _run_mapped(self, index: int, part: _Part, ranks: Sequence[dict[Any, Any]], watch: Watch) -> None:
        """A mapped function: each rank up to its next exchange, that for all, and so on."""
        assert isinstance(part.step, Map)
        traced = mapped_call(part.step.handle).traced
        labels = [
            f"{collective_name(node)} over {', '.join(node.args[1])}"
            for node in exchanges_of(traced.first.graph)
        ]
        positions, count = [start for start, _ in part.at], 0
        for number in range(len(part.exchanges) + 1):
            done: list[list[Instruction]] = []
            for place, (made, values) in enumerate(zip(self._listings, ranks, strict=True)):
                end, ran = part.at[place][1], []
                while positions[place] < end:
                    instruction = made.instructions[positions[place]]
                    if isinstance(instruction, EXCHANGES):
                        break
                    with below_autograd():
                        call(instruction, values)
                    ran.append(instruction)
                    positions[place] += 1
                done.append(ran)
            for abreast in zip_longest(*done):
                for alike in _alike(abreast):
                    watch(self._inside(index, count, part.step, alike, ranks))
                count += 1
            if number < len(part.exchanges):
                pairs = zip(self._listings, positions, strict=True)
                instructions = [made.instructions[position] for made, position in pairs]
                together(part.exchanges[number], instructions, ranks)
                alike = dict(enumerate(instructions))
                watch(self._inside(index, count, part.step, alike, ranks, labels[number]))
                positions = [position + 1 for position in positions]
                count += 1

    def _drop(self, part: _Part, ranks: Sequence[dict[Any, Any]]) -> None:
        for made, last, values, (start, end) in zip(self._listings, self._last, ranks, part.at, strict=True):
            for at in range(start, end):
                instruction = made.instructions[at]
                for number in (*instruction.reads(), *instruction.makes()):
                    if last[number] < end:
                        values.pop(number, None)

    # What is seen of it.

    def _observed(self, index: int, step: AnyStep, ranks: Sequence[dict[Any, Any]]) -> Observation:
        node = None
        if isinstance(step, (Compute, Draw)):
            node = self._nodes.get(id(step.node))
        elif isinstance(step, Map):
            made = [self.partitioned.values[number].source for number in results(step)]
            node = self._makers.get(made[0]) if made else None
        return Observation(
            index,
            step,
            label(step),
            origin_of(step),
            self._values(operands(step), ranks),
            self._values(results(step), ranks),
            node,
            overwrites=isinstance(step, Local) and step.writes,
        )

    def _values(self, numbers: Sequence[int], ranks: Sequence[dict[Any, Any]]) -> tuple[Value, ...]:
        known = len(self.graph.metas) if self.graph is not None else 0
        found = []
        for number in numbers:
            value = self.partitioned.values[number]
            locals = dict(zip(self.mesh.local_ranks, (values[number] for values in ranks), strict=True))
            source = value.source if value.source is not None and value.source < known else None
            name = self.partitioned.facts.names.get(number, "")
            filling = number in self._filling
            meta, layout = value.meta, value.layout
            if value.source is None and locals:
                meta, layout = TensorMeta.of(next(iter(locals.values()))), None
            found.append(Value(number, meta, layout, locals, self.mesh, source, name, filling))
        return tuple(found)

    def _inside(
        self,
        index: int,
        inner: int,
        step: Map,
        alike: Mapping[int, Instruction],
        ranks: Sequence[dict[Any, Any]],
        name: str = "",
    ) -> Observation:
        """An instruction of a mapped function, by the place of the ranks that ran it."""
        first = next(iter(alike.values()))

        def values(read: Callable[[Instruction], Sequence[int]]) -> tuple[Value, ...]:
            found = []
            for place, number in enumerate(read(first)):
                locals = {
                    self.mesh.local_ranks[at]: ranks[at][read(instruction)[place]]
                    for at, instruction in alike.items()
                }
                meta = TensorMeta.of(next(iter(locals.values())))
                found.append(Value(number, meta, None, locals, self.mesh))
            return tuple(found)

        assert isinstance(first, (Call, Exchange)), first
        name = name or name_of(first.fn)  # type: ignore[union-attr]
        taken = values(lambda instruction: list(dict.fromkeys(instruction.reads())))
        made = values(lambda instruction: instruction.makes())
        return Observation(index, step, name, first.origin, taken, made, inner=inner)


def _alike(abreast: Sequence[Instruction | None]) -> Iterator[dict[int, Instruction]]:
    """The instructions that ranks ran side by side, those that are the same op together."""
    groups: dict[tuple[str, str], dict[int, Instruction]] = {}
    for place, instruction in enumerate(abreast):
        if instruction is not None:
            assert isinstance(instruction, Call)
            key = name_of(instruction.fn), str(instruction.origin)
            groups.setdefault(key, {})[place] = instruction
    yield from groups.values()


def origin_of(step: AnyStep) -> Origin:
    """Where a step came from."""
    if isinstance(step, Wait):
        return step.start.origin
    return step.node.origin if isinstance(step, Compute) else step.origin


def label(step: AnyStep) -> str:
    """What a step does, in a few words."""
    if isinstance(step, Compute):
        return str(step.node.op)
    if isinstance(step, Map):
        return f"{mapped_call(step.handle).name}, mapped"
    if isinstance(step, (Start, Wait)):
        start = step if isinstance(step, Start) else step.start
        moved = start.moves[0].step
        half = "start" if isinstance(step, Start) else "end"
        return f"{half} of {moved.kind} over {'+'.join(moved.axes)}"
    if isinstance(step, Move):
        return f"{step.step.kind} over {'+'.join(step.step.axes)}"
    return step.name if isinstance(step, Local) else f"draw {step}"


# Instructions on the values of ranks, by number; a ticket is under ("ticket", its number).


def call(instruction: Call, values: dict[Any, Any]) -> None:
    """Run a call of one rank on its values."""
    args = map_args(instruction.args, lambda ref: values[ref.id])
    kwargs = {name: map_args(arg, lambda ref: values[ref.id]) for name, arg in instruction.kwargs.items()}
    found = instruction.fn(*args, **kwargs)
    if instruction.overwrites:  # the results are where the operands were
        made: Sequence[Any] = [values[number] for number in instruction.overwrites]
    else:
        made = found if instruction.unpack else [found]
    values.update((out, one) for out, one in zip(instruction.outs, made) if out is not None)


def together(
    exchange: Collective, instructions: Sequence[Instruction], ranks: Sequence[dict[Any, Any]]
) -> None:
    """Run an exchange, a half of one, or a draw: for all hosted ranks at once."""
    taken: list[Any] = []
    for instruction, values in zip(instructions, ranks, strict=True):
        if isinstance(instruction, Exchange):
            taken.append(values[instruction.source])
        elif isinstance(instruction, WaitExchange):
            taken.append(values.pop(("ticket", instruction.ticket)))
        else:
            assert isinstance(instruction, (StartExchange, DrawExchange)), instruction
            taken.append(tuple(values[number] for number in instruction.sources))
    with below_autograd():
        arrived: Sequence[Any] = exchange(taken)
    for instruction, values, result in zip(instructions, ranks, arrived, strict=True):
        if isinstance(instruction, Exchange):
            values[instruction.target] = result
        elif isinstance(instruction, StartExchange):
            values["ticket", instruction.ticket] = result
        else:
            assert isinstance(instruction, (WaitExchange, DrawExchange))
            pairs = zip(instruction.targets, result)
            values.update((number, one) for number, one in pairs if number is not None)
