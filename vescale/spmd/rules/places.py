"""A rank's own places of an indexed dim: calls on local pieces, whose indices are still global ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .batched import counts_once, own_range, unless_empty
from .embedding import check_range
from .notation import LocalCall, Localise

Ranges = Mapping[int, tuple[int, int, int]]  # indexed dim -> first, number of a rank's own, number of all


@dataclass(frozen=True)
class Places:
    """Where an op has its indices: `changed(args, own)` are its arguments with own(index, dim) for each.

    `from_end`: whether an index below zero counts from the end.
    """

    changed: Callable[[Sequence[Any], Callable[[Any, int], Any]], list[Any]]
    from_end: bool


def _own_ranges(call: LocalCall, dims: Sequence[int]) -> Ranges:
    layout = call.operands[0]
    found = {dim: own_range(layout, dim, call.rank) for dim in dims}
    return {dim: (*own, layout.shape[dim]) for dim, own in found.items() if own is not None}


def _from_start(index: Any, length: int, from_end: bool) -> Any:
    """Indices counted from the start; those below zero count `from_end`, or are an error."""
    if from_end:
        index = torch.where(index < 0, index + length, index)
    check_range(index, length, "an index")
    return index


def _read_own(op: Any, args: Sequence[Any], ranges: Ranges, places: Places, masks: Any) -> Any:
    """What is found at the rank's own places, and zeros for the others: a contribution to a sum."""
    inside: dict[int, Any] = {}

    def own(index: Any, dim: int) -> Any:
        if dim not in ranges:
            return index
        first, count, length = ranges[dim]
        index = _from_start(index, length, places.from_end) - first
        inside[dim] = (index >= 0) & (index < count)
        return torch.where(inside[dim], index, 0)

    found = op(*places.changed(args, own))
    for mine in inside.values():
        found = found.masked_fill(~masks(mine, found.dim()), 0)
    return found


def _write_own(op: Any, args: Sequence[Any], kwargs: Any, ranges: Ranges, places: Places) -> Any:
    """Written at the rank's own places; what is for the others goes to one more, which is cut off."""

    def own(index: Any, dim: int) -> Any:
        if dim not in ranges:
            return index
        first, count, length = ranges[dim]
        index = _from_start(index, length, places.from_end) - first
        return torch.where((index >= 0) & (index < count), index, count)

    x, *rest = args
    room = [0] * (2 * x.dim())
    for dim in ranges:
        room[2 * (x.dim() - 1 - dim) + 1] = 1
    result = op(*places.changed([torch.constant_pad_nd(x, room), *rest], own), **kwargs)
    for dim, (_, count, _) in ranges.items():
        result = result.narrow(dim, 0, count)
    return result


def _from_nothing(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return op(torch.zeros_like(x), *args, **kwargs)


def reading(
    node: Node, metas: Sequence[TensorMeta], dims: Sequence[int], places: Places, masks: Any
) -> Localise:
    def localise(call: LocalCall) -> LocalCall:
        ranges = _own_ranges(call, dims)
        if not ranges:
            return call
        return replace(call, fn=_read_own, args=(call.fn, call.args, ranges, places, masks), kwargs={})

    return unless_empty(node, metas, localise)


def writing(
    node: Node, metas: Sequence[TensorMeta], dims: Sequence[int], places: Places, adds: bool
) -> Localise:
    def localise(call: LocalCall) -> LocalCall:
        if adds and not counts_once(call, 0):
            call = replace(call, fn=partial(_from_nothing, call.fn))
        ranges = _own_ranges(call, dims)
        if not ranges:
            return call
        return replace(call, fn=_write_own, args=(call.fn, call.args, call.kwargs, ranges, places), kwargs={})

    return lambda call: _no_places(call, unless_empty(node, metas, localise), adds)


def _no_places(call: LocalCall, localise: Localise, adds: bool) -> LocalCall:
    """A rank that has the tensor, but no index, has nothing to add to it."""
    x, *others = call.operands
    nothing = any(0 not in layout.shape and 0 in layout.local_shape(call.rank) for layout in others)
    if nothing and 0 not in x.local_shape(call.rank):
        fn = torch.zeros_like if adds and not counts_once(call, 0) else torch.clone
        return replace(call, fn=fn, args=call.args[:1], kwargs={})
    return localise(call)
