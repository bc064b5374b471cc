"""Trace: a function of tensors to a `Graph` of ATen calls at global shapes, with fake tensors.

A dispatch mode above the fake tensor mode sees every ATen call of forward, backward and optimizer, in
the order in which one device would run it, and writes it down. Tensors are told apart by identity:
every one that was seen is kept alive until the end. We record ourselves rather than through make_fx
because each node then knows its source line, module path and region, closed-over tensors become
inputs in the same pass, and a node costs a third of the time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch

from ... import _tree
from ..._compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    data_dependent_errors,
    generator_key,
    is_mutable,
    no_modes,
)
from ..._errors import ShardingError, TraceError, VescaleError, explain
from ..lanes import LaneMesh
from ..layout import Layout
from ..mesh import Mesh
from ..placements import P
from .functionalise import functionalise
from .ir import Graph, Node, Origin, Ref, TensorMeta, map_args
from .torch_draws import (
    Source,
    Stream,
    decomposition,
    default_generator,
    is_effect,
    overwrite,
    refuse_in_shard_map,
    replaced,
    stream_of,
    torch_draw,
)

aten = torch.ops.aten

_HERE = __file__.rsplit("/", 3)[0]  # the package: its frames are never the user's line
_TORCH = torch.__file__.rsplit("/", 1)[0]


def _grouped_shape(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    grouped = x.dim() == 2 and w.dim() == 2
    return x.new_empty((len(ends), x.shape[0], w.shape[1]) if grouped else (x.shape[0], w.shape[-1]))


# Ops of which torch's own shape function (2.11 - 2.13) refuses dtypes that the kernels take.
SHAPED: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_shape}


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a constraint puts a value, and why."""

    spec: P | Layout
    cause: str = ""
    gradient: bool = False  # of a parameter


def gradient_of(name: str) -> str:
    """What moves the gradient of a parameter: the cause by which passes know it."""
    return f"gradient of {name}"


@dataclass(frozen=True, slots=True)
class Mark:
    """A parameter among the inputs: its layout in use and at rest (where its gradient belongs).

    `dtype` is its own; `run_dtype` and `reduce_dtype` are those of its uses and of its gradient on the way.
    """

    name: str
    run: Layout
    rest: Layout
    dtype: torch.dtype | None = None
    run_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Observer(Protocol):
    """Is told of the tensors of a trace as they come: shard_map types them so."""

    line: Callable[[], str]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are the inputs, in order."""

    def call(self, op: OpOverload, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """`op` made `results` of `operands` (tensors and others)."""


@dataclass
class Tracing:
    """What the transforms that run inside a trace need to know: see `current_trace`."""

    constraints: list[Pin] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)  # by id of the input
    activations: Sequence[tuple[re.Pattern[str], P]] = ()
    used_activations: set[int] = field(default_factory=set)
    used: dict[str, Any] = field(default_factory=dict)  # parameters in use, by name: see `_module_stack`
    observer: Observer | None = None
    mesh: Mesh | None = None  # where the function runs, when it runs on real values and nothing is recorded
    lanes: LaneMesh | None = None  # that the program is for, where ranks host several of its ranks
    region: str = ""
    modules: list[str] = field(default_factory=list)  # the stack of running modules, by path
    seen: dict[torch.nn.Module, str] = field(default_factory=dict)  # paths of the modules that ran
    roots: dict[torch.nn.Module, None] = field(default_factory=dict)  # those not called by another one
    device: torch.device | None = None  # for which closed-over tensors on the meta device stand
    generators: Sequence[Any] = ()  # leaves of the arguments, the generators among them
    closed: list[torch.Generator] = field(default_factory=list)  # generators that the function closes over
    repeated: set[int] | None = None  # in a recomputation: the keys of the generators whose states were kept
    unequal: str = ""  # the ranks that start from other states of the default generator, where that is known


_current: ContextVar[Tracing | None] = ContextVar("vescale_trace", default=None)


def current_trace() -> Tracing | None:
    """The trace that is being recorded in this context, None outside."""
    return _current.get()


def is_recording() -> bool:
    """Whether a graph is being recorded in this context."""
    tracing = _current.get()
    return tracing is not None and tracing.mesh is None


def trace(
    fn: Callable[[list[torch.Tensor]], Sequence[Any]],
    inputs: Sequence[TensorMeta],
    paths: Sequence[str],
    tracing: Tracing | None = None,
    marks: Sequence[Mark | None] = (),
) -> Graph:
    """The graph of `fn(tensors) -> flat results` for inputs of these global shapes.

    `paths` name the inputs in errors; `marks` say which of them are parameters. Raises TraceError
    when fn needs a value, has an output shape that depends on data, or mutates an input.
    """
    tracing = tracing or Tracing()
    fake_mode = FakeTensorMode()
    with _counting_versions(), fake_mode:
        fakes = [torch.empty(meta.shape, dtype=meta.dtype, device=meta.device) for meta in inputs]
    recorder = _Recorder(fake_mode, fakes, paths, tracing)
    tracing.marks = {id(fake): mark for fake, mark in zip(fakes, marks, strict=False) if mark is not None}
    if tracing.observer is not None:
        tracing.observer.line = lambda: recorder.line or user_line()
        tracing.observer.inputs(fakes)
    token = _current.set(tracing)
    try:
        with _counting_versions(), fake_mode, recorder, _module_stack(tracing):
            results = fn(fakes)
    except VescaleError:
        raise
    except data_dependent_errors() as error:
        raise _data_dependent(recorder, error) from error
    except RuntimeError as error:
        meant = _explained(recorder, error)
        if meant is None:
            raise
        raise meant from error
    finally:
        _current.reset(token)
    return functionalise(recorder.finish(results, tracing))


@contextmanager
def _counting_versions() -> Iterator[None]:
    """A trace counts the versions of its tensors, which torch doesn't in inference mode."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextmanager
