"""Ops that move elements within some dims, or copy them: those dims are whole, the others are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .batched import FIRST, along, own_range, trailing, unless_empty, unsharded
from .notation import Dims, LocalCall, Pattern, argument, operand_metas, result_shapes, rule

aten = torch.ops.aten


@rule(aten.flip.default)
def flip(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return along(node, metas, node.args[1], linear=FIRST, ragged=1)


@rule(aten.roll.default)
def roll(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Without dims it rolls the flattened elements."""
    dims = argument(node, 2, "dims", ())
    if not dims:
        return unsharded(node, metas, linear=FIRST)
    return along(node, metas, dims, linear=FIRST, ragged=1)


@rule(aten.rot90.default)
def rot90(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return along(node, metas, argument(node, 2, "dims", (0, 1)), linear=FIRST, ragged=1)


# Padding, and cutting where a pad is negative.


@rule(aten.constant_pad_nd.default)
def constant_pad(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    pads, ndim = node.args[1], len(operand_metas(node, metas)[0].shape)
    padded = {ndim - 1 - place // 2 for place, pad in enumerate(pads) if pad}
    linear = () if argument(node, 2, "value", 0) else FIRST
    return along(node, metas, padded, linear=linear, ragged=1)


_PADS = {
    aten.reflection_pad1d.default: 1,
    aten.reflection_pad2d.default: 2,
    aten.reflection_pad3d.default: 3,
    aten.replication_pad1d.default: 1,
    aten.replication_pad2d.default: 2,
    aten.replication_pad3d.default: 3,
    aten.reflection_pad1d_backward.default: 1,
    aten.reflection_pad2d_backward.default: 2,
    aten.reflection_pad3d_backward.default: 3,
    aten.replication_pad1d_backward.default: 1,
    aten.replication_pad2d_backward.default: 2,
    aten.replication_pad3d_backward.default: 3,
}


@rule(list(_PADS))
def pad(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return trailing(node, metas, _PADS[node.op], linear=FIRST, ragged=1)


# Dims of which a result has several, or that come apart.


@rule(aten.repeat.default)
def repeat(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """A dim repeated r times is (r d): sharded before, it is interleaved after, and nothing moves."""
    shape, repeats = operand_metas(node, metas)[0].shape, node.args[1]
    if 0 in repeats or 0 in shape:
        return unsharded(node, metas)
    new = len(repeats) - len(shape)
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    dims: Dims = tuple((name,) for name in sizes)
    sizes |= {f"r{place}": times for place, times in enumerate(repeats) if times > 1 or place < new}
    result: Dims = tuple(
        ((f"r{place}",) if f"r{place}" in sizes else ()) + (dims[place - new] if place >= new else ())
        for place in range(len(repeats))
    )
    whole = frozenset(name for name in sizes if name.startswith("r"))
    return Pattern((dims,), (result,), sizes, whole=whole, linear=FIRST, local=unless_empty(node, metas))


@rule([aten.pixel_shuffle.default, aten.pixel_unshuffle.default])
def pixel_shuffle(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Channels (c r r), rows h and columns w to c, (h r) and (w r); all but the r are free."""
    shuffled = node.op is aten.pixel_shuffle.default
    deep, wide = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    deep, wide = (deep, wide) if shuffled else (wide, deep)
    if 0 in deep:
        return unsharded(node, metas)
    factor = node.args[1]
    batch: Dims = tuple((f"b{dim}",) for dim in range(len(deep) - 3))
    sizes = {f"b{dim}": size for dim, size in enumerate(deep[:-3])}
    sizes |= {"c": wide[-3], "h": deep[-2], "w": deep[-1]}
    sizes |= {"q": factor * factor, "y": factor, "x": factor}
    dims = ((*batch, ("c", "q"), ("h",), ("w",)), (*batch, ("c",), ("h", "y"), ("w", "x")))
    operand, result = dims if shuffled else (dims[1], dims[0])
    return Pattern(
        (operand,),
        (result,),
        sizes,
        whole=frozenset("qyx"),
        linear=FIRST,
        local=unless_empty(node, metas),
    )


@rule(aten.channel_shuffle.default)
def channel_shuffle(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape, groups = operand_metas(node, metas)[0].shape, node.args[1]
    if 0 in shape:
        return unsharded(node, metas)
    sizes = {f"d{dim}": size for dim, size in enumerate(shape) if dim != 1}
    sizes |= {"g": groups, "c": shape[1] // groups}
    first, *rest = ((name,) for name in sizes if name.startswith("d"))
    operand, result = ((first, channels, *rest) for channels in (("g", "c"), ("c", "g")))
    return Pattern(
        (operand,),
        (result,),
        sizes,
        whole=frozenset("g"),
        linear=FIRST,
        local=unless_empty(node, metas),
    )


@rule([aten.im2col.default, aten.col2im.default])
def columns(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """An image n c y x to columns n (c k) l, for each of l places the k values of a window, and back."""
    apart = node.op is aten.im2col.default
    image, column = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    image, column = (image, column) if apart else (column, image)
    batch: Dims = (("n",),) if len(image) == 4 else ()
    sizes = {"c": image[-3], "y": image[-2], "x": image[-1], "l": column[-1]}
    sizes |= {"n": image[0]} if batch else {}
    sizes["k"] = column[-2] // image[-3] if image[-3] else 1
    dims = ((*batch, ("c",), ("y",), ("x",)), (*batch, ("c", "k"), ("l",)))
    operand, result = dims if apart else (dims[1], dims[0])
    return Pattern(
        (operand,),
        (result,),
        sizes,
        whole=frozenset("yxkl"),
        linear=FIRST,
        ragged=len(batch),
        local=unless_empty(node, metas),
    )


# Triangles: a rank with some rows or columns of the matrix has another diagonal.


@rule([aten.tril.default, aten.triu.default])
def triangle(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    made = along(node, metas, (), linear=FIRST, ragged=int(ndim > 2))
    matrix = frozenset((f"d{ndim - 2}", f"d{ndim - 1}"))
    return replace(made, contiguous=matrix, local=unless_empty(node, metas, _own_diagonal))


def _own_diagonal(call: LocalCall) -> LocalCall:
    diagonal = argument(call.node, 1, "diagonal", 0) + _shift(call)
    return replace(call, args=(call.args[0], diagonal), kwargs={})


def _shift(call: LocalCall) -> int:
    """How far above the diagonal of a rank's block that of the whole matrix is."""
    layout = call.operands[0]
    ndim = len(layout.shape)
    row, column = (own_range(layout, dim, call.rank) or (0, 0) for dim in (ndim - 2, ndim - 1))
    return row[0] - column[0]


@rule(aten.trace.default)
def trace(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """A block adds what it has of the diagonal."""
    return Pattern(
        ((("i",), ("j",)),),
        ((),),
        dict(zip("ij", operand_metas(node, metas)[0].shape, strict=True)),
        sum=frozenset("ij"),
        linear=FIRST,
        contiguous=frozenset("ij"),
        local=unless_empty(
            node, metas, lambda call: replace(call, fn=_sum_of_diagonal, args=(*call.args, _shift(call)))
        ),
    )


def _sum_of_diagonal(x: Any, offset: int) -> Any:
    return torch.diagonal(x, offset).sum()
