"""An `nn.Module` on a mesh: what `vs.parallelize(module, plan)` and `vs.init` return.

The module lends its code and its flags; parameters and buffers are DTensors of this object. A call runs
`forward` as a program over them. Where a gradient is wanted, one trace of forward and backward is decided
as one program, and split in two: a single autograd node joins them to the tape outside.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tree
from .._compat import inside_functorch
from .._errors import ArgumentError, TraceError, explain, near_misses
from .boundary import leave, own
from .distribute import distribute
from .dtensor import DTensor, distribute_tensor, place
from .dynamic import Dynamic
from .functional import functional_call
from .lane_plan import LanePlan
from .layout import Layout, replicated
from .mesh import Mesh
from .parallelize import Decision, Entry, Lowered, Parallelized, drawing
from .plan import Plan
from .program.cache import CacheInfo
from .program.partition import without_partials
from .program.program import Program, compile_partitioned
from .program.split import cotangent, split
from .program.trace import current_trace, is_recording
from .signature import Arguments, Signature
from .transforms import at_rest, in_use, marks_of

BUFFERS = "buffers"


class ParallelModule:
    """A module on a mesh, called like the module: see `parallelize`.

    `params` and `buffers` are flat dicts of DTensors by qualified name, tied ones once: parameters at rest as
    the plan says, buffers replicated unless `inputs` has a rule for the path `buffers.<name>`. `module` is
    the module that was given; its training flags and attributes count, its tensors don't.

        model = vs.parallelize(module, plan)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(x, y)          # an ordinary autograd result
        loss.backward()             # fills p.grad, in the layout of p at rest
        optimizer.step()

    A call updates `buffers`. It records one autograd node when gradients are on and a parameter, or a
    floating tensor among the arguments, requires one; the node can be differentiated once. Frozen parameters
    get neither a gradient nor a reduction. Results are DTensors. Inside a traced function use
    `vs.functional(model)`.

    >>> import torch, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"tp": 2}), params={"weight": vs.P(tp=vs.Shard(0))})
    >>> model = vs.parallelize(torch.nn.Linear(3, 4), plan)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> model.params["weight"].grad
    DTensor(shape=(4, 3), dtype=float32, P(tp=Shard(0)) on Mesh(tp=2, simulated on cpu))
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        placed: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None,
        static: bool = True,
        strict: bool = False,
    ) -> None:
        self.module, self.plan = module, plan
        params, buffers = placed or _placed(module, plan)
        trains = {name: p.requires_grad for name, p in module.named_parameters()}
        self.params = {name: nn.Parameter(p, trains[name]) for name, p in params.items()}
        self.buffers: dict[str, Tensor] = dict(buffers)
        self._call = _as_function(module, plan)
        # Results are (out, buffers): the paths in the plan are those in out.
        self._inner = copy.copy(plan)
        self._inner.outputs = {f"0.{path}".rstrip("."): spec for path, spec in plan.outputs.items()}
        self._static, self._strict = static, strict
        self._forward = (
            Parallelized(self._call, self._inner, (), strict)
            if static
            else Dynamic(self._call, self._inner, tape=True)
        )
        self._differentiated = _Differentiated(self._call, self._inner, strict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording() or (self._static and inside_functorch()):
            raise TraceError(
                explain(
                    f"a call of {self!r} inside a traced function or a transform",
                    rule="in there a module's parameters are arguments",
                    remedy="fn, params, buffers = vs.functional(model), and pass params and buffers",
                )
            )
        out, buffers = self._program_for(args, kwargs)(self.params, self.buffers, *args, **kwargs)
        self.buffers = buffers if self._static else {name: b.detach() for name, b in buffers.items()}
        return out

    def _program_for(self, args: Any, kwargs: Any) -> Parallelized:
        if isinstance(self.plan, LanePlan):
            raise ArgumentError(
                explain(
                    f"a call of {self!r}, whose plan has lanes",
                    rule="a module's forward and backward are programs of the ranks that there are",
                    remedy="a train step that takes vs.functional(module)'s params",
                )
            )
        recorded = self._static and torch.is_grad_enabled() and self._requires_grad((args, kwargs))
        return self._differentiated if recorded else self._forward

    def _requires_grad(self, given: Any) -> bool:
        if any(parameter.requires_grad for parameter in self.params.values()):
            return True
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _tree.leaves(given))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments like these, without running it or communicating.

        It is that of forward and backward where a gradient would be recorded.
        """
        return self._program_for(args, kwargs).lower(self.params, self.buffers, *args, **kwargs)

    def cache_info(self) -> tuple[CacheInfo, CacheInfo]:
        """Hits and misses of the programs of forward alone, and of those with a gradient."""
        return self._forward.cache_info(), self._differentiated.cache_info()

    # The module's manners.

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters and buffers of its own, on the same mesh. Gradients are not copied."""
        copied = [
            {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for tensors in (self.params, self.buffers)
        ]
        module = copy.deepcopy(self.module, memo)
        made = ParallelModule(module, self.plan, (copied[0], copied[1]), self._static, self._strict)
        for name, parameter in self.params.items():
            made.params[name].requires_grad_(parameter.requires_grad)
        memo[id(self)] = made
        return made

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> ParallelModule:
        """Set the module's training mode; returns self."""
        self.module.train(mode)
        return self

    def eval(self) -> ParallelModule:
        """Set the module's evaluation mode; returns self."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The sharded parameters, tied ones once."""
        return iter(self.params.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Qualified names and sharded parameters, tied ones once."""
        return iter(self.params.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Qualified names and buffers, tied ones once, persistent or not."""
        return iter(self.buffers.items())

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for parameter in self.params.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The DTensors by the names of the module's own state dict: tied ones under each of their names."""
        ours = {**self.params, **self.buffers}
        return {name: ours[first].detach() for name, first in self._names().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with these values: DTensors, or plain tensors that all ranks have.

        Raises ArgumentError, before anything is written, for names that are missing or unknown and for shapes
        that differ.
        """
        names, ours = self._names(), {**self.params, **self.buffers}
        problems = [f"{name} is missing" for name in names if name not in state]
        problems += [
            f"{name} is unknown (near: {', '.join(near_misses(name, names)) or 'nothing'})"
            for name in state
            if name not in names
        ]
        problems += [
            f"{name} has shape {tuple(state[name].shape)}, not {tuple(ours[first].shape)}"
            for name, first in names.items()
            if name in state and state[name].shape != ours[first].shape
        ]
        if problems:
            raise ArgumentError(
                explain(
                    "; ".join(problems),
                    where="load_state_dict",
                    rule="a state dict has the names and shapes of the module's",
                    remedy="load what state_dict() of the same model gave",
                )
            )
        with torch.no_grad():
            for name, first in names.items():
                ours[first].copy_(state[name])

    def _names(self) -> dict[str, str]:
        """Each name of the module's state dict, and the name under which we have its tensor."""
        first = {id(tensor): name for name, tensor in _named_tensors(self.module)}
        return {
            name: first[id(tensor)]
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }

    def __repr__(self) -> str:
        return f"ParallelModule({type(self.module).__name__} on {self.plan.mesh})"


def buffer_layout(plan: Plan, name: str, buffer: Tensor) -> Layout:
    """Where a buffer lies: as `inputs` says of `buffers.<name>`, else everywhere."""
    spec = plan.input_spec(f"{BUFFERS}.{name}")
    mesh, shape = plan.mesh.abstract, tuple(buffer.shape)
    return replicated(mesh, shape) if spec is None else Layout(mesh, spec, shape)


def _placed(module: nn.Module, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's parameters and buffers on the mesh."""
    params = distribute({name: p.detach() for name, p in module.named_parameters()}, plan)
    return params, {
        name: distribute_tensor(
            buffer.detach(), plan.hosted("parallelize"), buffer_layout(plan, name, buffer).spec
        )
        for name, buffer in module.named_buffers()
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _as_function(module: nn.Module, plan: Plan) -> Callable[..., Any]:
    """forward as a pure function, whose arguments have forward's names after params and buffers."""
    pure = functional_call(module)

    def call(params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> Any:
        params = dict(zip(params, in_use(list(params.values()), marks_of(list(params.values())))))
        return pure(params, buffers, *args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = inspect.signature(module.forward).parameters
    taken = [name for name in (plan.params_arg, BUFFERS) if name in own]
    if taken:
        raise ArgumentError(
            explain(
                f"forward of {type(module).__name__} has an argument {taken[0]!r}",
                rule="that name stands for the module's own tensors in the plan",
                remedy="rename the argument"
                + (", or set params_arg= of the plan" if taken[0] != BUFFERS else ""),
            )
        )
    first = [inspect.Parameter(name, kind) for name in (plan.params_arg, BUFFERS)]
    call.__signature__ = inspect.Signature([*first, *own.values()])  # type: ignore[attr-defined]
    call.__qualname__ = type(module).__name__
    return call


class _Pullback(Arguments):
    """Calls a function and the pullback of its gradient, within a trace."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Which tensors require a gradient is part of the signature."""
        signature = super().bind(args, kwargs)
        *parts, mode = signature.key
        return replace(signature, key=(*parts, (mode, _differentiated(signature))))

    def call(self, signature: Signature, tensors: Sequence[Any]) -> Any:
        """`(out, buffers, gradients)`: the gradients are those of the tensors that require one, by number."""
        tracing = current_trace()
        assert tracing is not None
        places = _differentiated(signature)
        chosen = [tensors[at] for at in places]
        marks = marks_of(chosen)
        structure: list[Any] = []

        def forward(*values: Tensor) -> Any:
            filled = list(tensors)
            for at, value in zip(places, values, strict=True):
                filled[at] = value
            out, buffers = super(_Pullback, self).call(signature, filled)
            leaves, spec = _tree.flatten(out)
            floats = [leaf for leaf in leaves if _is_differentiable(leaf)]
            integers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not _is_differentiable(leaf)]
            structure[:] = [spec, leaves]
            tracing.region = "backward"
            return tuple(floats), (integers, buffers)

        region, tracing.region = tracing.region, "forward"
        try:
            found: Any = torch.func.vjp(forward, *in_use(chosen, marks), has_aux=True)
            floats, pullback, (integers, buffers) = found
            arriving = tuple(cotangent(value, index) for index, value in enumerate(floats))
            gradients = at_rest(pullback(arriving), marks)
        finally:
            tracing.region = region
        spec, leaves = structure
        rest, integers = iter(floats), iter(integers)
        leaves = [
            leaf if not isinstance(leaf, Tensor) else next(rest if _is_differentiable(leaf) else integers)
            for leaf in leaves
        ]
        return _tree.unflatten(spec, leaves), buffers, dict(enumerate(gradients))


def _differentiated(signature: Signature) -> tuple[int, ...]:
    """The places, among the tensors of a call, of those that require a gradient."""
    leaves = signature.leaves
    return tuple(at for at, index in enumerate(signature.tensors()) if leaves[index].requires_grad)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class _Halves:
    """The programs of a signature: forward, whose last outputs are residuals, and backward."""

    forward: Program
    backward: Program
    results: int  # so many outputs of forward are results, and then so many residuals
    residuals: int
    read: tuple[int, ...]  # the leaves that backward reads too
    cotangents: tuple[tuple[int, Layout, torch.dtype], ...]  # index of the result, how backward takes it


class _Differentiated(Parallelized):
    """A function `-> (out, buffers)` whose `out` is on the tape of autograd."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, strict: bool) -> None:
        super().__init__(fn, plan, (), strict)
        self._arguments = _Pullback(fn)

    def _program(self, decision: Decision) -> _Halves:
        results = len(decision.graph.outputs) - decision.out_spec.child(2).num_leaves
        parts, mesh = split(decision.partitioned, results), self._mesh
        values = decision.partitioned.values
        entered = [index for index, layout in enumerate(decision.layouts) if layout is not None]
        return _Halves(
            compile_partitioned(parts.forward, mesh, optimise=True),
            compile_partitioned(parts.backward, mesh, optimise=True),
            results,
            len(parts.forward.outputs) - results,
            tuple(
                index
                for index, number in zip(entered, decision.partitioned.inputs)
                if number in parts.backward.inputs
            ),
            tuple((index, values[n].layout, values[n].meta.dtype) for index, n in parts.cotangents),
        )

    def _run(self, entry: Entry, leaves: list[Any], hidden: list[Tensor]) -> Any:
        mesh, decision, halves = self._mesh, entry.decision, entry.program
        with drawing(entry, leaves):
            found = halves.forward(self._enter(decision, leaves, hidden))
        results = [values[: halves.results] for values in found]
        residuals = [values[halves.results :] for values in found]
        results = own(results, [index for index in decision.aliases if index < halves.results])
        outputs = leave(mesh, results, decision.out_layouts[: halves.results])
        chosen = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        places = [
            at for at in range(decision.out_spec.child(0).num_leaves) if _is_differentiable(outputs[at])
        ]
        again = lambda: drawing(entry, leaves)  # noqa: E731
        back = _Backward(mesh, halves, decision.out_layouts[halves.results :], chosen, again)
        kept = [*(value for values in residuals for value in values), *(leaves[at] for at in halves.read)]
        on_tape = _Tape.apply(back, kept, [outputs[at] for at in places], *chosen)
        for at, output in zip(places, on_tape, strict=True):  # pyright: ignore[reportArgumentType]
            outputs[at] = output
        missing = [None] * decision.out_spec.child(2).num_leaves
        return _tree.unflatten(decision.out_spec, [*outputs, *missing])[:2]


class _Backward:
    """The second half of a call."""

    def __init__(
        self,
        mesh: Mesh,
        halves: _Halves,
        layouts: Sequence[Any],
        chosen: Sequence[Tensor],
        drawing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.mesh, self.halves, self.layouts, self.drawing = mesh, halves, layouts, drawing
        self.at = [tensor.layout if isinstance(tensor, DTensor) else None for tensor in chosen]

    def __call__(self, residuals: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Tensor]:
        """Gradients of the tensors that require one; residuals are those of each rank, one after another."""
        ranks = len(self.mesh.local_ranks)
        count = self.halves.residuals
        inputs = [list(residuals[start * count : (start + 1) * count]) for start in range(ranks)]
        for index, layout, dtype in self.halves.cotangents:
            for values, piece in zip(inputs, self._pieces(cotangents[index], layout, dtype), strict=True):
                values.append(piece)
        with self.drawing():
            found = self.halves.backward(inputs)
        gradients = leave(self.mesh, found, self.layouts)
        return [
            # A plain tensor is a global value, and so is its gradient.
            gradient.full_tensor() if layout is None else gradient.redistribute(without_partials(layout).spec)
            for gradient, layout in zip(gradients, self.at, strict=True)
        ]

    def _pieces(self, value: Any, layout: Layout, dtype: torch.dtype) -> list[Tensor]:
        if value is None:
            shapes = [layout.local_shape(rank) for rank in self.mesh.local_ranks]
            return [torch.zeros(shape, dtype=dtype, device=self.mesh.device) for shape in shapes]
        if not isinstance(value, DTensor):
            value = place(value, self.mesh, layout)
        return [piece.contiguous() for piece in value.redistribute(layout.spec).locals]


class _Tape(torch.autograd.Function):
    """Puts results that a program computed on the tape."""

    @staticmethod
    def forward(ctx: Any, back: _Backward, kept: Any, results: Any, *tensors: Tensor) -> Any:
        ctx.back, ctx.count = back, len(tensors)
        ctx.set_materialize_grads(False)
        # Saved so, they are freed with the tape, and a write to an argument before backward is an error.
        ctx.save_for_backward(*kept)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise ArgumentError(
                explain(
                    "create_graph=True through a module on a mesh",
                    rule="its result is differentiated once",
                    remedy="take gradients of gradients of vs.functional(model), inside vs.parallelize",
                )
            )
        if all(cotangent is None for cotangent in cotangents):
            return (None, None, None, *[None] * ctx.count)
        return (None, None, None, *ctx.back(ctx.saved_tensors, cotangents))
