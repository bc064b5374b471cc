"""Parts of tensors put back, diagonals and windows: the dim of which a part is taken is whole, others free.

What is written into a part of a sharded dim stays where it is: each rank writes what falls into its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .batched import FIRST, along, local_size, own_range, unless_empty, unsharded
from .notation import (
    Dims,
    LocalCall,
    Localise,
    Pattern,
    argument,
    named_dims,
    operand_metas,
    result_shapes,
    rule,
)

aten = torch.ops.aten

BOTH = (frozenset((0, 1)),)


def _names(shape: Sequence[int]) -> tuple[Dims, dict[str, int]]:
    dims, sizes = named_dims(shape)
    return tuple(dims), sizes


@rule(aten.select_backward.default)
def select_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    (shape,) = result_shapes(node, metas)
    dims, sizes = _names(shape)
    dim = node.args[2] % len(shape)
    return Pattern(
        ((*dims[:dim], *dims[dim + 1 :]),),
        (dims,),
        sizes,
        whole=frozenset((f"d{dim}",)),
        linear=FIRST,
        ragged=int(dim != 0),
        local=unless_empty(node, metas, local_size(1)),
    )


@rule(aten.slice_backward.default)
def slice_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    if operand_metas(node, metas)[0].shape == result_shapes(node, metas)[0]:  # all of it
        made = along(node, metas, (), linear=FIRST, ragged=1)
        return replace(made, local=lambda call: replace(call, fn=aten.alias.default, args=call.args[:1]))
    return along(node, metas, [node.args[2]], linear=FIRST, ragged=1, local=local_size(1))


@rule(aten.select_scatter.default)
def select_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    dims, sizes = _names(shape)
    dim, index = node.args[2] % len(shape), node.args[3] % shape[node.args[2]]

    def own(call: LocalCall) -> LocalCall:
        found = own_range(call.operands[0], dim, call.rank)
        if found is None:
            return call
        first, count = found
        if first <= index < first + count:
            return call.with_arg(3, index - first)
        return replace(call, fn=torch.clone, args=call.args[:1])

    return _scattered(node, metas, dims, (*dims[:dim], *dims[dim + 1 :]), sizes, dim, own)


def _scattered(
    node: Node,
    metas: Sequence[TensorMeta],
    dims: Dims,
    source: Dims,
    sizes: dict[str, int],
    dim: int,
    own: Localise,
) -> Pattern:
    return Pattern(
        (dims, source),
        (dims,),
        sizes,
        whole=frozenset(("part",)) & frozenset(sizes),
        linear=BOTH,
        ragged=int(dim != 0),
        contiguous=frozenset((f"d{dim}",)),
        local=unless_empty(node, metas, own),
    )


@rule(aten.slice_scatter.default)
def slice_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    dims, sizes = _names(shape)
    dim = argument(node, 2, "dim", 0) % len(shape)
    given = (argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1))
    places = range(*slice(*given).indices(shape[dim]))
    sizes["part"] = len(places)

    def own(call: LocalCall) -> LocalCall:
        found = own_range(call.operands[0], dim, call.rank)
        if found is None:
            return call
        first, count = found
        inside = [number for number, place in enumerate(places) if first <= place < first + count]
        if not inside:
            return replace(call, fn=torch.clone, args=call.args[:1], kwargs={})
        into = (places[inside[0]] - first, places[inside[-1]] - first + 1, places.step)
        args = (*call.args[:2], dim, inside[0], len(inside), *into)
        return replace(call, fn=_slice_own, args=args, kwargs={})

    return _scattered(node, metas, dims, (*dims[:dim], ("part",), *dims[dim + 1 :]), sizes, dim, own)


def _slice_own(x: Any, source: Any, dim: int, first: int, count: int, *into: int) -> Any:
    return torch.slice_scatter(x, source.narrow(dim, first, count), dim, *into)


# Diagonals: two dims become one, which is the last.


def _diagonal(
    node: Node, metas: Sequence[TensorMeta], shape: Sequence[int], position: int
) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Factors of a tensor of `shape` and of its diagonal, their sizes, and which are whole."""
    dims, sizes = _names(shape)
    default = (-2, -1) if node.op is aten.diag_embed.default else (0, 1)
    pair = {
        argument(node, position + offset, f"dim{offset}", default[offset - 1]) % len(shape)
        for offset in (1, 2)
    }
    rest = tuple(dims[dim] for dim in range(len(shape)) if dim not in pair)
    return dims, (*rest, ("diagonal",)), sizes, frozenset({"diagonal", *(f"d{dim}" for dim in pair)})


@rule([aten.diagonal.default, aten.diagonal_copy.default])
def diagonal(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    dims, part, sizes, whole = _diagonal(node, metas, shape, 1)
    sizes["diagonal"] = result_shapes(node, metas)[0][-1]
    return Pattern((dims,), (part,), sizes, whole=whole, linear=FIRST, view=True, ragged=1)


@rule(aten.diagonal_backward.default)
def diagonal_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _from_diagonal(node, metas, 2, local_size(1))


@rule(aten.diag_embed.default)
def diag_embed(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _from_diagonal(node, metas, 1)


def _from_diagonal(
    node: Node, metas: Sequence[TensorMeta], position: int, local: Localise | None = None
) -> Pattern:
    dims, part, sizes, whole = _diagonal(node, metas, result_shapes(node, metas)[0], position)
    sizes["diagonal"] = operand_metas(node, metas)[0].shape[-1]
    local = unless_empty(node, metas, local)
    return Pattern((part,), (dims,), sizes, whole=whole, linear=FIRST, ragged=1, local=local)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, source = operand_metas(node, metas)
    dims, part, sizes, whole = _diagonal(node, metas, x.shape, 2)
    sizes["diagonal"] = source.shape[-1]
    local = unless_empty(node, metas)
    return Pattern((dims, part), (dims,), sizes, whole=whole, linear=BOTH, ragged=1, local=local)


# Windows: a dim becomes two, which window and where in it; the second is the last dim.


def _windows(shape: Sequence[int], windows: Sequence[int], dim: int) -> tuple[Dims, Dims, dict[str, int]]:
    dims, sizes = _names(shape)
    sizes |= {"window": windows[dim], "place": windows[-1]}
    return dims, (*dims[:dim], ("window",), *dims[dim + 1 :], ("place",)), sizes


@rule(aten.unfold.default)
def unfold(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    if not shape:
        return unsharded(node, metas)
    dim = node.args[1] % len(shape)
    dims, parts, sizes = _windows(shape, result_shapes(node, metas)[0], dim)
    whole = frozenset((f"d{dim}", "window", "place"))
    return Pattern((dims,), (parts,), sizes, whole=whole, linear=FIRST, view=True, ragged=1)


@rule(aten.unfold_backward.default)
def unfold_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    (shape,) = result_shapes(node, metas)
    if not shape:
        return unsharded(node, metas)
    dim = node.args[2] % len(shape)
    dims, parts, sizes = _windows(shape, operand_metas(node, metas)[0].shape, dim)
    whole = frozenset((f"d{dim}", "window", "place"))
    local = unless_empty(node, metas, local_size(1))
    return Pattern((parts,), (dims,), sizes, whole=whole, linear=FIRST, ragged=1, local=local)
