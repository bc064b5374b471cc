"""DTensor: a global tensor whose pieces live on the ranks of a mesh.

It lives at the edges of programs and in op-by-op (dynamic) use, never inside a program. To torch it is a
tensor of the global shape; operations on it run through the sharding rules, one op at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _compat
from .._errors import ArgumentError, LayoutError, explain
from .agree import digest, exchange, same_on_all
from .chunks import Chunk, chunks
from .layout import Layout, replicated
from .locals import local_slice
from .mesh import Mesh
from .mesh_order import from_mesh_order, mesh_order, to_torch_placement
from .placements import P, Partial, Placement, RaggedShard
from .redistribute import redistribute
from .regions import strides

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


class DTensor(Tensor):
    """A tensor of global shape, dtype and device, whose pieces are on the ranks of `mesh`.

    Made by `distribute_tensor`, `from_local` and programs. `layout` says which elements each rank
    holds; this process holds those of `mesh.local_ranks`.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"dp": 2}, backend="simulated")
    >>> x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, P(dp=Shard(0)))
    >>> x
    DTensor(shape=(3, 2), dtype=float32, P(dp=Shard(0)) on Mesh(dp=2, simulated on cpu))
    >>> x.to_local(rank=1)
    tensor([[4., 5.]])
    >>> x.redistribute(P(dp=Shard(1))).to_local(rank=1)
    tensor([[1.],
            [3.],
            [5.]])
    """

    mesh: Mesh
    layout: Layout  # pyright: ignore[reportIncompatibleVariableOverride] - torch's is strided or sparse
    _locals: list[Tensor]  # one for each of mesh.local_ranks, never on a tape of their own

    __slots__ = ("_locals", "layout", "mesh")
    __torch_function__ = _compat.disabled_torch_function  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls: type[DTensor],
        locals: Sequence[Tensor],
        mesh: Mesh,
        layout: Layout,
        requires_grad: bool = False,
    ) -> DTensor:
        if not locals:
            raise ArgumentError(
                explain(
                    f"a DTensor in a process that has no rank in {mesh}",
                    rule="a process holds the pieces of its ranks",
                    remedy="make DTensors where mesh.local_ranks is not empty",
                )
            )
        dtype = locals[0].dtype
        self = _compat.make_wrapper(cls, layout.shape, dtype, mesh.device, requires_grad)
        self.mesh, self.layout = mesh, layout
        self._locals = list(locals)
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOCAL_OPS and isinstance(args[0], DTensor):
            x = args[0]
            pieces = [func(piece, *args[1:], **kwargs) for piece in x._locals]
            return DTensor(pieces, x.mesh, x.layout)
        from .program import dispatch  # it speaks of DTensors itself

        return dispatch.run(func, args, kwargs)

    @property
    def locals(self) -> list[Tensor]:
        """The pieces of `mesh.local_ranks`, in that order: this DTensor's own memory."""
        return self._locals

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement an axis of the mesh, split in the order of the mesh as torch does."""
        return mesh_order(self.layout)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's."""
        return self.mesh.device_mesh

    def to_local(self, rank: int | None = None) -> Tensor:
        """What this process's rank holds; on a simulated mesh say which rank.

        The result is the DTensor's own memory. Raises ArgumentError for a rank that is not here, and where
        a gradient would have to flow through: what a replicated piece's gradient means depends on how the
        ranks use it.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            raise ArgumentError(
                explain(
                    "to_local of a tensor that requires grad",
                    rule="gradients flow through global values",
                    remedy="use x.detach().to_local(), or keep computing on the DTensor",
                )
            )
        here = self.mesh.local_ranks
        if rank is None:
            if len(here) == 1:
                return self._locals[0]
            raise ArgumentError(
                explain(
                    "to_local() on a simulated mesh",
                    rule=f"this process hosts {len(here)} ranks",
                    remedy="say which: to_local(rank=0)",
                )
            )
        if rank not in here:
            raise ArgumentError(
                explain(
                    f"to_local(rank={rank})",
                    rule=f"this process hosts rank {', '.join(map(str, here))} of {self.mesh}",
                    remedy="ask for one of these, or use full_tensor()",
                )
            )
        return self._locals[here.index(rank)]

    def full_tensor(self) -> Tensor:
        """The global value as a plain tensor, equal on all ranks. One gather or reduction."""
        return _Full.apply(self)  # pyright: ignore[reportReturnType] - apply is untyped

    def redistribute(
        self,
        placements: P | DeviceMesh | Mesh | None = None,
        torch_placements: Sequence[Any] | None = None,
    ) -> DTensor:
        """The same global value in another layout: `x.redistribute(P(dp=Shard(0)))`.

        Axes that `P` doesn't name are replicated. torch's form `(device_mesh, placements)`, one
        placement an axis in the order of the mesh, is taken too. The gradient comes back in this tensor's
        layout. Where nothing has to move, the result may share memory with this tensor.
        """
        spec, me = placements, _compat.base_tensor(self)  # torch.func's wrappers hide who it is
        if not isinstance(spec, P):
            if torch_placements is None or not _is_mesh(spec, me.mesh):
                raise ArgumentError(
                    explain(
                        f"redistribute({placements!r}, {torch_placements!r})",
                        rule="a layout is P(axis=placement), or a placement for each axis of this mesh",
                        remedy="for example x.redistribute(vs.P(dp=vs.Shard(0)))",
                    )
                )
            spec = from_mesh_order(me.mesh.abstract, torch_placements)
        layout = Layout(me.mesh.abstract, spec, me.layout.shape)
        return _Redistribute.apply(self, layout)  # pyright: ignore[reportReturnType]

    def to_torch(self) -> torch_tensor.DTensor:
        """The same tensor as torch's DTensor, a leaf over the same local memory; processes only.

        Raises LayoutError for a layout that torch's placements cannot say.
        """
        placements = [to_torch_placement(p, self.layout) for p in self.placements]
        theirs = torch_tensor.DTensor.from_local(
            self._locals[0].detach(),
            self.mesh.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(self.layout.shape),
            stride=strides(self.layout.shape),
        )
        theirs.requires_grad_(self.requires_grad)
        return theirs

    def donate(self, where: str) -> None:
        """Give up the pieces: using this tensor from now on is an error that says `where` they went."""
        self._locals = _Gone(where)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # Says nothing of values: the whole one would take communication, the local one is to_local's.
        dtype = str(self.dtype).removeprefix("torch.")
        grad = ", requires_grad=True" if self.requires_grad else ""
        shape = self.layout.shape
        return f"DTensor(shape={shape}, dtype={dtype}, {self.layout.spec} on {self.mesh}{grad})"

    # torch.distributed.checkpoint's protocol: which boxes of the global tensor are here.

    def _chunks(self) -> list[Chunk]:
        if self.layout.partials:
            raise LayoutError(
                explain(
                    f"a tensor with pending reductions, {self.layout.spec}",
                    where="checkpoint",
                    rule="a checkpoint holds values, not contributions",
                    remedy="x.redistribute(P(...)) to a layout without Partial first",
                )
            )
        return [chunk for rank in self.mesh.local_ranks for chunk in chunks(self.layout, rank)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in self._chunks()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        # One item a box: replicas on simulated ranks are dropped here, on other processes by DCP.
        boxes = {(chunk.offsets, chunk.sizes): chunk for chunk in reversed(self._chunks())}
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, sizes in boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        found = self._chunks()
        # In a load the hint is the entry of our chunk list, which tells simulated replicas apart;
        # in a save it counts the chunks of all processes, and any replica will do.
        hinted = found[index.index :][:1] if index.index is not None else []
        chunk = next(c for c in [*hinted, *found] if c.offsets == tuple(index.offset))
        where = self.mesh.local_ranks.index(chunk.rank)
        # A strided piece is made contiguous for good: a load writes to it through the view.
        self._locals[where] = self._locals[where].contiguous()
        return chunk.of(self._locals[where])


class _Gone(list):
    """The pieces of a tensor that was donated: any use of them is an error."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _refuse(self, *_: Any) -> Any:
        raise ArgumentError(
            explain(
                "a tensor whose memory was given away",
                where=self.where,
                rule="a donated argument is used up by the call",
                remedy="use what the call returned, or leave the argument out of donate=",
            )
        )

    __iter__ = __getitem__ = __len__ = _refuse  # type: ignore[assignment]


