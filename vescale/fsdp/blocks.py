"""Blocks: the runs of elements of a parameter that must stay on one rank.

A block says two things of a parameter: where it may be cut (`cuts`, what the planner needs) and the dims
that its RaggedShard has at rest (`dims`). Both follow from the block and the shape alone, so a parameter's
local rank is the same on every mesh, wherever the cuts happen to fall.

    block          may be cut                                       dims at rest
    Rows(n)        after every n rows                               all but the last
    Tile(r, c)     between bands of r rows                          all but the last
    Elements(n)    after every n elements                           all
    Whole()        never                                            ()

A row is a run of the last dim. Blocks count from the tensor's start; rows count anew at each leading index,
so that a block never spans two matrices of a stack. The last block may be short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

from .._errors import LayoutError, explain


class Cuts(NamedTuple):
    """Where a tensor may be cut: after each `a * period + b * block` elements, b * block < period.

    `period` is 0 where blocks count from the tensor's start alone: after each multiple of `block`.
    """

    block: int
    period: int = 0


class Block:
    """Base of all blocks: frozen, hashable, comparable by value."""

    __slots__ = ()

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """Where a tensor of this shape may be cut, in elements."""
        raise NotImplementedError

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The dims of the RaggedShard that a parameter of this shape has at rest."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Rows(Block):
    """Blocks of `n` rows. A 1-d tensor is one row.

    Of a (3, 5, 4) tensor `Rows(2)` cuts each (5, 4) matrix after 2 and 4 rows, and between matrices:

    >>> Rows(2).cuts((3, 5, 4)), Rows(2).dims((3, 5, 4))
    (Cuts(block=8, period=20), (0, 1))
    >>> Rows(2).cuts((7, 4))
    Cuts(block=8, period=0)
    """

    n: int

    def __post_init__(self) -> None:
        _check(self, self.n)

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """Every n rows, from the start of each matrix."""
        return _bands(self.n, shape)

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """All dims but the last."""
        return tuple(range(len(shape) - 1))


@dataclass(frozen=True, slots=True)
class Tile(Block):
    """Blocks of `r` rows by `c` columns, all tiles of a band of r rows on one rank.

    >>> Tile(128, 128).cuts((256, 512))
    Cuts(block=65536, period=0)
    """

    r: int
    c: int

    def __post_init__(self) -> None:
        _check(self, self.r, self.c)

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """Every r rows, from the start of each matrix."""
        return _bands(self.r, shape)

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """All dims but the last."""
        return tuple(range(len(shape) - 1))


@dataclass(frozen=True, slots=True)
class Elements(Block):
    """Blocks of `n` elements of the flattened tensor.

    >>> Elements(2048).cuts((7, 4096)), Elements(2048).dims((7, 4096))
    (Cuts(block=2048, period=0), (0, 1))
    """

    n: int

    def __post_init__(self) -> None:
        _check(self, self.n)

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """Every n elements."""
        return Cuts(min(self.n, max(1, math.prod(shape))))

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """All dims."""
        return tuple(range(len(shape)))


@dataclass(frozen=True, slots=True)
class Whole(Block):
    """The whole tensor on one rank, in its own shape.

    >>> Whole().cuts((7, 4)), Whole().dims((7, 4))
    (Cuts(block=28, period=0), ())
    """

    def cuts(self, shape: Sequence[int]) -> Cuts:
        """Nowhere."""
        return Cuts(max(1, math.prod(shape)))

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        """None."""
        return ()


def default_block(shape: Sequence[int]) -> Block:
    """The block of a parameter that none is declared for: a row, an element of a 1-d tensor.

    >>> default_block((4, 8)), default_block((8,))
    (Rows(n=1), Elements(n=1))
    """
    return Rows(1) if len(shape) > 1 else Elements(1)


def _bands(rows: int, shape: Sequence[int]) -> Cuts:
    """Cuts after every `rows` rows of each matrix; blocks of elements, at least one."""
    columns = shape[-1] if shape else 1
    height = shape[-2] if len(shape) > 1 else 1
    block, matrix = min(rows, height) * columns, height * columns
    if not block:
        return Cuts(1)
    return Cuts(block, matrix if matrix % block and len(shape) > 2 else 0)


def _check(block: Block, *counts: int) -> None:
    for count in counts:
        try:
            good = index(count) > 0 and not isinstance(count, bool)
        except TypeError:
            good = False
        if not good:
            raise LayoutError(
                explain(
                    found=f"{block!r}",
                    rule="a block holds a whole number of rows, columns or elements, 1 or more",
                    remedy="use vs.Whole() for a tensor that must not be cut",
                )
            )
