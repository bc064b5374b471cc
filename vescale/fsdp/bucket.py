"""Bucket: parameters that move together, and the address of each piece in a rank's shard.

The buffer of a bucket is a flat tensor of `num_shards * shard_size` elements, cut evenly over the axis:
gathering it is an all-gather of that tensor, and reducing a buffer of gradients a reduce-scatter, with
the steps and the bits of any other redistribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from ..spmd.layout import AbstractMesh, Layout
from ..spmd.placements import P, Partial, Shard
from .buffer_plan import BufferPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered and reduced together.

    `names` are in the order of the buffer plan's tensors. `rest` are their layouts at rest, `run` in use.
    `gather_dtype` is what they are gathered in; `replicas` the axis over which shards are equal (HSDP).
    """

    name: str
    axis: str
    replicas: tuple[str, ...]
    names: tuple[str, ...]
    rest: tuple[Layout, ...]
    run: tuple[Layout, ...]
    plan: BufferPlan
    gather_dtype: torch.dtype
    reshard_after_forward: bool
    prefetch: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype at rest."""
        return self.plan.specs[0].dtype

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each name."""
        return {name: number for number, name in enumerate(self.names)}

    @property
    def label(self) -> str:
        """What errors and programs call it."""
        return self.name or "the bucket outside every wrap"

    @property
    def shape(self) -> Shape:
        """The shape of the global buffer: flat."""
        return (self.plan.num_shards * self.plan.shard_size,)

    def flat(self, mesh: AbstractMesh, placement: str) -> Layout:
        """The layout of the buffer as a tensor: "shard", "whole", "pending" over the axis, or "partial" also
        over replicas.

        Over other axes of the mesh buffers differ, in ways that no collective of a bucket looks at.
        """
        spec = {
            "shard": P.of([(self.axis, Shard(0))]),
            "whole": P(),
            "pending": P.of([(self.axis, Partial())]),
            "partial": P.of((axis, Partial()) for axis in (*self.replicas, self.axis)),
        }
        return Layout(mesh, spec[placement], self.shape)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of a rank's shard at rest."""
        return self.plan.shard_size * self.dtype.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.shape[0] * self.gather_dtype.itemsize

    @property
    def padding_nbytes(self) -> int:
        """Bytes of a shard that no parameter fills, of an average rank, rounded up."""
        return -(-self.plan.padding * self.dtype.itemsize // self.plan.num_shards)

    def grouped(self, shards: int, outside: Callable[[Layout], Layout]) -> Bucket:
        """The same buffer in fewer shards, each several neighbours of these; `outside` maps the layouts."""
        size = self.plan.num_shards * self.plan.shard_size // shards
        return replace(
            self,
            rest=tuple(map(outside, self.rest)),
            run=tuple(map(outside, self.run)),
            plan=replace(self.plan, num_shards=shards, shard_size=size),
        )

    def __str__(self) -> str:
        over = f"{self.axis}, replicas over {'+'.join(self.replicas)}" if self.replicas else self.axis
        return (
            f"{f'bucket {self.name}' if self.name else self.label}: {len(self.names)} parameters "
            f"over {over}, "
            f"shard {self.shard_nbytes:,} B of {str(self.dtype).removeprefix('torch.')}, "
            f"gathered {self.gathered_nbytes:,} B, padding {self.padding_nbytes:,} B a rank"
        )


@dataclass(frozen=True, slots=True)
class Address:
    """A piece of a buffer: `shape` at `offset`, contiguous. `numel` may be 0."""

    offset: int
    shape: Shape
    numel: int

    @staticmethod
    def of(offset: int, shape: Shape) -> Address:
        return Address(offset, shape, math.prod(shape))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece as a view of a flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@lru_cache(maxsize=4096)
def in_shard(bucket: Bucket, rank: int) -> tuple[Address, ...]:
    """Where each parameter's piece lies in the shard of `rank` of the mesh."""
    size = bucket.plan.shard_size
    index = bucket.rest[0].mesh.coordinate(rank)[bucket.axis]
    found = []
    for start, layout in zip(bucket.plan.starts, bucket.rest, strict=True):
        shape = layout.local_shape(rank)
        found.append(Address.of(max(start - index * size, 0) if math.prod(shape) else 0, shape))
    return tuple(found)


@lru_cache(maxsize=4096)
def in_whole(bucket: Bucket, rank: int) -> tuple[Address, ...]:
    """Where each parameter lies in the gathered buffer of `rank` of the mesh."""
    return tuple(
        Address.of(start, layout.local_shape(rank))
        for start, layout in zip(bucket.plan.starts, bucket.run, strict=True)
    )
