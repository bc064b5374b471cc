"""Batch and group norms. Channels are free, and of a group norm the batch too.

The statistics of a batch norm in training are those of the global batch: where that is sharded, the mean
first, then the mean square distance from it, two small reductions of one number a channel; two more in the
backward. Outside of training every dim is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, Ref, TensorMeta
from .batched import unless_empty
from .notation import Dims, LocalCall, Pattern, operand_metas, rule

aten = torch.ops.aten


def _image(shape: Sequence[int]) -> tuple[Dims, dict[str, int], set[str]]:
    """Dims n, c and those of space, their sizes, and all but c, over which a batch norm averages."""
    names = ["n", "c", *(f"s{dim}" for dim in range(len(shape) - 2))]
    return tuple((name,) for name in names), dict(zip(names, shape, strict=True)), set(names) - {"c"}


def _averaged(x: Any) -> tuple[list[int], tuple[int, ...], int]:
    """The dims that are averaged, a shape to broadcast channels against x, and how many elements one has."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return dims, (1, -1, *(1,) * (x.dim() - 2)), math.prod(x.shape[dim] for dim in dims)


def _wide(x: Any) -> Any:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _normalised_apart(dtypes: Sequence[torch.dtype], running: bool) -> Callable[..., tuple[Any, ...]]:
    """A batch norm as reductions and elementwise ops; its results have these dtypes."""

    def apart(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[Any, ...]:
        *statistics, _, momentum, eps = rest
        dims, shape, count = _averaged(x)
        wide = _wide(x)
        mean = torch.mean(wide, dims)
        centred = wide - mean.view(shape)
        variance = torch.mean(centred * centred, dims)
        deviation = torch.rsqrt(variance + eps)
        result = centred * (deviation if weight is None else deviation * weight).view(shape)
        result = result if bias is None else result + bias.view(shape)
        results = [result, mean, deviation]
        if running:
            unbiased = variance * (count / max(count - 1, 1))
            for old, new in zip(statistics, (mean, unbiased), strict=True):
                results.append(new * momentum + old * (1 - momentum))
        return tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True))

    return apart


@rule(
    [
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    ]
)
def batch_norm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes, averaged = _image(operand_metas(node, metas)[0].shape)
    results: list[Dims] = [dims]
    for number, out in enumerate(node.outs[1:]):
        assert out is not None
        results.append(_of_channels(f"e{number}", metas[out], sizes))
    operands = (dims, *((("c",),),) * (len(operand_metas(node, metas)) - 1))
    name = node.op.overloadpacket.__name__
    training = name != "_native_batch_norm_legit_no_training" and node.args[-3]
    whole = {name for name in sizes if name.startswith("e")}
    if not training:  # what is saved for the backward, if anything, is of the running statistics
        lacking = frozenset(place for place, of in enumerate(results) if of and of[0][0] in whole)
        saved = frozenset(range(1, len(results)))
        alike = dict.fromkeys(averaged, saved) | {"c": lacking}
        return Pattern(
            operands,
            tuple(results),
            sizes,
            whole=frozenset(whole),
            alike=alike,
            local=unless_empty(node, metas),
        )
    dtypes = [metas[out].dtype for out in node.outs if out is not None]
    apart = _normalised_apart(dtypes, running=name.endswith("functional"))
    return Pattern(
        operands,
        tuple(results),
        sizes,
        whole=frozenset(whole),
        expand=dict.fromkeys(averaged, apart),
        local=unless_empty(node, metas),
    )


def _of_channels(name: str, meta: TensorMeta, sizes: dict[str, int]) -> Dims:
    """One number a channel, or what is empty in its place."""
    if meta.shape == (sizes["c"],):
        return (("c",),)
    sizes |= {f"{name}.{dim}": size for dim, size in enumerate(meta.shape)}
    return tuple((f"{name}.{dim}",) for dim in range(len(meta.shape)))


