"""Emit: the decisions of a partition as the instructions of one rank, with its local shapes and offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..redistribute import bind_local
from ..rules.notation import LocalCall
from .ir import Origin, Ref, map_args
from .partition import Compute, Local, Move, Partitioned


@dataclass(frozen=True, slots=True)
class Call:
    """A local call. `outs` number its results (None: unused); `unpack` when it returns several."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    unpack: bool
    origin: Origin


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective step; every rank of the mesh has the same one at the same place."""

    source: int
    target: int
    origin: Origin


Instruction = Call | Exchange


def emit(step: Compute | Move | Local, partitioned: Partitioned, rank: int) -> Instruction:
    """The instruction of `rank` for a step."""
    if isinstance(step, Local):
        operands = tuple(Ref(number) for number in step.operands)
        return Call(step.make(rank), operands, {}, step.results, True, step.origin)
    if isinstance(step, Move):
        if step.step.is_collective:
            return Exchange(step.source, step.target, step.origin)
        return Call(bind_local(step.step, rank), (Ref(step.source),), {}, (step.target,), False, step.origin)
    node, values = step.node, partitioned.values
    numbers = iter(step.operands)
    read = len(step.operands)

    def local(ref: Ref) -> Any:
        number = next(numbers, None)  # a factory reads none of its tensors
        return None if number is None else Ref(number)

    args = map_args(node.args, local)
    kwargs = {name: map_args(value, local) for name, value in node.kwargs.items()}
    operands = tuple(values[number].layout for number in step.operands)
    results = tuple(values[number].layout for number in step.results if number is not None)
    call = LocalCall(
        node,
        node.op,
        args,
        kwargs,
        operands,
        results,
        values[next(number for number in step.results if number is not None)].meta,
        rank,
    )
    sharded = any(layout.spec.items() for layout in (*operands, *results))
    reads_less = read < sum(1 for _ in node.refs())
    if step.pattern.local is not None and (sharded or reads_less):
        call = step.pattern.local(call)
    return Call(call.fn, call.args, dict(call.kwargs), step.results, node.returns_list, node.origin)
