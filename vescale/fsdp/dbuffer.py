"""DBuffer: the memory of one bucket on the ranks of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.layout import Layout
from ..spmd.mesh import Mesh
from ..spmd.redistribute import redistribute
from ..spmd.tensor_group import TensorGroup
from .bucket import Address, Bucket, in_shard, in_whole
from .chains import pending
from .memory import pack, shard_of, views


class DBuffer(TensorGroup):
    """The parameters of a bucket in one flat shard on each rank and, while gathered, one whole buffer.

        shards    rank 0  [ w1 w1 w2 ]    rank 1  [ w2 w2 b  ]      members: RaggedShard DTensors, views
        whole     [ w1 w1 w2 w2 w2 b ]  on both                     gathered: views in the layout in use

    Members are views at planned addresses, so that a gather is one all-gather of shards, without a copy
    before or after, and an operation on the group one call on the shard. Made by `of`.

    >>> import vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> plan = vs.Plan(mesh, fsdp=vs.FSDP("dp"))
    >>> params = vs.distribute({"w": torch.arange(8.0).view(4, 2), "b": torch.ones(8)}, plan)
    >>> (bucket,) = plan.resolve(params).buckets
    >>> buffer = DBuffer.of(bucket, params)
    >>> buffer.all_gather()["w"].to_local(0)
    tensor([[0., 1.],
            [2., 3.],
            [4., 5.],
            [6., 7.]])
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, shards: list[torch.Tensor]) -> None:
        self.bucket, self.shards, self.mesh = bucket, shards, mesh
        self.wholes: list[torch.Tensor] | None = None
        super().__init__(self._views(shards, in_shard, bucket.rest))

    @classmethod
    def of(cls, bucket: Bucket, tensors: Mapping[str, DTensor]) -> DBuffer:
        """The buffer that these tensors lie in; those that lie elsewhere are copied into a new one.

        Tensors are those of the bucket's names, in its layouts at rest. Raises ArgumentError otherwise.
        """
        for name, layout in zip(bucket.names, bucket.rest, strict=True):
            tensor = tensors.get(name)
            if not isinstance(tensor, DTensor) or tensor.layout is not layout:
                raise ArgumentError(
                    explain(
                        f"{name}: {tensor!r}" if tensor is not None else f"no tensor {name!r}",
                        where=f"DBuffer of {bucket.label}",
                        rule=f"it has the bucket's tensors at rest, this one as {layout.spec}",
                        remedy="vs.distribute(params, plan), or redistribute it",
                    )
                )
        members = [tensors[name] for name in bucket.names]
        mesh = members[0].mesh
        shards = [
            shard_of(bucket, rank)(*(tensor.locals[place] for tensor in members))
            for place, rank in enumerate(mesh.local_ranks)
        ]
        return cls(bucket, mesh, shards)

    @classmethod
    def placed(cls, bucket: Bucket, tensors: Mapping[str, DTensor]) -> DBuffer:
        """A new buffer with a copy of these tensors."""
        members = [tensors[name] for name in bucket.names]
        mesh = members[0].mesh
        size = bucket.plan.shard_size
        shards = [
            pack(in_shard(bucket, rank), [tensor.locals[place] for tensor in members], size)
            for place, rank in enumerate(mesh.local_ranks)
        ]
        return cls(bucket, mesh, shards)

    # Moving.

    def all_gather(self) -> dict[str, DTensor]:
        """The members in the layout and dtype in use, views of the whole buffer: one all-gather, or none.

        Where that is another dtype than the one at rest the shard is cast first, one copy.
        """
        if self.wholes is None:
            dtype = self.bucket.gather_dtype
            self.wholes = self._moved([shard.to(dtype) for shard in self.shards], "shard", "whole")
        return self._views(self.wholes, in_whole, self.bucket.run)

    def release(self) -> None:
        """Give the whole buffer back; views of it that are held keep it alive."""
        self.wholes = None

    def contributions(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Zeros of the size of the whole buffer, one for each rank that lives here: for `reduce_scatter`."""
        (size,) = self.bucket.shape
        return [shard.new_zeros(size, dtype=dtype or self.bucket.dtype) for shard in self.shards]

    def places(self, wholes: list[torch.Tensor]) -> dict[str, DTensor]:
        """Views of whole buffers of contributions: the members in the layout in use, with sums pending."""
        axes = (*self.bucket.replicas, self.bucket.axis)
        return self._views(wholes, in_whole, [pending(layout, axes) for layout in self.bucket.run])

    def reduce_scatter(self, wholes: list[torch.Tensor]) -> DBuffer:
        """The sum over the ranks of whole buffers of contributions, as a DBuffer: each rank its shard.

        Over a replica axis the smaller piece is then all-reduced. The buffers, one for each rank that
        lives here, are what is sent: nothing is copied first.
        """
        for whole in wholes:
            if tuple(whole.shape) != self.bucket.shape:
                raise ArgumentError(
                    explain(
                        f"a buffer of shape {tuple(whole.shape)}",
                        where=f"reduce_scatter of {self.bucket.label}",
                        rule=f"the whole buffer is flat, {self.bucket.shape}",
                        remedy="write the gradients into views of such a buffer",
                    )
                )
        return DBuffer(self.bucket, self.mesh, self._moved(wholes, "partial", "shard"))

    def _moved(self, buffers: list[torch.Tensor], here: str, there: str) -> list[torch.Tensor]:
        abstract = self.mesh.abstract
        return redistribute(
            buffers, self.bucket.flat(abstract, here), self.bucket.flat(abstract, there), self.mesh
        )

    # The group, one call a shard.

    def zero_(self) -> DBuffer:
        """Every element becomes 0."""
        for shard in self.shards:
            shard.zero_()
        return self

    def scale_(self, factor: float) -> DBuffer:
        """Every element is multiplied by `factor`."""
        for shard in self.shards:
            shard.mul_(factor)
        return self

    def add_(self, other: Any, alpha: float = 1.0) -> DBuffer:
        """Grows by `alpha` times a buffer of the same bucket, or a group of the same tensors."""
        if isinstance(other, DBuffer) and other.bucket is self.bucket:
            for shard, more in zip(self.shards, other.shards, strict=True):
                shard.add_(more, alpha=alpha)
        else:
            super().add_(other, alpha)
        return self

    def cast(self, dtype: torch.dtype) -> TensorGroup:
        """The members in another dtype, views of one new shard: one call a shard."""
        shards = [shard.to(dtype, copy=True) for shard in self.shards]
        return TensorGroup(self._views(shards, in_shard, self.bucket.rest))

    def _views(
        self,
        buffers: Sequence[torch.Tensor],
        where: Callable[[Bucket, int], Sequence[Address]],
        layouts: Sequence[Layout],
    ) -> dict[str, DTensor]:
        """The members in buffers, one for each rank that lives here."""
        ranks = zip(self.mesh.local_ranks, buffers, strict=True)
        pieces = [views(where(self.bucket, rank))(buffer) for rank, buffer in ranks]
        return {
            name: DTensor([mine[index] for mine in pieces], self.mesh, layout)
            for index, (name, layout) in enumerate(zip(self.bucket.names, layouts, strict=True))
        }
