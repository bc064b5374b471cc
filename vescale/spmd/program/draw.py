"""Do a draw of torch's for the ranks that a process hosts: one draw, of which each keeps its own elements.

A process that hosts one rank makes all numbers too, a chunk at a time, because the generator has to end up
where one device would leave it. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...rng.numbers import compressed
from ...rng.torch_stream import Runs, draw, take
from ..mesh import Mesh
from .ir import Node, Ref, map_args
from .partition import Draw, Partitioned
from .torch_draws import Source, draws_from_nothing, set_torch_state, torch_draw, torch_state

Kept = Callable[[int, int], bool]  # whether a value is wanted on a rank


class BoundDraw:
    """A draw bound to the hosted ranks: the operands of each -> the results of each."""

    def __init__(self, run: Callable[[Sequence[Sequence[Tensor]]], list[list[Any]]]) -> None:
        self.run = run

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        return self.run(values)


def bind_draw(step: Draw, partitioned: Partitioned, mesh: Mesh, kept: Kept | None = None) -> BoundDraw:
    """The draw of `step` for the ranks that `mesh` hosts here; results that are not `kept` may be None."""
    if draws_from_nothing(step.node):
        return BoundDraw(_own_elements(step, partitioned, mesh, kept or (lambda value, rank: True)))
    if step.node.op is torch_state:
        return BoundDraw(lambda values: [[step.node.args[0].find().get_state()] for _ in values])
    if step.node.op is set_torch_state:
        return BoundDraw(lambda values: _set_state(step.node.args[1], values))
    return BoundDraw(lambda values: _whole(step, values))


def _own_elements(
    step: Draw, partitioned: Partitioned, mesh: Mesh, kept: Kept
) -> Callable[[Any], list[list[Tensor | None]]]:
    node, values = step.node, partitioned.values
    made = [number for number in step.results if number is not None]
    layouts = [values[number].layout for number in made]
    dtype = next((values[number].meta.dtype for number in made), None)
    wanted = [
        [
            (layout.local_shape(rank), Runs(compressed(layout.regions(rank)))) if kept(number, rank) else None
            for number, layout in zip(made, layouts, strict=True)
        ]
        for rank in mesh.local_ranks
    ]

    def run(_: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
        results: list[list[Tensor | None]] = []
        targets = []
        for of_rank in wanted:
            results.append([])
            for entry in of_rank:
                out = None
                if entry is not None:
                    shape, runs = entry
                    out = torch.empty(shape, dtype=dtype, device=mesh.device)
                    targets.append((out.view(-1), runs))
                results[-1].append(out)
        if node.op is torch_draw:
            stream, source = node.args
            draw(stream, targets, source.find())
        else:
            take(_run(node, []).contiguous().view(-1), targets)
        return results

    return run


def _set_state(source: Source, values: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    source.find().set_state(values[0][0])
    return [[None] for _ in values]


def _whole(step: Draw, values: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """The op on whole values, which all ranks have."""
    result = _run(step.node, values[0])
    first = list(result) if isinstance(result, (tuple, list)) else [result]
    others = [[_copy(part) for part in first] for _ in values[1:]]
    return [[_own(part) for part in first], *others]


def _run(node: Node, values: Sequence[Tensor]) -> Any:
    operands = iter(values)
    local: Callable[[Ref], Tensor] = lambda ref: next(operands)  # noqa: E731
    args = [_found(map_args(arg, local)) for arg in node.args]
    return node.op(*args, **{name: _found(map_args(value, local)) for name, value in node.kwargs.items()})


def _found(value: Any) -> Any:
    return value.find() if isinstance(value, Source) else value


def _own(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
