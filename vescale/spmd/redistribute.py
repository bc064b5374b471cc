"""Redistribution, done: steps bound to ranks or to a mesh, and applied to local tensors.

`bind_local(step, rank)` and `bind(step, mesh)` work out every offset, split and process group once;
the functions that they return are short and are called every time. Inputs are never modified. What a
collective returns is memory of its own, on each simulated rank too; what a local step returns may be a view
of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .hosted import bind_lanes
from .lanes import LaneMesh
from .layout import Layout, replicated
from .locals import local_slice
from .mesh import Mesh, group_ranks
from .placements import Replicate
from .redistribute_plan import GATHER_BYTES, Step, chunk, plan
from .reduction import Reduction, check_dtype, neutral
from .regions import Block, overlap, region
from .transport import (
    Assemble,
    all_gather,
    all_reduce as native_all_reduce,
    all_to_all,
    assembler,
    broadcast,
    pack,
    picker,
    reduce_scatter,
    unpack,
)
from .watch import here

__all__ = ["Step", "bind", "bind_local", "bind_many", "plan", "redistribute", "redistribute_all", "scatter"]

Local = Callable[[Tensor], Tensor]
Collective = Callable[[Sequence[Tensor]], list[Tensor]]
Collectives = Callable[[Sequence[Sequence[Tensor]]], list[list[Tensor]]]
Flatten = Callable[[Sequence[Tensor]], Tensor]
Unflatten = Callable[[Tensor], list[Tensor]]


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
    steps = plan(src, dst)
    _check_dtypes([steps], [values])
    for step in steps:
        if step.is_collective:
            run = bind(step, mesh, reduction=reduction)
            here.collective = lambda step=step: _told(step)
            values = run(values)
        else:
            values = _locally(step, values, mesh)
    return values


def _told(step: Step) -> str:
    return f"{step.kind} over {', '.join(step.axes)} from {step.src.spec} to {step.dst.spec}"


def redistribute_all(
    tensors: Sequence[Sequence[Tensor]],
    moves: Sequence[tuple[Layout, Layout]],
    mesh: Mesh,
    *,
    reduction: str | None = None,
) -> list[list[Tensor]]:
    """`redistribute` for several tensors, with one collective for all steps of a round.

    The moves are (src, dst) of each tensor; the bits are the same as one by one.
    """
    plans = [plan(src, dst) for src, dst in moves]
    values = [list(locals) for locals in tensors]
    _check_dtypes(plans, values)
    at = [0] * len(plans)
    for members in rounds(plans, [locals[0].dtype if locals else None for locals in values]):
        steps = tuple(plans[i][at[i]] for i in members)
        if steps[0].is_collective:
            run = bind_many(steps, mesh, reduction=reduction)
            here.collective = lambda step=steps[0]: _told(step)
            apart = run([values[i] for i in members])
        else:
            apart = [_locally(step, values[i], mesh) for step, i in zip(steps, members)]
        for i, moved in zip(members, apart, strict=True):
            values[i], at[i] = moved, at[i] + 1
    return values


def scatter(value: Tensor, layout: Layout, mesh: Mesh, src_rank: int) -> Tensor:
    """This process's local tensor of the value that `src_rank` of the mesh has: one collective.

    Every rank of the mesh makes this call, with a tensor of the value's shape and dtype.
    """
    wide = tuple(axis for axis in mesh.axis_names if mesh.abstract.axis_size(axis) > 1)
    if not wide:
        return local_slice(value, layout, mesh.rank).clone(memory_format=torch.contiguous_format)
    group, shape = mesh.group(wide), layout.local_shape(mesh.rank)
    here.collective = lambda: f"distribution of the value of rank {src_rank}"
    if layout is replicated(mesh.abstract, layout.shape):
        whole = value.clone(memory_format=torch.contiguous_format)
        broadcast(whole, src_rank, group)
        return whole
    if mesh.rank == src_rank:
        parts = [local_slice(value, layout, rank).reshape(-1) for rank in range(mesh.size)]
        send, in_splits = torch.cat(parts), [part.numel() for part in parts]
    else:
        send, in_splits = value.new_empty(0), [0] * mesh.size
    out_splits = [math.prod(shape) * (rank == src_rank) for rank in range(mesh.size)]
    return all_to_all(send, in_splits, out_splits, group).view(shape)


def rounds(plans: Sequence[Sequence[Step]], dtypes: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Which plans take their next step together: those of one kind, axes, reductions and dtype.

    A collective waits while another plan has one of the same kind later, behind other steps.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, Partial, Shard
    >>> mesh = AbstractMesh(("dp", "tp"), (2, 2))
    >>> a, b, c = (Layout(mesh, spec, (4, 4)) for spec in (P(dp=Partial(), tp=Shard(1)), P(dp=Shard(0)), P()))
    >>> d = Layout(mesh, P(tp=Shard(1)), (4, 4))
    >>> [step.kind for step in plan(a, b)], [step.kind for step in plan(d, c)]
    (['reduce_scatter', 'all_gather'], ['all_gather'])
    >>> list(rounds([plan(a, b), plan(d, c)], ["float32"] * 2))
    [(0,), (0, 1)]
    """
    left = [
        [(s.kind, s.axes, s.reductions, dtype) if s.is_collective else None for s in steps]
        for steps, dtype in zip(plans, dtypes, strict=True)
    ]
    while any(left):
        ready = dict.fromkeys(keys[0] for keys in left if keys)  # a set in order
        later = {key for keys in left for key in keys[1:] if key not in keys[:1]}
        key = None if None in ready else next((k for k in ready if k not in later), next(iter(ready)))
        members = tuple(i for i, keys in enumerate(left) if keys and keys[0] == key)
        yield members
        for i in members:
            left[i].pop(0)


