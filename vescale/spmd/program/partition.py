"""Partition: decide, for every node, how it is sharded and what has to move first.

One walk over the graph. For each node and mesh axis the candidates are: shard one factor, let a Partial or
a ragged cut pass, or run whole; the one that moves the fewest bytes wins. **A value stays where it is
unless a constraint, an output or an op's need moves it.** What keeps plain greed from ruining the program:

* slicing a whole value, or scattering a Partial, is charged as if it were gathered back, unless a
  constraint asks for that shard;
* a layout in which a value was already materialised, also through views, costs nothing;
* ties go to the fewest moves, the fewest Partials, the least memory;
* a Partial with several users is reduced where it is made;
* a whole value becomes Partial only under 1 KB; parameters move only as the plan says;
* draws and constants, and what elementwise ops make of them alone, are deferred until somebody needs them,
  and are then made in the layout that is needed: a rank makes its own elements only;
* torch's own draws stay where the function makes them, and have a result for each layout that is needed.

Nothing here depends on a rank: a mesh of 10,240 costs what a mesh of 8 costs. The result is frozen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._errors import ShardingError, explain
from ..layout import AbstractMesh, Layout, replicated
from ..mapped_call import mapped_call
from ..placements import P, Partial
from ..redistribute_plan import Step, plan
from ..rules.notation import Dims, Pattern, find_rule, is_source
from .candidates import (
    REFUSED,
    Candidate,
    carry,
    deferred_state,
    layout_from,
    refine,
    split_by,
    state_of,
    uncut,
    viewed,
)
from .cause import Cause
from .choice import Operand, choose
from .ir import Graph, Node, Origin, Ref, TensorMeta, map_args, refs_of
from .torch_draws import draws_from_nothing, is_effect, torch_draw
from .trace import trace


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a node on local values; `results` has None where a result is unused or no tensor."""

    node: Node
    pattern: Pattern
    operands: tuple[int, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Apply one redistribution step to a local value."""

    step: Step
    source: int
    target: int
    cause: Cause
    origin: Origin


@dataclass(frozen=True, slots=True)
class Map:
    """Run a mapped function on local values that are in the layouts of its specs."""

    handle: int
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Start:
    """Begin one collective for several moves, of one kind, axes, reductions and dtype. Passes make these."""

    moves: tuple[Move, ...]
    ticket: int

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(move.source for move in self.moves)

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(move.target for move in self.moves)

    @property
    def origin(self) -> Origin:
        return self.moves[0].origin


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a collective that was started: the targets of its moves exist from here on."""

    start: Start


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw from a generator of torch's, or read or set its state: an effect, where the function does it.

    What reads no value has one result for each layout that is needed of what it draws; other ops run once on
    whole values, and `results` are theirs.
    """

    node: Node
    operands: tuple[int, ...]
    results: tuple[int | None, ...]

    @property
    def origin(self) -> Origin:
        return self.node.origin

    def __str__(self) -> str:
        return str(self.node.args[0]) if self.node.op is torch_draw else str(self.node.op)


@dataclass(frozen=True, slots=True)
class Local:
    """Run a function of a rank's local values that is no ATen call: what passes put into a program.

    `make(rank)` is the function of that rank: operands -> list of results. Results may be memory of
    operands with `shares`; with `writes` the first operand is overwritten, and is the one result.
    """

    name: str
    make: Callable[[int], Callable[..., list[Any]]]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    origin: Origin
    shares: bool = False
    writes: bool = False


AnyStep = Compute | Draw | Move | Map | Local | Start | Wait


def operands(step: AnyStep) -> tuple[int, ...]:
    """The values that a step reads; a wait reads the sources of its start."""
    if isinstance(step, Move):
        return (step.source,)
    if isinstance(step, Start):
        return step.sources
    return step.start.sources if isinstance(step, Wait) else step.operands


def results(step: AnyStep) -> tuple[int, ...]:
    """The values that a step makes: none at a start."""
    if isinstance(step, Move):
        return (step.target,)
    if isinstance(step, Start):
        return ()
    if isinstance(step, Wait):
        return step.start.targets
    assert isinstance(step, (Compute, Draw, Map, Local))
    return tuple(value for value in step.results if value is not None)


@dataclass(frozen=True, slots=True)
class LocalValue:
    """One layout of a global value: of the graph's value `source`, unless it is none (a bucket's buffer)."""

    meta: TensorMeta
    layout: Layout
    source: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """What passes may know about the inputs: their argument paths, and which the call may consume.

    `notes` is for packages that add passes: what their part of the plan says.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """The decisions, the same for every rank. Numbers in it are those of `values`."""

    mesh: AbstractMesh
    inputs: tuple[int, ...]
    steps: tuple[AnyStep, ...]
    outputs: tuple[int | None, ...]  # None for a static result
    values: tuple[LocalValue, ...]
    unruled: tuple[Node, ...]  # nodes without a rule: they run whole on every rank
    facts: Facts = Facts()
    gradients: frozenset[int] = frozenset()  # those of parameters, pending and reduced


