"""Collectives, called by axis name inside a mapped function (see `shard_map`).

In the signatures V stands for a value that varies over the axis, I for an invariant one, equal on all of
its ranks. A value that is less varying than a signature asks for is first made varying (`pvary`). `axis`
is a name or a tuple of names: the axes flattened, the first outermost. Pictures show an axis of 3 ranks.
`=` says what one device would do with `parts`, the list of the n members' values, to get their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from . import collective_ops
from .redistribute_plan import chunk
from .varying import Mapped, current_map

Axis = str | Sequence[str]


def psum(x: Any, axis: Axis) -> Any:
    """psum: V -> I. The sum over the axis, on every rank. Trees are summed leaf by leaf.

        a | b | c   ->   a+b+c | a+b+c | a+b+c
        = [sum(parts)] * n

    Of an invariant value it is the value times the size of the axis. Gradient: pvary.
    """
    return _each(x, axis, "psum", collective_ops.psum)


def pmean(x: Any, axis: Axis) -> Any:
    """pmean: V -> I. The mean over the axis: psum divided by the size of the axis.

        a | b | c   ->   m | m | m      with m = (a+b+c) / 3
        = [sum(parts) / n] * n

    Gradient: pvary of the gradient divided by the size.
    """
    mapped = current_map("pmean")
    size = mapped.size(mapped.check_axes(axis, "pmean"))
    return _tree.tree_map(lambda leaf: leaf / size, psum(x, axis))


def pmax(x: Any, axis: Axis) -> Any:
    """pmax: V -> I. The elementwise maximum over the axis. It has no gradient: detach its operand.

    a | b | c   ->   max | max | max
    = [stack(parts).amax(0)] * n
    """
    return _each(x, axis, "pmax", collective_ops.pmax)


def pmin(x: Any, axis: Axis) -> Any:
    """pmin: V -> I. The elementwise minimum over the axis. It has no gradient: detach its operand.

    a | b | c   ->   min | min | min
    = [stack(parts).amin(0)] * n
    """
    return _each(x, axis, "pmin", collective_ops.pmin)


def pvary(x: Any, axis: Axis) -> Any:
    """pvary: I -> V. The same value, from now on typed as varying over the axis. Gradient: psum.

        a | a | a   ->   a | a | a
        = parts

    Put in by itself where values mix; say it for the start of a loop carry that becomes varying.
    """
    mapped = current_map("pvary")
    axes = mapped.check_axes(axis, "pvary")

    def leaf(value: Tensor) -> Tensor:
        return _vary(mapped, value, axes)

    return _tree.tree_map(leaf, x)


def all_gather(x: Any, axis: Axis, *, dim: int = 0, tiled: bool = True, to: str = "varying") -> Any:
    """all_gather: V -> V, or V -> I with to="invariant". The members' values side by side along `dim`.

        a | b | c   ->   abc | abc | abc
        = [cat(parts, dim)] * n

    Members may have different sizes along `dim` (ragged and uneven specs). With tiled=False they are
    stacked along a new dim. Gradient: psum_scatter; of to="invariant" the own slice of the gradient.
    """
    if to not in ("varying", "invariant"):
        raise ArgumentError(
            explain(
                f"all_gather(to={to!r})",
                rule='to is "varying" or "invariant"',
                remedy='use to="invariant" when the result is used alike on all ranks',
            )
        )
    gather = collective_ops.all_gather if to == "varying" else collective_ops.all_gather_invariant

    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        value = value if tiled else value.unsqueeze(dim)
        at = _dim(value, dim, "all_gather", mapped)
        return along(mapped, value, axes, at)

    def along(mapped: Mapped, value: Tensor, axes: tuple[str, ...], at: int) -> Tensor:
        sizes = _sizes(mapped, value, axes, at, "all_gather")
        if _one_by_one(mapped, axes, sizes, "all_gather"):  # innermost first
            return along(mapped, along(mapped, value, axes[1:], at), axes[:1], at)
        return gather(value, axes, at, sizes)

    return _each_varying(x, axis, "all_gather", leaf)


def psum_scatter(
    x: Any, axis: Axis, *, dim: int = 0, tiled: bool = True, sizes: Sequence[int] | None = None
) -> Any:
    """psum_scatter: V -> V. The sum over the axis, of which each member keeps its part along `dim`.

        abc | def | ghi   ->   a+d+g | b+e+h | c+f+i
        = sum(parts).split(sizes, dim)

    Parts are those of `Shard(dim)`, or of the given `sizes`, one a member. With tiled=False the dim has
    the size of the axis and is dropped. Gradient: all_gather.
    """

    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        at = _dim(value, dim, "psum_scatter", mapped)
        count = mapped.size(axes)
        parts = list(sizes) if sizes is not None else _parts(value.shape[at], count)
        if sum(parts) != value.shape[at] or len(parts) != count or (not tiled and set(parts) != {1}):
            raise ArgumentError(
                explain(
                    f"psum_scatter of dim {at} of {tuple(value.shape)} into {parts}",
                    where=mapped.line(),
                    rule=f"{count} sizes, one a member, that add up to the dim; with tiled=False each is 1",
                    remedy="give the members' sizes, or pad the dim",
                )
            )
        _alike(mapped, value, axes, "psum_scatter", f" along dim {at}")
        if any(other != parts for other in mapped.meet(axes, f"psum_scatter along dim {at}", parts)):
            raise ArgumentError(
                explain(
                    f"psum_scatter into {parts} here and other sizes on another member",
                    where=mapped.line(),
                    rule="all members cut the sum alike",
                    remedy="give all ranks the same sizes",
                )
            )
        result = along(mapped, value, axes, at, parts)
        return result if tiled else result.squeeze(at)

    def along(mapped: Mapped, value: Tensor, axes: tuple[str, ...], at: int, parts: list[int]) -> Tensor:
        if _one_by_one(mapped, axes, parts, "psum_scatter"):  # outermost first
            inner = len(parts) // mapped.size(axes[:1])
            runs = [parts[start : start + inner] for start in range(0, len(parts), inner)]
            mine = mapped.own(axes[:1], runs)
            return along(mapped, along(mapped, value, axes[:1], at, list(map(sum, runs))), axes[1:], at, mine)
        own = mapped.own(axes, parts)
        return collective_ops.psum_scatter(value, axes, at, parts, own)

    return _each_varying(x, axis, "psum_scatter", leaf)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int) -> Any:
    """all_to_all: V -> V. Cut along `split_dim`, part i to member i; what arrives joins along `concat_dim`.

        abc | def | ghi   ->   adg | beh | cfi
        = [cat([part.chunk(n, split_dim)[i] for part in parts], concat_dim) for i in range(n)]

    Parts are those of `Shard(split_dim)`. Gradient: all_to_all with the dims exchanged.
    """

    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        split, concat = (_dim(value, dim, "all_to_all", mapped) for dim in (split_dim, concat_dim))
        parts = _parts(value.shape[split], mapped.size(axes))
        if split == concat:
            if len(set(parts)) > 1:
                raise ArgumentError(
                    explain(
                        f"all_to_all along dim {split} of {tuple(value.shape)}",
                        where=mapped.line(),
                        rule="with one dim for both, the members divide it",
                        remedy="pad the dim, or concatenate along another",
                    )
                )
            gathered = parts
        else:
            gathered = _sizes(mapped, value, axes, concat, "all_to_all")
        own = mapped.own(axes, parts)
        return collective_ops.all_to_all(value, axes, split, concat, parts, gathered, own)

    return _each_varying(x, axis, "all_to_all", leaf)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """ppermute: V -> V. Member `source` sends its value to member `target`, for each pair; others get zeros.

        a | b | c   ->   0 | a | b      with perm = [(0, 1), (1, 2)]
        = results of zeros, then results[target] = parts[source] for each pair

    Gradient: ppermute with the pairs reversed.
    """

    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        count = mapped.size(axes)
        pairs = [(int(source), int(target)) for source, target in perm]
        once = all(len({pair[side] for pair in pairs}) == len(pairs) for side in (0, 1))
        if not once or any(not 0 <= member < count for pair in pairs for member in pair):
            raise ArgumentError(
                explain(
                    f"perm={pairs}",
                    where=mapped.line(),
                    rule=f"pairs (source, target) in 0..{count - 1}, each a source and a target once at most",
                    remedy="write one pair a message",
                )
            )
        sources = [-1] * count
        for source, target in pairs:
            sources[target] = source
        shapes = mapped.meet(axes, f"ppermute of {value.dtype} by {pairs}", tuple(value.shape))
        shape = mapped.own(
            axes, [shapes[source] if source >= 0 else tuple(value.shape) for source in sources]
        )
        return collective_ops.ppermute(value, axes, sources, list(shape))

    return _each_varying(x, axis, "ppermute", leaf)


def pshuffle(x: Any, axis: Axis, perm: Sequence[int]) -> Any:
    """pshuffle: V -> V. Member i gets the value of member perm[i].

        a | b | c   ->   c | a | b      with perm = [2, 0, 1]
        = [parts[perm[i]] for i in range(n)]

    Gradient: pshuffle with the inverse permutation.
    """
    mapped = current_map("pshuffle")
    count = mapped.size(mapped.check_axes(axis, "pshuffle"))
    if sorted(perm) != list(range(count)):
        raise ArgumentError(
            explain(
                f"perm={list(perm)}",
                where=mapped.line(),
                rule=f"a permutation of the members 0..{count - 1}",
                remedy="name each member once, or use ppermute for a partial exchange",
            )
        )
    return ppermute(x, axis, [(source, target) for target, source in enumerate(perm)])


def broadcast(x: Any, axis: Axis, *, root: int = 0) -> Any:
    """broadcast: V -> I. The value of member `root`, on every rank.

        a | b | c   ->   a | a | a      with root = 0
        = [parts[root]] * n

    Gradient: the gradient on the root, zeros elsewhere.
    """

    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        if not 0 <= root < mapped.size(axes):
            raise ArgumentError(
                explain(
                    f"broadcast from root={root}",
                    where=mapped.line(),
                    rule=f"the axis has members 0..{mapped.size(axes) - 1}",
                    remedy="use one of these",
                )
            )
        _alike(mapped, value, axes, "broadcast", f" from {root}")
        return collective_ops.broadcast(value, axes, root)

    return _each_varying(x, axis, "broadcast", leaf)


def axis_index(axis: Axis) -> Tensor:
    """axis_index: -> V. This rank's place on the axis, a 0-d int64 tensor: 0 | 1 | 2.

    It has no value while tracing: Python's `if` can't see it, torch.where can.
    """
    mapped = current_map("axis_index")
    axes = mapped.check_axes(axis, "axis_index")
    return collective_ops.ops.axis_index(torch.zeros((), dtype=torch.int64), list(axes))


def axis_size(axis: Axis) -> int:
    """How many ranks the axis has (the product, for several): a Python int."""
    mapped = current_map("axis_size")
    return mapped.size(mapped.check_axes(axis, "axis_size"))


# Shared by the above.


def _each(x: Any, axis: Axis, name: str, collective: Any) -> Any:
    def leaf(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        _alike(mapped, value, axes, name)
        return collective(value, axes)

    return _each_varying(x, axis, name, leaf)


def _each_varying(x: Any, axis: Axis, name: str, leaf: Any) -> Any:
    mapped = current_map(name)
    axes = mapped.check_axes(axis, name)

    def call(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value)
        return leaf(mapped, _vary(mapped, value, axes), axes)

    return _tree.tree_map(call, x)


def _vary(mapped: Mapped, value: Tensor, axes: tuple[str, ...]) -> Tensor:
    missing = [axis for axis in axes if axis not in mapped.over(value)]
    return collective_ops.pvary(value, missing)


def _alike(mapped: Mapped, value: Tensor, axes: tuple[str, ...], name: str, how: str = "") -> None:
    shapes = mapped.meet(axes, f"{name} of {value.dtype}{how}", tuple(value.shape))
    if len(set(shapes)) > 1:
        raise ArgumentError(
            explain(
                f"{name} of shapes {', '.join(map(str, dict.fromkeys(shapes)))}",
                where=mapped.line(),
                rule=f"the members of a {name} have one shape",
                remedy="gather first, or reduce the uneven dim",
            )
        )


def _sizes(mapped: Mapped, value: Tensor, axes: tuple[str, ...], dim: int, name: str) -> list[int]:
    """The members' sizes along `dim`; their other sizes must agree."""
    shapes = mapped.meet(axes, f"{name} of {value.dtype} along dim {dim}", tuple(value.shape))
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ArgumentError(
            explain(
                f"{name} along dim {dim} of shapes {', '.join(map(str, dict.fromkeys(shapes)))}",
                where=mapped.line(),
                rule="members differ in that dim only",
                remedy="choose the dim in which they differ",
            )
        )
    return [shape[dim] for shape in shapes]


def _one_by_one(mapped: Mapped, axes: tuple[str, ...], sizes: Sequence[int], name: str) -> bool:
    """Whether to take several axes one after the other: parts are uneven in some group, here or elsewhere."""
    return len(axes) > 1 and any(mapped.meet(mapped.mesh.axis_names, name, len(set(sizes)) > 1))


def _parts(size: int, count: int) -> list[int]:
    return [stop - start for start, stop in (chunk(size, count, index) for index in range(count))]


def _dim(value: Tensor, dim: int, name: str, mapped: Mapped) -> int:
    if not -value.dim() <= dim < value.dim():
        raise ArgumentError(
            explain(
                f"{name} along dim {dim} of {tuple(value.shape)}",
                where=mapped.line(),
                rule=f"the dim is one of the tensor's {value.dim()}",
                remedy="use a dim that the local tensor has",
            )
        )
    return dim % value.dim()