def _check_dtypes(plans: Sequence[Sequence[Step]], values: Sequence[Sequence[Tensor]]) -> None:
    """Before anything is sent."""
    for steps, locals in zip(plans, values, strict=True):
        for step in steps:
            if step.kind in ("reduce_scatter", "all_reduce") and locals:
                check_dtype([op for _, op in step.reductions], locals[0].dtype)


def _locally(step: Step, values: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    return [bind_local(step, rank)(value) for rank, value in zip(mesh.local_ranks, values, strict=True)]


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
    summed = [axis for axis, op in step.reductions if op == "sum"]
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
    if isinstance(mesh, LaneMesh):
        lanes = bind_lanes((step,), mesh)
        return lambda locals: lanes([locals])[0]
    if not mesh.is_simulated:
        return _bind_processes((step,), mesh, reduction)  # one rank, so one tensor a step
    if step.kind in ("all_gather", "all_to_all"):
        return _simulated_exchange(step)
    return _simulated_reduce(step)


@lru_cache(maxsize=4096)
def bind_many(steps: tuple[Step, ...], mesh: Mesh, *, reduction: str | None = None) -> Collectives:
    """`bind` for several steps of one kind, axes and reductions, as one collective.

    The tensors have one dtype. Bits are those of the steps one by one; with reduction="native" they are the
    backend's, which may depend on how much it reduces at once.
    """
    assert len({(step.kind, step.axes, step.reductions) for step in steps}) == 1, steps
    if isinstance(mesh, LaneMesh) and mesh.local_ranks:
        return bind_lanes(steps, mesh)
    if mesh.is_simulated or not mesh.local_ranks:
        each = [bind(step, mesh, reduction=reduction) for step in steps]
        return lambda locals: [one(pieces) for one, pieces in zip(each, locals, strict=True)]
    together = _bind_processes(steps, mesh, reduction)
    return lambda locals: [[tensor] for tensor in together([tensor for (tensor,) in locals])]


def _bind_processes(steps: tuple[Step, ...], mesh: Mesh, reduction: str | None) -> Collective:
    """One collective for the steps: a tensor each before -> after."""
    kind = steps[0].kind
    if kind in ("all_gather", "all_to_all"):
        return _exchange(steps, mesh)
    if (reduction or mesh.reduction) == "native" and steps[0].contributions == steps[0].group_size:
        return _native_reduce(steps, mesh)
    return _reduce_scatter(steps, mesh) if kind == "reduce_scatter" else _all_reduce(steps, mesh)


def _reduction(step: Step) -> Reduction:
    return Reduction(step.src.mesh, dict(step.reductions))


def _contributors(step: Step, rank: int) -> list[list[int]]:
    """The ranks of the group, those together that hold parts of one contribution; in the order of the sum."""
    found: dict[tuple[int, ...], list[int]] = {}
    for member in group_ranks(step.src.mesh, step.axes, rank):
        coordinate = step.src.mesh.coordinate(member)
        found.setdefault(tuple(coordinate[axis] for axis, _ in step.reductions), []).append(member)
    return [found[at] for at in sorted(found)]


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


def _exchange(steps: tuple[Step, ...], mesh: Mesh) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, steps[0].axes, mesh.rank)
    group = mesh.late_group(steps[0].axes)
    incoming = [[_blocks(step, peer, me) for peer in members] for step in steps]
    unpacked, out_splits = unpack(incoming, [step.dst.local_shape(me) for step in steps])
    if steps[0].kind == "all_gather" and len(set(out_splits)) == 1:
        # All need all of the same size; every member of the group sees that.
        packed, _ = pack([[_blocks(step, me, me)] for step in steps])

        def gather(locals: Sequence[Tensor]) -> list[Tensor]:
            send = packed([tensor.contiguous() for tensor in locals]).view(-1)
            return unpacked(all_gather(send, len(members), group()))

        return gather
    packed, in_splits = pack([[_blocks(step, me, peer) for peer in members] for step in steps])

    def exchange(locals: Sequence[Tensor]) -> list[Tensor]:
        # Buffers are passed on unnamed, here and below, so that each goes when it was last used.
        return unpacked(
            all_to_all(packed([tensor.contiguous() for tensor in locals]), in_splits, out_splits, group())
        )

    return exchange


