"""Memory of a bucket on one rank: the flat shard behind its pieces, views of buffers, writes into them.

Each function is bound to a bucket and a rank once, and then runs at every step: a few pointer
comparisons and views. Only `shard_of` may copy, where pieces have left their buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._compat import FakeTensor
from .bucket import Address, Bucket, in_shard, in_whole

Tensor = torch.Tensor


class Copies:
    """How many times the pieces of each bucket had left their buffer and were packed anew."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, label: str) -> None:
        self.counts[label] = self.counts.get(label, 0) + 1


packed = Copies()


def shard_of(bucket: Bucket, rank: int) -> Callable[..., Tensor]:
    """Pieces of the parameters -> the flat shard that they are views of.

    When some live elsewhere, after a tree_map or a load, all are copied into a new one, and that is counted.
    """
    places, size = in_shard(bucket, rank), bucket.plan.shard_size
    held = [(index, place.offset) for index, place in enumerate(places) if place.numel]
    item = bucket.dtype.itemsize

    def shard(*pieces: Tensor) -> Tensor:
        if isinstance(pieces[0], FakeTensor):  # has no address: stands for pieces at their places
            return pieces[0].new_empty(1).expand(size)
        if held:
            first, offset = held[0]
            start = pieces[first].data_ptr() - offset * item
            if all(pieces[index].data_ptr() == start + offset * item for index, offset in held):
                storage = pieces[first].untyped_storage()
                begins = start - storage.data_ptr()
                if begins >= 0 and begins + size * item <= storage.nbytes():
                    return pieces[first].as_strided((size,), (1,), begins // item)
            packed.count(bucket.label)
        return pack(places, pieces, size)

    return shard


def pack(places: Sequence[Address], pieces: Sequence[Tensor], size: int) -> Tensor:
    """A new flat buffer with the pieces at their places, zeros between them."""
    flat = pieces[0].new_zeros(size)
    for place, piece in zip(places, pieces, strict=True):
        if place.numel:
            place.view(flat).copy_(piece)
    return flat


def views(places: Sequence[Address]) -> Callable[[Tensor], list[Tensor]]:
    """A flat buffer -> its pieces, as views."""
    return lambda flat: [place.view(flat) for place in places]


def empty_gradients(
    bucket: Bucket, rank: int, dtype: torch.dtype, there: Sequence[int]
) -> Callable[..., Tensor]:
    """-> a buffer for the gradients of the parameters `there`; what they don't fill is zero."""
    places = [in_whole(bucket, rank)[index] for index in there]
    gaps, at = [], 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.numel:
            gaps.append((at, place.offset))
            at = place.offset + place.numel
    (size,) = bucket.shape
    gaps = [(start, stop) for start, stop in [*gaps, (at, size)] if stop > start]

    def make(like: Tensor) -> Tensor:
        flat = like.new_empty(size, dtype=dtype)
        for start, stop in gaps:
            flat[start:stop].zero_()
        return flat

    return make


class Write:
    """(buffer, gradient) -> [buffer], with the gradient at its place, in the buffer's dtype."""

    def __init__(self, place: Address) -> None:
        self.place = place

    def __call__(self, flat: Tensor, gradient: Tensor) -> list[Tensor]:
        self.place.view(flat).copy_(gradient)
        return [flat]
