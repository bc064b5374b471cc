"""Indexing with tensors: what is looked up, written or added at the places that other tensors name.

Dims that aren't indexed are free, and so are the dims of the indices of a lookup. Where contributions are
added, sharded indices leave a Partial, to which one rank adds the tensor itself. A sharded dim that is
indexed stays where it is: each rank writes at its own places; a lookup, when less comes out of it than is
looked through, reads its own places and leaves a Partial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .batched import unless_empty, unsharded
from .notation import Dims, Pattern, argument, operand_metas, result_shapes, rule
from .places import Places, reading, writing

aten = torch.ops.aten


def _pays(x: TensorMeta, found: Sequence[int]) -> bool:
    """Whether to sum what each rank finds moves less than to gather what is looked through."""
    return x.dtype is not torch.bool and 2 * math.prod(found) <= math.prod(x.shape)


# A dim and an index along it.


def _along_dim(dim: int, from_end: bool = False) -> Places:
    """index_select, gather, scatter, index_add ... (x, dim, index, ...)"""
    return Places(lambda args, own: [*args[:2], own(args[2], dim), *args[3:]], from_end)


@rule(aten.index_select.default)
def index_select(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """The index is a factor of its own in the place of the dim."""
    x, index = operand_metas(node, metas)
    if not x.shape or not index.shape:
        return unsharded(node, metas)
    (found,) = result_shapes(node, metas)
    dim = node.args[1] % len(x.shape)
    dims, sizes = _names(x.shape, dim)
    sizes["j"] = index.shape[0]

    def masks(mine: Any, ndim: int) -> Any:
        return mine.view([-1 if place == dim else 1 for place in range(ndim)])

    return Pattern(
        (dims, (("j",),)),
        ((*dims[:dim], ("j",), *dims[dim + 1 :]),),
        sizes,
        sum=frozenset("v"),
        whole=frozenset() if _pays(x, found) else frozenset("v"),
        linear=(frozenset((0,)),),
        ragged=int(dim != 0),
        contiguous=frozenset("v"),
        local=reading(node, metas, [dim], _along_dim(dim), masks),
    )


def _names(shape: Sequence[int], dim: int) -> tuple[Dims, dict[str, int]]:
    """Factors of a tensor that is indexed along `dim`: v there, d0, d1 ... elsewhere."""
    names = ["v" if place == dim else f"d{place}" for place in range(len(shape))]
    return tuple((name,) for name in names), dict(zip(names, shape, strict=True))


def _same_places(
    shapes: Sequence[Sequence[int]], dim: int, sizes: dict[str, int]
) -> tuple[list[Dims], set[str]]:
    """Factors of (x, index) or (x, index, source), and those that are whole.

    They share a dim other than `dim` when they are equally long there; where an index is shorter, only
    the first places of the others are used.
    """
    lists: list[list[str]] = [[] for _ in shapes]
    whole: set[str] = set()
    for place in range(len(shapes[0])):
        lengths = [shape[place] for shape in shapes]
        names = [f"d{place}"] * len(shapes)
        if place == dim:
            names = ["v", "j", "j"][: len(shapes)]
            if len(shapes) == 3 and lengths[1] != lengths[2]:
                names[2] = "s"
                whole |= {"j", "s"}
        elif len(set(lengths)) > 1:
            names = [f"{tensor}{place}" for tensor in "xis"[: len(shapes)]]
            whole.update(names)
        for dims, name, length in zip(lists, names, lengths, strict=True):
            dims.append(name)
            sizes[name] = length
    return [tuple((name,) for name in dims) for dims in lists], whole


@rule(aten.gather.default)
def gather(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, index = operand_metas(node, metas)
    if not x.shape or len(index.shape) != len(x.shape):  # torch takes an index of nothing of any rank
        return unsharded(node, metas)
    dim, sizes = node.args[1] % len(x.shape), {}
    (source, places), whole = _same_places([x.shape, index.shape], dim, sizes)
    whole |= set() if _pays(x, index.shape) else {"v"}
    return Pattern(
        (source, places),
        (places,),
        sizes,
        sum=frozenset("v"),
        whole=frozenset(whole),
        linear=(frozenset((0,)),),
        ragged=int(dim != 0),
        contiguous=frozenset("v"),
        local=reading(node, metas, [dim], _along_dim(dim), lambda mine, _: mine),
    )


def _reduction(node: Node) -> str | None:
    """How contributions to the same place are combined over ranks; None when a rank must have them all."""
    name = node.op.overloadpacket.__name__
    if name in ("scatter_add", "index_add"):
        return "sum"
    reduce = argument(node, 4, "reduce") if name != "index_fill" else None
    if not node.kwargs.get("include_self", True):
        return None
    return {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"}.get(reduce or "")


@rule(
    [
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    ]
)
def scatter(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    operands = operand_metas(node, metas)
    shapes = [meta.shape for meta in operands]
    ranks = {len(shape) for shape in shapes[:2]}
    if not all(shapes) or len(ranks) > 1:  # torch takes an index of nothing of any rank
        return unsharded(node, metas)
    dim, sizes = node.args[1] % len(shapes[0]), {}
    lists, whole = _same_places(shapes, dim, sizes)
    return _written(node, metas, lists, sizes, whole, dim)


@rule([aten.index_add.default, aten.index_copy.default, aten.index_reduce.default])
def index_add(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, index, source = operand_metas(node, metas)
    if not x.shape or not index.shape or not source.shape:
        return unsharded(node, metas)
    dim = node.args[1] % len(x.shape)
    dims, sizes = _names(x.shape, dim)
    sizes["j"] = index.shape[0]
    lists = [dims, (("j",),), (*dims[:dim], ("j",), *dims[dim + 1 :])]
    return _written(node, metas, lists, sizes, set(), dim)


@rule([aten.index_fill.int_Scalar, aten.index_fill.int_Tensor])
def index_fill(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, index, *value = operand_metas(node, metas)
    if not x.shape or not index.shape:
        return unsharded(node, metas)
    dim = node.args[1] % len(x.shape)
    dims, sizes = _names(x.shape, dim)
    sizes["j"] = index.shape[0]
    return _written(node, metas, [dims, (("j",),), *((),) * len(value)], sizes, set(), dim)


def _written(
    node: Node,
    metas: Sequence[TensorMeta],
    lists: list[Dims],
    sizes: dict[str, int],
    whole: set[str],
    dim: int,
) -> Pattern:
    reduction = _reduction(node)
    from_end = node.op.overloadpacket is aten.index_fill
    adds = reduction == "sum" and operand_metas(node, metas)[0].dtype is not torch.bool
    source = len(lists) > 2 and reduction is not None
    if not adds and reduction not in ("max", "min"):
        whole = whole | {"j"}
    return Pattern(
        tuple(lists),
        (lists[0],),
        sizes,
        sum=frozenset("j"),
        whole=frozenset(whole),
        linear=(frozenset((0, 2)),) if adds and source else (),
        ragged=int(dim != 0),
        contiguous=frozenset("v"),
        reduction=reduction or "sum",
        local=writing(node, metas, [dim], _along_dim(dim, from_end), adds),
    )


# x[i, :, j]: several indices, broadcast against each other.


def _indexed(indices: Sequence[Any], ndim: int) -> tuple[list[int], list[int], int]:
    """The indexed dims, the others, and where the dims of the indices stand in what is found."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return dims, [dim for dim in range(ndim) if dim not in dims], dims[0] if adjacent else 0


