"""Views: dims are regrouped, cut or permuted, and factors only move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import (
    ALL_DIMS,
    Dims,
    LocalCall,
    Pattern,
    named_dims,
    operand_metas,
    overloads,
    result_shape_arg,
    result_shapes,
    rule,
)

aten = torch.ops.aten

FIRST = (frozenset((0,)),)


def regroup(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Common factors of two shapes of one number of elements, and which of them must stay whole.

    (4, 64, 192) and (256, 192) have the factors 4, 64 and 192. (12, 8) and (16, 6) share the outermost 4;
    what is left, (3, 8) and (4, 6), has no common cut, so its factors are whole.

    >>> regroup((4, 6), (24,))[:2]
    ((('f0',), ('f1',)), (('f0', 'f1'),))
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]

    def new(size: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    i = j = 0
    rest_i = rest_j = 1  # what is left of the dims i - 1 and j - 1
    while True:
        while rest_i == 1 and i < len(source):
            rest_i, i = source[i], i + 1
        while rest_j == 1 and j < len(target):
            rest_j, j = target[j], j + 1
        if rest_i == 1 and rest_j == 1:
            break
        common = math.gcd(rest_i, rest_j)
        if common > 1 and (rest_i == common or rest_j == common):
            name = new(common)
            left[i - 1].append(name)
            right[j - 1].append(name)
            rest_i, rest_j = rest_i // common, rest_j // common
            continue
        if common > 1:
            name = new(common)
            left[i - 1].append(name)
            right[j - 1].append(name)
            rest_i, rest_j = rest_i // common, rest_j // common
        # No common cut until the products agree again: those factors are whole, one a dim.
        a, b = rest_i, rest_j
        spans_i, spans_j = [(i - 1, rest_i)], [(j - 1, rest_j)]
        while a != b and (i < len(source) or j < len(target)):
            if (a < b and i < len(source)) or j == len(target):
                a, i = a * source[i], i + 1
                spans_i.append((i - 1, source[i - 1]))
            else:
                b, j = b * target[j], j + 1
                spans_j.append((j - 1, target[j - 1]))
        for side, spans in ((left, spans_i), (right, spans_j)):
            for dim, size in spans:
                name = new(size)
                whole.add(name)
                side[dim].append(name)
        rest_i = rest_j = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, whole


@rule([aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default])
def view(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    source, target = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    if 0 in source:
        return _opaque(source, target)
    operand, result, sizes, whole = regroup(source, target)
    return Pattern(
        (operand,),
        (result,),
        sizes,
        whole=frozenset(whole),
        linear=FIRST,
        view=True,
        ragged=ALL_DIMS,
        local=_reshape,
    )


def _reshape(call: LocalCall) -> LocalCall:
    # reshape, not view: a local piece may have other strides than the global tensor had.
    return replace(
        call, fn=torch.reshape, args=(call.args[0], call.results[0].local_shape(call.rank)), kwargs={}
    )


def _opaque(source: Sequence[int], target: Sequence[int]) -> Pattern:
    sizes = {f"i{dim}": size for dim, size in enumerate(source)} | {
        f"o{dim}": size for dim, size in enumerate(target)
    }
    operand: Dims = tuple((f"i{dim}",) for dim in range(len(source)))
    result: Dims = tuple((f"o{dim}",) for dim in range(len(target)))
    return Pattern((operand,), (result,), sizes, whole=frozenset(sizes), linear=FIRST, view=True)


def _permuted(node: Node, metas: Sequence[TensorMeta], order: Sequence[int]) -> Pattern:
    dims, sizes = named_dims(operand_metas(node, metas)[0].shape)
    return Pattern(
        (tuple(dims),), (tuple(dims[dim] for dim in order),), sizes, linear=FIRST, view=True, ragged=1
    )


@rule([aten.t.default, aten.t_copy.default])
def t(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    return _permuted(node, metas, tuple(reversed(range(ndim))))


@rule([aten.transpose.int, aten.transpose_copy.int])
def transpose(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    order = list(range(ndim))
    if ndim:
        a, b = node.args[1] % ndim, node.args[2] % ndim
        order[a], order[b] = order[b], order[a]
    return _permuted(node, metas, order)


@rule([aten.permute.default, aten.permute_copy.default])
def permute(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    ndim = len(operand_metas(node, metas)[0].shape)
    return _permuted(node, metas, [dim % ndim for dim in node.args[1]])


@rule([aten.unsqueeze.default, aten.unsqueeze_copy.default])
def unsqueeze(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = named_dims(operand_metas(node, metas)[0].shape)
    at = node.args[1] % (len(dims) + 1)
    return Pattern((tuple(dims),), ((*dims[:at], (), *dims[at:]),), sizes, linear=FIRST, view=True, ragged=1)


@rule(overloads(aten.squeeze, aten.squeeze_copy))
def squeeze(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shape = operand_metas(node, metas)[0].shape
    _, sizes = named_dims(shape)
    wanted = (
        range(len(shape))
        if len(node.args) < 2
        else [node.args[1]]
        if isinstance(node.args[1], int)
        else node.args[1]
    )
    gone = {dim % max(len(shape), 1) for dim in wanted} & {dim for dim, size in enumerate(shape) if size == 1}
    operand: Dims = tuple(() if dim in gone else (f"d{dim}",) for dim in range(len(shape)))

    def localise(call: LocalCall) -> LocalCall:
        # By number: a dim that is 1 on this rank only must stay.
        return replace(call, fn=torch.squeeze, args=(call.args[0], tuple(sorted(gone))), kwargs={})

    return Pattern(
        (operand,),
        (tuple(dim for index, dim in enumerate(operand) if index not in gone),),
        sizes,
        linear=FIRST,
        view=True,
        ragged=1,
        local=localise,
    )


@rule([aten.expand.default, aten.expand_copy.default])
def expand(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    source, target = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dims, sizes = named_dims(target)
    offset = len(target) - len(source)
    operand: Dims = tuple(() if size == 1 else dims[offset + dim] for dim, size in enumerate(source))
    return Pattern(
        (operand,), (tuple(dims),), sizes, linear=FIRST, view=True, ragged=1, local=result_shape_arg(1)
    )


@rule([aten.slice.Tensor, aten.slice_copy.Tensor])
def slice_(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    source, target = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    dims, sizes = named_dims(source)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(source)
    result = list(dims)
    if source[dim] == target[dim] and (len(node.args) < 5 or node.args[4] == 1):
        return Pattern(
            (tuple(dims),),
            (tuple(dims),),
            sizes,
            linear=FIRST,
            view=True,
            ragged=ALL_DIMS,
            local=lambda call: replace(call, fn=torch.ops.aten.alias.default, args=call.args[:1], kwargs={}),
        )
    result[dim], sizes["cut"] = ("cut",), target[dim]
    return Pattern(
        (tuple(dims),),
        (tuple(result),),
        sizes,
        whole=frozenset((f"d{dim}", "cut")),
        linear=FIRST,
        view=True,
        ragged=1,
    )


@rule([aten.select.int, aten.select_copy.int])
def select(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = named_dims(operand_metas(node, metas)[0].shape)
    dim = node.args[1] % len(dims)
    return Pattern(
        (tuple(dims),),
        (tuple(dims[:dim] + dims[dim + 1 :]),),
        sizes,
        whole=frozenset((f"d{dim}",)),
        linear=FIRST,
        view=True,
        ragged=1,
    )


@rule([aten.unbind.int, aten.unbind_copy.int])
def unbind(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = named_dims(operand_metas(node, metas)[0].shape)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    result = tuple(dims[:dim] + dims[dim + 1 :])
    return Pattern(
        (tuple(dims),),
        (result,) * len(node.outs),
        sizes,
        whole=frozenset((f"d{dim}",)),
        linear=FIRST,
        view=True,
        ragged=1,
    )


_SPLITS = ("split", "split_copy", "split_with_sizes", "split_with_sizes_copy", "unsafe_split")


@rule([*overloads(*(getattr(aten, name) for name in (*_SPLITS, "unsafe_split_with_sizes")))])
def split(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Equal sections are a factor of their own, so a shard interleaved by sections stays where it is."""
    shape = operand_metas(node, metas)[0].shape
    dims, sizes = named_dims(shape)
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(shape)
    lengths = [result[dim] for result in result_shapes(node, metas)]
    results: list[Dims] = []
    if len(set(lengths)) == 1:
        sizes |= {"section": len(lengths), "part": lengths[0]}
        del sizes[f"d{dim}"]
        operand = (*dims[:dim], ("section", "part"), *dims[dim + 1 :])
        results = [(*dims[:dim], ("part",), *dims[dim + 1 :])] * len(lengths)
        whole = {"section"}
    else:
        operand = tuple(dims)
        sizes |= {f"part{index}": length for index, length in enumerate(lengths)}
        results = [(*dims[:dim], (f"part{index}",), *dims[dim + 1 :]) for index in range(len(lengths))]
        whole = {f"d{dim}", *(f"part{index}" for index in range(len(lengths)))}

    def localise(call: LocalCall) -> LocalCall:
        local = [result.local_shape(call.rank)[dim] for result in call.results]
        return replace(call, fn=torch.split, args=(call.args[0], local, dim), kwargs={})

    return Pattern(
        (operand,),
        tuple(results),
        sizes,
        whole=frozenset(whole),
        linear=FIRST,
        view=True,
        ragged=1,
        local=localise,
    )


