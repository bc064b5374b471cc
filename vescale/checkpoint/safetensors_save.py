"""`vs.checkpoint.save_safetensors`: files that any library of Hugging Face's loads."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from .contents import Leaf, check_paths, digests, holds_chosen, writes
from .directories import destination
from .files import as_bytes, sync, sync_directory
from .safetensors_files import INDEX, METADATA, NAMES, SINGLE, Rename, header_of, renamed
from .saving import check_equal, check_values
from .together import Together, mesh_of

_WRITTEN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # what a save may leave


def save_safetensors(
    tree: Any, path: str | os.PathLike, *, max_shard_bytes: int = 5 * 10**9, rename: Rename = None
) -> None:
    """Save the tensors of a tree in the directory `path`, in safetensors files as of Hugging Face's models.

        save_safetensors : (tree of tensors, path) -> model.safetensors, or several and their index

    Files hold at most `max_shard_bytes` of tensors, a larger tensor has one of its own. Names are the dotted
    paths of the tree after `rename`: a function (None leaves a tensor out), or `{regex: replacement}`. Every
    rank writes its own pieces where they belong in the files, so no rank holds more than it has, and none
    sends anything. Files appear under their names when all of them are on disk, and those of a model that was
    there before go; of several files that is one after the other, the index last.

    Every rank of the mesh of the DTensors makes this call. Errors are the same on all ranks: ArgumentError
    for a leaf that is no tensor or of a dtype that the format lacks, CheckpointError for a file that can't
    be written.
    """
    paths, leaves, _ = _tree.flatten_with_path(tree)
    mesh = mesh_of(leaves, None)
    ranks = Together(mesh, f"vs.checkpoint.save_safetensors(.., {str(path)!r})")
    root, first = Path(), ranks.rank == 0
    tensors: dict[str, Tensor] = {}
    files: dict[Path, list[str]] = {}

    def examine() -> dict[str, str]:
        nonlocal root
        root = destination(path)
        check_paths(paths)
        named = dict(zip(paths, leaves, strict=True))
        for new, old in renamed(paths, rename).items():
            _check_tensor(old, new, named[old])
            tensors[new] = named[old]
        groups = _groups(tensors, max_shard_bytes)
        many = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        names = many if len(groups) > 1 else [SINGLE]
        files.update({root / name: group for name, group in zip(names, groups)})
        return {} if ranks.size == 1 else digests(tensors, tensors.values())

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        for file, names in files.items():
            head, places = header_of(_described(tensors, names))
            end = max((places[name] + tensors[name].nbytes for name in names), default=len(head))
            with open(_unfinished(file), "wb") as out:
                out.write(head)
                out.truncate(end)

    def write() -> None:
        for file, names in files.items():
            _, places = header_of(_described(tensors, names))
            with open(_unfinished(file), "r+b") as out:
                for name in names:
                    if writes(name, tensors[name], mesh):
                        _write(out, places[name], name, tensors[name])
                sync(out)

    def finish() -> None:
        for file in files:
            _unfinished(file).rename(file)
        if len(files) > 1:
            _write_index(root, files, sum(tensor.nbytes for tensor in tensors.values()))
        for entry in root.iterdir():  # of a model that was here before
            kept = entry in files or (entry.name == INDEX and len(files) > 1)
            if _WRITTEN.fullmatch(entry.name) and not kept:
                entry.unlink()
        sync_directory(root)

    with torch.no_grad():
        check_equal(ranks.all("examine", examine), ranks.call)
        try:
            ranks.all("begin", lambda: begin() if first else None)
            ranks.all("write", write)
            ranks.all("finish", lambda: finish() if first else None)
        finally:
            for file in files if first else ():  # those of a save that failed
                with suppress(OSError):
                    _unfinished(file).unlink()


def _groups(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    """The names of each file, in the order of the tree."""
    if limit < 1:
        raise ArgumentError(explain(f"max_shard_bytes={limit}", rule="a number of bytes, 1 or more"))
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    return groups


def _write_index(root: Path, files: dict[Path, list[str]], size: int) -> None:
    where = {name: file.name for file, names in files.items() for name in names}
    index = _unfinished(root / INDEX)
    with open(index, "wb") as out:
        out.write(json.dumps({"metadata": {"total_size": size}, "weight_map": where}).encode())
        sync(out)
    index.rename(root / INDEX)


def _described(
    tensors: dict[str, Tensor], names: list[str]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}


def _write(out: BinaryIO, at: int, name: str, tensor: Tensor) -> None:
    """The runs of the file that this process's pieces are; of simulated ranks those of one replica."""
    if isinstance(tensor, DTensor):
        layout = tensor.layout
        held = zip(tensor.mesh.local_ranks, tensor.locals, strict=True)
        parts = [(layout.regions(rank), piece) for rank, piece in held if holds_chosen(name, layout, rank)]
    else:
        parts = [([(0, tensor.numel())], tensor)]
    for runs, piece in parts:
        data = as_bytes(piece).numpy().data
        for start, stop in runs:
            size = (stop - start) * tensor.dtype.itemsize
            out.seek(at + start * tensor.dtype.itemsize)
            out.write(data[:size])
            data = data[size:]


def _check_tensor(path: str, name: str, leaf: Any) -> None:
    if name == METADATA:
        raise ArgumentError(
            explain(
                f"a tensor named {METADATA!r}",
                where=path,
                rule="that name of a header is not for tensors",
                remedy="give it another with rename=",
            )
        )
    told = Leaf.of(path, leaf)
    if told.kind != "tensor" or told.dtype not in NAMES:
        raise ArgumentError(
            explain(
                str(told),
                where=path,
                rule="a safetensors file holds tensors of the usual dtypes and nothing else",
                remedy="save parameters only, and the rest with vs.checkpoint.save",
            )
        )
    check_values(path, leaf)


def _unfinished(file: Path) -> Path:
    return file.with_name(f".{file.name}.partial")
