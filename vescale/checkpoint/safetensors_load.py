"""`vs.checkpoint.load_safetensors`: other people's models, straight into the layouts of a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError, CheckpointError, explain
from ..spmd.dtensor import DTensor
from ..spmd.layout import Layout
from ..spmd.mesh import Mesh
from ..spmd.plan import Plan
from .files import damaged
from .safetensors_files import Entry, Rename, find_files, read_header, renamed
from .together import Together


def load_safetensors(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    plan: Plan,
    *,
    rename: Rename = None,
    dtype: torch.dtype | None = None,
) -> dict[str, DTensor]:
    """The tensors of safetensors files by name, as DTensors in the plan's layouts at rest.

        load_safetensors : (files, plan) -> {name: DTensor}

    `paths` is a file, several, an index (`model.safetensors.index.json`), or a directory with either. A rank
    reads the headers, and of the data the bytes of its own shards; no rank sends anything. A shard that
    is not contiguous in the file is read run by run. With `plan.fsdp` the parameters of a bucket share one
    buffer, and are read into it.

    `rename` maps names in the files to names of parameters, those that the plan's rules are about: a function
    (None leaves a tensor out), or `{regex: replacement}`. The dtype is the file's; `dtype` casts
    floating-point tensors to another, each as it is read.

    Every rank of the plan's mesh makes this call, and an error is the same on all: CheckpointError, naming
    the file, for one that is missing, cut short or no safetensors file; ArgumentError for two tensors
    of one name; PlanError as `plan.resolve` does.

    >>> import tempfile, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"tp": 2}), params={"w": vs.P(tp=vs.Shard(0))})
    >>> with tempfile.TemporaryDirectory() as root:
    ...     vs.checkpoint.save_safetensors({"model.w": torch.arange(6.0).view(2, 3)}, root)
    ...     params = load_safetensors(root, plan, rename={r"model\\.(.*)": r"\\1"})
    >>> params["w"].to_local(1)
    tensor([[3., 4., 5.]])
    """
    mesh = plan.hosted("vs.checkpoint.load_safetensors")
    ranks = Together(mesh, f"vs.checkpoint.load_safetensors({paths!r}, ..)")
    params: dict[str, DTensor] = {}

    def read() -> None:
        entries = _entries(paths, rename)
        shapes = {name: _abstract(entry, dtype) for name, entry in entries.items()}
        resolved = plan.resolve_leaves(list(shapes), list(shapes.values()))
        moved = {name for bucket in resolved.buckets for name in bucket.names}
        for one in resolved:
            params[one.path] = _empty(mesh, one.rest, shapes[one.path].dtype, hollow=one.path in moved)
        if plan.fsdp:
            params.update(plan.fsdp.store(resolved.buckets, params))
        for name, entry in entries.items():
            try:
                for rank, piece in zip(mesh.local_ranks, params[name].locals, strict=True):
                    _fill(piece, entry, params[name].layout, rank)
            except OSError as error:
                raise damaged(f"tensor {name!r}: {error}", entry.file) from None

    with torch.no_grad():
        ranks.all("read", read)
    return params


def _entries(paths: Any, rename: Rename) -> dict[str, Entry]:
    """The tensors that are wanted, by their new names."""
    found: dict[str, Entry] = {}
    for file, promised in find_files(paths).items():
        for name, entry in read_header(file, promised).items():
            if name in found:
                raise CheckpointError(
                    explain(
                        f"tensor {name!r} in {found[name].file.name} and in {file.name}",
                        where=file.parent,
                        rule="a tensor is in one of the files",
                        remedy="pass the files of one model",
                    )
                )
            found[name] = entry
    return {new: found[name] for new, name in renamed(list(found), rename).items()}


def _abstract(entry: Entry, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            explain(
                f"dtype={dtype!r}",
                where="vs.checkpoint.load_safetensors",
                rule="dtype is a floating-point type, for the tensors that are of one",
                remedy="leave it out, and cast afterwards",
            )
        )
    cast = dtype is not None and entry.dtype.is_floating_point
    return torch.empty(entry.shape, dtype=dtype if cast else entry.dtype, device="meta")


def _empty(mesh: Mesh, layout: Layout, dtype: torch.dtype, hollow: bool) -> DTensor:
    """A DTensor without values; a hollow one has no memory either: it will get its place in a buffer."""
    pieces = []
    for rank in mesh.local_ranks:
        shape = () if hollow else layout.local_shape(rank)
        piece = torch.empty(shape, dtype=dtype, device=mesh.device)
        pieces.append(piece.expand(layout.local_shape(rank)) if hollow else piece)
    return DTensor(pieces, mesh, layout)


def _fill(piece: Tensor, entry: Entry, layout: Layout, rank: int) -> None:
    """Read the runs of a file that are a rank's elements, in the order in which it holds them."""
    direct = piece.dtype == entry.dtype and piece.device.type == "cpu" and piece.is_contiguous()
    flat = piece.view(-1) if direct else torch.empty(piece.numel(), dtype=entry.dtype)
    entry.read(layout.regions(rank), flat)
    if not direct:
        piece.copy_(flat.view(piece.shape))