def _simulated_reduce(step: Step) -> Collective:
    mesh, reduce = step.src.mesh, _reduction(step)

    def contribution(members: Sequence[int], rank: int) -> Assemble:
        if len(members) == 1:
            (only,) = members
            take = picker(_blocks(step, only, rank), step.dst.local_shape(rank))
            return lambda sources: take(sources[only])
        pieces = [(member, block) for member in members for block in _blocks(step, member, rank)]
        return assembler(pieces, step.dst.local_shape(rank))

    if step.kind == "all_reduce":
        groups = [group_ranks(mesh, step.axes, rank) for rank in range(mesh.size)]

        def apply_once(locals: Sequence[Tensor]) -> list[Tensor]:
            results: dict[int, Tensor] = {}
            for rank, members in enumerate(groups):
                first = members[0]
                if first == rank:
                    results[rank] = reduce.tree([locals[m] for m in members])
                else:
                    results[rank] = results[first].clone()
            return [results[rank] for rank in range(mesh.size)]

        return apply_once
    make = [[contribution(who, rank) for who in _contributors(step, rank)] for rank in range(mesh.size)]

    def apply(locals: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.contiguous() for tensor in locals]
        return [reduce.tree([one(sources) for one in contributions]) for contributions in make]

    return apply


def _reduce_scatter(steps: tuple[Step, ...], mesh: Mesh) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, steps[0].axes, mesh.rank)
    group, reduce = mesh.late_group(steps[0].axes), _reduction(steps[0])
    packed, in_splits = pack([[_blocks(step, me, peer) for peer in members] for step in steps])
    shapes = [step.dst.local_shape(me) for step in steps]
    if steps[0].contributions == len(members):
        # All contributions have the same shape here, and so the same order on the wire.
        unpacked, (numel,) = unpack([[_blocks(step, me, me)] for step in steps], shapes)
        out_splits = [numel] * len(members)

        def apply(locals: Sequence[Tensor]) -> list[Tensor]:
            recv = all_to_all(
                packed([tensor.contiguous() for tensor in locals]), in_splits, out_splits, group()
            )
            return unpacked(reduce.tree(recv.view(len(members), numel).unbind()))

        return apply
    # Each contribution, in parts from several ranks, is put together as a tensor of its own.
    who = _contributors(steps[0], me)
    parts = [
        [_blocks(step, peer, me) if peer in holders else () for peer in members]
        for step in steps
        for holders in who
    ]
    apart, out_splits = unpack(parts, [shape for shape in shapes for _ in who])

    def apply_parts(locals: Sequence[Tensor]) -> list[Tensor]:
        send = packed([tensor.contiguous() for tensor in locals])
        found = apart(all_to_all(send, in_splits, out_splits, group()))
        return [reduce.tree(found[at : at + len(who)]) for at in range(0, len(found), len(who))]

    return apply_parts


