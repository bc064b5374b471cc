"""Redistribution, done: steps bound to ranks or to a mesh, and applied to local tensors.

`bind_local(step, rank)` and `bind(step, mesh)` work out every offset, split and process group once;
the functions that they return are short and are called every time. Inputs are never modified. What a
collective returns is memory of its own, on each simulated rank too; what a local step returns may be a view
of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Layout
from .mesh import Mesh, group_ranks
from .placements import Replicate
from .redistribute_plan import Step, chunk, plan
from .reduction import Reduction, neutral
from .regions import Block, overlap, region
from .transport import all_gather, all_to_all, assembler, pack, picker, reduce_scatter, unpack

__all__ = ["Step", "bind", "bind_local", "plan", "redistribute"]

Local = Callable[[Tensor], Tensor]
Collective = Callable[[Sequence[Tensor]], list[Tensor]]

# Below this many bytes in all (group size x tensor) an ordered all-reduce is one exchange and the
# whole tree on every rank: more bytes, half the messages. On gloo a message costs what 256 KB do.
GATHER_BYTES = 256 * 1024


def redistribute(
    locals: Sequence[Tensor], src: Layout, dst: Layout, mesh: Mesh, *, reduction: str | None = None
) -> list[Tensor]:
    """The local tensors of `mesh.local_ranks` in another layout of the same global value.

        redistribute : locals in src -> locals in dst

    Raises LayoutError when the layouts differ in mesh or shape, before any communication.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"dp": 2}, backend="simulated")
    >>> rows, columns = (Layout(mesh.abstract, P(dp=Shard(dim)), (2, 2)) for dim in (0, 1))
    >>> redistribute([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], rows, columns, mesh)
    [tensor([[1],
            [3]]), tensor([[2],
            [4]])]
    """
    values = list(locals)
    for step in plan(src, dst):
        if step.is_collective:
            values = bind(step, mesh, reduction=reduction)(values)
        else:
            values = [
                bind_local(step, rank)(value) for rank, value in zip(mesh.local_ranks, values, strict=True)
            ]
    return values


# Local steps.


@lru_cache(maxsize=65536)
def bind_local(step: Step, rank: int) -> Local:
    """The function of a local step on `rank`: its local tensor before -> after."""
    assert not step.is_collective, step
    src, dst = step.src, step.dst
    shape = dst.local_shape(rank)
    if step.kind == "to_partial":
        return _to_partial(step, rank)
    narrow = _narrow(src, dst, rank)
    if narrow is not None:
        return narrow
    take = picker(overlap(region(src, rank), region(dst, rank)), shape)
    return lambda tensor: take(tensor.contiguous())


def _narrow(src: Layout, dst: Layout, rank: int) -> Local | None:
    """A slice of each dim: keeps the strides, so it copies nothing whatever they are."""
    if src.ragged is not None or dst.ragged is not None:
        return None
    slices = []
    for held, kept in zip(region(src, rank).sets, region(dst, rank).sets, strict=True):
        if len(held) != 1 or len(kept) != 1:
            return None
        if kept[0][0] < held[0][0] or kept[0][1] > held[0][1]:  # only when there are no elements
            return None
        slices.append(slice(kept[0][0] - held[0][0], kept[0][1] - held[0][0]))
    index = tuple(slices)
    return lambda tensor: tensor[index]


def _to_partial(step: Step, rank: int) -> Local:
    """One contribution of a value: this rank's pieces of it, and zeros."""
    src, dst = step.src, step.dst
    coordinate = src.mesh.coordinate(rank)
    summed = [axis for axis, op in zip(step.axes, step.ops) if op == "sum"]
    shape = dst.local_shape(rank)
    # Of ranks that hold the same elements the first contributes them.
    silent = any(coordinate[axis] for axis in summed if src.placement(axis) == Replicate())
    blocks = () if silent else overlap(region(src, rank), region(dst, rank))
    if sum(block.numel for block in blocks) == math.prod(shape) and not silent:
        return lambda tensor: tensor.reshape(shape)

    def contribute(tensor: Tensor) -> Tensor:
        value = neutral(tensor.dtype)
        out = torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)
        flat = tensor.contiguous()
        for b in blocks:
            piece = out.as_strided(b.sizes, b.dst_strides, b.dst_offset)
            piece.copy_(flat.as_strided(b.sizes, b.src_strides, flat.storage_offset() + b.src_offset))
        return out

    return contribute


# Collective steps.


@lru_cache(maxsize=4096)
def bind(step: Step, mesh: Mesh, *, reduction: str | None = None) -> Collective:
    """The function of a collective step: local tensors of `mesh.local_ranks` before -> after.

    `reduction` is "ordered" or "native" (the backend's own order; simulated ranks always use the
    tree), by default `mesh.reduction`. Nothing is communicated here.
    """
    assert step.is_collective, step
    assert step.src.mesh == mesh.abstract, (step, mesh)
    if not mesh.local_ranks:
        return lambda locals: []
    if step.kind in ("all_gather", "all_to_all"):
        return _simulated_exchange(step) if mesh.is_simulated else _exchange(step, mesh)
    reduce = Reduction(step.src.mesh, dict(zip(step.axes, step.ops, strict=True)))
    if mesh.is_simulated:
        return _simulated_reduce(step, reduce)
    if (reduction or mesh.reduction) == "native":
        return _native_reduce(step, mesh, reduce)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(step, mesh, reduce)
    return _all_reduce(step, mesh, reduce)


