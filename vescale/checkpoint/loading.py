"""`vs.checkpoint.load`, and trees that say what to load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from .. import _tree
from .._errors import ArgumentError, CheckpointError, explain
from ..spmd.dtensor import DTensor
from ..spmd.mesh import Mesh
from ..spmd.plan import Plan
from .contents import Leaf, check_paths, fresh, is_abstract, memory, misfit, restored
from .directories import destination
from .storage import Reader
from .together import Together, mesh_of


def load(tree: Any, path: str | os.PathLike, *, in_place: bool = False, mesh: Mesh | None = None) -> Any:
    """The values of a checkpoint, in a tree of the structure, layouts, shapes and dtypes of `tree`.

        load : (tree, path) -> tree

    The mesh, the placements, the blocks and the number of ranks may be others than when it was saved. A rank
    reads what its own pieces need. `tree` may be part of what was saved, is left as it is, and needs no
    values: `abstract` makes one that takes no memory. Plain tensors come back as plain tensors (of the meta
    device: on the CPU), generators as new ones, numbers as numbers. With `in_place` the values go into
    the memory of `tree`, such as a `DBuffer`'s, and its tensors are returned.

    Every rank of the mesh of the DTensors makes this call, in trees without DTensors every process; `mesh`
    says another. Whatever fails, on one rank or more, is one error on all of them, and then nothing
    was loaded: CheckpointError, naming tensor and file, for a file that is not as it was written or
    lacks a tensor, and for a tensor of another shape or dtype; ArgumentError for a leaf that can't be loaded.
    """
    paths, leaves, spec = _tree.flatten_with_path(tree)
    mesh = mesh_of(leaves, mesh)
    ranks = Together(mesh, f"vs.checkpoint.load(.., {str(path)!r})")
    reader = Reader("")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    forms: list[Tensor | None] = []

    def read() -> None:
        check_paths(paths)
        reader.reset(destination(path))
        metadata = reader.read_metadata()
        wanted = [Leaf.of(where, leaf) for where, leaf in zip(paths, leaves, strict=True)]
        _check(wanted, reader)
        if in_place:
            _check_memory(paths, leaves)
        make = memory if in_place else fresh
        forms.extend(make(leaf) for leaf in leaves)
        tensors = {where: form for where, form in zip(paths, forms, strict=True) if form is not None}
        planner.set_up_planner(tensors, metadata)
        plan = planner.create_local_plan()
        if in_place:
            reader.check(plan)
        else:
            reader.read_data(plan, planner)

    def write() -> None:
        reader.read_data(planner.create_local_plan(), planner)

    with torch.no_grad():
        ranks.all("read", read)
        if in_place:  # everything has been read once, on all ranks
            ranks.all("write", write)
    loaded = [
        restored(leaf, form, reader.leaves[where], in_place)
        for where, leaf, form in zip(paths, leaves, forms, strict=True)
    ]
    return _tree.unflatten(spec, loaded)


def abstract(tree: Any, plan: Plan) -> Any:
    """DTensors without values or memory, in the layouts at rest that a plan gives parameters.

        abstract : (tree of tensors, plan) -> tree of DTensors whose pieces are on the meta device

    Of the tensors only shapes and dtypes count; a module made `with torch.device("meta")` has such. An
    optimizer's `init` makes abstract state of them. Raises PlanError as `plan.resolve` does.

    >>> import vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"dp": 2}), params={"w": vs.P(dp=vs.Shard(0))})
    >>> shapes = abstract({"w": torch.empty(4, 2, device="meta")}, plan)
    >>> shapes["w"].locals[0]
    tensor(..., device='meta', size=(2, 2))
    """
    mesh = plan.hosted("vs.checkpoint.abstract")
    leaves, spec = _tree.flatten(tree)

    def empty(leaf: Tensor, entry: Any) -> DTensor:
        shapes = [entry.rest.local_shape(rank) for rank in mesh.local_ranks]
        pieces = [torch.empty(shape, dtype=leaf.dtype, device="meta") for shape in shapes]
        return DTensor(pieces, mesh, entry.rest)

    resolved = plan.resolve(tree)
    return _tree.unflatten(spec, [empty(leaf, entry) for leaf, entry in zip(leaves, resolved, strict=True)])


def _check(wanted: list[Leaf], reader: Reader) -> None:
    faults = [fault for leaf in wanted if (fault := misfit(leaf, reader.leaves))]
    if faults:
        raise CheckpointError(
            explain(
                "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else ""),
                where=Path(reader.path),
                rule="what is loaded was saved under the same path, in the same shape and dtype",
                remedy="load into a tree like the one that was saved, and convert it afterwards",
            )
        )


def _check_memory(paths: list[str], leaves: list[Any]) -> None:
    for path, leaf in zip(paths, leaves, strict=True):
        if is_abstract(leaf):
            raise ArgumentError(
                explain(
                    "a tensor without memory, on the meta device",
                    where=path,
                    rule="in_place writes to the tensors that are given",
                    remedy="leave in_place out: new tensors are made",
                )
            )
        # Of a DTensor such a piece is replaced.
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and _overlaps(leaf):
            raise ArgumentError(
                explain(
                    f"an expanded tensor, of shape {tuple(leaf.shape)} and strides {leaf.stride()}",
                    where=path,
                    rule="in_place writes to the tensors that are given: each element has its own memory",
                    remedy="clone() it, or leave in_place out: new tensors are made",
                )
            )


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
