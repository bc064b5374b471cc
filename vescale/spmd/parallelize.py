"""`vs.parallelize`: a function for one device, run on a mesh as a plan says.

On the first call with a signature the function is traced at its global shapes, partitioned, compiled and
kept. Every other call flattens its arguments, looks the program up and runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from .. import _tree
from .._errors import ArgumentError, PlanError, explain
from . import rules as _rules  # noqa: F401  (registers them)
from .abstract import refuse_abstract, standing_for
from .agree import digest, give_up
from .boundary import Apart, Boundary, Static, own
from .closure import Getter, Guard, getters, read
from .dtensor import DTensor
from .kinds import kind_of
from .lane_boundary import LaneBoundary
from .lane_plan import LanePlan, with_lanes
from .lanes import LaneMesh, not_in_lanes
from .layout import Layout, replicated
from .lowered import Inputs, Lowered
from .mesh import Mesh
from .mirrors import mirrors, owner_of
from .plan import Plan, with_near_misses
from .program import passes
from .program.agreement import Record, agree, checksums
from .program.cache import CacheInfo, ProgramCache
from .program.cleanup import cleanup
from .program.ir import Graph, Ref, TensorMeta
from .program.partition import Facts, Partitioned, partition
from .program.program import (
    aliases,
    as_lines,
    compile_partitioned,
    drawn_from,
    sequence,
)
from .program.strict import refuse_unasked
from .program.torch_draws import Source, using
from .program.trace import Mark, Tracing, trace
from .signature import PARTS, Arguments, Signature
from .watch import here

if TYPE_CHECKING:
    from .parallel_module import ParallelModule


@overload
def parallelize(
    fn: nn.Module,
    plan: Plan,
    *,
    static: bool = True,
    strict: bool = False,
    donate: Sequence[str] = (),
    reduction: str | None = None,
    lanes: Mapping[str, int] | None = None,
) -> ParallelModule: ...
@overload
def parallelize(
    fn: Callable[..., Any],
    plan: Plan,
    *,
    static: bool = True,
    strict: bool = False,
    donate: Sequence[str] = (),
    reduction: str | None = None,
    lanes: Mapping[str, int] | None = None,
) -> Parallelized: ...
@overload
def parallelize(
    fn: Plan,
    plan: None = None,
    *,
    static: bool = True,
    strict: bool = False,
    donate: Sequence[str] = (),
    reduction: str | None = None,
    lanes: Mapping[str, int] | None = None,
) -> Callable[[Callable[..., Any]], Parallelized]: ...
def parallelize(
    fn: Any,
    plan: Any = None,
    *,
    static: bool = True,
    strict: bool = False,
    donate: Sequence[str] = (),
    reduction: str | None = None,
    lanes: Mapping[str, int] | None = None,
) -> Any:
    """Run `fn`, written for one device, on the mesh of `plan`. A call, or a decorator: `@parallelize(plan)`.

    fn: (*trees of tensors and static values) -> tree. A DTensor argument keeps its layout; a plain tensor is
    the global value, equal on all ranks, and is placed as the plan says. Results are DTensors. A result
    subtree of the structure and shapes of an argument's (new parameters, new optimizer state) comes
    back in that argument's layouts, so that a train step is a fixed point; others stay where the
    program left them, with pending reductions done.

    `donate` names arguments whose DTensors the call may consume: using one afterwards is an error. What fn
    makes of one elementwise at the end of its life, as an optimizer does, is written in its memory: whatever
    else shares that memory (what `from_local` was given, a detached alias) changes too.

    With `strict`, communication that the plan did not ask for is a ShardingError that names the op, its
    source line, the bytes and the line that would ask for it. The plan asks for what a constraint moves
    (`vs.constrain`, `activations`, a parameter's layout in use or at rest), for the layouts of results, for
    what a `vs.shard_map` inside says and calls, and for the sums that are pending where an op contracts
    over a dim that is split. It does not ask for what moves because an op needs a dim whole, or its operands
    in one layout, or has no sharding rule. `lower(...).collectives()` gives the reason of each.

    fn is traced: Python control flow on a tensor's value, a shape that depends on data, or mutation
    of an argument is a TraceError that names the line. Python numbers are static: each new value
    compiles anew. The gradient of the result is not recorded; take gradients inside, with
    `vs.value_and_grad`.

    An `nn.Module` becomes a `ParallelModule`: it keeps sharded parameters and buffers of its own, placed by
    the plan, is called like the module, and its results can be differentiated with `.backward()`.

    `reduction` says in which order contributions are added up: "ordered", one binary tree over the ranks of
    an axis, so that the bits are those of simulated ranks, or "native", the backend's own; by default ordered
    on cpu and native on cuda.

    With `lanes={"dp": 8}` the program is decided for 8 ranks of dp, a power of two, and a mesh whose dp
    divides that hosts several of them a rank: the bits of the results don't depend on how many ranks there
    are. Sums are then ordered on every device. What rests ragged is cut for lanes, as `.plan` of the result
    says: `vs.distribute(params, step.plan)`.

    With `static=False` nothing is traced: fn runs op by op on DTensors with real values, at every call.
    Prints, breakpoints, `.item()` and control flow on values work. Inputs, parameters, activations and
    results are placed as the plan says; in between each op decides for itself.

    >>> import torch, vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> plan = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))})
    >>> total = vs.parallelize(lambda x: (x * x).sum(), plan)
    >>> total(torch.arange(4.0)).full_tensor()
    tensor(14.)
    >>> print(total.lower(torch.arange(4.0)).collectives()[0].kind)
    all_reduce
    """
    from .dynamic import Dynamic  # they build on what is below
    from .parallel_module import ParallelModule

    if isinstance(fn, Plan):
        return lambda function: parallelize(
            function, fn, static=static, strict=strict, donate=donate, reduction=reduction, lanes=lanes
        )
    if not isinstance(plan, Plan):
        raise ArgumentError(
            explain(
                f"parallelize(fn, {plan!r})",
                rule="the second argument is a vs.Plan",
                remedy="vs.parallelize(fn, vs.Plan(mesh, params=..., inputs=...))",
            )
        )
    given = plan.lanes if lanes is None and isinstance(plan, LanePlan) else lanes
    _check_order(reduction, given, static, isinstance(fn, nn.Module))
    if isinstance(fn, nn.Module):
        if donate:
            raise ArgumentError(
                explain(
                    f"parallelize(a module, donate={list(donate)})",
                    rule="a module's parameters are its own, and its arguments are kept for the gradient",
                    remedy="donate arguments of a train step that takes vs.functional(module)'s params",
                )
            )
        return ParallelModule(fn, plan, static=static, strict=strict)
    if static:
        return Parallelized(fn, plan, tuple(donate), strict, reduction, lanes)
    return Dynamic(fn, plan, tuple(donate), strict)


def _check_order(reduction: str | None, lanes: Mapping[str, int] | None, static: bool, module: bool) -> None:
    """Raises ArgumentError for orders of sums that there aren't."""
    rule, remedy = 'an order is "ordered" or "native"', "leave it out for the mesh's own"
    if lanes is not None and reduction == "native":
        rule = "the sums of lanes are taken in their tree, which the backend doesn't know"
        remedy = "leave out one of the two"
    elif not static and (lanes is not None or reduction is not None):
        rule = "op by op each rank is one rank, and reduces as its mesh does"
        remedy = "static=True"
    elif module and (lanes is not None or reduction is not None):
        rule = "a module's forward and backward are programs of the ranks that there are"
        remedy = "a train step that takes vs.functional(module)'s params"
    elif reduction in (None, "ordered", "native"):
        return
    raise ArgumentError(
        explain(
            f"static={static}, reduction={reduction!r}, lanes={lanes!r}",
            where="parallelize",
            rule=rule,
            remedy=remedy,
        )
    )


