"""Collectives of run-time sizes: counts are tensors, capacities are static.

A ragged value is a tensor of `capacity` rows of which the first `count` mean something. What lies beyond is
zero in results, and gets a zero gradient. Rows that would not fit are never dropped in silence: a result
that overflows its capacity is NaN throughout (whole-number results: their least value), and so
is every loss made of it. The default capacities can't overflow.

    counts 2, 1, 0 of capacity 2:   ab | c. | ..   -- all_gather_ragged -->   abc...  on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .collectives import Axis, all_gather, all_to_all, axis_index, psum_scatter
from .varying import current_map


def all_gather_ragged(
    x: Tensor, count: Tensor, axis: Axis, *, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """all_gather_ragged: V -> V. The first `count` rows of each member, one after the other.

        ab | c. | ..   ->   abc... | abc... | abc...      with counts 2, 1, 0
        = [cat([part[:count] for part, count in zip(parts, counts)])] * n, padded to `capacity`

    (x: T[rows, ...], count: 0-d int) -> (T[capacity, ...], counts: int64[members]). `capacity` is by
    default the sum of all members' rows. Gradient: psum_scatter_ragged, zero beyond `count`.
    """
    rows = _most_rows(x, axis, "all_gather_ragged")
    counts = all_gather(count.to(torch.int64).reshape(1), axis)
    blocks = all_gather(_poison(_pad(x, rows), _bad(count, x.shape[0])), axis)
    return _compact(blocks, counts, rows, capacity), counts


def all_to_all_ragged(
    x: Tensor,
    send_counts: Tensor,
    axis: Axis,
    *,
    capacity: int | None = None,
    pair_capacity: int | None = None,
) -> tuple[Tensor, Tensor]:
    """all_to_all_ragged: V -> V. Rows of x sorted by destination: the first send_counts[0] go to member 0.

        abc | de. | f..   ->   ad....... | be....... | cf.......
                               with send_counts (1, 1, 1) | (1, 1, 0) | (0, 0, 1)
        = [cat([part.split(counts)[i] for part, counts in zip(parts, send_counts)]) for i in range(n)], padded

    (x: T[rows, ...], send_counts: int[members]) -> (T[capacity, ...], received: int64[members]): what
    arrives, in the order of senders. At most `pair_capacity` rows go from one member to one other (by
    default all of its rows may), and at most `capacity` arrive at one (by default all may): bytes are
    those of `pair_capacity` rows for each pair. Gradient: the rows' gradients are sent back.
    """
    rows = _most_rows(x, axis, "all_to_all_ragged")
    pair = rows if pair_capacity is None else pair_capacity
    counts = send_counts.to(torch.int64)
    blocks = _poison(_spread(x, counts, pair), _bad(counts, x.shape[0]))
    received = all_to_all(counts, axis, 0, 0)
    arrived = all_to_all(blocks, axis, 0, 0)
    result = _compact(arrived, received.clamp(max=pair), pair, capacity)
    return _poison(result, (received > pair).any()), received


def psum_scatter_ragged(x: Tensor, counts: Tensor, axis: Axis, *, capacity: int | None = None) -> Tensor:
    """psum_scatter_ragged: V -> V. The sum over the axis, of which member i keeps counts[i] rows, in order.

        abc | def | ghi   ->   a+d+g, b+e+h, . | . . . | c+f+i, . .      with counts (2, 0, 1)
        = sum(parts).split(counts), each padded to `capacity`

    (x: T[rows, ...], counts: int[members], the same on all members) -> T[capacity, ...]. `capacity` is by
    default the number of rows. Gradient: all_gather_ragged.
    """
    rows = _most_rows(x, axis, "psum_scatter_ragged") if capacity is None else capacity
    counts = counts.to(torch.int64)
    result = psum_scatter(_poison(_spread(x, counts, rows), _bad(counts, x.shape[0])), axis)
    mine = counts.gather(0, axis_index(axis).reshape(1)).reshape(())  # indexing would ask for the value
    return _poison(result, mine > rows)


def _most_rows(x: Tensor, axis: Axis, name: str) -> int:
    mapped = current_map(name)
    if x.dim() == 0:
        raise ArgumentError(
            explain(
                f"{name} of a 0-d tensor",
                where=mapped.line(),
                rule="rows are counted along dim 0",
                remedy="give it a dim: x.reshape(1)",
            )
        )
    return max(shape[0] for shape in mapped.meet(mapped.check_axes(axis, name), name, tuple(x.shape)))


def _bad(counts: Tensor, rows: int) -> Tensor:
    """Whether counts speak of rows that are not there: the others then get NaN, and not other rows."""
    return (counts.sum() > rows) | (counts < 0).any()


def _pad(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over rows, with as many dims as `like`."""
    return mask.reshape(-1, *(1,) * (like.dim() - 1))


def _pick(x: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    """Row source[j] of x where valid[j], zeros elsewhere."""
    if x.shape[0] == 0:
        return x.new_zeros((source.shape[0], *x.shape[1:]))
    picked = x[torch.where(valid, source, 0).clamp(0, x.shape[0] - 1)]
    return torch.where(_rows(valid, picked), picked, torch.zeros((), dtype=x.dtype, device=x.device))


def _spread(x: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """Rows sorted by destination to one block of `capacity` rows each, one after the other."""
    members = counts.shape[0]
    place = torch.arange(members * capacity, device=x.device)
    member, row = place // capacity if capacity else place, place % capacity if capacity else place
    starts = torch.cumsum(counts, 0) - counts
    return _pick(x, starts[member] + row, row < counts[member])


def _compact(blocks: Tensor, counts: Tensor, rows: int, capacity: int | None) -> Tensor:
    """Blocks of `rows` rows, of which the first counts[i] are valid, to those one after the other."""
    members = counts.shape[0]
    size = members * rows if capacity is None else capacity
    ends = torch.cumsum(counts, 0)
    place = torch.arange(size, device=blocks.device)
    member = torch.searchsorted(ends, place, right=True).clamp(max=members - 1)
    source = member * rows + place - (ends - counts)[member]
    result = _pick(blocks, source, place < ends[-1])
    return _poison(result, ends[-1] > size)


def _poison(result: Tensor, overflow: Tensor) -> Tensor:
    if result.dtype is torch.bool:
        worst: float | bool = True
    elif result.is_floating_point() or result.is_complex():
        worst = float("nan")
    else:
        worst = torch.iinfo(result.dtype).min
    return torch.where(overflow, torch.full((), worst, dtype=result.dtype, device=result.device), result)


__all__: Sequence[str] = ["all_gather_ragged", "all_to_all_ragged", "psum_scatter_ragged"]
