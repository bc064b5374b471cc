"""Batch norms as values: in training they write their running statistics, which most schemas don't say.

Each form of the op becomes one that returns the new statistics, and the backward of cudnn's form the
backward of the others: its reserve is of another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..._compat import OpOverload
from .ir import Node

aten = torch.ops.aten

_FORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten.cudnn_batch_norm.default,
)


def is_batch_norm(node: Node) -> bool:
    """Whether the node is a form of the op that may write, or belongs to one."""
    return node.op in _FORMS or node.op is aten.cudnn_batch_norm_backward.default


def updates_statistics(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the call writes its arguments 3 and 4, the running mean and variance."""
    return op in _FORMS and bool(args[5]) and args[3] is not None


def writes_statistics(node: Node) -> bool:
    """`updates_statistics` of a node."""
    return updates_statistics(node.op, node.args)


def without_writes(node: Node) -> Node:
    """A node of the same first three results; with the new statistics after them if there are any."""
    if node.op is aten.cudnn_batch_norm_backward.default:
        x, gradient, *rest, eps, _ = node.args
        args = (gradient, x, *rest, True, eps, (True, True, True))
        return replace(node, op=aten.native_batch_norm_backward.default, args=args)
    op = aten.native_batch_norm.default
    if writes_statistics(node):
        op = aten._native_batch_norm_legit_functional.default
    return replace(node, op=op, outs=node.outs[:3])
