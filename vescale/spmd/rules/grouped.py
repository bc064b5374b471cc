"""Grouped matrix products: rows in runs, one run a matrix, as experts take tokens that are sorted by expert.

Ends of the runs are values, so a rank that has some of the rows, or of the matrices, finds its own runs
as the program runs, without a read of a value by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import flop_counter

from ..._errors import ShardingError, explain
from ..program.ir import Node, TensorMeta
from .batched import own_range
from .notation import Dims, LocalCall, Pattern, argument, operand_metas, rule

aten = torch.ops.aten

# By the numbers of dims of the two: rows of x by matrices w; and x's rows to a matrix for each group.
_FORMS = {
    (2, 3): ("sk", "gkn", "sn"),
    (2, 2): ("ks", "sn", "gkn"),
}


@rule(aten._grouped_mm.default)
def grouped_mm(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    x, w, *others = operand_metas(node, metas)
    names = _FORMS.get((len(x.shape), len(w.shape)))
    if names is None or len(others) != 1 or argument(node, 3, "bias") is not None:
        raise ShardingError(
            explain(
                f"a grouped product of {len(x.shape)} by {len(w.shape)} dims, {len(others)} tensors more",
                where=node.origin,
                rule="rows (s, k) by matrices (g, k, n), or (k, s) by (s, n), with offs and without bias",
                remedy="use torch.bmm for matrices of equal sizes, and add the bias afterwards",
            )
        )
    first, second, result = (tuple((name,) for name in dims) for dims in names)
    sizes = dict(zip(names[0] + names[1], x.shape + w.shape, strict=True)) | {
        "g": others[0].shape[0],
        "ends": others[0].shape[0],
    }
    dims: tuple[Dims, ...] = (first, second, (("ends",),))
    return Pattern(
        dims,
        (result,),
        sizes,
        sum=frozenset(name for name in "skg" if name not in names[2]),
        whole=frozenset(("ends",)),
        linear=(frozenset((0,)), frozenset((1,))),
        contiguous=frozenset("sg"),
        local=_own_runs,
    )


def _flops(x: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row meets one matrix; rows behind the last run, if there are any, are counted too."""
    return 2 * x[0] * x[1] * w[-1]


if aten._grouped_mm not in flop_counter.flop_registry:  # torch 2.11 - 2.13 count nothing
    flop_counter.register_flop_formula(aten._grouped_mm)(_flops)


def _own_runs(call: LocalCall) -> LocalCall:
    x, w = call.operands[:2]
    rows = own_range(x, 0 if len(w.shape) == 3 else 1, call.rank)
    matrices = own_range(w if len(w.shape) == 3 else call.results[0], 0, call.rank)
    return replace(call, fn=_grouped, args=(*call.args[:3], rows, matrices), kwargs=dict(call.kwargs))


def _grouped(x: Any, w: Any, ends: Any, rows: Any, matrices: Any, *_: Any, **options: Any) -> Any:
    """`rows` and `matrices` are (first, number) of the rank's own; None when it has them all."""
    by_rows = w.dim() == 3
    count = x.shape[0] if by_rows else w.shape[0]
    if rows is not None:
        ends = (ends - rows[0]).clamp(0, count)
    first, number = matrices or (0, len(ends))
    if not count or not number:
        return x.new_zeros((count, w.shape[2]) if by_rows else (number, x.shape[0], w.shape[1]))
    start = ends[first - 1] if first else torch.zeros_like(ends[0])
    ends = ends[first : first + number] - start
    # A product begins with the first row: turn the rows so that the rank's own do.
    places = torch.arange(count, device=x.device)
    turned = (places + start) % count if first else None
    if not by_rows:
        left, right = _aligned(_turned(x.t(), turned)), _aligned(_turned(w, turned))
        return aten._grouped_mm(left.t(), right, ends, **options)[:, : x.shape[0], : w.shape[1]]
    found = aten._grouped_mm(_aligned(_turned(x, turned)), _aligned(w, both=True), ends, **options)
    found = found[:, : w.shape[2]].masked_fill((places >= ends[-1]).unsqueeze(1), 0)  # past the last run
    return found if turned is None else torch.empty_like(found).index_copy_(0, turned, found)


def _turned(rows: Any, places: Any) -> Any:
    return rows if places is None else rows.index_select(0, places)


def _aligned(x: Any, both: bool = False) -> Any:
    """The kernel wants dense tensors with columns (and rows, for `both`) in multiples of 16 bytes."""
    unit = 16 // x.element_size()
    room = [0, -x.shape[-1] % unit, 0, -x.shape[-2] % unit if both else 0]
    if any(room):
        return torch.constant_pad_nd(x, room)
    outer, inner = x.stride()[-2:]
    dense = (inner == 1 and outer % unit == 0) or (both and outer == 1 and inner % unit == 0)
    return x if dense and 0 not in x.stride() else x.contiguous()


@rule(aten.histc.default)
def histc(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Counts of each rank's own numbers add up, when the range is given and isn't theirs."""
    (shape,) = (meta.shape for meta in operand_metas(node, metas))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    given = argument(node, 2, "min", 0) != argument(node, 3, "max", 0)
    numbers = frozenset(sizes)
    dims: Dims = tuple((name,) for name in sizes)
    sizes["bins"] = argument(node, 1, "bins", 100)
    none: frozenset[str] = frozenset()
    return Pattern(
        (dims,),
        ((("bins",),),),
        sizes,
        sum=numbers if given else none,
        whole=frozenset(("bins",)) | (none if given else numbers),
    )