@dataclass(frozen=True)
class Decision:
    """All that is decided for a signature, without a rank."""

    graph: Graph
    partitioned: Partitioned
    layouts: tuple[Layout | None, ...]  # of each leaf; None for static ones
    out_spec: _tree.TreeSpec
    out_layouts: tuple[Layout | Static, ...]
    donated: tuple[int, ...]
    paths: tuple[str, ...]
    aliases: tuple[int, ...]  # results that may be memory of a plain tensor of the caller's
    modules: tuple[torch.nn.Module, ...]  # that fn called
    out_kinds: tuple[Any, ...]
    places: Mapping[int, range]  # of the leaves that are tensors, among the inputs of a rank
    sources: tuple[Source, ...] = ()  # the generators that it draws from
    generators: tuple[torch.Generator, ...] = ()  # those of them that fn closes over


@dataclass(frozen=True)
class Entry:
    """What is kept for a signature."""

    decision: Decision
    program: Any  # a Program, or whatever `_program` makes for `_run`
    closed_over: tuple[Getter, ...]
    set_apart: Apart
    generators: tuple[Getter, ...] = ()  # closed-over ones

    def read(self) -> list[torch.Tensor] | None:
        """The closed-over tensors of this call, if the program takes them."""
        graph = self.decision.graph
        return read(self.closed_over, (graph.metas[value] for value, _ in graph.hidden))


