"""Wire: what each collective of a program puts on the wire for one rank, and the buffers that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..mapped_call import mapped_call
from ..mesh import group_ranks
from ..redistribute_plan import GATHER_BYTES, Step
from ..regions import common_size, region
from ..transport import COPIED_BYTES
from .mapped import MappedTrace, collective_name, exchanges_of
from .partition import Map, Move, Partitioned, Start

# In a larger group an exchange is estimated: each element that doesn't stay goes to one peer.
_COUNTED = 64


@dataclass(frozen=True, slots=True)
class Wire:
    """One collective, as a rank sees it; all in bytes.

    `buffers` is the memory that its transport holds at once beside the value before and the value after:
    packed copies to send, and what is received where that is not the result itself.
    """

    kind: str
    axes: tuple[str, ...]
    received: int
    sent: int
    buffers: int

    @property
    def axis(self) -> str:
        """The axis, or several joined by `+`."""
        return "+".join(self.axes)


def wires(partitioned: Partitioned, rank: int) -> tuple[Wire, ...]:
    """The collectives of a program in order."""
    found: list[Wire] = []
    for step in partitioned.steps:
        if isinstance(step, Map):
            found += mapped_wires(mapped_call(step.handle).traced, rank)
        else:
            moves = step.moves if isinstance(step, Start) else [step] if isinstance(step, Move) else []
            for move in moves:
                if move.step.is_collective:
                    itemsize = partitioned.values[move.source].meta.dtype.itemsize
                    found.append(wire(move.step, rank, itemsize))
    return tuple(found)


def together(parts: Sequence[Wire]) -> Wire:
    """What one collective for several values exchanges."""
    totals = (sum(getattr(part, name) for part in parts) for name in ("received", "sent", "buffers"))
    return Wire(parts[0].kind, parts[0].axes, *totals)


def wire(step: Step, rank: int, itemsize: int) -> Wire:
    """What `rank` exchanges in a step of a redistribution, with ordered reductions."""
    before, after = (math.prod(side.local_shape(rank)) * itemsize for side in (step.src, step.dst))
    return Wire(
        step.kind,
        step.axes,
        step.bytes_moved(rank, itemsize),
        _sent(step, rank, itemsize, before, after),
        _buffers(step, before, after),
    )


def _sent(step: Step, rank: int, itemsize: int, before: int, after: int) -> int:
    if step.kind == "all_reduce":  # a chunk to each, then the sum of its own chunk to all
        return step.bytes_moved(rank, itemsize)
    if step.kind == "all_gather":
        return (step.group_size - 1) * before
    if step.kind == "reduce_scatter" and step.contributions == step.group_size:
        return before - after
    mine = region(step.src, rank)
    if step.group_size > _COUNTED:
        return before - common_size(mine, region(step.dst, rank)) * itemsize
    peers = (peer for peer in group_ranks(step.src.mesh, step.axes, rank) if peer != rank)
    return sum(common_size(mine, region(step.dst, peer)) for peer in peers) * itemsize


def _buffers(step: Step, before: int, after: int) -> int:
    """Those of the exchanges of flat buffers in `transport`, at the moment when they are largest.

    The result is counted from the start; where it isn't there yet, buffers have its place.
    """
    count = step.group_size
    if step.kind == "all_gather":  # a copy for each peer; then what is received, and the result made of it
        return max(_copies(count, before), 0 if _leading(step) else after)
    if step.kind == "all_reduce":
        if count * before <= GATHER_BYTES:  # a copy for each peer, and all contributions
            return 2 * count * before - after
        part = -(-after // count)  # the tree above all contributions to a chunk; then its sum, gathered
        sent = _copies(count, part) if after % count == 0 else count * part
        return max(count // 2 * part, part + sent)
    if step.kind == "reduce_scatter":  # what is sent, and all contributions; then the tree above these
        received, packed = step.contributions * after, 0 if _leading(step) else before
        return max(packed + received - after, received + (step.contributions // 2 - 1) * after)
    return max(before, after)


def _copies(count: int, nbytes: int) -> int:
    """Copies for the peers that a gather makes of what it sends, see `transport.start_all_gather`."""
    return count * nbytes if count != 2 and count * nbytes <= COPIED_BYTES else 0


def _leading(step: Step) -> bool:
    """Whether pieces lie end to end in memory, so that nothing is packed or put together."""
    cut = step.src if step.kind == "all_gather" else step.dst
    if cut.ragged is not None:
        return True
    digits = [cut.digits[axis] for axis in step.axes if axis in cut.digits]
    whole = (step.dst if step.kind == "all_gather" else step.src).local_shape(0)
    return bool(digits) and all(digit.outer == 1 and math.prod(whole[: digit.dim]) == 1 for digit in digits)


def mapped_wires(traced: MappedTrace, rank: int = 0) -> list[Wire]:
    """The collectives that a mapped function calls."""
    graph, found = traced.variant(rank).graph, []
    for node in exchanges_of(graph):
        (out,), name, axes = node.outs, collective_name(node) or "", tuple(node.args[1])
        assert out is not None
        before, after = graph.metas[node.args[0].id].nbytes, graph.metas[out].nbytes
        count = math.prod(traced.mesh.axis_size(axis) for axis in axes)
        share = max(count - 1, 0)
        if name in ("psum", "pmax", "pmin"):
            received = sent = (
                share * before if count * before <= GATHER_BYTES else 2 * before * share // count
            )
        elif name in ("all_gather", "all_gather_invariant"):
            received, sent = after * share // count, before * share
        elif name == "psum_scatter":
            received, sent = after * share, before * share // count
        elif name in ("ppermute", "broadcast"):
            received, sent = after, before
        else:
            received, sent = after * share // count, before * share // count
        found.append(Wire(name, axes, received, sent, before + after))
    return found
