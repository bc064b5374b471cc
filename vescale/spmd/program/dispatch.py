"""Dynamic eager: one op on DTensors, through the same rules as a program, as a program of one node.

Used at the edges: `loss.item()`, `x.norm()`, `p + 1`, `p.add_(g)`, also under torch.func and `.backward()`.
The decision for an op and its operands' layouts is made once and kept.

In place, the written tensor keeps its layout and the other operands move to it. A view shares memory with
its base where the base's layout survives it. Where something has to move it is a copy, which knows that:
writing to it, or reading it when the base was written since, is an error and no silent difference from torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._compat import (
    OpOverload,
    functional_form,
    is_mutable,
    plain_dispatch,
    view_source,
    written_arguments,
)
from ..._errors import ArgumentError, ConsistencyError, ShardingError, explain
from ..boundary import Static, enter, leave
from ..dtensor import DTensor
from ..layout import Layout, replicated
from ..mesh import Mesh
from . import foreach
from .agreement import unequal_states
from .cache import ProgramCache
from .cleanup import in_values
from .ir import Graph, Node, Ref, TensorMeta, map_args
from .partition import Compute, Move, Partitioned, partition, without_partials
from .program import Program, compile_partitioned, drawn_from
from .running import updates_statistics
from .torch_draws import using
from .trace import Tracing, current_trace, is_strided_view, trace

aten = torch.ops.aten

_programs = ProgramCache["_Op"](("op", "arguments", "mesh", "mode"), bound=4096)
_implicit: ContextVar[bool] = ContextVar("vescale_implicit_redistribution", default=True)


@contextmanager
def no_implicit_redistribute() -> Iterator[None]:
    """Inside, an op that would move a DTensor operand to another layout raises ShardingError instead.

    The error names the op, the operand, its layout and the call that would move it. `redistribute` and
    `full_tensor` still move what they are asked to, a plain tensor still is the global value, and the pending
    sum that an op leaves (of `x.sum()`, say) is still completed: that is part of the op.

    >>> import torch
    >>> import vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    >>> x = vs.distribute_tensor(torch.ones(4, 4), mesh, vs.P(dp=vs.Shard(0)))
    >>> y = x.redistribute(vs.P(dp=vs.Shard(1)))
    >>> with vs.no_implicit_redistribute():
    ...     _ = x + 1  # stays where it is
    ...     _ = x + y
    Traceback (most recent call last):
    vescale._errors.ShardingError: found: operand 1 in P(dp=Shard(1)), needed in P(dp=Shard(0))
    where: aten.add.Tensor
    rule: no operand moves inside vs.no_implicit_redistribute()
    remedy: call operand.redistribute(P(dp=Shard(0))) first
    """
    token = _implicit.set(False)
    try:
        yield
    finally:
        _implicit.reset(token)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on DTensors, plain tensors (global values) and static arguments."""
    if foreach.is_foreach(func):
        return foreach.run(func, args, kwargs)
    if isinstance(kwargs.get("out"), DTensor):  # torch's optimizers write a running maximum so
        form, rest = functional_form(func), {name: value for name, value in kwargs.items() if name != "out"}
        if form is not None:
            return kwargs["out"].copy_(form(*args, **rest))
    if func is aten.squeeze_.dim and isinstance(args[0], DTensor):
        return _squeeze(*args)
    if updates_statistics(func, args):
        *results, mean, var = aten._native_batch_norm_legit_functional.default(*args)
        args[3].copy_(mean)
        args[4].copy_(var)
        return tuple(results)
    if func is aten.rrelu_with_noise.default:
        result, noise = aten.rrelu_with_noise_functional.default(*args, **kwargs)
        args[1].copy_(noise)
        return result
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton((args, kwargs), tensors)
    mesh = _mesh(func, tensors)
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor.check_fresh()
    if is_strided_view(func):
        raise ShardingError(
            explain(
                f"{func}",
                where="outside a program",
                rule="strides are those of one device's memory: pieces have others",
                remedy="use view, permute, slicing or unfold",
            )
        )
    if func in _QUESTIONS:
        return _QUESTIONS[func](*args, **kwargs)
    if kwargs.get("device") and torch.device(kwargs["device"]) != mesh.device:
        raise ArgumentError(
            explain(
                f"device={kwargs['device']}",
                where=func,
                rule=f"the pieces of a DTensor are on its mesh's device, {mesh.device}",
                remedy="take x.full_tensor() there, or make the mesh with that device",
            )
        )
    written = _written(func, args, kwargs)
    place = None if written is None else next(i for i, tensor in enumerate(tensors) if tensor is written)
    layouts = [
        tensor.layout if isinstance(tensor, DTensor) else replicated(mesh.abstract, tuple(tensor.shape))
        for tensor in tensors
    ]
    key = (
        func,
        (skeleton, tuple((layout, tensor.dtype) for layout, tensor in zip(layouts, tensors, strict=True))),
        id(mesh),
        torch.get_default_dtype(),
    )
    found = _programs.get(key)
    if found is None:
        found = _compile(func, skeleton, tensors, layouts, mesh, place)
        _programs.put(key, found)
    if not _implicit.get():
        _refuse_moves(func, tensors, found.moves)
    if found.draws and (tracing := current_trace()) is not None and tracing.unequal:
        raise ConsistencyError(unequal_states(tracing.unequal, str(func)))
    mismatch = lambda index, leaf, layout: AssertionError(layout)  # noqa: E731
    inputs = enter(mesh, tensors, layouts, (), mismatch, found.strided)
    with using((), found.generators) if found.generators else nullcontext():
        outputs = leave(mesh, found.program(inputs), found.outputs)
    if written is not None:
        written.write(outputs[0]._locals)
        return written
    source = view_source(func)
    if source is not None:
        for output in outputs:
            output.mark_copied(args[source])
    return found.structure(outputs) if found.structure is not None else outputs[0]