class Parallelized:
    """A function on a mesh: see `parallelize`. `__wrapped__` is the function for one device."""

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        donate: tuple[str, ...],
        strict: bool = False,
        reduction: str | None = None,
        lanes: Mapping[str, int] | None = None,
    ) -> None:
        if not callable(fn):
            raise ArgumentError(
                explain(
                    f"parallelize({fn!r})",
                    rule="the first argument is a function",
                    remedy="pass the train step itself",
                )
            )
        self._fn, self._donate, self._strict, self._reduction = fn, donate, strict, reduction
        # Decisions follow `_plan`, which knows the ranks of programs. Where these are lanes, values
        # outside are on the mesh of another plan.
        self.plan = with_lanes(plan, lanes)
        self._plan = self.plan.over_lanes if isinstance(self.plan, LanePlan) else plan
        self._boundary = (
            Boundary(plan.mesh) if self._plan is plan else LaneBoundary(plan.mesh, self._plan.mesh)
        )
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._arguments = Arguments(fn)
        unknown = [name for name in donate if name not in self._arguments.names]
        if unknown:
            raise ArgumentError(
                explain(
                    f"donate={unknown}",
                    where=self._name,
                    rule=f"the arguments are {', '.join(self._arguments.names)}",
                    remedy="name one of these",
                )
            )
        self._cache = ProgramCache[Entry]((*PARTS, "module state"))
        self._guards: dict[tuple[Any, ...], Guard] = {}
        self._calls = 0
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outside = here.enter(self._name, self._calls + 1)
        try:
            return self._run(*self.entry(*args, **kwargs))
        finally:
            here.leave(outside)

    def entry(self, *args: Any, **kwargs: Any) -> tuple[Entry, list[Any], list[torch.Tensor]]:
        """What a call runs: the program of its signature, made on a miss; its leaves; what it closes over."""
        self._calls += 1
        signature, entry = self._find(args, kwargs)
        closed_over = entry.read() if entry is not None else None
        if entry is None or closed_over is None:
            entry = self._compile(signature)
            closed_over = [get() for get in entry.closed_over]
        return entry, signature.leaves, closed_over

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments like these, without running it or communicating.

        Arguments need no values: tensors on the meta device, or fake ones, stand for those on the mesh's
        device. With a plan on an `AbstractMesh` there need be no ranks either.

        >>> import torch, vescale as vs
        >>> mesh = vs.AbstractMesh(("dp",), (4096,))
        >>> plan = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))})
        >>> lowered = vs.parallelize(lambda x: x.sum(), plan).lower(torch.empty(8192, device="meta"))
        >>> lowered.collectives()[0].bytes
        16380
        """
        decision = self._decide(self._arguments.bind(args, kwargs))
        tensors = [index for index, layout in enumerate(decision.layouts) if layout is not None]
        numbers = dict(zip(tensors, decision.partitioned.inputs))
        paths = {number: decision.paths[index] for index, number in numbers.items()}
        own = self._plan.params_arg
        inputs = Inputs(
            paths,
            frozenset(n for n, path in paths.items() if path == own or path.startswith(f"{own}.")),
            frozenset(numbers[index] for index in decision.donated),
            self._plan.device,
        )
        return Lowered(decision.partitioned, inputs, self.plan.mesh.abstract)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, and for each miss which part of the signature was new."""
        return self._cache.info()

    # One call.

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """The mesh of arguments and results."""
        return self.plan.hosted(self._name)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Entry | None]:
        """The signature of a call, and the program that is kept for it."""
        signature = self._arguments.bind(args, kwargs)
        return signature, self._cache.get((*signature.key, self._module_state(signature.key)))

    def _run(self, entry: Entry, leaves: list[Any], hidden: list[torch.Tensor]) -> Any:
        decision = entry.decision
        inputs = self._enter(decision, leaves, hidden)
        if decision.donated:
            self._donate_leaves(entry, leaves, inputs)
        with drawing(entry, leaves):
            results = own(entry.program(inputs), decision.aliases)
        outputs = self._boundary.leave(results, decision.out_layouts, decision.out_kinds)
        return _tree.unflatten(decision.out_spec, outputs)

    def _enter(self, decision: Decision, leaves: list[Any], hidden: list[torch.Tensor]) -> Any:
        return self._boundary.enter(
            leaves,
            decision.layouts,
            hidden,
            lambda index, leaf, layout: self._mismatch(decision.paths[index], leaf, layout),
        )

    def _donate_leaves(self, entry: Entry, leaves: list[Any], inputs: list[list[torch.Tensor]]) -> None:
        decision, call = entry.decision, f"call {self._calls} of {self._name}"
        for index in decision.donated:
            leaf = leaves[index]
            if isinstance(leaf, DTensor):
                leaf.donate(decision.paths[index], call)
                continue
            for place in decision.places[index]:
                if place in entry.program.overwritten:  # it stays the caller's
                    for values in inputs:
                        values[place] = values[place].clone()
        if entry.program.overwritten:
            entry.set_apart(inputs)

    # A miss.

    def _compile(self, signature: Signature) -> Entry:
        mesh = self._mesh
        refuse_abstract(signature.leaves, signature.paths, self._name)
        try:
            decision = self._decide(signature)
            hidden = [tensor for _, tensor in decision.graph.hidden]
            names = [f"closed-over tensor {number}" for number in range(len(hidden))]
            refuse_abstract(hidden, lambda: names, self._name)
        except Exception as error:
            give_up(mesh, error)
            raise
        if not mesh.is_simulated:
            lines = as_lines(decision.partitioned, decision.graph)
            agree(mesh, self._record(signature, decision, lines), lines)
        modules = [module for root in decision.modules for module in root.modules()]
        if len(self._guards) > 256:
            self._guards.clear()
        # Watched together with what other traces of the same arguments ran: train and eval take turns.
        self._guards.setdefault(signature.key, Guard()).watch(modules)
        places = getters(self._fn, modules, (tensor for _, tensor in decision.graph.hidden))
        program = self._program(decision)
        generators = getters(self._fn, (), decision.generators)
        apart = Apart(getattr(program, "overwritten", frozenset()))
        entry = Entry(decision, program, places, apart, generators)
        self._cache.put((*signature.key, self._module_state(signature.key)), entry)
        return entry

    def _program(self, decision: Decision) -> Any:
        hosted = self._plan.hosted(self._name)
        return compile_partitioned(decision.partitioned, hosted, optimise=True, reduction=self._reduction)

    def _decide(self, signature: Signature) -> Decision:
        plan, mesh = self._plan, self._plan.mesh
        paths, tensors = signature.paths(), signature.tensors()
        layouts, marks, buckets = self._layouts(signature, paths)
        out_spec: list[_tree.TreeSpec] = []

        def flat(values: list[torch.Tensor]) -> list[Any]:
            results, spec = _tree.flatten(self._arguments.call(signature, values))
            out_spec[:] = [spec]
            return results

        tracing = Tracing(
            activations=plan.activation_rules(),
            device=plan.device,
            generators=signature.leaves,
            lanes=mesh if isinstance(mesh, LaneMesh) else None,
        )
        inputs = [standing_for(TensorMeta.of(signature.leaves[index]), plan.device) for index in tensors]
        graph = cleanup(
            trace(
                flat,
                inputs,
                [paths[index] for index in tensors],
                tracing,
                [marks[index] for index in tensors],
            )
        )
        self._check_activations(tracing)
        (spec,) = out_spec
        known = [layout for layout in layouts if layout is not None]
        hidden = [replicated(mesh.abstract, tuple(tensor.shape)) for _, tensor in graph.hidden]
        results = _tree.paths(_tree.unflatten(spec, range(len(graph.outputs))))
        metas = [graph.metas[output.id] if isinstance(output, Ref) else None for output in graph.outputs]
        shapes = [meta and meta.shape for meta in metas]
        wishes = self._wishes(spec, results, shapes, signature, layouts)
        names = {value: paths[index] for value, index in zip(graph.inputs, tensors, strict=True)}
        parameters = frozenset(
            value for value, index in zip(graph.inputs, tensors, strict=True) if marks[index] is not None
        )
        decide = functools.partial(partition, graph, mesh.abstract, [*known, *hidden])
        partitioned = decide(wishes, parameters, names, results)
        if self._stay_outside(partitioned, wishes, results):
            partitioned = decide(wishes, parameters, names, results)
        if self._strict:
            refuse_unasked(partitioned, self._name)
        donated = tuple(
            index
            for index, path in enumerate(paths)
            if layouts[index] is not None
            and any(path == name or path.startswith(f"{name}.") for name in self._donate)
        )
        numbers = dict(zip(tensors, partitioned.inputs))
        facts = Facts(
            {numbers[index]: paths[index] for index in tensors},
            frozenset(numbers[index] for index in donated),
            {"buckets": buckets, "parameters": {m.name: numbers[i] for i, m in enumerate(marks) if m}},
        )
        partitioned = passes.apply(passes.DECISIONS, replace(partitioned, facts=facts))
        out_layouts = tuple(
            Static(output) if number is None else partitioned.values[number].layout
            for output, number in zip(graph.outputs, partitioned.outputs, strict=True)
        )
        leaving = self._boundary.places(
            [layout if isinstance(layout, Layout) else None for layout in out_layouts]
        )
        plain = {
            number
            for number, leaf in zip(partitioned.inputs, [signature.leaves[index] for index in tensors])
            if not isinstance(leaf, DTensor)
        } | set(partitioned.inputs[len(tensors) :])
        return Decision(
            graph,
            partitioned,
            tuple(layouts),
            spec,
            out_layouts,
            donated,
            tuple(paths),
            tuple(place for index in aliases(partitioned, plain) for place in leaving[index]),
            tuple(tracing.roots),
            tuple(
                None if value is None else kind_of(self._outside(value.layout), value.meta.dtype)
                for value in [None if n is None else partitioned.values[n] for n in partitioned.outputs]
            ),
            dict(zip(tensors, self._boundary.places(known), strict=True)),
            drawn_from(partitioned),
            tuple(tracing.closed),
        )

    def _layouts(
        self, signature: Signature, paths: list[str]
    ) -> tuple[list[Layout | None], list[Mark | None], tuple[Any, ...]]:
        """The layout of each leaf on entry, the marks of parameters, and those that move together."""
        plan, mesh, outside = self._plan, self._plan.mesh, self.plan.mesh
        plan.check_inputs(paths)
        prefix = f"{plan.params_arg}."
        own = {
            index: path.removeprefix(prefix)
            for index, path in enumerate(paths)
            if (path.startswith(prefix) or path == plan.params_arg)
            and isinstance(signature.leaves[index], torch.Tensor)
        }
        if (plan.params or plan.fsdp) and not own:
            raise PlanError(
                explain(
                    f"params rules, and no tensor in an argument {plan.params_arg!r}",
                    where=f"{self._name}({', '.join(signature.names)})",
                    rule="`params` rules speak of the argument named by `params_arg`",
                    remedy=f"vs.Plan(..., params_arg={signature.names[0]!r})"
                    if signature.names
                    else "pass the parameters as an argument",
                )
            )
        resolved = plan.resolve_leaves(list(own.values()), [signature.leaves[index] for index in own])
        parameters = dict(zip(own, resolved, strict=True))
        by_path = {entry.path: entry for entry in resolved}
        layouts: list[Layout | None] = []
        marks: list[Mark | None] = [None] * len(paths)
        for index, (path, leaf) in enumerate(zip(paths, signature.leaves, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                layouts.append(None)
                continue
            if not isinstance(leaf, DTensor) and leaf.layout is not torch.strided:
                raise ArgumentError(
                    explain(
                        f"{path}, a tensor of {leaf.layout}",
                        where=self._name,
                        rule="arguments are dense tensors",
                        remedy="pass x.to_dense()",
                    )
                )
            shape = tuple(leaf.shape)
            owner = owner_of(path, by_path)
            likely = owner.rest if owner is not None and owner.rest.shape == shape else None
            wanted: Layout | None = None
            if index in parameters:
                entry = parameters[index]
                wanted = entry.rest
                marks[index] = Mark(
                    entry.path, entry.run, entry.rest, leaf.dtype, entry.run_dtype, entry.reduce_dtype
                )
            elif (spec := plan.input_spec(path)) is not None:
                wanted = Layout(mesh.abstract, spec, shape)
            elif not isinstance(leaf, DTensor):
                wanted = likely or replicated(mesh.abstract, shape)
            if isinstance(leaf, DTensor):
                inside = self._boundary.inside(leaf.layout, wanted, likely)
                if leaf.mesh is not outside or inside is None:
                    raise self._mismatch(path, leaf, wanted)
                wanted = inside
            layouts.append(wanted)
        return layouts, marks, resolved.buckets

    def _mismatch(self, path: str, leaf: DTensor, wanted: Layout | None) -> PlanError:
        mesh = self.plan.mesh
        if leaf.mesh is not mesh:
            return PlanError(
                explain(
                    f"{path} lives on {leaf.mesh}",
                    where=self._name,
                    rule=f"arguments live on the plan's mesh object, {mesh}",
                    remedy="make one mesh and use it for the plan and for the tensors",
                )
            )
        if wanted is None:
            return PlanError(not_in_lanes(path, leaf.layout, self._plan.mesh.abstract, self._name))
        outside = self._boundary.outside(wanted)
        said = wanted.spec if outside is None else outside.spec
        over, plan = ("", "plan") if self.plan is self._plan else (" for lanes", "step.plan")
        return PlanError(
            explain(
                f"{path} has the layout {leaf.layout.spec}",
                where=self._name,
                rule=f"the plan says {said}{over}",
                remedy=f"call vs.distribute(..., {plan}) first, or x.redistribute(vs.{said!r})",
            )
        )

    def _outside(self, layout: Layout) -> Layout:
        outside = self._boundary.outside(layout)
        assert outside is not None, layout
        return outside

    def _stay_outside(
        self, partitioned: Partitioned, wishes: list[Layout | None], paths: Sequence[str]
    ) -> bool:
        """Whether results have layouts that no placements say outside: `wishes` then has others for them."""
        found = False
        for index, number in enumerate(partitioned.outputs):
            if number is None:
                continue
            layout = partitioned.values[number].layout
            if self._boundary.outside(layout) is None:
                if wishes[index] is not None:
                    raise PlanError(
                        explain(
                            f"the result {paths[index] or 'of fn'}, {layout.spec} over lanes of shape "
                            f"{layout.shape}",
                            where=self._name,
                            rule="what the lanes of a rank hold of a result is a piece that placements say",
                            remedy="a dim that divides by the lanes, or `outputs` that say another layout",
                        )
                    )
                wishes[index], found = self._boundary.nearest(layout), True
        return found

    def _wishes(
        self,
        spec: _tree.TreeSpec,
        paths: list[str],
        shapes: list[tuple[int, ...] | None],
        signature: Signature,
        layouts: list[Layout | None],
    ) -> list[Layout | None]:
        """The layouts of results: those that the plan says, else those of the argument that they mirror.

        Else those of the parameter whose path and shape they have, as state that a function makes.
        """
        wishes: list[Layout | None] = [None] * len(shapes)
        prefix = f"{self._plan.params_arg}."
        by_path = {
            path.removeprefix(prefix): layout
            for path, layout in zip(signature.paths(), layouts, strict=True)
            if path.startswith(prefix)
        }
        for index, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
            owner = owner_of(path.partition(".")[2], by_path)
            if owner is not None and owner.shape == shape:
                wishes[index] = owner
        for start, layouts_there in mirrors(
            spec,
            shapes,
            signature.spec,
            [layout and layout.shape for layout in layouts],
            layouts,
        ):
            wishes[start : start + len(layouts_there)] = layouts_there
        self._plan.check_outputs(paths)
        for index, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
            wanted = self._plan.output_spec(path)
            if wanted is not None and shape is not None:
                wishes[index] = Layout(self._plan.mesh.abstract, wanted, shape)
        return wishes

    def _check_activations(self, tracing: Tracing) -> None:
        unused = [
            rule for index, rule in enumerate(self._plan.activations) if index not in tracing.used_activations
        ]
        if unused:
            paths = [
                f"{path}{end}"
                for path in dict.fromkeys(tracing.seen.values())
                for end in (".input", ".output")
            ]
            raise PlanError(
                explain(
                    f"activations rules that match nothing: {with_near_misses(unused, paths)}",
                    where=f"{self._name}, in which {len(paths) // 2} modules ran",
                    rule="a rule is a regex that fullmatches the path of a module that ran + '.input' or "
                    "'.output'; an input is a tensor that is passed by position",
                    remedy="mend the regex, or drop the rule",
                )
            )

    def _module_state(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Training flags and attributes of the modules that ran: part of the signature."""
        guard = self._guards.get(key)
        return guard.state() if guard is not None else ()

    def _record(self, signature: Signature, decision: Decision, lines: Sequence[str]) -> Record:
        leaves = dict(zip(decision.paths, signature.leaves, strict=True))
        shown = {
            path: f"{type(leaf).__name__} {TensorMeta.of(leaf)} {layout.spec}"
            if isinstance(leaf, torch.Tensor) and layout is not None
            else f"static {torch.Generator if isinstance(leaf, torch.Generator) else leaf!r}"
            for (path, leaf), layout in zip(leaves.items(), decision.layouts, strict=True)
        }
        plain = {
            path: digest(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        }
        plain |= {
            f"closed-over tensor {number}": digest(tensor)
            for number, (_, tensor) in enumerate(decision.graph.hidden)
        }
        with using(signature.leaves, decision.generators):
            generators = {
                decision.paths[source.argument] if source.argument is not None else str(source): digest(
                    source.find().get_state()
                )
                for source in decision.sources
            }
        calls = sequence(decision.partitioned)
        return Record(self._calls, self._name, shown, calls, checksums(lines), plain, generators)


def drawing(entry: Entry, leaves: list[Any]) -> AbstractContextManager[None]:
    """Inside, the program finds the generators that it draws from."""
    if not entry.decision.sources:
        return nullcontext()
    return using(leaves, [get() for get in entry.generators])