# Ops that do to every piece, contributions included, what they do to the whole.
_LOCAL_OPS = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.zeros_like.default,
}


class _Redistribute(torch.autograd.Function):
    """Identity on the global value; so is its gradient, which comes back in the input's splits."""

    @staticmethod
    def forward(x: DTensor, layout: Layout) -> DTensor:
        return DTensor(redistribute(x._locals, x.layout, layout, x.mesh), x.mesh, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        layout = _compat.base_tensor(inputs[0]).layout
        ctx.spec = P.of((a, p) for a, p in layout.spec.items() if not isinstance(p, Partial))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_ours = isinstance(_compat.base_tensor(grad), DTensor)
        return DTensor.redistribute(grad, ctx.spec) if is_ours else grad, None


class _Full(torch.autograd.Function):
    """The global value; a gradient of it is a global value too, equal on all ranks."""

    @staticmethod
    def forward(x: DTensor) -> Tensor:
        whole = replicated(x.mesh.abstract, x.layout.shape)
        full = redistribute(x._locals, x.layout, whole, x.mesh)[0]
        return full.view_as(full) if any(full is piece for piece in x._locals) else full

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        whole = _compat.base_tensor(inputs[0])
        ctx.mesh, ctx.layout = whole.mesh, whole.layout

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = P.of((a, p) for a, p in ctx.layout.spec.items() if not isinstance(p, Partial))
        return place(grad, ctx.mesh, Layout(ctx.mesh.abstract, spec, ctx.layout.shape))


class _Place(torch.autograd.Function):
    """A global value that all ranks have, cut up; its gradient is a global value again."""

    @staticmethod
    def forward(value: Tensor, mesh: Mesh, layout: Layout) -> DTensor:
        return DTensor([local_slice(value, layout, rank).clone() for rank in mesh.local_ranks], mesh, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_ours = isinstance(_compat.base_tensor(grad), DTensor)
        return DTensor.full_tensor(grad) if is_ours else grad, None, None


def place(value: Tensor, mesh: Mesh, layout: Layout) -> DTensor:
    """A global value that all ranks have, in a layout; nothing is checked, and gradients flow back."""
    return _Place.apply(value, mesh, layout)  # pyright: ignore[reportReturnType]


def distribute_tensor(tensor: Tensor, mesh: Mesh, placements: P) -> DTensor:
    """The global value `tensor`, equal on all ranks, cut up over `mesh`.

        distribute_tensor : global -> DTensor

    In processes the ranks compare checksums first. No rank sends anything else: each keeps its own
    part of what it has, in memory of its own.

    Raises ConsistencyError when ranks have different values, LayoutError when the placements don't fit.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"tp": 2}, backend="simulated")
    >>> distribute_tensor(torch.arange(4), mesh, P(tp=Shard(0))).to_local(rank=0)
    tensor([0, 1])
    """
    if isinstance(tensor, DTensor):
        raise ArgumentError(
            explain(
                f"{tensor!r}",
                where="distribute_tensor",
                rule="distribute_tensor takes a plain tensor, the global value",
                remedy="to change a DTensor's layout, use x.redistribute(P(...))",
            )
        )
    layout = Layout(mesh.abstract, placements, tuple(tensor.shape))
    if not mesh.is_simulated and mesh.local_ranks:
        same_on_all(mesh, "distribute_tensor", {"the tensor": digest(tensor)})
    value = tensor.detach().to(mesh.device)
    pieces = [
        local_slice(value, layout, rank).clone(memory_format=torch.contiguous_format)
        for rank in mesh.local_ranks
    ]
    return DTensor(pieces, mesh, layout, tensor.requires_grad)


def from_local(
    tensors: Tensor | Sequence[Tensor],
    mesh: Mesh,
    placements: P,
    shape: Sequence[int] | None = None,
) -> DTensor:
    """The DTensor whose pieces the ranks already hold.

        from_local : local -> DTensor

    In a process: this rank's piece. On a simulated mesh: a list, one tensor a rank, or one tensor
    when nothing is split. The global shape is what the pieces add up to; a RaggedShard over several
    dims needs `shape`. Pieces are kept, not copied. Ranks compare shapes and dtypes through the store, so
    every rank of the mesh makes this call.

    Raises ArgumentError, the same on all ranks, when a rank's piece is not what the layout gives it.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"dp": 2}, backend="simulated")
    >>> from_local([torch.zeros(2, 3), torch.ones(1, 3)], mesh, P(dp=Shard(0))).shape
    torch.Size([3, 3])
    """
    pieces = _pieces(tensors, mesh)
    mine = [[list(piece.shape), str(piece.dtype).removeprefix("torch.")] for piece in pieces]
    where = f"from_local(..., {placements})"
    records = mine if mesh.is_simulated else [r[0] for r in exchange(mesh, where, mine)]
    shapes, dtypes = [tuple(r[0]) for r in records], [r[1] for r in records]
    odd = [rank for rank, dtype in enumerate(dtypes) if dtype != dtypes[0]]
    if odd:
        raise ArgumentError(
            explain(
                f"{dtypes[odd[0]]} on rank {', '.join(map(str, odd))}, {dtypes[0]} on rank 0",
                where=where,
                rule="all pieces have one dtype",
                remedy="cast before from_local",
            )
        )
    if shape is None:
        shape = _global_shape(mesh, placements, shapes, where)
    layout = Layout(mesh.abstract, placements, tuple(shape))
    wrong = [rank for rank, found in enumerate(shapes) if found != layout.local_shape(rank)]
    if wrong:
        listed = [f"rank {r} has {shapes[r]}, not {layout.local_shape(r)}" for r in wrong[:8]]
        raise ArgumentError(
            explain(
                f"pieces that don't make up {tuple(shape)}: {'; '.join(listed)}",
                where=where,
                rule="a piece has the shape that the placements give its rank",
                remedy="give the global shape=, or a RaggedShard with the rows of each rank",
            )
        )
    return DTensor([piece.detach() for piece in pieces], mesh, layout)


def _pieces(tensors: Tensor | Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    pieces = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if any(isinstance(piece, DTensor) for piece in pieces):
        found, remedy = "a DTensor", "pass x.to_local(), or use x.redistribute(P(...))"
    elif any(piece.requires_grad for piece in pieces):
        found, remedy = "a piece that requires grad", "detach it: no gradient flows back to it"
    elif mesh.is_simulated and len(pieces) == 1 and mesh.size > 1:
        # One tensor for all ranks; replicas are memory of their own. Splits fail on their shape.
        return [pieces[0], *(pieces[0].clone() for _ in range(mesh.size - 1))]
    elif len(pieces) != len(mesh.local_ranks):
        found = f"{len(pieces)} pieces for {len(mesh.local_ranks)} ranks"
        remedy = "pass one piece for each of mesh.local_ranks"
    else:
        return pieces
    rule = "from_local takes one plain tensor for each rank that this process hosts"
    raise ArgumentError(explain(found, where="from_local", rule=rule, remedy=remedy))


def _global_shape(mesh: Mesh, spec: P, shapes: Sequence[tuple[int, ...]], where: str) -> tuple[int, ...]:
    """What the pieces add up to, dim by dim, over the ranks along the axes that split it."""
    ranks = {len(shape) for shape in shapes}
    ragged = [p for _, p in spec.items() if isinstance(p, RaggedShard)]
    if len(ranks) > 1 or any(len(p.dims) > 1 for p in ragged):
        raise ArgumentError(
            explain(
                f"pieces of shapes {', '.join(map(str, dict.fromkeys(shapes)))}",
                where=where,
                rule="the global shape is the sum of the pieces' shapes, dim by dim",
                remedy="give the global shape=",
            )
        )
    total = []
    for dim in range(ranks.pop()):
        along = {
            axis
            for axis, p in spec.items()
            if getattr(p, "dim", None) == dim or (dim == 0 and isinstance(p, RaggedShard))
        }
        total.append(
            sum(
                shape[dim]
                for rank, shape in enumerate(shapes)
                if not any(i for a, i in mesh.abstract.coordinate(rank).items() if a not in along)
            )
        )
    return tuple(total)


def from_torch(tensor: torch_tensor.DTensor) -> DTensor:
    """torch's DTensor as ours, over the same local memory.

    Every rank of its mesh makes this call the first time that the mesh is seen.
    """
    mesh = _meshes.get(tensor.device_mesh)
    if mesh is None:
        mesh = _meshes[tensor.device_mesh] = Mesh.from_device_mesh(tensor.device_mesh)
    layout = Layout(mesh.abstract, from_mesh_order(mesh.abstract, tensor.placements), tuple(tensor.shape))
    return DTensor([tensor.to_local().detach()], mesh, layout, tensor.requires_grad)


_meshes: dict[DeviceMesh, Mesh] = {}


def _is_mesh(candidate: Any, mesh: Mesh) -> bool:
    if isinstance(candidate, DeviceMesh):
        return tuple(candidate.mesh.flatten().tolist()) == mesh.world_ranks
    return candidate is mesh or candidate is None