@dataclass(frozen=True)
class _Op:
    """The program of one op for operands in given layouts."""

    program: Program
    outputs: tuple[Layout | Static, ...]
    structure: type | None  # what holds several results
    moves: tuple[tuple[int, Layout], ...]  # the operands that move, and to which layout
    strided: bool  # takes operands that are not contiguous, as it would in a program
    generators: tuple[torch.Generator, ...]  # that were passed
    draws: bool  # from a generator of torch's


def _compile(
    func: OpOverload,
    skeleton: Any,
    tensors: list[torch.Tensor],
    layouts: list[Layout],
    mesh: Mesh,
    written: int | None,
) -> _Op:
    structure: list[type | None] = [None]

    def call(fakes: list[torch.Tensor]) -> list[Any]:
        if written is not None:  # torch's own checks of an in-place op, on a stand-in that it may write
            fakes = [*fakes[:written], fakes[written].clone(), *fakes[written + 1 :]]
        args, kwargs = _fill(skeleton, iter(fakes))
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            structure[0] = type(result)
            return list(result)
        return [result]

    metas = [TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]
    tracing = Tracing()
    graph = in_values(trace(call, metas, [f"operand {index}" for index in range(len(tensors))], tracing))
    pinned: frozenset[int] = frozenset()
    wishes: Sequence[Layout | None] = [None] * len(graph.outputs)
    if written is not None:
        graph, wishes = _without_stand_in(graph), [layouts[written]]
        pinned = frozenset((graph.inputs[written],))
    elif func.overloadpacket.__name__.endswith("_like"):
        wishes = [without_partials(layouts[0])]
    partitioned = partition(graph, mesh.abstract, layouts, wishes, pinned)
    outputs = tuple(
        Static(value) if number is None else partitioned.values[number].layout
        for value, number in zip(graph.outputs, partitioned.outputs, strict=True)
    )
    moves, program = _moves(partitioned), compile_partitioned(partitioned, mesh)
    strided = not moves and _takes_strides(partitioned)
    draws = bool(drawn_from(partitioned))
    return _Op(program, outputs, structure[0], moves, strided, tuple(tracing.closed), draws)


def _without_stand_in(graph: Graph) -> Graph:
    """The graph that reads the written operand itself, not the clone of it that was traced."""
    clone, *nodes = graph.nodes
    (stand_in,) = clone.outs

    def resolve(ref: Ref) -> Ref:
        return clone.args[0] if ref.id == stand_in else ref

    def resolved(node: Node) -> Node:
        kwargs = {name: map_args(value, resolve) for name, value in node.kwargs.items()}
        return replace(node, args=map_args(node.args, resolve), kwargs=kwargs)

    outputs = tuple(map_args(output, resolve) for output in graph.outputs)
    return replace(graph, nodes=tuple(map(resolved, nodes)), outputs=outputs)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """The DTensor that an in-place op writes, None for other ops."""
    if not is_mutable(func):
        return None
    if torch.Tag.inplace_view in func.tags:
        found, rule, remedy = f"{func}", "a DTensor keeps its shape", "use the form out of place"
    elif written_arguments(func) != [0]:
        found, rule, remedy = (
            f"{func}",
            "an op on DTensors writes to its first argument only",
            "don't pass out=",
        )
    elif not isinstance(args[0], DTensor):
        found, rule = (
            f"a plain tensor written by {func}, with a DTensor among the operands",
            "in-place results are DTensors",
        )
        remedy = "write to a DTensor, or pass x.full_tensor()"
    elif args[0].is_copy:
        found = f"in-place {func} on a view that is a copy: the layout of its base did not survive the view"
        rule, remedy = "a write to a view is seen by its base", "write to the base, or redistribute it first"
    else:
        return args[0]
    raise ArgumentError(explain(found, where=func, rule=rule, remedy=remedy))


