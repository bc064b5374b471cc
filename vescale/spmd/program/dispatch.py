"""Dynamic eager: one op on DTensors, through the same rules as a program, as a program of one node.

Used at the edges: `loss.item()`, `x.norm()`, `p + 1`, also under torch.func and `.backward()`. The decision
for an op and its operands' layouts is made once and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import OpOverload, is_mutable
from ..._errors import ArgumentError, explain
from ..boundary import Static, enter, leave
from ..dtensor import DTensor
from ..layout import Layout, replicated
from ..mesh import Mesh
from .cache import ProgramCache
from .ir import TensorMeta
from .partition import partition, without_partials
from .program import Program, compile_partitioned
from .trace import trace

_programs = ProgramCache["_Op"](("op", "arguments", "mesh"), bound=4096)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on DTensors, plain tensors (global values) and static arguments."""
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton((args, kwargs), tensors)
    mesh = _mesh(func, tensors)
    if is_mutable(func):
        raise ArgumentError(
            explain(
                f"in-place {func} on a DTensor",
                rule="outside a program DTensors are values",
                remedy="use the out-of-place form and keep its result",
            )
        )
    if func is torch.ops.aten._local_scalar_dense.default:
        return _whole(tensors[0]).item()
    layouts = [
        tensor.layout if isinstance(tensor, DTensor) else replicated(mesh.abstract, tuple(tensor.shape))
        for tensor in tensors
    ]
    key = (
        func,
        (skeleton, tuple((layout, tensor.dtype) for layout, tensor in zip(layouts, tensors, strict=True))),
        id(mesh),
    )
    found = _programs.get(key)
    if found is None:
        found = _compile(func, skeleton, tensors, layouts, mesh)
        _programs.put(key, found)
    inputs = enter(mesh, tensors, layouts, (), lambda index, leaf, layout: AssertionError(layout))
    outputs = leave(mesh, found.program(inputs), found.outputs)
    return found.structure(outputs) if found.structure is not None else outputs[0]


@dataclass(frozen=True)
class _Op:
    """The program of one op for operands in given layouts."""

    program: Program
    outputs: tuple[Layout | Static, ...]
    structure: type | None  # what holds several results


def _compile(
    func: OpOverload, skeleton: Any, tensors: list[torch.Tensor], layouts: list[Layout], mesh: Mesh
) -> _Op:
    structure: list[type | None] = [None]

    def call(fakes: list[torch.Tensor]) -> list[Any]:
        args, kwargs = _fill(skeleton, iter(fakes))
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            structure[0] = type(result)
            return list(result)
        return [result]

    metas = [TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]
    graph = trace(call, metas, [f"operand {index}" for index in range(len(tensors))])
    like = func.overloadpacket.__name__.endswith("_like")
    wishes = [without_partials(layouts[0]) if like else None for _ in graph.outputs]
    partitioned = partition(graph, mesh.abstract, layouts, wishes)
    outputs = tuple(
        Static(value) if number is None else partitioned.values[number].layout
        for value, number in zip(graph.outputs, partitioned.outputs, strict=True)
    )
    return _Op(compile_partitioned(partitioned, mesh), outputs, structure[0])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mesh(func: OpOverload, tensors: list[torch.Tensor]) -> Mesh:
    meshes = {id(tensor.mesh): tensor.mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if len(meshes) != 1:
        raise ArgumentError(
            explain(
                f"operands on {len(meshes)} meshes: {', '.join(map(repr, meshes.values()))}",
                where=str(func),
                rule="the operands of an op live on one mesh object",
                remedy="make one mesh and use it for all",
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
    return value


class _Slot:
    """Stands for a tensor."""


class _Named(tuple):
    """Stands for a dict of keyword arguments."""


def _fill(value: Any, tensors: Any) -> Any:
    if value is _Slot:
        return next(tensors)
    if isinstance(value, _Named):
        return {name: _fill(item, tensors) for name, item in value}
    if isinstance(value, tuple):
        return tuple(_fill(item, tensors) for item in value)
    return value
