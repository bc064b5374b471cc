"""Matrices: how a tensor is read as a batch of matrices, written like einops with sizes.

    "r c -> r c"                            one matrix, of any sizes
    "e r c -> e r c"                        a batch of matrices
    "(h d=128) k -> h d k"                  the heads of a fused projection, each a matrix of 128 rows
    "r (h d=128) -> h r d"                  the same for its columns
    "o i y x -> o (i y x)"                  a kernel of a convolution, as the matrix that it multiplies by

To the left a name for each factor of the dims, outermost first, with its size where that doesn't follow
from the dim. To the right the batch, then rows and columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from .._errors import ArgumentError, explain

Names = tuple[str, ...]

_RULE = "dims -> batch rows columns, such as 'r c -> r c' or '(h d=128) k -> h d k'"


@dataclass(frozen=True)
class Matrices:
    """A parsed text: factors of each dim, outermost first, with the sizes that it gives; and the result."""

    text: str
    dims: tuple[Names, ...]
    given: tuple[tuple[str, int], ...]
    batch: Names
    rows: Names
    columns: Names

    @classmethod
    def of(cls, text: str, where: str = "") -> Matrices:
        """The arrangement that `text` says; raises ArgumentError when it says none.

        >>> Matrices.of("(h d=2) k -> h d k").batch
        ('h',)
        """
        return _parse(text, where)

    @classmethod
    def default(cls, ndim: int) -> Matrices | None:
        """Two dims are a matrix, three a batch of matrices; None for others."""
        return {2: _parse("r c -> r c", ""), 3: _parse("b r c -> b r c", "")}.get(ndim)

    @property
    def follow(self) -> bool:
        """Whether matrices follow one another in memory, each row by row."""
        return tuple(name for dim in self.dims for name in dim) == (*self.batch, *self.rows, *self.columns)

    def sizes(self, shape: Sequence[int], where: str = "") -> dict[str, int]:
        """The size of each factor of a tensor of `shape`; raises ArgumentError when it doesn't fit.

        >>> Matrices.of("(h d=2) k -> h d k").sizes((6, 5))
        {'h': 3, 'd': 2, 'k': 5}
        """
        return dict(_sizes(self, tuple(shape), where))

    def grid(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(matrices, rows, columns) in a tensor of `shape`."""
        sizes = self.sizes(shape)
        return tuple(math.prod(sizes[n] for n in names) for names in (self.batch, self.rows, self.columns))  # pyright: ignore[reportReturnType]

    def split(self, x: Tensor) -> Tensor:
        """T[*shape] -> T[matrices, rows, columns]: a view where that is possible."""
        sizes = self.sizes(x.shape)
        order = (*self.batch, *self.rows, *self.columns)
        factors = [name for dim in self.dims for name in dim]
        apart = x.reshape([sizes[name] for name in factors])
        return apart.permute([factors.index(name) for name in order]).reshape(self.grid(x.shape))

    def join(self, matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """T[matrices, rows, columns] -> T[*shape]: `split` backwards."""
        sizes = self.sizes(shape)
        order = (*self.batch, *self.rows, *self.columns)
        factors = [name for dim in self.dims for name in dim]
        apart = matrices.reshape([sizes[name] for name in order])
        return apart.permute([order.index(name) for name in factors]).reshape(tuple(shape))

    def merged(self, shape: Sequence[int], dims: int) -> str:
        """The text for a part of a tensor of `shape` whose matrices follow one another.

        The part has any number of them along each dim, and its `dims` leading dims (1 or more) flattened to
        one.

        >>> Matrices.of("b r c -> b r c").merged((4, 2, 3), 2)
        '(b r=2) c=3 -> b r c'
        """
        sizes, batch = self.sizes(shape), list[str]()
        left: list[str] = []
        for names in (tuple(name for dim in self.dims[:dims] for name in dim), *self.dims[dims:]):
            free = [name for name in names if name in self.batch][:1]  # all of them together
            batch += free
            left.append(_group(free + [f"{name}={sizes[name]}" for name in names if name not in self.batch]))
        right = [*batch, _group(self.rows), _group(self.columns)]
        return f"{' '.join(left)} -> {' '.join(right)}"


def _group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


_TOKEN = re.compile(r"\(|\)|[A-Za-z_]\w*(?:=\d+)?|\S")


@lru_cache(maxsize=4096)
def _parse(text: str, where: str) -> Matrices:
    sides = text.split("->")
    if len(sides) != 2:
        raise ArgumentError(explain(repr(text), where=where or None, rule=_RULE))
    given: dict[str, int] = {}
    left, right = (_dims(side, given, text, where) for side in sides)
    names, made = ([name for dim in side for name in dim] for side in (left, right))
    if len(right) < 2 or sorted(names) != sorted(made) or len(set(names)) != len(names):
        rule = f"{_RULE}; each factor once on each side"
        raise ArgumentError(explain(repr(text), where=where or None, rule=rule))
    batch = tuple(name for dim in right[:-2] for name in dim)
    return Matrices(text, tuple(left), tuple(given.items()), batch, right[-2], right[-1])


def _dims(side: str, given: dict[str, int], text: str, where: str) -> list[Names]:
    dims: list[Names] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(side):
        name, _, size = token.partition("=")
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif name.isidentifier():
            given.update({name: int(size)} if size else {})
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
        else:
            raise ArgumentError(explain(f"{token!r} in {text!r}", where=where or None, rule=_RULE))
    if group is not None:
        raise ArgumentError(explain(f"an open bracket in {text!r}", where=where or None, rule=_RULE))
    return dims


@lru_cache(maxsize=65536)
def _sizes(matrices: Matrices, shape: tuple[int, ...], where: str) -> tuple[tuple[str, int], ...]:
    given, sizes = dict(matrices.given), {}
    if len(shape) != len(matrices.dims):
        found = f"{matrices.text!r} for a tensor of shape {shape}"
        raise ArgumentError(explain(found, where=where or None, rule="a group of names for each dim"))
    for dim, size in zip(matrices.dims, shape, strict=True):
        known = math.prod(given.get(name, 1) for name in dim)
        open_ = [name for name in dim if name not in given]
        fits = (size % known == 0) if open_ else size == known
        if len(open_) > 1 or not known or not fits:
            raise ArgumentError(
                explain(
                    f"{_group(dim) if dim else '()'} for a dim of {size} elements, in {matrices.text!r}",
                    where=where or None,
                    rule="the sizes of a dim's factors multiply to it, and one at most is not given",
                    remedy="give sizes as in (h d=128)",
                )
            )
        sizes |= {name: given.get(name, size // known) for name in dim}
    return tuple(sizes.items())