def _squeeze(x: DTensor, dim: int) -> DTensor:
    """What torch's own `vector @ matrix` does to its result: a DTensor in another shape, the same memory."""
    squeezed: Any = aten.squeeze.dim(x, dim)
    x.layout, x._locals, x._kind = squeezed.layout, squeezed._locals, None
    with plain_dispatch():
        return aten.squeeze_.dim(x, dim)


def _moves(partitioned: Partitioned) -> tuple[tuple[int, Layout], ...]:
    operands = {number: index for index, number in enumerate(partitioned.inputs)}
    moved: dict[int, Layout] = {}
    for step in partitioned.steps:
        if isinstance(step, Move) and step.source in operands:
            operands[step.target] = operands[step.source]
            moved[operands[step.target]] = step.step.dst
    return tuple(moved.items())


_FLAT = (aten.view, aten._unsafe_view, aten.as_strided, aten.view_as_real, aten.view_as_complex)
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def _takes_strides(partitioned: Partitioned) -> bool:
    """Whether no kernel needs contiguous operands, nor what moves may be strided like them."""
    ops = [step.node.op for step in partitioned.steps if isinstance(step, Compute)]
    if any(isinstance(step, Move) for step in partitioned.steps):
        return all(op in _MATMULS for op in ops)
    return all(op.overloadpacket not in _FLAT for op in ops)


def _refuse_moves(
    func: OpOverload, tensors: list[torch.Tensor], moves: tuple[tuple[int, Layout], ...]
) -> None:
    for index, target in moves:
        tensor = tensors[index]
        if isinstance(tensor, DTensor):
            raise ShardingError(
                explain(
                    f"operand {index} in {tensor.layout.spec}, needed in {target.spec}",
                    where=func,
                    rule="no operand moves inside vs.no_implicit_redistribute()",
                    remedy=f"call operand.redistribute({target.spec}) first",
                )
            )


# Ops that answer with a Python value.


def _item(tensor: DTensor) -> Any:
    whole = replicated(tensor.mesh.abstract, tensor.layout.shape)
    if not _implicit.get() and tensor.layout is not whole:
        _refuse_moves(aten._local_scalar_dense.default, [tensor], ((0, whole),))
    return tensor.full_tensor().item()


def _is_nonzero(tensor: DTensor) -> bool:
    return bool(_item(tensor))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _allclose(one: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any) -> bool:
    return bool(torch.isclose(one, other, *rest, **options).all())


_QUESTIONS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,  # as it is asked in inference mode
    aten.is_nonzero.default: _is_nonzero,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
}


def _mesh(func: OpOverload, tensors: list[torch.Tensor]) -> Mesh:
    meshes = {id(tensor.mesh): tensor.mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if len(meshes) != 1:
        raise ArgumentError(
            explain(
                f"operands on {len(meshes)} meshes: {', '.join(map(repr, meshes.values()))}",
                where=str(func),
                rule="the operands of an op live on one mesh object",
                remedy="make one mesh and use it for all, or pass x.full_tensor()",
            )
        )
    return next(iter(meshes.values()))


def _skeleton(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The arguments with tensors replaced by a mark, hashable; the tensors are appended in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot
    if isinstance(value, dict):
        return _Named(tuple((name, _skeleton(item, tensors)) for name, item in value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(_skeleton(item, tensors) for item in value)
    return _Number(type(value), repr(value), value) if isinstance(value, (int, float, complex)) else value


class _Slot:
    """Stands for a tensor."""


class _Named(tuple):
    """Stands for a dict of keyword arguments."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A number as part of a key: 1 == 1.0 == True and 0.0 == -0.0, but what an op makes of them differs."""

    type: type
    text: str
    value: Any = field(compare=False)


def _fill(value: Any, tensors: Any) -> Any:
    if value is _Slot:
        return next(tensors)
    if isinstance(value, _Number):
        return value.value
    if isinstance(value, _Named):
        return {name: _fill(item, tensors) for name, item in value}
    if isinstance(value, tuple):
        return tuple(_fill(item, tensors) for item in value)
    return value