def partition(
    graph: Graph,
    mesh: AbstractMesh,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout | None],
    parameters: frozenset[int] = frozenset(),
    names: Mapping[int, str] | None = None,
    results: Sequence[str] = (),
) -> Partitioned:
    """Decide the layouts of a graph.

    `inputs` are the layouts of the graph's inputs (closed-over tensors last), `outputs` the wishes for
    its outputs (None: where the value is, Partials reduced). `parameters` are input values that stay
    put; `names` name input values, and `results` the outputs, in causes.
    """
    walk = _Walk(graph, mesh, parameters, names or {}, results)
    return walk.run(inputs, outputs)


def without_partials(layout: Layout) -> Layout:
    """The layout with every pending reduction done."""
    if not layout.partials:
        return layout
    return Layout(
        layout.mesh,
        P.of(
            (axis, placement) for axis, placement in layout.spec.items() if not isinstance(placement, Partial)
        ),
        layout.shape,
    )


class _Walk:
    def __init__(
        self,
        graph: Graph,
        mesh: AbstractMesh,
        parameters: frozenset[int],
        names: Mapping[int, str],
        results: Sequence[str],
    ) -> None:
        self.graph, self.mesh, self.names, self.results = graph, mesh, dict(names), results
        self.axes = [axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
        self.metas = list(graph.metas)
        self.pinned = set(parameters)
        self.uses = Counter(value for node in graph.nodes for value in _read(node)) + Counter(
            refs_of(graph.outputs)
        )
        self.readers: dict[int, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for value in _read(node):
                self.readers[value].append(node)
        self.wishes = self.pulled_back()
        self.values: list[LocalValue] = []
        self.steps: list[AnyStep] = []
        self.draws: dict[
            int, int
        ] = {}  # what is drawn -> its step, which has no results until they are needed
        self.unruled: list[Node] = []
        self.gradients: set[int] = set()
        self.pinned_gradients: set[int] = set()  # global values, by constraints on what they are gradients of
        self.makers: dict[int, Node] = {}
        self.made: dict[
            int, dict[Layout, int]
        ] = {}  # global value -> its materialised layouts, its home first
        self.deferred: dict[int, tuple[Node, Pattern]] = {}  # values to make when somebody needs them
        self.views: dict[
            int, tuple[Node, Pattern, int]
        ] = {}  # global value -> the view that it is, and which result

    def pulled_back(self) -> dict[int, Layout]:
        """Layouts that constraints ask for, by value: through views, of the value viewed."""
        wishes: dict[int, Layout] = {}
        for node in reversed(self.graph.nodes):
            if node.op.name() == "vescale::constrain":
                wishes[node.args[0].id] = self.target(node)
                continue
            (out, *others), rule = node.outs, find_rule(node.op)
            if out in wishes and rule is not None and not others:
                pattern = rule(node, self.metas)
                if pattern.view:
                    source = next(node.refs())
                    layout = viewed(pattern, self.mesh, self.metas[source].shape, 0, wishes[out])
                    if layout is not None:
                        wishes[source] = layout
        return wishes

    def run(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> Partitioned:
        values = (*self.graph.inputs, *(value for value, _ in self.graph.hidden))
        numbers = [self.define(value, layout) for value, layout in zip(values, inputs, strict=True)]
        for node in self.graph.nodes:
            self.visit(node)
        results: list[int | None] = []
        for place, (output, wish) in enumerate(zip(self.graph.outputs, outputs, strict=True)):
            if isinstance(output, Ref):
                target = wish or self.settled(output.id)
                path = self.results[place] if self.results else place
                cause = Cause(f"result {path}".rstrip(), "result")
                maker = self.makers.get(self.through_views(output.id))
                results.append(self.obtain(output.id, target, cause, maker.origin if maker else Origin()))
            else:
                results.append(None)
        return Partitioned(
            self.mesh,
            tuple(numbers),
            live(self.steps, results),
            tuple(results),
            tuple(self.values),
            tuple(self.unruled),
            gradients=frozenset(self.gradients),
        )

    # Global values and the layouts in which they exist.

    def define(self, value: int, layout: Layout) -> int:
        number = self.new(value, layout)
        self.made[value] = {layout: number}
        return number

    def new(self, value: int, layout: Layout) -> int:
        self.values.append(LocalValue(self.metas[value], layout, value))
        return len(self.values) - 1

    def home(self, value: int) -> Layout:
        return next(iter(self.made[value]))

    def settled(self, value: int) -> Layout:
        """Where the value is, with pending reductions done."""
        return (
            without_partials(self.home(value))
            if self.made[value]
            else replicated(self.mesh, self.metas[value].shape)
        )

    def available(self, value: int) -> dict[Layout, Layout | None]:
        """Layouts that cost nothing: those made, and views (with what of) of those of the value viewed."""
        layouts: dict[Layout, Layout | None] = dict.fromkeys(self.made[value])
        if value in self.views:
            node, pattern, place = self.views[value]
            for source in self.available(next(node.refs())):
                carried = carry(pattern, self.mesh, source, place, self.metas[value].shape)
                if carried is not None:
                    layouts.setdefault(carried, source)
        return layouts

    def obtain(self, value: int, target: Layout, cause: Cause, origin: Origin) -> int:
        """The number of `value` in the layout `target`, moved there if need be."""
        made = self.made[value]
        if target in made:
            return made[target]
        if value in self.deferred:
            return self.make(value, target, cause, origin)
        available = self.available(value)
        source = available.get(target)
        if source is not None:
            return self.view_again(value, source, target, cause, origin)
        source = self.beneath(value, target)
        if source is not None:  # its other views then find it moved
            return self.view_again(value, source, target, cause, origin)
        routes = [(layout, plan(layout, target)) for layout in available]
        start, steps = min(routes, key=lambda route: (sum(step.traffic for step in route[1]), len(route[1])))
        return self.move(value, self.obtain(value, start, cause, origin), steps, cause, origin)

    def beneath(self, value: int, target: Layout) -> Layout | None:
        """The layout of what `value` views that makes it a view in layout `target`; None if there is none."""
        if value not in self.views or self.home(value).partials:
            return None
        node, pattern, place = self.views[value]
        return viewed(pattern, self.mesh, self.metas[next(node.refs())].shape, place, target)

    def move(self, value: int, number: int, steps: Sequence[Step], cause: Cause, origin: Origin) -> int:
        made = self.made[value]
        for step in steps:
            if step.dst not in made:
                made[step.dst] = self.new(value, step.dst)
                self.steps.append(Move(step, number, made[step.dst], cause, origin))
            number = made[step.dst]
        return number

    def make(self, value: int, target: Layout, cause: Cause, origin: Origin) -> int:
        """Make a deferred value in the layout in which it is needed."""
        node, pattern = self.deferred[value]
        if value in self.draws and not target.partials:
            number = self.made[value][target] = self.new(value, target)
            step = self.steps[self.draws[value]]
            assert isinstance(step, Draw)
            self.steps[self.draws[value]] = replace(step, results=(*step.results, number))
            return number
        broadcast = target.ragged is not None and any(
            dims and (len(dims) < len(target.shape) or not all(dims)) for dims in pattern.operands
        )
        asked = refine(replace(pattern, operands=pattern.results, results=pattern.operands), 0, target)
        states = {
            axis: (state_of(target, axis), self.mesh.axis_size(axis)) for axis, _ in target.spec.items()
        }
        lost = pattern.view and any(uncut(asked, *state) for state in states.values())
        if target.partials or broadcast or lost:  # no operand has these elements: make it whole, and cut
            whole = self.make(value, replicated(self.mesh, self.metas[value].shape), cause, origin)
            return self.move(value, whole, plan(self.values[whole].layout, target), cause, origin)
        numbers = []
        for index, operand in enumerate(_read(node)):
            # The key of a draw is whole; what an elementwise op reads is cut like its result.
            placed = (
                {}
                if is_source(node.op)
                else {axis: deferred_state(asked, *state, index) for axis, state in states.items()}
            )
            numbers.append(
                self.obtain(operand, layout_from(self.mesh, self.metas[operand].shape, placed), cause, origin)
            )
        number = self.made[value][target] = self.new(value, target)
        self.steps.append(Compute(node, pattern, tuple(numbers), (number,)))
        return number

    def view_again(self, value: int, source: Layout, target: Layout, cause: Cause, origin: Origin) -> int:
        """Take the view that `value` is of its source's other layout."""
        node, pattern, _ = self.views[value]
        operand = self.obtain(next(node.refs()), source, cause, origin)
        results: list[int | None] = []
        for place, out in enumerate(node.outs):
            layout = None if out is None else carry(pattern, self.mesh, source, place, self.metas[out].shape)
            if out is None or layout is None:
                results.append(None)
                continue
            # The results of a split are made together; those made before stay what they are.
            results.append(self.new(out, layout))
            self.made.setdefault(out, {}).setdefault(layout, results[-1])  # type: ignore[arg-type]
        self.steps.append(Compute(node, pattern, (operand,), tuple(results)))
        return self.made[value][target]

    # One node.

    def visit(self, node: Node) -> None:
        if node.op.name() == "vescale::constrain":
            self.constrain(node)
            return
        if node.op.name() == "vescale::mapped":
            self.map(node)
            return
        if draws_from_nothing(node):
            (out,) = node.outs
            assert out is not None
            self.deferred[out], self.made[out] = (node, whole_pattern(node, self.metas)), {}
            self.draws[out] = len(self.steps)
            self.steps.append(Draw(node, (), ()))
            return
        operands = list(node.refs())
        pattern = self.pattern(node, operands)
        if self.defers(node, pattern):
            (out,) = node.outs
            assert out is not None
            self.deferred[out], self.made[out] = (node, pattern), {}
            return
        if pattern.follow is not None:
            self.follow(node, pattern, operands)
            return
        chosen = self.choose(node, pattern, operands)
        for candidate in chosen.values():
            for factor in split_by(candidate):
                if factor in pattern.expand:
                    self.expand(node, operands, pattern.expand[factor])
                    return
        numbers = []
        for index, value in enumerate(operands):
            target = layout_from(
                self.mesh,
                self.metas[value].shape,
                {axis: candidate.operand(pattern, index) for axis, candidate in chosen.items()},
            )
            cause = self.cause(value, node, target)
            numbers.append(self.obtain(value, target, cause, self.origin(value, node)))
        results: list[int | None] = []
        tensors = 0
        for place, out in enumerate(node.outs):
            if out is None:
                results.append(None)
                continue
            results.append(
                self.define(
                    out,
                    layout_from(
                        self.mesh,
                        self.metas[out].shape,
                        {axis: candidate.result(pattern, tensors) for axis, candidate in chosen.items()},
                    ),
                )
            )
            if pattern.view:
                self.views[out] = (node, pattern, place)
                if operands[0] in self.pinned:
                    self.pinned.add(out)
            tensors += 1
            self.makers[out] = node
        if is_effect(node.op):
            self.steps.append(Draw(node, tuple(numbers), tuple(results)))
            return
        self.steps.append(Compute(node, pattern, tuple(numbers), tuple(results)))
        for out in node.outs:
            if out is not None and self.uses[out] > 1 and self.home(out).partials:
                self.reduce_at_source(node, out)

    def follow(self, node: Node, pattern: Pattern, operands: list[int]) -> None:
        """A node that runs where its first operand is: the others come there."""
        assert pattern.follow is not None
        targets, layouts = pattern.follow(self.settled(operands[0]))
        numbers = [
            self.obtain(value, target, self.cause(value, node, target), self.origin(value, node))
            for value, target in zip(operands, targets, strict=True)
        ]
        results: list[int | None] = []
        for out, layout in zip(node.outs, layouts, strict=True):
            results.append(None if out is None else self.define(out, layout))
            if out is not None:
                self.makers[out] = node
        self.steps.append(Compute(node, pattern, tuple(numbers), tuple(results)))

    def cause(self, value: int, user: Node, target: Layout) -> Cause:
        """Why a value moves: its name or maker, and who needs it so."""
        seen = self.through_views(value)
        name, maker, ruled = self.names.get(seen, ""), self.makers.get(seen), find_rule(user.op) is not None
        unruled = "" if ruled else ", which has no rule and runs whole"
        leaves = seen in self.pinned_gradients and user.origin.region == "backward"
        return Cause(
            f"{name or (maker.op if maker else 'value')} for {user.op}{unruled}",
            ("transpose" if leaves else "op") if ruled else "unruled",
            target,
            user.origin,
            maker.origin if maker else Origin(),
            name if value == seen else "",
            self.home(seen) if seen in self.pinned else None,
        )

    def origin(self, value: int, user: Node) -> Origin:
        """A pending reduction belongs to the op that left it, any other move to the op that asks for it."""
        maker = self.makers.get(self.through_views(value))
        return (
            maker.origin
            if maker is not None and self.made[value] and self.home(value).partials
            else user.origin
        )

    def through_views(self, value: int) -> int:
        """The value of which this one is a view."""
        while value in self.views:
            value = next(self.views[value][0].refs())
        return value

    def defers(self, node: Node, pattern: Pattern) -> bool:
        if is_source(node.op):
            return True
        if node.op is torch.ops.aten.expand.default:  # what it adds is the same everywhere
            (source,) = node.refs()
            return source in self.deferred or not self.home(source).spec.items()
        refs = list(node.refs())
        return (
            (pattern.pointwise or pattern.view)
            and len(node.outs) == 1
            and bool(refs)
            and all(value in self.deferred for value in refs)
        )

    def pattern(self, node: Node, operands: list[int]) -> Pattern:
        """The node's pattern, its factors cut where the digits of its operands start."""
        rule = find_rule(node.op)
        if rule is None:
            if operands and node.op.namespace == "aten":
                self.unruled.append(node)
            return whole_pattern(node, self.metas)
        pattern = rule(node, self.metas)
        for index, value in enumerate(operands):
            for layout in self.available(value):
                pattern = refine(pattern, index, layout)
        return pattern

    def reduce_at_source(self, node: Node, value: int) -> None:
        """Each user would otherwise reduce on its own, or drag the Partial along."""
        layout = without_partials(self.home(value))
        cause = Cause(f"result of {node.op}", "reduction")
        number = self.obtain(value, layout, cause, node.origin)
        self.made[value] = {layout: number}
        self.views.pop(value, None)

    def target(self, node: Node) -> Layout:
        """The layout that a constraint asks for."""
        source, index = node.args
        spec = self.graph.constraints[index].spec
        return spec if isinstance(spec, Layout) else Layout(self.mesh, spec, self.metas[source.id].shape)

    def constrain(self, node: Node) -> None:
        source, index = node.args
        (out,) = node.outs
        assert out is not None
        pin, target = self.graph.constraints[index], self.target(node)
        cause = Cause(pin.cause or self.names.get(source.id, "constraint"), "plan")
        number = self.obtain(source.id, target, cause, node.origin)
        self.made[out] = {target: number}
        if node.origin.region == "backward":
            self.pinned_gradients.add(out)
        if pin.gradient:
            self.gradients |= {*self.made[source.id].values(), number}
        if source.id in self.makers:
            self.makers[out] = self.makers[source.id]
        if source.id in self.names:
            self.names[out] = self.names[source.id]
        if source.id in self.pinned:
            self.pinned.add(out)

    def map(self, node: Node) -> None:
        """A mapped function: its specs are constraints on its operands, and say what its results are."""
        handle = node.args[1]
        made = mapped_call(handle)
        if made.traced.mesh != self.mesh:
            raise ShardingError(
                explain(
                    f"{made.name} is mapped over {made.traced.mesh}",
                    where=node.origin,
                    rule=f"a mapped function inside a program has the program's mesh, {self.mesh}",
                    remedy="make one mesh and use it for both",
                )
            )
        numbers = [
            self.obtain(
                value,
                layout,
                Cause(f"{self.names.get(value, 'operand')} for {made.name}", "mapped"),
                node.origin,
            )
            for value, layout in zip(node.refs(), made.operands, strict=True)
        ]
        results: list[int | None] = []
        for out, layout in zip(node.outs, made.results, strict=True):
            assert out is not None
            results.append(self.define(out, layout))
            self.makers[out] = node
        self.steps.append(Map(handle, tuple(numbers), tuple(results), node.origin))
        for out in node.outs:
            if out is not None and self.uses[out] > 1 and self.home(out).partials:
                self.reduce_at_source(node, out)

    def expand(self, node: Node, operands: list[int], replacement: Callable[..., Any]) -> None:
        """Walk the graph of `replacement(*the node's arguments)` in the place of the node."""

        def run(tensors: list[Any]) -> list[Any]:
            taken = iter(tensors)
            fill: Callable[[Ref], Any] = lambda ref: next(taken)  # noqa: E731
            args = map_args(node.args, fill)
            result = replacement(
                *args, **{name: map_args(value, fill) for name, value in node.kwargs.items()}
            )
            return list(result) if isinstance(result, tuple) else [result]

        inner = trace(run, [self.metas[value] for value in operands], [""] * len(operands))
        numbers = dict(zip(inner.inputs, operands, strict=True))
        numbers |= {
            output.id: out for output, out in zip(inner.outputs, node.outs, strict=True) if out is not None
        }
        for value, meta in enumerate(inner.metas):
            if value not in numbers:
                numbers[value] = len(self.metas)
                self.metas.append(meta)
        rename: Callable[[Ref], Any] = lambda ref: Ref(numbers[ref.id])  # noqa: E731
        nodes = [
            replace(
                part,
                args=map_args(part.args, rename),
                kwargs={name: map_args(value, rename) for name, value in part.kwargs.items()},
                outs=tuple(None if out is None else numbers[out] for out in part.outs),
                origin=node.origin,
            )
            for part in inner.nodes
        ]
        self.uses.subtract(operands)
        self.uses.update(value for part in nodes for value in part.refs())
        for part in nodes:
            self.visit(part)

    # The choice.

    def choose(self, node: Node, pattern: Pattern, operands: list[int]) -> dict[str, Candidate]:
        """The cheapest candidate of each axis; when it moves something, what others will move is free."""
        chosen, cost = self.weigh(node, pattern, operands)
        if not cost or cost >= REFUSED:
            return chosen
        wanted = [self.wanted(value) for value in operands]
        return self.weigh(node, pattern, operands, wanted)[0] if any(wanted) else chosen

    def weigh(
        self, node: Node, pattern: Pattern, operands: list[int], wanted: Sequence[Iterable[Layout]] = ()
    ) -> tuple[dict[str, Candidate], float]:
        """The candidates and the bytes that they move, with the layouts `wanted` of operands for nothing."""
        free = [(*self.available(value),) for value in operands]
        for index, more in enumerate(wanted):
            free[index] += (*more,)
        found = [
            Operand(self.metas[value], layouts, value in self.deferred, value in self.pinned)
            for value, layouts in zip(operands, free, strict=True)
        ]
        outs = [out for out in node.outs if out is not None]
        results, wishes = [self.metas[out] for out in outs], [self.wishes.get(out) for out in outs]
        return choose(self.mesh, self.axes, pattern, found, results, wishes)

    def wanted(self, value: int) -> list[Layout]:
        """Layouts that other nodes, which have a parameter to go with, will have the value moved to.

        Linear layers take two products with the gradient that arrives: one has to gather it, if it is
        split by rows and the weight is not, and the other then finds it gathered.
        """
        layouts: list[Layout] = []
        if value in self.views:
            node, pattern, place = self.views[value]
            for layout in self.wanted(next(node.refs())):
                carried = carry(pattern, self.mesh, layout, place, self.metas[value].shape)
                layouts.extend([carried] if carried is not None else [])
        for node in self.readers[value]:
            operands = list(node.refs())
            if any(out in self.made for out in node.outs) or not all(
                other in self.made for other in operands
            ):
                continue  # it has been visited, or what it will meet is not known yet
            if not any(other in self.pinned for other in operands) or find_rule(node.op) is None:
                continue
            pattern = self.pattern(node, operands)
            if pattern.follow is not None:
                continue
            chosen, _ = self.weigh(node, pattern, operands)
            place = operands.index(value)
            states = {axis: candidate.operand(pattern, place) for axis, candidate in chosen.items()}
            layouts.append(layout_from(self.mesh, self.metas[value].shape, states))
        return layouts


def live(steps: Sequence[AnyStep], outputs: Sequence[int | None]) -> tuple[AnyStep, ...]:
    """The steps that an output depends on: views may have been taken in layouts that nobody used."""
    needed = {number for number in outputs if number is not None}
    waited: set[int] = set()  # the tickets of starts that are needed
    kept: list[AnyStep] = []
    for step in reversed(steps):
        begins = isinstance(step, Start) and step.ticket in waited
        if begins or isinstance(step, Draw) or needed.intersection(results(step)):
            kept.append(step)
            needed.update(operands(step))
            if isinstance(step, Wait):
                waited.add(step.start.ticket)
    return tuple(reversed(kept))


def _read(node: Node) -> list[int]:
    """The values that a node reads: none of a draw's or a factory's but the key."""
    refs = list(node.refs())
    return (refs[:1] if node.op.namespace == "vescale" else []) if is_source(node.op) else refs


def whole_pattern(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """For an op without a rule: every dim is whole."""
    sizes: dict[str, int] = {}

    def dims(value: int) -> Dims:
        shape = metas[value].shape
        names = tuple((f"w{len(sizes) + dim}",) for dim in range(len(shape)))
        sizes.update((name, size) for (name,), size in zip(names, shape, strict=True))
        return names

    operands = tuple(dims(value) for value in node.refs())
    results = tuple(dims(out) for out in node.outs if out is not None)
    return Pattern(operands, results, sizes, whole=frozenset(sizes))