def _tensors_at(args: Sequence[Any], own: Any) -> list[Any]:
    """index(x, indices), index_put(x, indices, ...)"""
    changed = [None if index is None else own(index, dim) for dim, index in enumerate(args[1])]
    return [args[0], changed, *args[2:]]


_TENSORS = Places(_tensors_at, from_end=True)


def _index_dims(
    node: Node, metas: Sequence[TensorMeta]
) -> tuple[list[Dims], Dims, dict[str, int], list[int], int, int]:
    """Factors of x and the indices, and of what is found: v0 is an indexed dim, d0 another, b0 of indices."""
    x, indices = operand_metas(node, metas)[0], node.args[1]
    dims, rest, start = _indexed(indices, len(x.shape))
    found = [metas[index.id].shape for index in indices if index is not None]
    broadcast = torch.broadcast_shapes(*found)
    sizes = {f"{'v' if dim in dims else 'd'}{dim}": size for dim, size in enumerate(x.shape)}
    names = tuple((name,) for name in sizes)
    sizes |= {f"b{place}": size for place, size in enumerate(broadcast)}
    rows: Dims = tuple((f"b{place}",) for place in range(len(broadcast)))
    lists: list[Dims] = [names]
    for shape in found:
        aligned = rows[len(rows) - len(shape) :]
        lists.append(
            tuple(
                () if size == 1 != sizes[name] else (name,)
                for (name,), size in zip(aligned, shape, strict=True)
            )
        )
    others = [names[dim] for dim in rest]
    return lists, (*others[:start], *rows, *others[start:]), sizes, dims, start, len(rows)


