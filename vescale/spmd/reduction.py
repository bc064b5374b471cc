"""Reductions in one fixed order: a binary tree over the ranks of a group.

    rank     0   1   2   3   4
              \\ /     \\ /    |
              0+1     2+3    4
                \\     /      |
                 0..3       4
                     \\     /
                      0..4

Which ranks are added first depends on their places in the group only, so simulated ranks and real
processes give the same bits, and so does any way of cutting the tensor: each element has its own tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import ArgumentError, explain
from .layout import AbstractMesh

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_NATIVE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Reduction:
    """How contributions over some axes become one value: combine in the tree, then divide (avg)."""

    def __init__(self, mesh: AbstractMesh, ops: dict[str, str]) -> None:
        kinds = {"sum" if op == "avg" else op for op in ops.values()}
        assert len(kinds) == 1, ops  # a Layout has no mixture whose order would matter
        (kind,) = kinds
        self.combine = _COMBINE[kind]
        self.native = _NATIVE[kind]
        self.divisor = math.prod(mesh.axis_size(axis) for axis, op in ops.items() if op == "avg")

    def tree(self, contributions: Sequence[Tensor]) -> Tensor:
        """The reduced value, in memory of its own; two contributions or more."""
        return self.finish(self.partial(contributions))

    def partial(self, contributions: Sequence[Tensor]) -> Tensor:
        """The value of one node of the tree, from all that is below it; not divided yet."""
        level = self._level(contributions)
        while len(level) > 1:
            # Left operands are results of the level before, never a contribution: an odd one
            # that is carried up stays last, and so on the right.
            level = self._level(level, in_place=True)
        return level[0]

    def finish(self, total: Tensor) -> Tensor:
        """The average from a sum that is ours to overwrite; other reductions are done already."""
        if self.divisor == 1:
            return total
        check_dtype(("avg",), total.dtype)
        return total.div_(self.divisor)

    def _level(self, values: Sequence[Tensor], in_place: bool = False) -> list[Tensor]:
        pairs = zip(values[::2], values[1::2])  # an odd last one is left over
        level = [self.combine(a, b, out=a) if in_place else self.combine(a, b) for a, b in pairs]
        return level + list(values[len(level) * 2 :])


def check_dtype(ops: Iterable[str], dtype: torch.dtype) -> None:
    """Raise ArgumentError where contributions of `dtype` can't be reduced so."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    for op in ops:
        if op == "avg" and exact:
            found, rule = (
                f"the average of {dtype} contributions",
                "an average of whole numbers need not be one",
            )
            remedy = 'use Partial("sum"), or a floating dtype'
        elif op in ("max", "min") and dtype.is_complex:
            found, rule = f"the {op} of {dtype} contributions", "complex numbers have no order"
            remedy = 'use Partial("sum")'
        elif dtype.is_floating_point and dtype.itemsize == 1:
            found, rule = f"the {op} of {dtype} contributions", "torch does no arithmetic on 8-bit floats"
            remedy = "cast to a wider dtype first"
        else:
            continue
        raise ArgumentError(explain(found, where="redistribute", rule=rule, remedy=remedy))


def neutral(dtype: torch.dtype) -> complex:
    """What added to any number gives that number: minus zero, for floats, because 0.0 + -0.0 is 0.0."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0