def _blocks(step: Step, sender: int, receiver: int) -> tuple[Block, ...]:
    return overlap(region(step.src, sender), region(step.dst, receiver))


def _simulated_exchange(step: Step) -> Collective:
    make = []
    for rank in range(step.src.mesh.size):
        senders = group_ranks(step.src.mesh, step.axes, rank)
        pieces = [(sender, block) for sender in senders for block in _blocks(step, sender, rank)]
        make.append(assembler(pieces, step.dst.local_shape(rank)))

    def exchange(locals: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.contiguous() for tensor in locals]
        return [assemble(sources) for assemble in make]

    return exchange


def _exchange(step: Step, mesh: Mesh) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, step.axes, mesh.rank)
    group = mesh.late_group(step.axes)
    packed, in_splits = pack([_blocks(step, me, peer) for peer in members])
    unpacked, out_splits = unpack([_blocks(step, peer, me) for peer in members], step.dst.local_shape(me))
    numel = math.prod(step.src.local_shape(me))
    if set(in_splits) == set(out_splits) == {numel}:  # all get all of the same size

        def gather(locals: Sequence[Tensor]) -> list[Tensor]:
            (tensor,) = locals
            flat = tensor.contiguous().view(-1)
            return [unpacked((all_gather(flat, len(members), group()),))]

        return gather

    def exchange(locals: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = locals
        send = packed((tensor.contiguous(),))
        return [unpacked((all_to_all(send, in_splits, out_splits, group()),))]

    return exchange


def _simulated_reduce(step: Step, reduce: Reduction) -> Collective:
    mesh = step.src.mesh
    plans = []
    for rank in range(mesh.size):
        members = group_ranks(mesh, step.axes, rank)
        take = [picker(_blocks(step, m, rank), step.dst.local_shape(rank)) for m in members]
        plans.append((members, take))

    def apply(locals: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.contiguous() for tensor in locals]
        return [reduce.tree([t(sources[m]) for m, t in zip(members, take)]) for members, take in plans]

    def apply_once(locals: Sequence[Tensor]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for rank, (members, _) in enumerate(plans):
            first = members[0]
            if first == rank:
                results[rank] = reduce.tree([locals[m] for m in members])
            else:
                results[rank] = results[first].clone()
        return [results[rank] for rank in range(len(plans))]

    return apply_once if step.kind == "all_reduce" else apply


def _reduce_scatter(step: Step, mesh: Mesh, reduce: Reduction) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, step.axes, mesh.rank)
    group = mesh.late_group(step.axes)
    packed, in_splits = pack([_blocks(step, me, peer) for peer in members])
    # All contributions have the same shape here, and so the same order on the wire.
    unpacked, (numel,) = unpack([_blocks(step, me, me)], step.dst.local_shape(me))
    out_splits = [numel] * len(members)

    def apply(locals: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = locals
        send = packed((tensor.contiguous(),))
        recv = all_to_all(send, in_splits, out_splits, group())
        return [unpacked((reduce.tree(recv.view(len(members), numel).unbind()),))]

    return apply


def _all_reduce(step: Step, mesh: Mesh, reduce: Reduction) -> Collective:
    members = group_ranks(mesh.abstract, step.axes, mesh.rank)
    group, count = mesh.late_group(step.axes), len(members)
    index = members.index(mesh.rank)
    shape = step.dst.local_shape(mesh.rank)
    numel = math.prod(shape)
    in_splits = [stop - start for start, stop in (chunk(numel, count, i) for i in range(count))]
    mine = in_splits[index]

    def apply(locals: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = locals
        flat = tensor.contiguous().view(-1)
        if tensor.nbytes * count <= GATHER_BYTES:
            rows = all_gather(flat, count, group()).view(count, numel)
            return [reduce.tree(rows.unbind()).view(shape)]
        recv = all_to_all(flat, in_splits, [mine] * count, group())
        total = reduce.tree(recv.view(count, mine).unbind())
        if len(set(in_splits)) == 1:
            return [all_gather(total, count, group()).view(shape)]
        return [all_to_all(total.repeat(count), [mine] * count, in_splits, group()).view(shape)]

    return apply


def _native_reduce(step: Step, mesh: Mesh, reduce: Reduction) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, step.axes, mesh.rank)
    group, index = mesh.late_group(step.axes), members.index(mesh.rank)

    def all_reduce(locals: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = locals
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, reduce.native, group())
        return [reduce.finish(total)]

    if step.kind == "all_reduce":
        return all_reduce
    packed, splits = pack([_blocks(step, me, peer) for peer in members])
    unpacked, _ = unpack([_blocks(step, me, me)], step.dst.local_shape(me))

    def scatter(locals: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = locals
        send = packed((tensor.contiguous(),))
        return [unpacked((reduce.finish(reduce_scatter(send, splits, index, reduce.native, group())),))]

    return scatter