@rule(aten.cat.default)
def cat(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    (result,) = result_shapes(node, metas)
    dims, sizes = named_dims(result)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(result)
    everything = (frozenset(range(len(shapes))),)
    del sizes[f"d{dim}"]
    if len(set(shapes)) == 1:
        sizes |= {"section": len(shapes), "part": shapes[0][dim]}
        operand = (*dims[:dim], ("part",), *dims[dim + 1 :])
        return Pattern(
            (operand,) * len(shapes),
            ((*dims[:dim], ("section", "part"), *dims[dim + 1 :]),),
            sizes,
            whole=frozenset(("section",)),
            linear=everything,
            ragged=1,
        )
    lengths = [shape[dim] if len(shape) == len(result) else 0 for shape in shapes]
    sizes |= {f"part{index}": length for index, length in enumerate(lengths)} | {"all": result[dim]}
    operands: list[Any] = [
        (*dims[:dim], (f"part{index}",), *dims[dim + 1 :])
        if len(shape) == len(result)
        else ((f"part{index}",),)
        for index, shape in enumerate(shapes)
    ]
    return Pattern(
        tuple(operands),
        ((*dims[:dim], ("all",), *dims[dim + 1 :]),),
        sizes,
        whole=frozenset({"all", *(f"part{index}" for index in range(len(shapes)))}),
        linear=everything,
        ragged=1,
    )


@rule(aten.stack.default)
def stack(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    dims, sizes = named_dims(shapes[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % (len(dims) + 1)
    sizes["new"], everything = len(shapes), frozenset(range(len(shapes)))
    return Pattern(
        (tuple(dims),) * len(shapes),
        ((*dims[:dim], ("new",), *dims[dim:]),),
        sizes,
        whole=frozenset(("new",)),
        linear=(everything,),
        extremes={"max": everything, "min": everything},
        ragged=1,
    )
