"""What the planner knows of a tensor, and the checks on what it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch

from .._errors import PlanError, explain
from .blocks import Block, Cuts


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be placed in a buffer: its name, shape, dtype, and blocks in elements.

    It may be cut after each multiple of `block` elements. With a `period` blocks count anew after each
    multiple of it: cuts are at `a * period + b * block`, which is what `vs.Rows` means for a stack of
    matrices whose height isn't a multiple of the rows. `TensorSpec.of` takes a block such as `vs.Rows(128)`
    instead.

    Raises PlanError for a 0-d tensor, and for a block or period that isn't a positive whole number.

    >>> from vescale.fsdp import Rows
    >>> TensorSpec.of("w", (256, 64), torch.bfloat16, Rows(128)).block
    8192
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    period: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape:
            _refuse(
                self.name,
                found="a 0-d tensor",
                rule="0-d tensors are never ragged",
                remedy="leave it replicated, outside the bucket, or make it (1,)",
            )
        try:
            good = index(self.block) > 0 and index(self.period) >= 0
        except TypeError:
            good = False
        if not good:
            _refuse(
                self.name,
                found=f"block {self.block!r}, period {self.period!r}",
                rule="the block is a positive whole number of elements, the period one or 0",
                remedy="use TensorSpec.of(name, shape, dtype, vs.Rows(1))",
            )
        if self.period and self.period < self.block:
            _refuse(
                self.name,
                found=f"block {self.block}, period {self.period}",
                rule="a period holds at least one block",
                remedy="make the block no larger than the period",
            )

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype, block: Block) -> TensorSpec:
        """From a declared block."""
        cuts = block.cuts(shape)
        return cls(name, tuple(shape), dtype, cuts.block, cuts.period)

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def cuts(self) -> Cuts:
        """Where it may be cut; a block larger than the tensor means nowhere."""
        block = min(self.block, self.elements) or 1
        return Cuts(block, self.period if block < self.elements and self.period % block else 0)


def grain_of(specs: Sequence[TensorSpec], num_shards: int, unit: int) -> int:
    """The collective unit in elements, after all checks of what a buffer is planned from."""
    if not isinstance(num_shards, int) or num_shards < 1:
        raise PlanError(
            explain(
                found=f"num_shards={num_shards!r}",
                rule="a buffer is cut into a whole number of shards, 1 or more",
                remedy="give the size of the mesh axis that shards the parameters",
            )
        )
    if not specs:
        raise PlanError(
            explain(
                found="no tensors",
                rule="a buffer holds at least one",
                remedy="leave the bucket out when it has no parameters",
            )
        )
    check_names(specs)
    first = specs[0]
    for spec in specs:
        if spec.dtype != first.dtype:
            _refuse(
                spec.name,
                found=f"{spec.dtype}, and {first.dtype} of {first.name}",
                rule="a buffer has one dtype",
                remedy="use plan_buckets, which makes a buffer for each dtype",
            )
    item = first.dtype.itemsize
    if not isinstance(unit, int) or unit < 1 or unit % item:
        raise PlanError(
            explain(
                found=f"unit={unit!r} bytes, items of {item} bytes ({first.dtype})",
                where=first.name,
                rule="the unit is a whole number of items",
                remedy=f"use a multiple of {item}",
            )
        )
    return unit // item


def check_names(specs: Sequence[TensorSpec]) -> None:
    """Refuse a name that is given twice."""
    names = set()
    for spec in specs:
        if spec.name in names:
            _refuse(
                spec.name,
                found="this name twice",
                rule="offsets are by name",
                remedy="use each parameter's full path; give a shared parameter once",
            )
        names.add(spec.name)


def _refuse(name: str, *, found: str, rule: str, remedy: str) -> None:
    raise PlanError(explain(found=found, where=name, rule=rule, remedy=remedy))
