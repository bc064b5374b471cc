"""Moving pieces of local tensors: packing, exchanging, unpacking.

Everything is worked out when a step is bound; what is left for each call is a few strided copies
around one `all_to_all_single`, or none where the memory already has the right order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import watch
from .regions import Block, strides

Assemble = Callable[[Sequence[Tensor]], Tensor]

# Renamed in torch 2.13, which warns at the old names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What gloo carries as it is; other types travel as bytes.
_CARRIED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    }
)


def assembler(pieces: Sequence[tuple[int, Block]], shape: tuple[int, ...], *, own: bool = True) -> Assemble:
    """A function that puts a tensor of `shape` together from pieces of contiguous ones.

    `pieces` are (which of the tensors, block) and cover the result once. With `own=False` the result may
    be memory of one of the inputs, when that is what it would be a copy of.
    """
    numel = math.prod(shape)
    if not pieces:
        assert numel == 0, shape
        return lambda tensors: tensors[0].new_empty(shape)
    if not own and _in_order(pieces, numel):
        return lambda tensors: tensors[pieces[0][0]].view(-1)[:numel].view(shape)
    dim = _cat_dim(pieces, numel)
    if dim is not None and len(pieces) > 1:
        return lambda tensors: torch.cat([_at(tensors[i], b) for i, b in pieces], dim).view(shape)

    def assemble(tensors: Sequence[Tensor]) -> Tensor:
        out = tensors[0].new_empty(numel)
        for i, block in pieces:
            out.as_strided(block.sizes, block.dst_strides, block.dst_offset).copy_(_at(tensors[i], block))
        return out.view(shape)

    return assemble


def picker(blocks: Sequence[Block], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A function that takes blocks out of one contiguous tensor: a view where one block is all."""
    if len(blocks) == 1:
        (block,) = blocks
        return lambda tensor: _at(tensor, block).reshape(shape)
    assemble = assembler([(0, block) for block in blocks], shape)
    return lambda tensor: assemble((tensor,))


def pack(blocks_for: Sequence[Sequence[Sequence[Block]]]) -> tuple[Assemble, list[int]]:
    """One send buffer from several tensors, and how much of it each receiver gets.

    `blocks_for[tensor][receiver]`; the buffer has, for each receiver in turn, its blocks of each tensor.
    """
    pieces: list[tuple[int, Block]] = []
    splits: list[int] = []
    offset = 0
    for parts in zip(*blocks_for, strict=True):
        start = offset
        for which, blocks in enumerate(parts):
            for b in blocks:
                to = strides(b.sizes)
                pieces.append((which, Block(b.sizes, b.src_offset, b.src_strides, offset, to)))
                offset += b.numel
        splits.append(offset - start)
    return assembler(pieces, (offset,), own=False), splits


def unpack(
    blocks_from: Sequence[Sequence[Sequence[Block]]], shapes: Sequence[tuple[int, ...]]
) -> tuple[Callable[[Tensor], list[Tensor]], list[int]]:
    """The inverse: the tensors made of one receive buffer, and how much comes from each sender.

    Each of several tensors has memory of its own; one alone may be the buffer itself.
    """
    pieces: list[list[tuple[int, Block]]] = [[] for _ in blocks_from]
    splits: list[int] = []
    offset = 0
    for parts in zip(*blocks_from, strict=True):
        start = offset
        for which, blocks in enumerate(parts):
            for b in blocks:
                by = strides(b.sizes)
                pieces[which].append((0, Block(b.sizes, offset, by, b.dst_offset, b.dst_strides)))
                offset += b.numel
        splits.append(offset - start)
    own = len(pieces) > 1
    make = [assembler(mine, shape, own=own) for mine, shape in zip(pieces, shapes, strict=True)]
    if not own:
        return (lambda buffer, only=make[0]: [only((buffer,))]), splits
    return (lambda buffer: [assemble((buffer,)) for assemble in make]), splits


