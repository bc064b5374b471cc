"""What must not happen: another trace, another collective, a copy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.parallelize import Parallelized


class Count(Counter[tuple[str, str]]):
    """How many collectives a program has of each kind and axis: `count["all_reduce", "tp"]`."""

    def __str__(self) -> str:
        return (
            ", ".join(f"{count} {kind} over {axis}" for (kind, axis), count in sorted(self.items())) or "none"
        )


def count_collectives(step: Any, *args: Any, **kwargs: Any) -> Count:
    """The collectives of the program for these arguments, by kind and axis; nothing is run.

    `step` is what `vs.parallelize` returns. Several axes are joined by `+`. What isn't there counts 0.

    >>> import torch, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"dp": 2}), inputs={"x": vs.P(dp=vs.Shard(0))})
    >>> found = vs.testing.count_collectives(vs.parallelize(lambda x: x.sum(), plan), torch.ones(4))
    >>> print(found)
    1 all_reduce over dp
    >>> found["all_gather", "dp"]
    0
    """
    return Count((one.kind, one.axis) for one in step.lower(*args, **kwargs).collectives())


def assert_max_traces(step: Parallelized, most: int) -> None:
    """That `step` has been traced at most `most` times so far; else what was new each time, by argument.

    >>> import torch, vescale as vs
    >>> double = vs.parallelize(lambda x: x * 2, vs.Plan(vs.make_mesh({"dp": 2})))
    >>> _ = double(torch.ones(2)), double(torch.zeros(2))
    >>> vs.testing.assert_max_traces(double, 1)
    """
    _check_traces(step, most, 0)


@contextmanager
def max_traces(step: Parallelized, most: int) -> Iterator[None]:
    """`assert_max_traces` of the calls inside: `with max_traces(step, 0): ...`."""
    before = _parallelized(step).cache_info().misses
    yield
    _check_traces(step, most, before)


def _check_traces(step: Parallelized, most: int, before: int) -> None:
    info = _parallelized(step).cache_info()
    made = info.misses - before
    if made <= most:
        return
    paths = step._cache.last().decision.paths

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"{paths[index]}:" if index < len(paths) else match[0]

    reasons = [re.sub(r"\bleaf (\d+):", named, reason) for reason in info.reasons[-made:]]
    name = getattr(step, "__qualname__", "the function")
    lines = [f"{name} was traced {made} times, at most {most} expected; what was new:"]
    raise AssertionError("\n".join([*lines, *(f"    {reason}" for reason in reasons)]))


def _parallelized(step: Any) -> Parallelized:
    if not isinstance(step, Parallelized):
        raise ArgumentError(
            explain(
                repr(step),
                where="traces",
                rule="what vs.parallelize(function, plan) returns has traces to count",
                remedy="pass it itself, not a function that calls it",
            )
        )
    return step


def assert_no_copy(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """That each tensor of `fn(*args)` is in memory of an argument's tensor, on every rank here; returns the
    result.

    Tensors and DTensors count, whatever their trees. A donated argument counts by the memory that it had.

    >>> import torch, vescale as vs
    >>> _ = vs.testing.assert_no_copy(lambda x: x.view(2, 2).t(), torch.ones(4))
    >>> vs.testing.assert_no_copy(lambda x: (x, x * 2), torch.ones(4))
    Traceback (most recent call last):
    AssertionError: 1 of 2 results of <lambda> have memory of their own: 1 (16 bytes)
    """
    given = {key for leaf in _tree.leaves((args, kwargs)) for key in _storages(leaf)}
    result = fn(*args, **kwargs)
    paths, leaves, _ = _tree.flatten_with_path(result)
    tensors = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
    copies = [
        f"{path or 'result'} ({sum(piece.nbytes for piece in _pieces(leaf))} bytes)"
        for path, leaf in tensors
        if not _storages(leaf) <= given
    ]
    if copies:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        what = f"{len(copies)} of {len(tensors)} results of {name} have memory of their own"
        raise AssertionError(f"{what}: {', '.join(copies)}")
    return result


def _pieces(leaf: Any) -> list[Tensor]:
    if isinstance(leaf, DTensor):
        return list(leaf.locals)
    return [leaf] if isinstance(leaf, Tensor) else []


def _storages(leaf: Any) -> set[int]:
    """Where the memory of a tensor begins, of each rank here; empty tensors have none."""
    return {piece.untyped_storage().data_ptr() for piece in _pieces(leaf) if piece.untyped_storage().nbytes()}
