"""`vs.checkpoint.save` and `async_save`."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, ConsistencyError, explain
from ..spmd.dtensor import DTensor
from ..spmd.mesh import Mesh
from .contents import Leaf, check_paths, digests, is_abstract, saved_form, writes
from .directories import begin, commit, destination, partial, step_path
from .storage import write_index, write_pieces
from .together import Together, mesh_of


def save(
    tree: Any,
    path: str | os.PathLike,
    *,
    step: int | None = None,
    keep: int | None = None,
    mesh: Mesh | None = None,
) -> Path:
    """Save a tree as the directory `path`, or with `step` as `path/step_00000100`; the path it is at.

        save : (tree of leaves, path) -> path

    A leaf is a DTensor in any layout, a plain tensor (the global value, equal on all ranks), a
    `torch.Generator`, or a number, bool or string. Each rank writes its own pieces, replicas once, and no
    rank sends a tensor. The directory appears when everything is on disk: a save that fails or is killed
    leaves what was there before. A checkpoint at the path is replaced, and nothing else is: a file or a
    directory of other things is an error. With `keep`, only the last `keep` steps remain.

    Every rank of the mesh of the DTensors makes this call, in trees without DTensors every process;
    `mesh` says another. What fails on one rank is the same error on all: ArgumentError for a
    leaf that can't be saved, ConsistencyError for a plain leaf that differs between ranks, CheckpointError
    for a file that can't be written.

    >>> import tempfile, vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> w = vs.distribute_tensor(torch.arange(6.0), mesh, vs.P(dp=vs.RaggedShard((0,), (5, 1))))
    >>> with tempfile.TemporaryDirectory() as root:
    ...     path = save({"w": w, "step": 7}, root, step=7)
    ...     loaded = vs.checkpoint.load({"w": torch.empty(6), "step": 0}, path)
    >>> loaded
    {'w': tensor([0., 1., 2., 3., 4., 5.]), 'step': 7}
    """
    return _start(tree, path, step, keep, mesh, "save").result()


def async_save(
    tree: Any,
    path: str | os.PathLike,
    *,
    step: int | None = None,
    keep: int | None = None,
    mesh: Mesh | None = None,
) -> Future[Path]:
    """`save` on a thread: a future of the path, which is there when every rank has written.

    What is saved are the values at the call: a rank first copies what it writes to memory of its own (on
    the CPU), so later writes to the tensors, donation among them, don't matter. Saves of a process run one
    after another, in the order of the calls; wait for one before the next, or their copies add up.

    Errors that depend on the tree alone are raised here, the others by the future's `result()`.
    """
    return _start(tree, path, step, keep, mesh, "async_save")


def _start(
    tree: Any, root: str | os.PathLike, step: int | None, keep: int | None, mesh: Mesh | None, name: str
) -> Future[Path]:
    paths, leaves, _ = _tree.flatten_with_path(tree)
    mesh = mesh_of(leaves, mesh)
    ranks = Together(mesh, f"vs.checkpoint.{name}(.., {str(root)!r}, step={step})")
    told: list[Leaf] = []
    forms: dict[str, Tensor] = {}

    path = Path()

    def examine() -> dict[str, str]:
        nonlocal path
        _check_step(step, keep)
        path = destination(root) if step is None else step_path(destination(root), step)
        check_paths(paths)
        told.extend(Leaf.of(where, leaf) for where, leaf in zip(paths, leaves, strict=True))
        for where, leaf in zip(paths, leaves, strict=True):
            check_values(where, leaf)
        for where, leaf in zip(paths, leaves, strict=True):
            form = saved_form(leaf)
            if form is not None and writes(where, leaf, mesh):
                forms[where] = _copy(form) if name == "async_save" else form
        return {} if ranks.size == 1 else digests(paths, leaves)

    check_equal(ranks.all("examine", examine), ranks.call)
    return _thread(os.getpid()).submit(_write, forms, told, path, keep, ranks)


def _write(
    forms: dict[str, Tensor], leaves: list[Leaf], path: Path, keep: int | None, ranks: Together
) -> Path:
    """On a thread, so without collectives: the store is all that ranks share."""
    first = ranks.rank == 0

    def write() -> dict[str, str]:
        return write_pieces(partial(path), ranks.rank, forms)

    def finish(files: list[dict[str, str]]) -> None:
        write_index(partial(path), leaves, files)
        commit(path, keep)

    try:
        with torch.no_grad():
            ranks.all("begin", lambda: begin(path) if first else None)
            files = ranks.all("write", write)
            ranks.all("commit", lambda: finish(files) if first else None)
    except BaseException:
        if first:
            shutil.rmtree(partial(path), ignore_errors=True)
        raise
    return path


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    # One: saves happen in the order of the calls, on every rank. Python waits for it at exit. A forked
    # process has its own, for it inherits no thread.
    return ThreadPoolExecutor(1, thread_name_prefix="vescale-checkpoint")


def _copy(form: Tensor) -> Tensor:
    """The values as they are now, on the CPU."""
    if isinstance(form, DTensor):
        pieces = [piece.to("cpu", copy=True) for piece in form.locals]
        return DTensor(pieces, form.mesh, form.layout)
    return form.to("cpu", copy=True)


def _check_step(step: Any, keep: Any) -> None:
    whole = lambda value, least: type(value) is int and value >= least  # noqa: E731
    if (step is None and keep is None) or (whole(step, 0) and (keep is None or whole(keep, 1))):
        return
    raise ArgumentError(
        explain(
            f"step={step!r}, keep={keep!r}",
            where="vs.checkpoint.save",
            rule="a step is a whole number, and keep how many steps of a directory remain, 1 or more",
            remedy="save(tree, directory, step=step, keep=3)",
        )
    )


def check_values(path: str, leaf: Any) -> None:
    if is_abstract(leaf):
        raise ArgumentError(
            explain(
                "a tensor without values, on the meta device",
                where=path,
                rule="a checkpoint holds values",
                remedy="save what was computed; abstract trees are for vs.checkpoint.load",
            )
        )


def check_equal(found: list[dict[str, str]], call: str) -> None:
    """Raises ConsistencyError when ranks have other leaves, or other plain values."""
    for rank, other in enumerate(found):
        differ = [path for path in {**found[0], **other} if found[0].get(path) != other.get(path)]
        if differ:
            raise ConsistencyError(
                explain(
                    f"{', '.join(sorted(differ)[:8])} on rank {rank}, other than on rank 0",
                    where=call,
                    rule="plain tensors, generators and values are global, equal on all ranks",
                    remedy="if each rank has its own part, say so: vs.from_local(tensor, mesh, P(...))",
                )
            )