def _all_reduce(steps: tuple[Step, ...], mesh: Mesh) -> Collective:
    members = group_ranks(mesh.abstract, steps[0].axes, mesh.rank)
    group, reduce, count = mesh.late_group(steps[0].axes), _reduction(steps[0]), len(members)
    index = members.index(mesh.rank)
    flatten, unflatten, numel = _flat(steps, mesh.rank)
    in_splits = [stop - start for start, stop in (chunk(numel, count, i) for i in range(count))]
    mine = in_splits[index]

    def apply(locals: Sequence[Tensor]) -> list[Tensor]:
        flat = flatten(locals)
        if flat.nbytes * count <= GATHER_BYTES:
            rows = all_gather(flat, count, group()).view(count, numel)
            return unflatten(reduce.tree(rows.unbind()))
        total = reduce.tree(all_to_all(flat, in_splits, [mine] * count, group()).view(count, mine).unbind())
        if len(set(in_splits)) == 1:
            return unflatten(all_gather(total, count, group()))
        return unflatten(all_to_all(total.repeat(count), [mine] * count, in_splits, group()))

    return apply


def _native_reduce(steps: tuple[Step, ...], mesh: Mesh) -> Collective:
    me, members = mesh.rank, group_ranks(mesh.abstract, steps[0].axes, mesh.rank)
    group, reduce, index = mesh.late_group(steps[0].axes), _reduction(steps[0]), members.index(mesh.rank)
    flatten, unflatten, _ = _flat(steps, me)

    def all_reduce(locals: Sequence[Tensor]) -> list[Tensor]:
        flat = flatten(locals)
        total = flat.clone() if len(steps) == 1 else flat  # several have just been copied together
        native_all_reduce(total, reduce.native, group())
        return unflatten(reduce.finish(total))

    if steps[0].kind == "all_reduce":
        return all_reduce
    packed, splits = pack([[_blocks(step, me, peer) for peer in members] for step in steps])
    mine = [[_blocks(step, me, me)] for step in steps]
    unpacked, _ = unpack(mine, [step.dst.local_shape(me) for step in steps])

    def scatter(locals: Sequence[Tensor]) -> list[Tensor]:
        send = packed([tensor.contiguous() for tensor in locals])
        return unpacked(reduce.finish(reduce_scatter(send, splits, index, reduce.native, group())))

    return scatter


def _flat(steps: tuple[Step, ...], rank: int) -> tuple[Flatten, Unflatten, int]:
    """Tensors to one flat one and results back from it, and how long that is."""
    shapes = [step.dst.local_shape(rank) for step in steps]
    sizes = [math.prod(shape) for shape in shapes]
    if len(steps) == 1:
        (shape,) = shapes
        return (
            lambda tensors: tensors[0].contiguous().view(-1),
            lambda flat: [flat.view(shape)],
            sizes[0],
        )
    return (
        lambda tensors: torch.cat([tensor.reshape(-1) for tensor in tensors]),
        lambda flat: [part.clone().view(shape) for part, shape in zip(flat.split(sizes), shapes)],
        sum(sizes),
    )