def within(tracing: Tracing) -> Iterator[None]:
    """Inside, a function runs on real values: transforms find `tracing`, activations are pinned."""
    token = _current.set(tracing)
    try:
        with _module_stack(tracing):
            yield
    finally:
        _current.reset(token)


class _Recorder(TorchDispatchMode):
    """Writes down each ATen call."""

    def __init__(
        self, fake_mode: Any, fakes: list[torch.Tensor], paths: Sequence[str], tracing: Tracing
    ) -> None:
        super().__init__()
        self.fake_mode, self.paths, self.tracing = fake_mode, paths, tracing
        self.fakes = fakes
        self.alive: list[Any] = []
        self.ids: dict[int, int] = {}
        self.metas: list[TensorMeta] = []
        self.nodes: list[Node] = []
        self.hidden: dict[int, tuple[int, torch.Tensor, torch.Tensor, int]] = {}  # last: its version
        self.line = ""
        self.wrote = ""  # the line of an in-place op whose versions are not checked yet
        self.makers: dict[int, Node] = {}
        self.inputs = tuple(self.number(fake) for fake in fakes)

    def number(self, tensor: torch.Tensor) -> int:
        """A new value for this tensor."""
        self.alive.append(tensor)
        self.ids[id(tensor)] = len(self.metas)
        self.metas.append(TensorMeta.of(tensor))
        return len(self.metas) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions such as prim.device, not computation
            return func(*args, **kwargs)
        if self.wrote:  # torch counts the version up when the op has returned
            self.check_inputs()
            self.wrote = ""
        self.line = user_line()
        if is_strided_view(func):
            if func is aten.as_strided.default:
                args = (self.in_memory_order(args[0]), *args[1:])
            check_memory(func, args, kwargs, self.line)
        args, kwargs = self.lift(args), {name: self.lift(value) for name, value in kwargs.items()}
        if func is aten._local_scalar_dense.default and id(args[0]) in self.ids:
            known = self.known_value(self.ids[id(args[0])])
            if known is not None:
                return known
        if torch.Tag.nondeterministic_seeded in func.tags and func.namespace == "aten":
            if self.tracing.observer is not None and is_effect(func):
                raise refuse_in_shard_map(func, self.line)
            instead = decomposition(func, args)
            if instead is not None:
                with self:
                    return instead(*args, **kwargs)
        run: Any = SHAPED.get(func) or func
        result = run(*args, **kwargs)
        if is_mutable(func):
            self.wrote = self.line
        outs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        self.check_strided(func, outs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            source = self.source((*args, *kwargs.values()), outs)
            stream = stream_of(func, args, kwargs, result) if func.namespace == "aten" else None
            if stream is not None:
                assert isinstance(result, torch.Tensor)
                self.draw(stream, source, result, args[0] if is_mutable(func) else None)
                return result
            args, kwargs = replaced(func, args, kwargs, source)
        if self.tracing.observer is not None:
            self.tracing.observer.call(func, (*args, *kwargs.values()), outs)
        node = Node(
            func,
            tuple(self.refer(arg) for arg in args),
            {name: self.refer(value) for name, value in kwargs.items()},
            tuple(self.number(out) if isinstance(out, torch.Tensor) else None for out in outs),
            Origin(self.line, self.tracing.modules[-1] if self.tracing.modules else "", self.tracing.region),
            isinstance(result, (tuple, list)),
        )
        self.note(node)
        return result

    def note(self, node: Node) -> None:
        self.nodes.append(node)
        self.makers.update((out, node) for out in node.outs if out is not None)

    def draw(
        self, stream: Stream, source: Source, result: torch.Tensor, written: torch.Tensor | None
    ) -> None:
        """Notes a draw of torch's that made `result`, or wrote it to `written`."""
        modules = self.tracing.modules
        origin = Origin(self.line, modules[-1] if modules else "", self.tracing.region)
        order, shape = stream.order, stream.shape
        chain: list[tuple[Any, tuple[Any, ...]]] = []  # what makes the result of the draw
        if order != tuple(range(len(order))):
            chain.append((aten.permute.default, (tuple(order.index(dim) for dim in range(len(order))),)))
        if result.is_complex():
            chain.append((aten.view_as_complex.default, ()))
        if written is not None:
            chain.append((overwrite, ()))
        with self.fake_mode:
            value = torch.empty([shape[dim] for dim in order], dtype=stream.dtype, device=stream.device)
            op, rest, operands = torch_draw, (stream, source), ()
            for following, arguments in chain:
                number = self.number(value)
                self.note(Node(op, (*operands, *rest), {}, (number,), origin))
                if following is overwrite:
                    operands, rest = (self.refer(written), Ref(number)), ()
                else:
                    value = following(value, *arguments)
                    operands, rest = (Ref(number),), arguments
                op = following
        self.note(Node(op, (*operands, *rest), {}, (self.number(result),), origin))

    def source(self, given: Sequence[Any], outs: Sequence[Any]) -> Source:
        """The generator of a random call."""
        found = next((value for value in given if isinstance(value, torch.Generator)), None)
        if found is None:
            tensors = [value for value in (*outs, *given) if isinstance(value, torch.Tensor)]
            return Source(tensors[0].device.type if tensors else "cpu")
        key, device = generator_key(found), found.device.type
        if self.tracing.repeated is not None and key not in self.tracing.repeated:
            raise TraceError(
                explain(
                    "a draw from a closed-over generator inside vs.remat",
                    where=self.line,
                    rule="what is computed again draws the same numbers, of generators that are arguments",
                    remedy="pass the generator to the function that vs.remat wraps",
                )
            )
        for index, leaf in enumerate(self.tracing.generators):
            if isinstance(leaf, torch.Generator) and generator_key(leaf) == key:
                return Source(device, argument=index)
        if key == generator_key(default_generator(device)):
            return Source(device)
        closed = self.tracing.closed
        keys = [generator_key(other) for other in closed]
        if key not in keys:
            closed.append(found)
        return Source(device, closed=keys.index(key) if key in keys else len(keys))

    def in_memory_order(self, base: torch.Tensor) -> torch.Tensor:
        """A view of `base` with its dims in the order of its memory, through which as_strided sees the same.

        The gradient of a write to a view asks as_strided of a tensor that has the strides of what is viewed.
        """
        order = sorted(range(base.dim()), key=base.stride, reverse=True)
        if base.is_contiguous() or not base.permute(order).is_contiguous():
            return base
        with self:
            return base.permute(order)

    def known_value(self, value: int) -> Any:
        """The number that `value` is in every call; None when it comes of an input, closure, draw or write.

        Models ask for such values as they run (are positions that came of `arange` consecutive?): they
        are computed then, for real, from the nodes that made them.
        """
        needed: dict[int, Node] = {}
        pending = [value]
        while pending:
            number = pending.pop()
            node = self.makers.get(number)
            if (
                node is None
                or torch.Tag.nondeterministic_seeded in node.op.tags
                or node.op.namespace == "vescale"  # of a rank, a key or a constraint
                or self.alive[number]._version
            ):
                return None
            if number not in needed:
                needed[number] = node
                pending.extend(node.refs())
        made: dict[int, Any] = {}
        with no_modes():
            for number in sorted(needed):  # values are numbered in the order in which they were made
                if number in made:
                    continue
                node, get = needed[number], lambda ref: made[ref.id]
                result = node.op(
                    *map_args(node.args, get),
                    **{name: map_args(arg, get) for name, arg in node.kwargs.items()},
                )
                results = result if isinstance(result, (tuple, list)) else (result,)
                made.update(
                    (out, one) for out, one in zip(node.outs, results, strict=True) if out is not None
                )
            return made[value].item()

    def lift(self, value: Any) -> Any:
        """Closed-over and constant tensors become hidden inputs, read at each call."""
        if isinstance(value, torch.Tensor):
            if id(value) in self.ids or isinstance(value, FakeTensor):
                return value
            if id(value) not in self.hidden:
                if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                    raise TraceError(
                        explain(
                            f"a closed-over {type(value).__name__}",
                            where=user_line(),
                            rule="a function closes over plain tensors, which are the global value",
                            remedy="pass it as an argument",
                        )
                    )
                device = self.tracing.device if value.is_meta and self.tracing.device else value.device
                with _counting_versions(), self.fake_mode:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                self.hidden[id(value)] = (self.number(fake), value, fake, _version(value))
            return self.hidden[id(value)][2]
        if isinstance(value, (tuple, list)):
            return type(value)([self.lift(item) for item in value])
        return value

    def refer(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.ids:
                raise TraceError(
                    explain(
                        "a tensor that no traced op made",
                        where=self.line,
                        rule="every tensor comes from an argument, a closure or an op",
                        remedy="pass it as an argument",
                    )
                )
            return Ref(self.ids[id(value)])
        if isinstance(value, (tuple, list)):
            return tuple(self.refer(item) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError(
                explain(
                    "a size that depends on data",
                    where=self.line,
                    rule="shapes are static",
                    remedy="use a mask, or a static capacity",
                )
            )
        return value

    def check_strided(self, func: OpOverload, outs: Sequence[Any]) -> None:
        for out in outs:
            if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
                raise TraceError(
                    explain(
                        f"{func} makes a tensor of the layout {out.layout}",
                        where=self.line,
                        rule="values are dense: how many elements a sparse one has depends on data",
                        remedy="use a mask, or indices of a static number",
                    )
                )

    def check_inputs(self) -> None:
        for path, fake in zip(self.paths, self.fakes, strict=True):
            if fake._version:
                raise TraceError(
                    explain(
                        f"an in-place update of the argument {path!r}",
                        where=self.wrote,
                        rule="a function doesn't mutate its arguments: its results are what it returns",
                        remedy="compute the new value out of place and return it",
                    )
                )
        for _, tensor, _, version in self.hidden.values():
            if _version(tensor) != version:
                raise TraceError(
                    explain(
                        f"an in-place update of a closed-over tensor of shape {tuple(tensor.shape)}",
                        where=self.wrote,
                        rule="a function doesn't mutate what it closes over",
                        remedy="pass it as an argument and return the new value",
                    )
                )

    def finish(self, results: Sequence[Any], tracing: Tracing) -> Graph:
        self.check_inputs()
        for result in results:
            if not isinstance(result, torch.Tensor) and _holds_tensors(result):
                raise TraceError(
                    explain(
                        f"a result of type {type(result).__name__} that holds tensors",
                        rule="results are trees of dicts, lists, tuples, namedtuples, registered dataclasses",
                        remedy="return its tensors, such as `output.loss`, or a dict of them",
                    )
                )
        outputs = tuple(self.refer(self.lift(result)) for result in results)
        return Graph(
            self.inputs,
            tuple((value, tensor) for value, tensor, _, _ in self.hidden.values()),
            tuple(self.nodes),
            outputs,
            tuple(self.metas),
            tuple(tracing.constraints),
        )


def _version(tensor: torch.Tensor) -> int:
    """How often it was written. Tensors made in inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


def is_strided_view(op: OpOverload) -> bool:
    """Whether the op is as_strided or one of its kind, which address memory and not elements."""
    return op.overloadpacket.__name__.startswith("as_strided")


def check_memory(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> None:
    """Raises ShardingError when as_strided would see memory other than its operand's elements in order."""
    names = (*(("src",) if "scatter" in op.name() else ()), "size", "stride", "storage_offset")
    given = dict(zip(names, args[1:])) | kwargs
    base, offset = args[0], given.get("storage_offset") or 0
    last = offset + sum((size - 1) * step for size, step in zip(given["size"], given["stride"], strict=True))
    if base.is_contiguous() and not base.storage_offset() and (last < base.numel() or 0 in given["size"]):
        return
    raise ShardingError(
        explain(
            f"{op} of a tensor whose elements are not all of its memory, in order",
            where=where,
            rule="strides are those of one device's memory: pieces have others",
            remedy="use view, permute, slicing or unfold, or take it of x.contiguous()",
        )
    )


def _holds_tensors(value: Any) -> bool:
    """Whether a leaf that is no tensor has tensors among its items or attributes."""
    parts = [*value.values()] if isinstance(value, Mapping) else []
    parts += value if isinstance(value, Set) else []
    if not isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
        parts += getattr(value, "__dict__", {}).values()
    return any(isinstance(part, torch.Tensor) for part in parts)


def user_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            not name.startswith((_TORCH, _HERE, "<"))
            and "/contextlib.py" not in name
            and "/optree/" not in name
        ):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _data_dependent(recorder: _Recorder, error: BaseException) -> TraceError:
    return TraceError(
        explain(
            f"the value of a traced tensor, or a shape made of one, is needed ({str(error).splitlines()[0]})",
            where=recorder.line or user_line(),
            rule="a function is traced without values: Python's if, while, int(), float() and .item() "
            "can't see a tensor, and shapes are static",
            remedy="use torch.where or a mask, or pass the number as a static Python argument",
        )
    )


def _explained(recorder: _Recorder, error: RuntimeError) -> TraceError | None:
    """What an error of torch's means here; None for those that a call on one device raises as well."""
    text = str(error)
    # An op that reads values without a call that could be seen.
    if "data pointer" in text or "data is not allocated" in text:
        return _data_dependent(recorder, error)
    if "setup_context staticmethod" in text:
        return TraceError(
            explain(
                "a torch.autograd.Function whose forward takes `ctx`",
                where=recorder.line or user_line(),
                rule="gradients are those of torch.func, which needs forward and setup_context apart",
                remedy="give the Function a setup_context, or use an op without it",
            )
        )
    if "saved tensor hooks" in text:
        return TraceError(
            explain(
                "hooks on saved tensors, such as those of torch.utils.checkpoint",
                where=recorder.line or user_line(),
                rule="gradients are those of torch.func, which has no such hooks",
                remedy="vs.remat(fn)(x) in the place of checkpoint(fn, x)",
            )
        )
    return None


@contextmanager
def _module_stack(tracing: Tracing) -> Iterator[None]:
    """Keeps the dotted path of the running module, and applies the plan's activation rules."""
    from ..transforms import constrain_tree, in_use  # they look at the trace; here the trace applies them

    names: dict[int, str] = {}
    depth = 0

    def name_of(module: torch.nn.Module) -> str:
        if not depth:
            tracing.roots[module] = None
            names.clear()
            names.update({id(child): name for name, child in module.named_modules()})
        return names.get(id(module), type(module).__name__)

    def constrained(path: str, value: Any) -> Any:
        for index, (pattern, spec) in enumerate(tracing.activations):
            if pattern.fullmatch(path):
                if any(isinstance(leaf, torch.Tensor) for leaf in _tree.leaves(value)):
                    tracing.used_activations.add(index)
                return constrain_tree(value, spec)
        return value

    def use_parameters(module: torch.nn.Module) -> None:
        """Parameters at rest that the caller has lent to the module (functional_call) are in use there."""
        for name, lent in module._parameters.items():
            mark = tracing.marks.get(id(lent))
            if mark is not None and mark.run is not mark.rest:
                if mark.name not in tracing.used:
                    (tracing.used[mark.name],) = in_use([lent], [mark])
                module._parameters[name] = tracing.used[mark.name]

    def enter(module: torch.nn.Module, args: Any) -> Any:
        nonlocal depth
        if current_trace() is not tracing:  # hooks are global: another thread is tracing this one
            return None
        tracing.modules.append(name_of(module))
        tracing.seen[module] = tracing.modules[-1]
        depth += 1
        use_parameters(module)
        return constrained(f"{tracing.modules[-1]}.input", args) if tracing.activations else None

    def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
        nonlocal depth
        if current_trace() is not tracing:
            return None
        path = tracing.modules.pop()
        depth -= 1
        return constrained(f"{path}.output", output) if tracing.activations else None

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
