"""Rearrangements: what takes or writes a part of a value, repeats it, or spreads it over new dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .notation import Dim, Dims, Pattern, argument, operand_metas, result_shape_arg, result_shapes, rule

aten = torch.ops.aten

FIRST = (frozenset((0,)),)
TOGETHER = (frozenset((0, 1)),)


def _dims(shape: Sequence[int]) -> tuple[list[Dim], dict[str, int]]:
    return [(f"d{dim}",) for dim in range(len(shape))], {f"d{dim}": size for dim, size in enumerate(shape)}


# Diagonals: two dims are one.


def _diagonal(full: Sequence[int], dim1: int, dim2: int, length: int) -> tuple[Dims, Dims, dict[str, int]]:
    """The dims of a value and those of its diagonal, which is the last dim."""
    dims, sizes = _dims(full)
    gone = (dim1 % len(full), dim2 % len(full))
    rest = [dim for place, dim in enumerate(dims) if place not in gone]
    return tuple(dims), (*rest, ("diagonal",)), sizes | {"diagonal": length}


def _unsharded(sizes: dict[str, int], full: Sequence[int], *dims: int) -> frozenset[str]:
    return frozenset(("diagonal", *(f"d{dim % len(full)}" for dim in dims))) & sizes.keys()


@rule([aten.diagonal.default, aten.diagonal_copy.default])
def diagonal(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    full, part = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dim1, dim2 = argument(node, 2, "dim1", 0), argument(node, 3, "dim2", 1)
    dims, result, sizes = _diagonal(full, dim1, dim2, part[-1])
    whole = _unsharded(sizes, full, dim1, dim2)
    return Pattern((dims,), (result,), sizes, whole=whole, linear=FIRST, view=True)


@rule(aten.diagonal_backward.default)
def diagonal_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    part, full = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dim1, dim2 = argument(node, 3, "dim1"), argument(node, 4, "dim2")
    dims, operand, sizes = _diagonal(full, dim1, dim2, part[-1])
    whole = _unsharded(sizes, full, dim1, dim2)
    return Pattern((operand,), (dims,), sizes, whole=whole, linear=FIRST, local=result_shape_arg(1))


@rule(aten.diag_embed.default)
def diag_embed(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    part, full = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dim1, dim2 = argument(node, 2, "dim1", -2), argument(node, 3, "dim2", -1)
    dims, operand, sizes = _diagonal(full, dim1, dim2, part[-1])
    whole = _unsharded(sizes, full, dim1, dim2)
    return Pattern((operand,), (dims,), sizes, whole=whole, linear=FIRST)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    full, part = (meta.shape for meta in operand_metas(node, metas))
    dim1, dim2 = argument(node, 3, "dim1", 0), argument(node, 4, "dim2", 1)
    dims, source, sizes = _diagonal(full, dim1, dim2, part[-1])
    whole = _unsharded(sizes, full, dim1, dim2)
    return Pattern((dims, source), (dims,), sizes, whole=whole, linear=TOGETHER)


# Parts of one dim, which is whole; the others may be sharded.


@rule(aten.slice_backward.default)
def slice_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    part, full = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dims, sizes = _dims(full)
    dim = node.args[2] % len(full)
    operand = list(dims)
    whole: frozenset[str] = frozenset()
    if part[dim] != full[dim] or node.args[5] != 1:
        operand[dim], sizes["cut"] = ("cut",), part[dim]
        whole = frozenset((f"d{dim}", "cut"))
    return Pattern(
        (tuple(operand),), (tuple(dims),), sizes, whole=whole, linear=FIRST, local=result_shape_arg(1)
    )


@rule(aten.select_backward.default)
def select_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    full = result_shapes(node, metas)[0]
    dims, sizes = _dims(full)
    dim = node.args[2] % len(full)
    operand = (*dims[:dim], *dims[dim + 1 :])
    whole = frozenset((f"d{dim}",))
    return Pattern((operand,), (tuple(dims),), sizes, whole=whole, linear=FIRST, local=result_shape_arg(1))


@rule(aten.select_scatter.default)
def select_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    full = operand_metas(node, metas)[0].shape
    dims, sizes = _dims(full)
    dim = argument(node, 2, "dim") % len(full)
    source = (*dims[:dim], *dims[dim + 1 :])
    whole = frozenset((f"d{dim}",))
    return Pattern((tuple(dims), source), (tuple(dims),), sizes, whole=whole, linear=TOGETHER)


@rule(aten.slice_scatter.default)
def slice_scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    full, part = (meta.shape for meta in operand_metas(node, metas))
    dims, sizes = _dims(full)
    dim = argument(node, 2, "dim", 0) % len(full)
    source = (*dims[:dim], ("cut",), *dims[dim + 1 :])
    sizes["cut"] = part[dim]
    whole = frozenset((f"d{dim}", "cut"))
    return Pattern((tuple(dims), source), (tuple(dims),), sizes, whole=whole, linear=TOGETHER)


# Repeats and shuffles: a dim is several factors, of which the inner or the outer ones move.


@rule(aten.repeat.default)
def repeat(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """A repeated dim has the number of repeats as its outer factor."""
    shape, repeats = operand_metas(node, metas)[0].shape, argument(node, 1, "repeats")
    dims, sizes = _dims(shape)
    new = len(repeats) - len(shape)
    result = [(f"r{place}", *(dims[place - new] if place >= new else ())) for place in range(len(repeats))]
    sizes |= {f"r{place}": count for place, count in enumerate(repeats)}
    whole = frozenset(name for name in sizes if name.startswith("r"))
    return Pattern((tuple(dims),), (tuple(result),), sizes, whole=whole, linear=FIRST)


@rule(aten.glu.default)
def glu(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, halves, sizes = _halves(operand_metas(node, metas)[0].shape, argument(node, 1, "dim", -1))
    return Pattern((halves,), (dims,), sizes, whole=frozenset(("half",)))


@rule(aten.glu_backward.default)
def glu_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, halves, sizes = _halves(operand_metas(node, metas)[1].shape, argument(node, 2, "dim", -1))
    return Pattern((dims, halves), (halves,), sizes, whole=frozenset(("half",)))


def _halves(shape: Sequence[int], dim: int) -> tuple[Dims, Dims, dict[str, int]]:
    dims, sizes = _dims(shape)
    dim %= len(shape)
    sizes |= {"half": 2, f"d{dim}": shape[dim] // 2}
    return tuple(dims), (*dims[:dim], ("half", f"d{dim}"), *dims[dim + 1 :]), sizes


@rule(aten.channel_shuffle.default)
def channel_shuffle(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """(g c) to (c g)."""
    shape, groups = operand_metas(node, metas)[0].shape, argument(node, 1, "groups")
    dims, sizes = _dims(shape)
    sizes |= {"g": groups, "d1": shape[1] // groups}
    operand, result = ((dims[0], names, *dims[2:]) for names in (("g", "d1"), ("d1", "g")))
    return Pattern((operand,), (result,), sizes, whole=frozenset("g"), linear=FIRST)


@rule([aten.pixel_shuffle.default, aten.pixel_unshuffle.default])
def pixel_shuffle(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """(c r s) h w to c (h r) (w s), or back: the inner factors are whole."""
    shapes, factor = (operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]), node.args[1]
    shuffles = node.op is aten.pixel_shuffle.default
    (*leading, channels, _, _), (*_, height, width) = shapes if shuffles else reversed(shapes)
    sizes = {f"b{dim}": size for dim, size in enumerate(leading)}
    batch = tuple((name,) for name in sizes)
    sizes |= {"c": channels // factor**2, "h": height // factor, "w": width // factor}
    sizes |= {"r": factor, "s": factor}
    few: Dims = (*batch, ("c", "r", "s"), ("h",), ("w",))
    many: Dims = (*batch, ("c",), ("h", "r"), ("w", "s"))
    operand, result = (few, many) if shuffles else (many, few)
    return Pattern((operand,), (result,), sizes, whole=frozenset("rs"), linear=FIRST)


@rule(aten.view_as_real.default)
def view_as_real(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = _dims(result_shapes(node, metas)[0])
    whole = frozenset(dims[-1])
    return Pattern((tuple(dims[:-1]),), (tuple(dims),), sizes, whole=whole, linear=FIRST, view=True)


@rule(aten.view_as_complex.default)
def view_as_complex(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = _dims(operand_metas(node, metas)[0].shape)
    whole = frozenset(dims[-1])
    return Pattern((tuple(dims),), (tuple(dims[:-1]),), sizes, whole=whole, linear=FIRST, view=True)


@rule([aten.bucketize.Tensor, aten.isin.Tensor_Tensor])
def look_up(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Each element is looked up among all of the second operand's."""
    shape, others = (meta.shape for meta in operand_metas(node, metas))
    dims, sizes = _dims(shape)
    names: Dims = tuple((f"o{dim}",) for dim in range(len(others)))
    sizes |= {f"o{dim}": size for dim, size in enumerate(others)}
    whole = frozenset(name for (name,) in names)
    return Pattern((tuple(dims), names), (tuple(dims),), sizes, whole=whole)
