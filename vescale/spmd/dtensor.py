"""DTensor: a global tensor whose pieces live on the ranks of a mesh.

It lives at the edges of programs and in op-by-op (dynamic) use, never inside a program. To torch it is a
tensor of the global shape; operations on it run through the sharding rules, one op at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _compat
from .._errors import ArgumentError, LayoutError, VescaleError, explain
from .agree import digest, exchange, give_up, same_on_all
from .chunks import Chunk, chunks
from .layout import Layout, replicated
from .locals import in_memory, local_slice
from .mesh import Mesh, make_mesh
from .mesh_order import as_spec, from_mesh_order, to_torch_placement
from .placements import (
    InterleavedShard,
    P,
    Partial,
    Placement,
    RaggedShard,
    Shard,
    StridedRaggedShard,
)
from .redistribute import redistribute, scatter
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
    _copied: tuple[ReferenceType[DTensor], int] | None  # of a view that is a copy: the base, its version

    _kind: Any  # what a program depends on, made when it is asked for: see kinds.py

    __slots__ = ("_copied", "_kind", "_locals", "layout", "mesh")
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
        order = _strides_like(locals[0], layout.shape)
        self = _compat.make_wrapper(cls, layout.shape, order, dtype, mesh.device, requires_grad)
        self.mesh, self.layout = mesh, layout
        _seen.add(mesh)
        self._locals, self._copied, self._kind = list(locals), None, None
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOCAL_OPS and isinstance(args[0], DTensor):
            x = args[0]
            x.check_fresh()
            result = DTensor([func(piece, *args[1:], **kwargs) for piece in x._locals], x.mesh, x.layout)
            if func in _SHARING_OPS:
                result._copied = x._copied
            return result
        from .program import dispatch  # it speaks of DTensors itself

        return dispatch.run(func, args, kwargs)

    @property
    def locals(self) -> list[Tensor]:
        """The pieces of `mesh.local_ranks`, in that order: this DTensor's own memory."""
        return self._locals

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement an axis of the mesh, split in the order of the mesh as torch does."""
        return self.layout.placements

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
        placements: P | Sequence[Any] | DeviceMesh | Mesh | None = None,
        torch_placements: Sequence[Any] | None = None,
    ) -> DTensor:
        """The same global value in another layout: `x.redistribute(P(dp=Shard(0)))`.

        Axes that `P` doesn't name are replicated. A list, one placement an axis in the order of the mesh, is
        taken too, and so is torch's form `(device_mesh, placements)`. The gradient comes back in this
        tensor's layout. In the layout that it has, it is the same memory; else it is memory of its own.
        """
        spec, me = placements, _compat.base_tensor(self)  # torch.func's wrappers hide who it is
        if isinstance(spec, (P, list, tuple)):
            spec = as_spec(me.mesh.abstract, spec)
        else:
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

    def donate(self, path: str, call: str) -> None:
        """Give up the pieces as the argument `path` of `call`: using this tensor from now on is an error."""
        self._locals = _Gone((path, call))

    def norm(
        self,
        p: float | str | None = "fro",
        dim: Any = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The vector norm of order `p`, over all dims or some; matrix norms are in torch.linalg."""
        # torch.norm takes the path of sparse tensors when x.layout is not torch.strided.
        order = 2.0 if p is None or p == "fro" else p
        return torch.linalg.vector_norm(self, order, dim, keepdim, dtype=dtype)  # type: ignore[arg-type]

    # Views that are copies: where the layout of the base did not survive the view.

    @property
    def is_copy(self) -> bool:
        """Whether this is a view of a tensor that still exists, in memory of its own."""
        return self._copied is not None and self._copied[0]() is not None

    def mark_copied(self, base: DTensor) -> None:
        """Say that this is a view of `base`: is it one in memory too?"""
        shared = [
            not own.numel() or own.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
            for own, piece in zip(self._locals, base._locals, strict=True)
        ]
        if base.is_copy:
            self._copied = base._copied
        elif not all(shared):
            self._copied = ref(base), -1 if base.is_inference() else base._version

    def check_fresh(self) -> None:
        """Raises ArgumentError for a view that is a copy, when its base was written since."""
        if self._copied is None:
            return
        base, version = self._copied[0](), self._copied[1]
        if base is not None and version >= 0 and base._version != version:
            raise ArgumentError(
                explain(
                    f"{self!r}, a view of a tensor that was written since",
                    rule=f"a view that the layout {base.layout.spec} doesn't survive is a copy",
                    remedy="take the view again, or clone it before the write",
                )
            )

    def write(self, values: Sequence[Tensor]) -> None:
        """Overwrite the pieces with values of the same shapes, in the memory that they have."""
        for index, (piece, value) in enumerate(zip(self._locals, values, strict=True)):
            # A gradient may come as one element, expanded: nobody else sees that one.
            expanded = any(not stride and size > 1 for stride, size in zip(piece.stride(), piece.shape))
            if expanded and self._base is None:
                self._locals[index] = value.clone()
            else:
                piece.copy_(value)

    # Pickling and copying.

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The pieces of this process's ranks, and the mesh by its axes and ranks: loaded where they live."""
        mesh = self.mesh
        place = mesh.backend, mesh.axis_names, mesh.shape, mesh.world_ranks, str(mesh.device)
        where = (*place, f"{_PROCESS} {id(mesh)}")
        spec = tuple((axis, *_to_plain(placement)) for axis, placement in self.layout.spec.items())
        detached = [piece.detach() for piece in self._locals]
        kind = "parameter" if isinstance(self, torch.nn.Parameter) else ""
        return _load, (detached, where, spec, tuple(self.layout.shape), self.requires_grad, kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise ArgumentError(
                explain(
                    f"a deep copy of {self!r}, the result of an op",
                    rule="a copy has no history: only leaves are copied",
                    remedy="copy x.detach()",
                )
            )
        if id(self) not in memo:
            copied = DTensor([p.clone() for p in self._locals], self.mesh, self.layout, self.requires_grad)
            for name, value in vars(self).items():  # what marks a parameter, among others
                setattr(copied, name, deepcopy(value, memo))
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

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
        boxes = dict.fromkeys((chunk.offsets, chunk.sizes) for chunk in self._chunks())
        if not self.numel():  # there is no box anywhere, and a checkpoint has the tensor all the same
            boxes = {((0,) * self.dim(), tuple(self.shape)): None}
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
        if not self.numel():
            return self._locals[0].new_empty(self.shape)
        found = self._chunks()
        # In a load the hint is the entry of our chunk list, which tells simulated replicas apart;
        # in a save it counts the chunks of all processes, and any replica will do.
        hinted = found[index.index :][:1] if index.index is not None else []
        chunk = next(c for c in [*hinted, *found] if c.offsets == tuple(index.offset))
        where = self.mesh.local_ranks.index(chunk.rank)
        # A strided piece is made contiguous for good: a load writes to it through the view.
        self._locals[where] = self._locals[where].contiguous()
        return chunk.of(self._locals[where])


def _strides_like(piece: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a dense tensor whose dims are ordered in memory as those of `piece`; None: as they come.

    Autograd asks: which formula gives a matmul's gradient, and so its bits, depends on what is transposed.
    """
    if piece.is_contiguous() or piece.dim() != len(shape) or 0 in piece.stride():
        return None
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (piece.stride(dim), -dim)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


class _Gone(list):
    """In the place of the pieces of a donated tensor: (argument path, call). Any use of them is an error."""

    def _refuse(self, *_: Any) -> Any:
        path, call = list.__iter__(self)
        raise ArgumentError(
            explain(
                "a tensor whose memory was given away",
                where=f"argument {path!r} of {call}",
                rule="a donated argument is used up by the call",
                remedy="use what the call returned, or leave the argument out of donate=",
            )
        )

    __iter__ = __getitem__ = __len__ = _refuse  # type: ignore[assignment]


# What programs return.


def wrap(locals: list[Tensor], mesh: Mesh, layout: Layout, dtype: torch.dtype, kind: Any) -> DTensor:
    """A DTensor of pieces that are known to fit: `DTensor(...)` at half the cost. Its mesh is a known one."""
    order = None if locals[0].is_contiguous() else _strides_like(locals[0], layout.shape)
    self = _compat.make_wrapper(DTensor, layout.shape, order, dtype, mesh.device, False)
    self.mesh, self.layout, self._locals, self._copied, self._kind = mesh, layout, locals, None, kind
    return self


def remember(mesh: Mesh) -> None:
    """Count a mesh among those on which this process has made DTensors."""
    _seen.add(mesh)


# Ops that do to every piece, contributions included, what they do to the whole.
_SHARING_OPS = {aten.detach.default, aten.alias.default}
_LOCAL_OPS = {
    *_SHARING_OPS,
    aten.clone.default,
    aten.zeros_like.default,
}


class _Redistribute(torch.autograd.Function):
    """Identity on the global value; so is its gradient, which comes back in the input's splits."""

    @staticmethod
    def forward(x: DTensor, layout: Layout) -> DTensor:
        x.check_fresh()
        pieces = redistribute(x._locals, x.layout, layout, x.mesh)
        # A slice of a replica that could be written would leave replicas that differ.
        return DTensor(pieces if layout is x.layout else _apart(pieces, x), x.mesh, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        layout = _compat.base_tensor(inputs[0]).layout
        ctx.spec = P.of((a, p) for a, p in layout.spec.items() if not isinstance(p, Partial))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_ours = isinstance(_compat.base_tensor(grad), DTensor)
        return DTensor.redistribute(grad, ctx.spec) if is_ours else grad, None


def _apart(pieces: Sequence[Tensor], x: DTensor) -> list[Tensor]:
    """The pieces, copied where they are memory of `x`."""
    taken = {piece.untyped_storage().data_ptr() for piece in x._locals if piece.numel()}
    return [p.clone() if p.numel() and p.untyped_storage().data_ptr() in taken else p for p in pieces]


class _Full(torch.autograd.Function):
    """The global value; a gradient of it is a global value too, equal on all ranks."""

    @staticmethod
    def forward(x: DTensor) -> Tensor:
        x.check_fresh()
        whole = replicated(x.mesh.abstract, x.layout.shape)
        (full,) = _apart(redistribute(x._locals, x.layout, whole, x.mesh)[:1], x)
        return full

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


def distribute_tensor(
    tensor: Tensor, mesh: Mesh, placements: P | Sequence[Any], src_rank: int | None = None
) -> DTensor:
    """The global value `tensor`, equal on all ranks, cut up over `mesh`.

        distribute_tensor : global -> DTensor

    In processes the ranks compare checksums first. No rank sends anything else: each keeps its own
    part of what it has, in memory of its own. With `src_rank` only the value of that rank of the mesh counts;
    the others bring a tensor of the same shape and dtype, and get their parts in one scatter.

    Raises ConsistencyError when ranks have different values, LayoutError when the placements don't fit.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import P, Shard
    >>> mesh = make_mesh({"tp": 2}, backend="simulated")
    >>> distribute_tensor(torch.arange(4), mesh, P(tp=Shard(0))).to_local(rank=0)
    tensor([0, 1])
    """
    try:
        if isinstance(tensor, DTensor):
            raise ArgumentError(
                explain(
                    f"{tensor!r}",
                    where="distribute_tensor",
                    rule="distribute_tensor takes a plain tensor, the global value",
                    remedy="to change a DTensor's layout, use x.redistribute(P(...))",
                )
            )
        layout = Layout(mesh.abstract, as_spec(mesh.abstract, placements), tuple(tensor.shape))
        if src_rank is not None and not 0 <= src_rank < mesh.size:
            raise ArgumentError(
                explain(
                    f"src_rank={src_rank}",
                    where="distribute_tensor",
                    rule=f"the source is one of the {mesh.size} ranks of the mesh",
                    remedy="count ranks within the mesh, from 0",
                )
            )
    except VescaleError as error:
        give_up(mesh, error)  # the others are told, and don't wait
        raise
    value = tensor.detach().to(mesh.device)
    if mesh.is_simulated or not mesh.local_ranks:
        src_rank = None  # this process has the one value
    elif src_rank is None:
        same_on_all(mesh, "distribute_tensor", {"the tensor": digest(tensor)})
    else:
        kind = f"{list(tensor.shape)} of {tensor.dtype}"
        same_on_all(mesh, f"distribute_tensor(..., src_rank={src_rank})", {"shape and dtype": kind})
        return DTensor([scatter(value, layout, mesh, src_rank)], mesh, layout, tensor.requires_grad)
    pieces = [
        local_slice(value, layout, rank).clone(memory_format=torch.contiguous_format)
        for rank in mesh.local_ranks
    ]
    return DTensor(pieces, mesh, layout, tensor.requires_grad)


def from_local(
    tensors: Tensor | Sequence[Tensor],
    mesh: Mesh,
    placements: P | Sequence[Any],
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
    try:
        placements = as_spec(mesh.abstract, placements)
        pieces = _pieces(tensors, mesh)
    except VescaleError as error:
        give_up(mesh, error)  # the others are told, and don't wait
        raise
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
    return DTensor([in_memory(piece.detach()) for piece in pieces], mesh, layout)


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
    ragged = [p for _, p in spec.items() if isinstance(p, (RaggedShard, StridedRaggedShard))]
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
            axis for axis, p in spec.items() if getattr(p, "dim", None) == dim or (dim == 0 and p in ragged)
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

# Pickling. Placements as plain data, so that torch.load needs to trust one function only.

_PROCESS = uuid4().hex
_seen: WeakSet[Mesh] = WeakSet()  # the meshes on which this process has made DTensors


def _to_plain(placement: Placement) -> tuple[Any, ...]:
    values = tuple(getattr(placement, name) for name in placement.__dataclass_fields__)  # type: ignore[attr-defined]
    return (type(placement).__name__, *values)


def _from_plain(name: str, *values: Any) -> Placement:
    if name == "RaggedShard":
        return RaggedShard.from_runs(*values)
    kind = {"Shard": Shard, "InterleavedShard": InterleavedShard, "Partial": Partial}[name]
    return kind(*values)


def _load(
    pieces: list[Tensor],
    where: tuple[Any, ...],
    spec: Sequence[Any],
    shape: tuple[int, ...],
    grad: bool,
    kind: str,
) -> DTensor:
    """The DTensor that was pickled, on this process's mesh of that shape: one in use, else a new one.

    In processes every rank loads what it saved, and where no such mesh is in use all ranks load together.
    """
    backend, names, sizes, ranks, device, token = where
    here = [
        mesh
        for mesh in _seen
        if (mesh.backend, mesh.axis_names, mesh.shape, mesh.world_ranks) == (backend, names, sizes, ranks)
        and str(mesh.device) == device
    ]
    if here:  # the very one, if this process pickled it
        mesh = min(here, key=lambda mesh: f"{_PROCESS} {id(mesh)}" != token)
    elif backend == "simulated" or ranks == tuple(range(len(ranks))):
        mesh = make_mesh(dict(zip(names, sizes)), backend=backend, device=device)
    else:
        raise ArgumentError(
            explain(
                f"a DTensor on the ranks {ranks}",
                where="unpickling",
                rule="a mesh of some ranks is made by the whole world",
                remedy="make that mesh, and a DTensor on it, before loading",
            )
        )
    layout = Layout(mesh.abstract, P.of((axis, _from_plain(*plain)) for axis, *plain in spec), tuple(shape))
    loaded = DTensor(pieces, mesh, layout, grad)
    return torch.nn.Parameter(loaded, grad) if kind else loaded  # type: ignore[return-value]


torch.serialization.add_safe_globals([_load])


def _is_mesh(candidate: Any, mesh: Mesh) -> bool:
    if isinstance(candidate, DeviceMesh):
        return tuple(candidate.mesh.flatten().tolist()) == mesh.world_ranks
    return candidate is mesh or candidate is None
