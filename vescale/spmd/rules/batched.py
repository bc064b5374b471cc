"""What ops have in common that work on a few dims and do the same for each index of all the others.

The dims that an op works on are whole, and each tensor has factors of its own for them; the others, its
batch, are factors that the tensors share: they may be sharded, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..layout import Layout
from ..program.ir import Node, TensorMeta
from .notation import Dims, LocalCall, Localise, Pattern, operand_metas, result_shapes

FIRST = (frozenset((0,)),)


def along(node: Node, metas: Sequence[TensorMeta], dims: Collection[int], **options: Any) -> Pattern:
    """Tensors of one number of dims: `dims` are worked on. A dim of 1 against a longer one is broadcast."""
    shapes, count = _shapes(node, metas)
    ndim = max(map(len, shapes))
    worked = {dim % ndim for dim in dims} if ndim else set()
    sizes: dict[str, int] = {}
    for shape in shapes:
        for dim, size in enumerate(shape):
            sizes[f"d{dim}"] = max(sizes.get(f"d{dim}", 0), size)
    lists: list[Dims] = []
    for number, shape in enumerate(shapes):
        assert len(shape) == ndim, (node.op, shapes)
        names = [f"w{number}.{dim}" if dim in worked else f"d{dim}" for dim in range(ndim)]
        sizes |= {names[dim]: shape[dim] for dim in worked}
        lists.append(
            tuple(() if shape[dim] == 1 != sizes[name] else (name,) for dim, name in enumerate(names))
        )
    return _pattern(node, metas, lists, count, sizes, **options)


def trailing(
    node: Node,
    metas: Sequence[TensorMeta],
    worked: int | tuple[Sequence[int], Sequence[int]],
    **options: Any,
) -> Pattern:
    """The last dims are worked on: `worked` of every tensor, or so many of each operand and each result.

    The dims before them are aligned at the right; a dim of 1 against a longer one is broadcast. Results in
    `spare` have none of them, and are alike on every rank.
    """
    shapes, count = _shapes(node, metas)
    counts = (worked,) * len(shapes) if isinstance(worked, int) else (*worked[0], *worked[1])
    sizes: dict[str, int] = {}
    for shape, last in zip(shapes, counts, strict=True):
        for place, size in enumerate(reversed(shape[: len(shape) - last])):
            sizes[f"b{place}"] = max(sizes.get(f"b{place}", 0), size)
    lists: list[Dims] = []
    for number, (shape, last) in enumerate(zip(shapes, counts, strict=True)):
        batch = len(shape) - last
        names = [f"b{batch - 1 - dim}" if dim < batch else f"w{number}.{dim}" for dim in range(len(shape))]
        sizes |= dict(zip(names[batch:], shape[batch:], strict=True))
        lists.append(
            tuple(
                () if size == 1 != sizes[name] else (name,) for name, size in zip(names, shape, strict=True)
            )
        )
    return _pattern(node, metas, lists, count, sizes, **options)


def _shapes(node: Node, metas: Sequence[TensorMeta]) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of operands and results, and how many of them are operands'."""
    operands = [meta.shape for meta in operand_metas(node, metas)]
    return [*operands, *result_shapes(node, metas)], len(operands)


def _pattern(
    node: Node,
    metas: Sequence[TensorMeta],
    lists: list[Dims],
    count: int,
    sizes: dict[str, int],
    *,
    spare: frozenset[int] = frozenset(),
    local: Localise | None = None,
    **options: Any,
) -> Pattern:
    operands, results = tuple(lists[:count]), tuple(lists[count:])
    everywhere = set(sizes)
    for place, dims in enumerate(results):
        if place not in spare:
            everywhere &= {name for dim in dims for name in dim}
    return Pattern(
        operands,
        results,
        sizes,
        whole=frozenset(name for name in sizes if name not in everywhere or name.startswith("w")),
        alike=dict.fromkeys(sizes, spare),
        local=unless_empty(node, metas, local),
        **options,
    )


def unless_empty(node: Node, metas: Sequence[TensorMeta], local: Localise | None = None) -> Localise:
    """A rank without elements of an operand has none of the results, or adds nothing to them.

    Many kernels refuse to run on no elements; otherwise `local` adapts the call.
    """
    outs = [None if out is None else metas[out] for out in node.outs]

    def localise(call: LocalCall) -> LocalCall:
        if not any(_runs_out(layout, call.rank) for layout in call.operands):
            return local(call) if local is not None else call
        results = iter(call.results)
        made = [
            None if meta is None else (next(results).local_shape(call.rank), meta.dtype, meta.device)
            for meta in outs
        ]
        return replace(call, fn=_zeros, args=(made, node.returns_list), kwargs={})

    return localise


def _runs_out(layout: Layout, rank: int) -> bool:
    return 0 not in layout.shape and 0 in layout.local_shape(rank)


def _zeros(made: Sequence[Any], several: bool) -> Any:
    results = tuple(
        None if part is None else torch.zeros(part[0], dtype=part[1], device=part[2]) for part in made
    )
    return results if several else results[0]


def local_size(*positions: int) -> Localise:
    """The arguments at `positions` are the global shape of the result: on a rank they are the local one."""

    def localise(call: LocalCall) -> LocalCall:
        for position in positions:
            call = call.with_arg(position, call.results[0].local_shape(call.rank))
        return call

    return localise


def counts_once(call: LocalCall, operand: int) -> bool:
    """Whether this rank is the one that adds a whole operand to a result that is Partial.

    The others start from nothing, or it would be counted once a rank.
    """
    layout, result = call.operands[operand], call.results[0]
    coordinate = layout.mesh.coordinate(call.rank)
    return not any(coordinate[axis] for axis in result.partials if axis not in layout.partials)


def unsharded(node: Node, metas: Sequence[TensorMeta], **options: Any) -> Pattern:
    """Every dim is whole: for calls of an op of which a rank can't do a part."""
    counts = (
        [len(meta.shape) for meta in operand_metas(node, metas)],
        [len(shape) for shape in result_shapes(node, metas)],
    )
    return trailing(node, metas, counts, **options)


def own_range(layout: Layout, dim: int, rank: int) -> tuple[int, int] | None:
    """(first, number) of the indices of `dim` that the rank has, a single run; None when it has them all.

    A ragged split of dims before it takes none of them away.
    """
    assert layout.ragged is None or dim not in layout.ragged[1].dims, "the rule offers no ragged cut of it"
    ((first, stop), *rest) = layout.index_sets(rank)[dim] or ((0, 0),)
    assert not rest, "the rule offers contiguous indices only"
    return None if stop - first == layout.shape[dim] else (first, stop - first)