def _integers(node: Node, metas: Sequence[TensorMeta]) -> bool:
    used = [metas[index.id] for index in node.args[1] if index is not None]
    return bool(used) and all(meta.dtype not in (torch.bool, torch.uint8) for meta in used)


@rule([aten.index.Tensor, aten._unsafe_index.Tensor])
def index_(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    if not _integers(node, metas):
        return unsharded(node, metas)
    lists, found, sizes, dims, start, count = _index_dims(node, metas)
    looked = frozenset(f"v{dim}" for dim in dims)

    def masks(mine: Any, ndim: int) -> Any:
        shape = [1] * (count - mine.dim()) + list(mine.shape)
        return mine.view([1] * start + shape + [1] * (ndim - start - count))

    pays = _pays(operand_metas(node, metas)[0], result_shapes(node, metas)[0])
    return Pattern(
        tuple(lists),
        (found,),
        sizes,
        sum=looked,
        whole=frozenset() if pays else looked,
        linear=(frozenset((0,)),),
        ragged=int(0 not in dims),
        contiguous=looked,
        local=reading(node, metas, dims, _TENSORS, masks),
    )


@rule([aten.index_put.default, aten._unsafe_index_put.default])
def index_put(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, *_, values = operand_metas(node, metas)
    if not _integers(node, metas):
        return _masked_put(node, metas)
    lists, found, sizes, dims, _, count = _index_dims(node, metas)
    aligned = found[len(found) - len(values.shape) :]
    lists.append(
        tuple(
            () if size == 1 != sizes[name] else (name,)
            for (name,), size in zip(aligned, values.shape, strict=True)
        )
    )
    adds = bool(argument(node, 3, "accumulate", False)) and x.dtype is not torch.bool
    rows = frozenset(f"b{place}" for place in range(count))
    return Pattern(
        tuple(lists),
        (lists[0],),
        sizes,
        sum=rows,
        whole=frozenset() if adds else rows,
        linear=(frozenset((0, len(lists) - 1)),) if adds else (),
        ragged=int(0 not in dims),
        contiguous=frozenset(f"v{dim}" for dim in dims),
        local=writing(node, metas, dims, _TENSORS, adds),
    )


def _masked_put(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """x[mask] = one number is elementwise; with more values a rank can't know which are its own."""
    operands = operand_metas(node, metas)
    used = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]
    if len(used) != 1 or math.prod(operands[2].shape) != 1:
        return unsharded(node, metas)
    ((first, _),) = used
    x, mask, value = operands
    dims: Dims = tuple((f"d{dim}",) for dim in range(len(x.shape)))
    ones: Dims = ((),) * len(value.shape)
    return Pattern(
        (dims, dims[first : first + len(mask.shape)], ones),
        (dims,),
        {f"d{dim}": size for dim, size in enumerate(x.shape)},
        ragged=int(first == 0),
        local=unless_empty(node, metas),
    )


# Flat places.


@rule(aten.take.default)
def take(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, index = operand_metas(node, metas)
    sizes = {f"x{dim}": size for dim, size in enumerate(x.shape)}
    whole = frozenset(sizes)
    places: Dims = tuple((f"j{dim}",) for dim in range(len(index.shape)))
    sizes |= {f"j{dim}": size for dim, size in enumerate(index.shape)}
    return Pattern(
        (tuple((name,) for name in sorted(whole)), places),
        (places,),
        sizes,
        whole=whole,
        linear=(frozenset((0,)),),
        ragged=1,
        local=unless_empty(node, metas),
    )


@rule(aten.put.default)
def put(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, index, source = operand_metas(node, metas)
    if index.shape != source.shape:
        return unsharded(node, metas)
    adds = bool(argument(node, 3, "accumulate", False)) and x.dtype is not torch.bool
    sizes = {f"x{dim}": size for dim, size in enumerate(x.shape)}
    dims: Dims = tuple((name,) for name in sizes)
    whole = set(sizes)
    places: Dims = tuple((f"j{dim}",) for dim in range(len(index.shape)))
    rows = {f"j{dim}": size for dim, size in enumerate(index.shape)}
    return Pattern(
        (dims, places, places),
        (dims,),
        sizes | rows,
        sum=frozenset(rows),
        whole=frozenset(whole if adds else whole | set(rows)),
        linear=(frozenset((0, 2)),) if adds else (),
        ragged=1,
        local=writing(node, metas, (), _TENSORS, adds),
    )