def all_to_all(send: Tensor, in_splits: list[int], out_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """What each rank of the group has for this one, in order of ranks."""
    return start_all_to_all(send, in_splits, out_splits, group)()


def start_all_to_all(
    send: Tensor, in_splits: list[int], out_splits: list[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin an `all_to_all`; call the result, once, for what it returns. It holds the memory that is sent."""
    recv = send.new_empty(sum(out_splits))
    work = _begin_exchange(recv, send, out_splits, in_splits, group)
    return _arriving(recv, work, send, group)


def _begin_exchange(
    recv: Tensor, send: Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
) -> Any:
    watch.begin()
    if send.dtype in _CARRIED or send.is_cuda:
        return dist.all_to_all_single(recv, send, out_splits, in_splits, group, async_op=True)
    size = send.dtype.itemsize
    return dist.all_to_all_single(
        recv.view(torch.uint8),
        send.view(torch.uint8),
        [size * n for n in out_splits],
        [size * n for n in in_splits],
        group,
        async_op=True,
    )


def _arriving(recv: Tensor, work: Any, send: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """A function that waits for what is under way; until then it holds the memory that is sent."""
    pending = [(work, send)]

    def wait() -> Tensor:
        work, sent = pending.pop()
        _finish(work, sent, group)
        return recv

    return wait


def _finish(work: Any, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Wait for what is under way; on cuda only the stream does, and the backend watches over it."""
    if not sent.is_cuda:
        watch.finish(work, group)
    elif work is not None:
        work.wait()


# Up to this many bytes in all, a gather on gloo is an exchange of copies; see `start_all_gather`.
COPIED_BYTES = 256 * 1024


def all_gather(send: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """The equally long flat tensors of all `count` ranks of the group, end to end."""
    return start_all_gather(send, count, group)()


def start_all_gather(send: Tensor, count: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin an `all_gather`; call the result, once, for what it returns.

    What is sent is `send` itself, but for small ones: on gloo a gather is a ring of dependent sends, and an
    exchange of copies took 2.6 ms where it took 3.7 ms (4 ranks, 2 cores, 1 KB to 256 KB each).
    """
    size = send.numel()
    if send.is_cuda or (send.nbytes * count > COPIED_BYTES and count > 2 and send.dtype in _CARRIED):
        watch.begin()
        recv = send.new_empty(size * count)
        return _arriving(recv, _gather_single(recv, send, group, async_op=True), send, group)
    if count != 2:
        return start_all_to_all(torch.cat([send] * count), [size] * count, [size] * count, group)
    recv, me = send.new_empty(2 * size), group.rank()  # two ranks swap what they have
    own, other = recv[me * size :][:size], recv[(1 - me) * size :][:size]
    own.copy_(send)
    splits = [size * (rank != me) for rank in (0, 1)]
    return _arriving(recv, _begin_exchange(other, send, splits, splits, group), send, group)


def reduce_scatter(send: Tensor, splits: list[int], index: int, op: Any, group: dist.ProcessGroup) -> Tensor:
    """The backend's own reduce-scatter of flat pieces; `index` is this rank's place in the group."""
    watch.begin()
    out = send.new_empty(splits[index])
    if len(set(splits)) == 1:
        work = _reduce_scatter_single(out, send, op, group, async_op=True)
    else:
        work = dist.reduce_scatter(out, list(send.split(splits)), op, group, async_op=True)
    _finish(work, send, group)
    return out


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """The backend's own all-reduce, in place."""
    watch.begin()
    _finish(dist.all_reduce(tensor, op, group, async_op=True), tensor, group)


def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """What the member number `root` of the group has, in place."""
    watch.begin()
    _finish(dist.broadcast(tensor, group_src=root, group=group, async_op=True), tensor, group)


def _at(tensor: Tensor, block: Block) -> Tensor:
    """The block's view of a contiguous tensor; as_strided counts from the storage, not the tensor."""
    return tensor.as_strided(block.sizes, block.src_strides, tensor.storage_offset() + block.src_offset)


def _in_order(pieces: Sequence[tuple[int, Block]], numel: int) -> bool:
    """Whether the pieces are the first elements of one tensor, already in the order of the result."""
    offset = 0
    for i, b in pieces:
        flat = strides(b.sizes)
        if i != pieces[0][0] or not b.src_offset == b.dst_offset == offset:
            return False
        if b.src_strides != flat or b.dst_strides != flat:
            return False
        offset += b.numel
    return offset == numel


def _cat_dim(pieces: Sequence[tuple[int, Block]], numel: int) -> int | None:
    """The dim along which the pieces, in order, are a concatenation; None when they aren't one."""
    blocks = [block for _, block in pieces]
    first = blocks[0]
    if any(len(block.sizes) != len(first.sizes) for block in blocks):
        return None
    for dim in range(len(first.sizes)):
        length = sum(block.sizes[dim] for block in blocks)
        whole = (*first.sizes[:dim], length, *first.sizes[dim + 1 :])
        stride = strides(whole)
        if (
            math.prod(whole) == numel
            and first.dst_offset == 0
            and all(block.dst_strides == stride for block in blocks)
            and all(
                (*b.sizes[:dim], *b.sizes[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :]) for b in blocks
            )
            and all(b.dst_offset == a.dst_offset + a.sizes[dim] * stride[dim] for a, b in pairwise(blocks))
        ):
            return dim
    return None
