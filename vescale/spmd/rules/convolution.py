"""Convolutions: batch and channels are sharded, the dims that a kernel slides over are whole.

Of g groups a sharded part runs as fewer groups. Sharded input channels leave a Partial, to which one rank
adds the bias; in the backward the bias has its gradient from the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.ir import Node, Ref, TensorMeta
from .batched import counts_once, unless_empty
from .notation import Dims, LocalCall, Pattern, operand_metas, rule

aten = torch.ops.aten


def _channels(input_shape: Sequence[int], weight: Sequence[int], transposed: bool, groups: int) -> Any:
    """Dims of input, weight, output and bias: batch n, groups g, channels i in and o out; and their sizes."""
    spatial = len(weight) - 2
    per_group = input_shape[1] // groups
    i, o = (per_group, weight[1]) if transposed else (weight[1], weight[0] // groups)
    sizes = {"n": input_shape[0], "g": groups, "i": i, "o": o}
    if groups == 1:
        del sizes["g"]

    def kept(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in sizes)

    def slid(of: str, shape: Sequence[int]) -> Dims:
        names = [f"{of}{dim}" for dim in range(spatial)]
        sizes.update(zip(names, shape[2:], strict=True))
        return tuple((name,) for name in names)

    kernel = slid("k", weight)
    inner, outer = (kept("g", "i"), kept("o")) if transposed else (kept("g", "o"), kept("i"))
    x: Dims = (("n",), kept("g", "i"), *slid("x", input_shape))
    return x, (inner, outer, *kernel), (("n",), kept("g", "o")), (kept("g", "o"),), sizes, slid


def _whole(sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(name for name in sizes if name not in ("n", "g", "i", "o"))


@rule([aten.convolution.default, aten._convolution.default])
def convolution(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    x, weight, output, bias, sizes, slid = _channels(shapes[0], shapes[1], node.args[6], node.args[8])
    result = (*output, *slid("y", metas[node.outs[0] or 0].shape))
    biased = isinstance(node.args[2], Ref)
    with_bias = frozenset((2,)) if biased else frozenset()
    return Pattern(
        (x, weight, bias) if biased else (x, weight),
        (result,),
        sizes,
        sum=frozenset("i"),
        whole=_whole(sizes),
        linear=(frozenset((0,)) | with_bias, frozenset((1,)) | with_bias),
        ragged=1,
        local=unless_empty(node, metas, _own_groups),
    )


def _groups(x: Sequence[int], output: Sequence[int], weight: Sequence[int], transposed: bool) -> int:
    """How many groups the local channels are."""
    return (output if transposed else x)[1] // weight[1]


def _own_groups(call: LocalCall) -> LocalCall:
    x, weight = (layout.local_shape(call.rank) for layout in call.operands[:2])
    output = call.results[0].local_shape(call.rank)
    call = call.with_arg(8, _groups(x, output, weight, call.args[6]))
    if call.args[2] is not None and not counts_once(call, 2):
        call = call.with_arg(2, None)
    return call


@rule(aten.convolution_backward.default)
def convolution_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    gradient, x_shape, weight_shape = (meta.shape for meta in operand_metas(node, metas))
    x, weight, output, bias, sizes, slid = _channels(x_shape, weight_shape, node.args[7], node.args[9])
    wanted = [dims for dims, out in zip((x, weight, bias), node.outs, strict=True) if out is not None]
    of_bias = frozenset((len(wanted) - 1,)) if node.outs[2] is not None else frozenset()
    return Pattern(
        ((*output, *slid("y", gradient)), x, weight),
        tuple(wanted),
        sizes,
        sum=frozenset("nio"),
        whole=_whole(sizes),
        linear=(frozenset((0,)),) if len(wanted) == 1 else (),
        alike={"i": of_bias},
        local=unless_empty(node, metas, _own_groups_backward),
    )


def _own_groups_backward(call: LocalCall) -> LocalCall:
    gradient, x, weight = (layout.local_shape(call.rank) for layout in call.operands)
    call = call.with_arg(9, _groups(x, gradient, weight, call.args[7]))
    return call.with_arg(3, [gradient[1]]) if call.args[3] is not None else call