def _backward_apart(dtypes: Sequence[torch.dtype | None]) -> Callable[..., tuple[Any, ...]]:
    """The gradients of a batch norm in training, each reduction on its own."""

    def apart(gradient: Any, x: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
        _, _, mean, deviation, *_ = rest
        dims, shape, count = _averaged(x)
        wide = _wide(gradient)
        normal = (_wide(x) - mean.view(shape)) * deviation.view(shape)
        along, total = torch.sum(wide * normal, dims), torch.sum(wide, dims)
        scale = deviation if weight is None else deviation * weight
        left = wide - total.view(shape) / count - normal * (along.view(shape) / count)
        results = (left * scale.view(shape), along, total)
        return tuple(
            None if dtype is None else result.to(dtype) for result, dtype in zip(results, dtypes, strict=True)
        )

    return apart


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    operands = operand_metas(node, metas)
    dims, sizes, averaged = _image(operands[0].shape)
    channels = [
        _of_channels(f"e{number}", metas[arg.id], sizes)
        for number, arg in enumerate(node.args[2:7])
        if isinstance(arg, Ref)
    ]
    wanted: list[Dims] = [dims, (("c",),), (("c",),)]
    results = [of for of, out in zip(wanted, node.outs, strict=True) if out is not None]
    dtypes = [None if out is None else metas[out].dtype for out in node.outs]
    return Pattern(
        (dims, dims, *channels),
        tuple(results),
        sizes,
        sum=frozenset(averaged),
        whole=frozenset(name for name in sizes if name.startswith("e")),
        expand=dict.fromkeys(averaged, _backward_apart(dtypes)) if node.args[7] else {},
        local=unless_empty(node, metas),
    )


# Group norms: channels (g c), of which the groups may be shared out.


def _grouped(shape: Sequence[int], groups: int) -> tuple[Dims, dict[str, int]]:
    space = {f"s{dim}": size for dim, size in enumerate(shape[2:])}
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups}
    if shape[1] == groups:  # then an uneven number of them too
        del sizes["c"]
    channels = tuple(name for name in ("g", "c") if name in sizes)
    return (("n",), channels, *((name,) for name in space)), sizes | space


def _own_groups(position: int, image: int) -> Callable[[LocalCall], LocalCall]:
    """The arguments N, C, HxW and group from `position` on, of the pieces of operand `image`."""

    def localise(call: LocalCall) -> LocalCall:
        layout = call.operands[image]
        shape, channels = layout.local_shape(call.rank), layout.shape[1]
        groups = call.args[position + 3] * shape[1] // channels
        for offset, value in ((0, shape[0]), (1, shape[1]), (3, groups)):
            call = call.with_arg(position + offset, value)
        return replace(call, fn=_on_dense, args=(call.fn, *call.args))

    return localise


def _on_dense(op: Any, *args: Any) -> Any:
    """torch's kernels read what they are given as if it were contiguous; a slice of channels isn't."""
    return op(*(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args))


@rule(aten.native_group_norm.default)
def group_norm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = _grouped(operand_metas(node, metas)[0].shape, node.args[6])
    affine = sum(isinstance(arg, Ref) for arg in node.args[1:3])
    statistics: Dims = (("n",), ("g",))
    return Pattern(
        (dims, *(dims[1:2],) * affine),
        (dims, statistics, statistics),
        sizes,
        whole=frozenset(sizes) - {"n", "g"},
        local=unless_empty(node, metas, _own_groups(3, 0)),
    )


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    dims, sizes = _grouped(operand_metas(node, metas)[1].shape, node.args[8])
    statistics: Dims = (("n",), ("g",))
    weight = (dims[1:2],) if isinstance(node.args[4], Ref) else ()
    wanted = [of for of, out in zip((dims, dims[1:2], dims[1:2]), node.outs, strict=True) if out is not None]
    return Pattern(
        (dims, dims, statistics, statistics, *weight),
        tuple(wanted),
        sizes,
        sum=frozenset("n"),
        whole=frozenset(sizes) - {"n", "g"},
        local=unless_empty(node, metas, _own_groups(5, 1)),
    )
