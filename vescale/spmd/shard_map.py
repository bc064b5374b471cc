"""`vs.shard_map`: a function of local shards, with placements as annotations.

Every rank calls the function on its part of each argument; the parts of the results make the global
results. What the function communicates it says itself, by axis name (`collectives`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._compat import FakeTensor, base_tensor, inside_functorch, is_batched
from .._errors import ArgumentError, LayoutError, ShardingError, VescaleError, explain
from .agree import digest
from .boundary import Static, enter, leave, own
from .closure import Getter, Guard, closed_over, getters, read
from .collective_ops import pvary
from .dtensor import DTensor, from_local
from .dynamic_map import run_dynamic
from .layout import Layout
from .mapped_call import call_in_trace, handle_of
from .mesh import Mesh
from .placements import P, Replicate
from .program.agreement import Record, agree, checksums
from .program.cache import CacheInfo, ProgramCache
from .program.ir import Ref, TensorMeta
from .program.mapped import MappedTrace, rank_at, trace_mapped
from .program.program import Collectives, Program, collectives_of, compile_mapped
from .program.trace import current_trace, is_recording
from .pullback import Pullback, call, compile_pullback, cotangent_layout, differentiable
from .signature import PARTS, Arguments, Signature
from .specs import UNSAID, Specs, global_shape
from .varying import current_map
from .watch import here


def shard_map(
    fn: Any = None,
    /,
    *,
    mesh: Mesh,
    in_specs: Any = UNSAID,
    out_specs: Any = UNSAID,
    axis_names: Sequence[str] | None = None,
    check: bool = True,
    redistribute: bool = False,
    static: bool = True,
) -> Any:
    """Map `fn` over the shards of its arguments: every rank of `mesh` runs it on its own part.

        shard_map(fn, mesh=mesh, in_specs=(P(dp=Shard(0)), P()), out_specs=P())
        @shard_map(mesh=mesh)   # and then the specs are fn's annotations

    `in_specs` holds a `P` for each argument, or a tree of them: a prefix of the argument's tree, where one P
    stands for a subtree. `out_specs` likewise for the result. Where they are left out, they are the
    annotations of fn: `x: Annotated[Tensor, P(dp=Shard(0))]`, and a bare `x: P(...)` too.

    An argument is a DTensor in the layout of its spec, or a plain tensor: the global value, cut up as the
    spec says. Leaves that are not tensors are static. What fn closes over is the same on all ranks.
    Results are DTensors. An axis that a spec does not mention must find the value equal along it: a result
    that differs there is an error, unless `check=False`. A Partial in a spec is a contribution to a sum.

    Inside, values that vary over an axis and values that do not are told apart, and gradients of the latter
    are full sums, equal on all ranks (see `varying`). Gradients flow through from outside too.

    `axis_names`: the axes that are mapped (all, by default); values are whole over the others.
    `redistribute`: move DTensors to the layouts of their specs; otherwise one in another layout is an error.
    `static=False`: run op by op on real values (control flow on values, prints, breakpoints), with the same
    bits; gradients are then taken inside only.

    Raises, before any communication: ArgumentError when a spec does not fit its tree, or a dim does not
    divide into a ragged spec; ShardingError when a result varies over an axis that its spec leaves
    out; TraceError for collectives that depend on values.

    >>> import torch, vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> @vs.shard_map(mesh=mesh, in_specs=(vs.P("dp"), vs.P()), out_specs=vs.P())
    ... def loss(x, w):
    ...     return vs.psum((x * w).sum(), "dp")
    >>> loss(torch.arange(4.0), torch.tensor(2.0)).full_tensor()
    tensor(12.)
    >>> vs.grad(loss, argnums=1)(torch.arange(4.0), torch.tensor(2.0))
    tensor(6.)
    """
    if fn is None:
        return lambda function: shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check=check,
            redistribute=redistribute,
            static=static,
        )
    return ShardMapped(fn, mesh, in_specs, out_specs, axis_names, check, redistribute, static)


@dataclass(frozen=True)
class Entry:
    """What is kept for a signature: the trace, its program, and how to cross the boundary."""

    traced: MappedTrace
    hidden: tuple[Getter, ...]
    program: Program
    layouts: tuple[Layout | None, ...]
    out_spec: _tree.TreeSpec
    out_layouts: tuple[Layout | Static, ...]
    paths: tuple[str, ...]
    shared: tuple[int, ...]  # results that would otherwise be memory of an argument or of another result

    def is_current(self) -> bool:
        """Whether what the function closes over still looks as it did."""
        graph = self.traced.first.graph
        return (
            not self.hidden
            or read(self.hidden, (graph.metas[value] for value, _ in graph.hidden)) is not None
        )


class ShardMapped:
    """A mapped function: see `shard_map`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        axis_names: Sequence[str] | None,
        check: bool,
        redistribute: bool = False,
        static: bool = True,
    ) -> None:
        if not callable(fn):
            raise ArgumentError(
                explain(
                    f"shard_map({fn!r})",
                    rule="the first argument is a function",
                    remedy="pass the function to map",
                )
            )
        self._fn, self.mesh, self._check, self._redistribute = fn, mesh, check, redistribute
        self._static = static
        self._over = lambda lanes: ShardMapped(fn, lanes, in_specs, out_specs, axis_names, check)
        self._on_lanes: ShardMapped | None = None
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self._axes = tuple(mesh.axis_names if axis_names is None else axis_names)
        for axis in self._axes:
            mesh.abstract.check_axis(axis, where=f"axis_names of shard_map({self.name})")
        self._arguments = Arguments(fn)
        self._specs = Specs(self._arguments, self.name, mesh.abstract, self._axes, in_specs, out_specs)
        parts = (*PARTS, "modules")
        self._cache = ProgramCache[Entry](parts)
        self._pullbacks = ProgramCache[Pullback](parts)
        self._products = ProgramCache[ShardMapped](parts)
        self._traces = ProgramCache[Traced](parts)
        self._handles = ProgramCache[tuple[int]](parts)
        self._guards: dict[tuple[Any, ...], Guard] = {}
        self._calls = 0
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = self._arguments.bind(args, kwargs)
        if self._redistribute:
            signature = self._moved(signature)
        if not self._static:
            return self._run_dynamic(signature)
        tensors = [leaf for leaf in signature.leaves if isinstance(leaf, Tensor)]
        below = False
        if inside_functorch() or is_recording():
            self._check_transforms(tensors)
        if inside_functorch():
            # Under torch.func: what the arguments are is below its wrappers.
            wrapped = [base_tensor(tensor) for tensor in tensors]
            below = any(base is not tensor for base, tensor in zip(wrapped, tensors, strict=True))
            signature = self._arguments.with_tensors(signature, wrapped) if below else signature
        if is_recording():
            return call_in_trace(self._where_it_runs(), signature, tensors)
        if below:
            return call(self, signature, tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return call(self, signature, tensors)
        entry = self._entry(signature)
        results = own(self.run(entry, entry.program, signature.leaves), entry.shared)
        return _tree.unflatten(entry.out_spec, leave(self.mesh, results, entry.out_layouts))

    def _where_it_runs(self) -> ShardMapped:
        """In a program over lanes: the same function, mapped over these."""
        tracing = current_trace()
        lanes = tracing.lanes if tracing is not None else None
        if lanes is None or lanes.hosts is not self.mesh:
            return self
        if self._on_lanes is None or self._on_lanes.mesh is not lanes:
            self._on_lanes = self._over(lanes)
        return self._on_lanes

    def _run_dynamic(self, signature: Signature) -> Any:
        """The mapped function on real values: see `dynamic_map`."""
        tensors = [leaf for leaf in signature.leaves if isinstance(leaf, Tensor)]
        followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if followed or inside_functorch() or is_recording():
            raise ArgumentError(
                explain(
                    f"{self.name}, with static=False, inside a transform or of arguments that require grad",
                    where=f"shard_map of {self.name}",
                    rule="a function that runs on real values is not traced: gradients are taken inside",
                    remedy="use vs.grad inside the mapped function, or static=True",
                )
            )
        paths = signature.paths()
        layouts = self._layouts(signature, paths)
        inputs = enter(
            self.mesh,
            signature.leaves,
            layouts,
            (),
            lambda index, leaf, layout: self._mismatch(paths[index], leaf, layout),
        )
        trees: list[Any] = []

        def flat(values: list[Tensor]) -> list[Any]:
            results, spec = _tree.flatten(self._arguments.call(signature, values))
            trees.append(spec)
            return results

        varying = [_varying(layout) for layout in layouts if layout is not None]
        results, types = run_dynamic(flat, self.mesh, self._axes, inputs, varying)
        tree = _tree.unflatten(trees[0], range(len(types)))
        leaves = []
        named = zip(_tree.paths(tree), self._specs.of_results(tree), types, strict=True)
        for index, (path, spec, varies) in enumerate(named):
            parts = [values[index] for values in results]
            if isinstance(parts[0], Tensor):
                self._check_varies(path or "the result", spec, varies)
                leaves.append(from_local([part.detach().clone() for part in parts], self.mesh, spec))
            else:
                leaves.append(parts[0])
        return _tree.unflatten(trees[0], leaves)

    def collectives(self, *args: Any, **kwargs: Any) -> Collectives:
        """The collectives that a call with arguments like these makes, as a table; nothing runs."""
        return collectives_of(self.trace(self._arguments.bind(args, kwargs)).traced)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, and for each miss which part of the signature was new."""
        return self._cache.info()

    # Arguments.

    def _moved(self, signature: Signature) -> Signature:
        """The same call with DTensors in the layouts of their specs."""
        specs = self._specs.of_leaves(signature)
        tensors = []
        for index in signature.tensors():
            tensor, base = signature.leaves[index], base_tensor(signature.leaves[index])
            if isinstance(base, DTensor) and base.mesh is self.mesh:
                layout = Layout(self.mesh.abstract, specs[index], tuple(base.shape))
                tensor = tensor if base.layout is layout else DTensor.redistribute(tensor, layout.spec)
            tensors.append(tensor)
        return self._arguments.with_tensors(signature, tensors)

    def _layouts(self, signature: Signature, paths: Sequence[str]) -> list[Layout | None]:
        layouts: list[Layout | None] = []
        problems: list[str] = []
        for path, leaf, spec in zip(paths, signature.leaves, self._specs.of_leaves(signature), strict=True):
            if not isinstance(leaf, Tensor):
                layouts.append(None)
                continue
            try:
                layout = Layout(self.mesh.abstract, spec, tuple(leaf.shape))
            except LayoutError as error:
                problems.append(f"{path} of shape {tuple(leaf.shape)}: {error}")
                continue
            if isinstance(leaf, DTensor) and (leaf.mesh is not self.mesh or leaf.layout is not layout):
                problems.append(str(self._mismatch(path, leaf, layout)))
            layouts.append(layout)
        if problems:
            raise ArgumentError(
                "\n".join([f"shard_map of {self.name}: arguments that don't fit their specs", *problems])
            )
        return layouts

    def _mismatch(self, path: str, leaf: DTensor, layout: Layout) -> ArgumentError:
        if leaf.mesh is not self.mesh:
            return ArgumentError(
                explain(
                    f"{path} lives on {leaf.mesh}",
                    where=f"shard_map of {self.name}",
                    rule=f"arguments live on the mapped mesh object, {self.mesh}",
                    remedy="make one mesh and use it for both",
                )
            )
        return ArgumentError(
            explain(
                f"{path} has the layout {leaf.layout.spec}",
                where=f"shard_map of {self.name}",
                rule=f"its spec says {layout.spec}",
                remedy=f"call {path.split('.')[0]}.redistribute(vs.{layout.spec!r}) first, "
                "or pass redistribute=True to shard_map",
            )
        )

    # What the function closes over.

    def _check_transforms(self, tensors: Sequence[Tensor]) -> None:
        """Transforms outside see arguments only, and know nothing of ranks."""
        if any(is_batched(tensor) for tensor in tensors):
            raise ArgumentError(
                explain(
                    f"vmap over the mapped function {self.name}",
                    rule="a mapped function takes whole values: a batch dim would be taken for one of them",
                    remedy="use vs.vmap inside the mapped function",
                )
            )
        for tensor in closed_over(self._fn):
            if base_tensor(tensor) is not tensor or isinstance(tensor, FakeTensor):
                raise ArgumentError(
                    explain(
                        f"a closed-over value of {tuple(tensor.shape)} that a transform outside follows",
                        where=f"shard_map of {self.name}",
                        rule="gradients and traces follow the arguments of a mapped function",
                        remedy="pass it as an argument",
                    )
                )

    def _key(self, signature: Signature) -> tuple[Any, ...]:
        """The signature, and the training flags and attributes of the modules that ran."""
        guard = self._guards.get(signature.key) if self._guards else None
        return (*signature.key, guard.state() if guard is not None else ())

    def _hidden(self, traced: MappedTrace) -> tuple[Getter, ...]:
        """Where to read what the function closes over."""
        tensors = [tensor for _, tensor in traced.first.graph.hidden]
        for tensor in tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    explain(
                        f"a closed-over tensor of shape {tuple(tensor.shape)} that requires grad",
                        where=f"shard_map of {self.name}",
                        rule="gradients flow to the arguments of a mapped function",
                        remedy="pass it as an argument, detach it, or call under torch.no_grad()",
                    )
                )
        return getters(self._fn, _modules(traced), tensors)

    # Tracing.

    def _entry(self, signature: Signature) -> Entry:
        entry = self._cache.get(self._key(signature))
        if entry is None or not entry.is_current():
            if entry is not None:
                self._traces.put(self._key(signature), self._trace(signature))
            made = self.trace(signature)
            self._agree(signature, made)
            entry = Entry(
                made.traced,
                self._hidden(made.traced),
                compile_mapped(made.traced, self.mesh),
                made.layouts,
                made.out_spec,
                made.out_layouts,
                made.paths,
                made.traced.shared(),
            )
            self._cache.put(self._key(signature), entry)
        return entry

    def trace(self, signature: Signature) -> Traced:
        """The traced function for arguments of this signature."""
        made = self._traces.get(self._key(signature))
        if made is None:
            made = self._trace(signature)
            self._traces.put(self._key(signature), made)
        return made

    def _trace(self, signature: Signature) -> Traced:
        paths = tuple(signature.paths())
        layouts = self._layouts(signature, paths)
        tensors = signature.tensors()
        out_spec: list[_tree.TreeSpec] = []

        def flat(values: list[Tensor]) -> list[Any]:
            results, spec = _tree.flatten(self._arguments.call(signature, values))
            out_spec[:] = [spec]
            return results

        known = [layout for layout in layouts if layout is not None]
        metas = [TensorMeta.of(signature.leaves[index]) for index in tensors]
        varying = [_varying(layout) for layout in known]
        traced = trace_mapped(
            flat, self.mesh.abstract, self._axes, known, metas, varying, [paths[index] for index in tensors]
        )
        (spec,) = out_spec
        if len(self._guards) > 256:
            self._guards.clear()
        # Watched together with what other traces of the same arguments ran: train and eval take turns.
        modules = _modules(traced)
        if modules:
            self._guards.setdefault(signature.key, Guard()).watch(modules)
        return Traced(traced, tuple(layouts), spec, self._out_layouts(traced, spec), paths)

    def _out_layouts(self, traced: MappedTrace, spec: _tree.TreeSpec) -> tuple[Layout | Static, ...]:
        """The layout of each result; errors for those that their spec does not fit, all of them."""
        outputs = traced.first.graph.outputs
        tree = _tree.unflatten(spec, range(len(outputs)))
        specs = self._specs.of_results(tree)
        layouts: list[Layout | Static] = []
        problems: list[str] = []
        for index, (path, one) in enumerate(zip(_tree.paths(tree), specs, strict=True)):
            output = outputs[index]
            if not isinstance(output, Ref):
                layouts.append(Static(output))
                continue
            try:
                layouts.append(self._out_layout(traced, index, path or "the result", one))
            except VescaleError as error:
                problems.append(str(error))
        if problems:
            raise ShardingError(
                "\n".join([f"shard_map of {self.name}: results that don't fit their specs", *problems])
            )
        return tuple(layouts)

    def _check_varies(self, path: str, spec: P, varies: frozenset[str]) -> None:
        """A result must not vary over an axis that its spec leaves out, unless told so."""
        said = {axis for axis, placement in spec.items() if not isinstance(placement, Replicate)}
        left = [
            axis for axis in self._axes if axis in varies - said and self.mesh.abstract.axis_size(axis) > 1
        ]
        if left and self._check:
            names = ", ".join(left)
            raise ShardingError(
                explain(
                    f"{path} varies over {names}",
                    where=f"out_specs {spec}",
                    rule="a result is equal on all ranks along the axes that its spec leaves out",
                    remedy=f"vs.psum over {left[0]!r}, or say in out_specs how the parts make the whole",
                )
            )

    def _out_layout(self, traced: MappedTrace, index: int, path: str, spec: P) -> Layout:
        varies = frozenset[str]().union(*(variant.varying[index] for variant in traced.variants.values()))
        self._check_varies(path, spec, varies)

        def local(rank: int) -> tuple[int, ...]:
            graph = traced.variant(rank).graph
            return graph.metas[graph.outputs[index].id].shape

        mesh = self.mesh.abstract
        shape = global_shape(mesh, spec, local)
        layout = Layout(mesh, spec, shape)
        for place in traced.variants:
            rank = rank_at(mesh, dict(zip(traced.apart, place)))
            if layout.local_shape(rank) != local(rank):
                raise ShardingError(
                    explain(
                        f"{path} has the local shape {local(rank)} on rank {rank}",
                        where=f"out_specs {spec}",
                        rule=f"of {shape} in all the spec gives this rank {layout.local_shape(rank)}",
                        remedy="use a RaggedShard of each rank's rows, or return parts as torch.chunk's",
                    )
                )
        return layout

    def _agree(self, signature: Signature, made: Traced) -> None:
        if self.mesh.is_simulated:
            return
        leaves = dict(zip(made.paths, signature.leaves, strict=True))
        shown = {
            path: f"{TensorMeta.of(leaf)}" if isinstance(leaf, Tensor) else f"static {leaf!r}"
            for path, leaf in leaves.items()
        }
        plain = {
            path: digest(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
        }
        plain |= {
            f"closed-over tensor {number}": digest(tensor)
            for number, (_, tensor) in enumerate(made.traced.first.graph.hidden)
        }
        sequence = tuple(f"{item.kind} over {item.axis}" for item in collectives_of(made.traced))
        lines = made.traced.lines()
        agree(self.mesh, Record(self._calls, self.name, shown, sequence, checksums(lines), plain), lines)

    def run(self, entry: Entry | Pullback, program: Program, leaves: Sequence[Any]) -> list[list[Any]]:
        """Run one of the entry's programs on global arguments: the local results of each hosted rank."""
        self._calls += 1
        outside = here.enter(self.name, self._calls)
        try:
            return program(
                enter(
                    self.mesh,
                    leaves,
                    entry.layouts,
                    [place() for place in entry.hidden],
                    lambda index, leaf, layout: self._mismatch(entry.paths[index], leaf, layout),
                )
            )
        finally:
            here.leave(outside)

    # Gradients from outside: see `pullback`.

    def pullback(self, signature: Signature) -> Pullback:
        """The function and its vector-Jacobian product, for a signature."""
        found = self._pullbacks.get(self._key(signature))
        if found is None:
            found = self._trace_pullback(signature)
            self._pullbacks.put(self._key(signature), found)
        return found

    def _differentiated(self, signature: Signature, made: Traced) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of the tensor arguments have a gradient, and which of the results do."""
        tensors = signature.tensors()
        leaves = [signature.leaves[index] for index in tensors]
        known = [layout for layout in made.layouts if layout is not None]
        inputs = tuple(index for index, leaf in enumerate(leaves) if differentiable(leaf))
        for index in inputs:
            if known[index].partials:
                path = made.paths[tensors[index]]
                raise ArgumentError(
                    explain(
                        f"a gradient with respect to {path}, whose spec is {known[index].spec}",
                        where=f"shard_map of {self.name}",
                        rule="a contribution to a sum has no gradient of its own",
                        remedy="detach it, or give its sum to the function",
                    )
                )
        first = made.traced.first.graph
        results = tuple(
            index
            for index, (output, layout) in enumerate(zip(first.outputs, made.out_layouts, strict=True))
            if isinstance(layout, Layout) and differentiable(first.metas[output.id])
        )
        for index in results:
            layout = made.out_layouts[index]
            extremes = [op for op in layout.partials.values() if op in ("max", "min")]  # type: ignore[union-attr]
            if extremes:
                raise ArgumentError(
                    explain(
                        f"a gradient through result {index} of {self.name}, a Partial({extremes[0]!r})",
                        rule="which rank holds the extreme value is not a smooth choice",
                        remedy="detach it, or take the extreme inside, of a detached value",
                    )
                )
        return inputs, results

    def _trace_pullback(self, signature: Signature) -> Pullback:
        made = self.trace(signature)
        self._agree(signature, made)
        inputs, results = self._differentiated(signature, made)
        tensors, first = signature.tensors(), made.traced.first.graph
        leaves = [signature.leaves[index] for index in tensors]
        known = [layout for layout in made.layouts if layout is not None]
        out_layouts = [made.out_layouts[index] for index in results]
        cotangents = [cotangent_layout(layout) for layout in out_layouts if isinstance(layout, Layout)]

        def joint(values: list[Tensor]) -> list[Any]:
            arguments, given = values[: len(tensors)], values[len(tensors) :]
            return self._product(signature, arguments, given, inputs, results, out_layouts)

        metas = [TensorMeta.of(leaf) for leaf in leaves]
        metas += [first.metas[first.outputs[index].id] for index in results]
        layouts = [*known, *cotangents]
        paths = [made.paths[index] for index in tensors] + ["cotangent"] * len(cotangents)
        varying = [_varying(layout) for layout in layouts]
        traced = trace_mapped(joint, self.mesh.abstract, self._axes, layouts, metas, varying, paths)
        forward, backward, shared = compile_pullback(self, traced, len(tensors), len(first.outputs))
        return Pullback(
            traced,
            self._hidden(traced),
            forward,
            backward,
            made.layouts,
            made.out_spec,
            made.out_layouts,
            made.paths,
            inputs,
            results,
            shared,
        )

    def _product(
        self,
        signature: Signature,
        arguments: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[int],
        results: Sequence[int],
        layouts: Sequence[Layout | Static],
    ) -> list[Any]:
        """All results of fn, then the gradients of the arguments number `inputs`; tensors are local."""
        mapped = current_map("shard_map")
        parts = [1] * len(results)

        def some(*chosen: Tensor) -> Any:
            filled = list(arguments)
            for index, value in zip(inputs, chosen, strict=True):
                filled[index] = value
            outputs, _ = _tree.flatten(self._arguments.call(signature, filled))
            # A result is as varying as its spec says, and so is its cotangent. What varies beyond that
            # (check=False) is one value all the same, and an average divides by the ranks: a rank's
            # copy or contribution gets that part of the cotangent.
            for number, (index, layout) in enumerate(zip(results, layouts, strict=True)):
                assert isinstance(layout, Layout)
                over = mapped.over(outputs[index])
                shared = [axis for axis in self._axes if axis in over and axis not in layout.spec]
                shared += [axis for axis, op in layout.partials.items() if op == "avg"]
                parts[number] = mapped.size(shared)
                outputs[index] = pvary(outputs[index], [axis for axis in layout.spec if axis not in over])
            return tuple(outputs[index] for index in results), outputs

        _, vjp, outputs = torch.func.vjp(  # pyright: ignore[reportAssignmentType] - with has_aux there are 3
            some, *(arguments[index] for index in inputs), has_aux=True
        )
        given = [ct if part == 1 else ct / part for ct, part in zip(cotangents, parts, strict=True)]
        return [*outputs, *vjp(tuple(given))]

    def product(self, signature: Signature, tensors: Sequence[Tensor]) -> tuple[ShardMapped, Signature]:
        """The vector-Jacobian product as a mapped function of arguments and cotangents, and its signature."""
        made = self.trace(signature)
        inputs, results = self._differentiated(signature, made)
        known = [layout for layout in made.layouts if layout is not None]
        out_layouts = [made.out_layouts[index] for index in results]
        cotangents = [cotangent_layout(layout) for layout in out_layouts if isinstance(layout, Layout)]
        count = len(known)

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            both = self._product(signature, values[:count], values[count:], inputs, results, out_layouts)
            return tuple(both[len(made.out_layouts) :])

        found = self._products.get(self._key(signature))
        if found is None:
            found = ShardMapped(
                gradients,
                self.mesh,
                tuple(layout.spec for layout in (*known, *cotangents)),
                tuple(known[index].spec for index in inputs),
                self._axes,
                check=False,
            )
            found.name = f"gradient of {self.name}"
            self._products.put(self._key(signature), found)
        return found, found._arguments.bind(tuple(base_tensor(tensor) for tensor in tensors), {})

    # Inside a traced function: see `mapped_call`.

    def handle(self, signature: Signature) -> int:
        """The handle of the node for arguments of this signature."""
        found = self._handles.get(self._key(signature))
        if found is None:
            found = (handle_of(self, signature),)
            self._handles.put(self._key(signature), found)
        return found[0]

    def differentiated(self, signature: Signature) -> tuple[int, ...]:
        """Which of the tensor arguments have a gradient."""
        return self._differentiated(signature, self.trace(signature))[0]


@dataclass(frozen=True)
class Traced:
    """A traced mapped function, and how to cross its boundary."""

    traced: MappedTrace
    layouts: tuple[Layout | None, ...]
    out_spec: _tree.TreeSpec
    out_layouts: tuple[Layout | Static, ...]
    paths: tuple[str, ...]


def _modules(traced: MappedTrace) -> list[torch.nn.Module]:
    """All modules that any rank ran, and those below them."""
    roots = dict.fromkeys(root for variant in traced.variants.values() for root in variant.modules)
    return [module for root in roots for module in root.modules()]


def _varying(layout: Layout) -> frozenset[str]:
    return frozenset(axis for axis, _ in layout.spec.items())
