"""Overlap: a collective in two halves, so that other work goes on between its start and its end.

`bind_start(steps, mesh)` returns two functions of all hosted ranks, as `bind` returns one:

    start : for each rank the sources of the steps -> for each rank a ticket
    wait  : for each rank its ticket -> for each rank the results of the steps

Simulated ranks do the work at the start. In processes an exchange is under way between the two, and so is a
reduce-scatter in the order of the ranks, which is an exchange and a sum. What is left, all-reduces and
reductions that the backend does, happens at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .mesh import Mesh, group_ranks
from .redistribute import Collective, bind_many
from .redistribute_plan import Step
from .reduction import Reduction
from .regions import Block, overlap, region
from .transport import pack, start_all_gather, start_all_to_all, unpack

Sources = Sequence[Sequence[Tensor]]
Ticket = Callable[[], Sequence[Sequence[Tensor]]]


def bind_start(
    steps: tuple[Step, ...], mesh: Mesh, *, reduction: str | None = None
) -> tuple[Collective, Collective]:
    """The start and the end of one collective for steps of one kind, axes, reductions and dtype.

    The bits are those of `bind_many`. Every start is waited for once; between the two nobody writes to the
    sources. The collectives of a group keep the order of their starts.
    """
    begin = _begin(steps, mesh, reduction)

    def start(sources: Any) -> Any:
        ticket = begin(sources)
        return [ticket] * len(sources)

    def wait(tickets: Any) -> Any:
        return tickets[0]()

    return start, wait


def _begin(steps: tuple[Step, ...], mesh: Mesh, reduction: str | None) -> Callable[[Sources], Ticket]:
    ordered = (reduction or mesh.reduction) != "native"
    if not mesh.is_simulated and mesh.local_ranks:
        members = group_ranks(mesh.abstract, steps[0].axes, mesh.rank)
        if steps[0].kind in ("all_gather", "all_to_all"):
            return _begin_exchange(steps, mesh, members)
        whole = steps[0].contributions == len(members)
        if steps[0].kind == "reduce_scatter" and ordered and whole:
            return _begin_reduce_scatter(steps, mesh, members)
    run = bind_many(steps, mesh, reduction=reduction)

    def begin(sources: Sources) -> Ticket:
        results = list(zip(*run(list(zip(*sources, strict=True))), strict=True))
        return lambda: results

    return begin


def _begin_exchange(
    steps: tuple[Step, ...], mesh: Mesh, members: Sequence[int]
) -> Callable[[Sources], Ticket]:
    me, group = mesh.rank, mesh.late_group(steps[0].axes)
    incoming = [[_blocks(step, peer, me) for peer in members] for step in steps]
    unpacked, out_splits = unpack(incoming, [step.dst.local_shape(me) for step in steps])
    if steps[0].kind == "all_gather" and len(set(out_splits)) == 1:
        packed, _ = pack([[_blocks(step, me, me)] for step in steps])

        def gather(sources: Sources) -> Ticket:
            (tensors,) = sources
            send = packed([tensor.contiguous() for tensor in tensors]).view(-1)
            arrived = start_all_gather(send, len(members), group())
            return lambda: [unpacked(arrived())]

        return gather
    packed, in_splits = pack([[_blocks(step, me, peer) for peer in members] for step in steps])

    def begin(sources: Sources) -> Ticket:
        (tensors,) = sources
        send = packed([tensor.contiguous() for tensor in tensors])
        arrived = start_all_to_all(send, in_splits, out_splits, group())
        return lambda: [unpacked(arrived())]

    return begin


def _begin_reduce_scatter(
    steps: tuple[Step, ...], mesh: Mesh, members: Sequence[int]
) -> Callable[[Sources], Ticket]:
    me, group = mesh.rank, mesh.late_group(steps[0].axes)
    reduce = Reduction(steps[0].src.mesh, dict(steps[0].reductions))
    packed, in_splits = pack([[_blocks(step, me, peer) for peer in members] for step in steps])
    shapes = [step.dst.local_shape(me) for step in steps]
    numel = sum(map(math.prod, shapes))
    # All contributions have the same shape here, and so the same order on the wire.
    unpacked, _ = unpack([[_blocks(step, me, me)] for step in steps], shapes)

    def begin(sources: Sources) -> Ticket:
        (tensors,) = sources
        send = packed([tensor.contiguous() for tensor in tensors])
        arrived = start_all_to_all(send, in_splits, [numel] * len(members), group())
        return lambda: [unpacked(reduce.tree(arrived().view(len(members), numel).unbind()))]

    return begin


def _blocks(step: Step, sender: int, receiver: int) -> tuple[Block, ...]:
    return overlap(region(step.src, sender), region(step.dst, receiver))
