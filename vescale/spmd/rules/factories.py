"""Factories: constants, made by each rank in whatever layout is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import LocalCall, Pattern, operand_metas, overloads, result_shapes, rule, source

aten = torch.ops.aten

_FILL = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILL |= {"_efficientzerotensor": 0}  # a derivative that is zero: memory of its own, like any other value
_FILL_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


def _fill(call: LocalCall) -> LocalCall:
    name = call.node.op.overloadpacket.__name__
    value: Any = _FILL[name] if name in _FILL else call.node.args[_FILL_ARGUMENT[name]]
    shape = call.results[0].local_shape(call.rank)
    return replace(
        call,
        fn=torch.full,
        args=(shape, value),
        kwargs={"dtype": call.meta.dtype, "device": call.meta.device},
    )


def _empty(call: LocalCall) -> LocalCall:
    return replace(
        call,
        fn=torch.empty,
        args=(call.results[0].local_shape(call.rank),),
        kwargs={"dtype": call.meta.dtype, "device": call.meta.device},
    )


source(
    overloads(
        aten.zeros,
        aten.ones,
        aten.full,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.scalar_tensor,
        aten._efficientzerotensor,
    ),
    _fill,
)
source(
    overloads(
        aten.empty,
        aten.empty_like,
        aten.empty_permuted,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    ),
    _empty,
)


@rule([*overloads(aten.arange, aten.eye, aten.linspace, aten.logspace)])
def sequence(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    # Whole: the factors of the result are in no operand, so nothing is ever proposed for them.
    (shape,) = result_shapes(node, metas)
    ends = len(operand_metas(node, metas))  # the ends of the range, when they are tensors: 0-d
    sizes = {f"r{dim}": size for dim, size in enumerate(shape)}
    return Pattern(((),) * ends, (tuple((name,) for name in sizes),), sizes)
