"""Our files as a storage of torch's distributed checkpoint (DCP).

DCP's planners ask tensors what they hold (the protocol of `vs.DTensor`) and decide which part of which saved
box goes where; what is here writes and reads. `Reader` is public: a program that has DCP and not our `load`
reads a checkpoint with it, into tensors of torch's own.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._errors import CheckpointError, explain
from ..spmd.regions import strides
from .contents import Leaf, misfit
from .directories import existing
from .files import BLOCK, INDEX, DataFile, DataWriter, Piece, as_bytes, damaged, read_lines, write_lines

FORMAT, VERSION = "vescale checkpoint", 1


def write_pieces(path: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write what this process holds of tensors, by path; on disk when this returns.

    The result is what the index says of the file.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    items = planner.create_local_plan().items
    items.sort(key=lambda item: (item.index.fqn, tuple(item.index.offset or ())))
    lines: dict[str, list[Any]] = {}
    name = f"{rank:05d}.bin"
    with open(path / name, "wb") as file:
        data = DataWriter(file)
        for item in items:
            value, told = planner.resolve_data(item), item.tensor_data
            assert isinstance(value, torch.Tensor), item
            assert told is not None, item
            at = data.write(value)
            lines.setdefault(item.index.fqn, []).append([[*told.chunk.offsets], [*told.chunk.sizes], at])
        data.finish()
    head = {"file": name, "bytes": data.bytes, "block": BLOCK, "crc32": data.checksums}
    tail = [{"path": where, "pieces": pieces} for where, pieces in lines.items()]
    checksum = write_lines(path / f"{rank:05d}.jsonl", [head, *tail])
    return {"file": f"{rank:05d}.jsonl", "crc32": checksum}


def write_index(path: Path, leaves: list[Leaf], files: list[dict[str, str]]) -> None:
    """What the tree is made of, and the files that hold it."""
    head = {"format": FORMAT, "version": VERSION, "files": files}
    write_lines(path / INDEX, [head, *(leaf.line() for leaf in leaves)])


class Reader(StorageReader):
    """Reads a checkpoint of `vs.checkpoint.save` for `torch.distributed.checkpoint.load`.

        dcp.load(state_dict, storage_reader=vs.checkpoint.Reader(path))

    Keys are the dotted paths of the tree that was saved. Raises CheckpointError, naming tensor and file,
    for bytes that are not those that were written.

    >>> import tempfile, vescale as vs
    >>> tree = {"w": torch.arange(4.0), "step": 3}
    >>> with tempfile.TemporaryDirectory() as root:
    ...     reader = Reader(vs.checkpoint.save(tree, f"{root}/first"))
    ...     sorted(reader.read_metadata().state_dict_metadata)
    ['step', 'w']
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Read another checkpoint from now on."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.leaves: dict[str, Leaf] = {}
        self._pieces: dict[MetadataIndex, Piece] = {}
        self._files: dict[str, DataFile] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which boxes of which tensors there are. CheckpointError for lines that were not written so."""
        self.reset()
        path = existing(self.path)
        if not (path / INDEX).exists():
            raise CheckpointError(
                explain(
                    f"no {INDEX} in {self.path}",
                    where="checkpoint",
                    rule="a checkpoint is a directory that vs.checkpoint.save has finished",
                    remedy="vs.checkpoint.latest(directory) finds the last one of a directory of steps",
                )
            )
        head, *lines = read_lines(path / INDEX)
        if (head["format"], head["version"]) != (FORMAT, VERSION):
            raise damaged(f"a file of {head['format']!r}, version {head['version']}", path / INDEX)
        self.leaves = {leaf.path: leaf for leaf in map(Leaf.of_line, lines)}
        boxes: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.leaves}
        for entry in head["files"]:
            first, *tensors = read_lines(path / entry["file"], entry["crc32"])
            name = first["file"]
            self._files[name] = DataFile(path / name, first["bytes"], first["block"], first["crc32"])
            for line in tensors:
                for offsets, sizes, at in line["pieces"]:
                    piece = Piece(name, tuple(offsets), tuple(sizes), at)
                    self._pieces[MetadataIndex(line["path"], offsets)] = piece
                    boxes[line["path"]].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        described = {name: _described(leaf, boxes[name]) for name, leaf in self.leaves.items()}
        return Metadata(described, storage_data=self._pieces, storage_meta=StorageMeta(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kw: Any) -> None:
        """On ranks that were given another's metadata, what it says of the files."""
        if metadata.storage_data and not self._pieces:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan wants into the tensors of its planner, in the order of the files."""
        for item in self._in_order(plan):
            if item.type is LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(self.leaves[item.storage_index.fqn].value, stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                into = planner.resolve_tensor(item).detach()
                self._read(item, into)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check(self, plan: LoadPlan) -> None:
        """Read all that a plan wants and keep nothing: CheckpointError where `read_data` would raise it."""
        for item in self._in_order(plan):
            if item.type is LoadItemType.TENSOR:
                self._read(item, None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """A checkpoint is a directory."""
        return Path(checkpoint_id).is_dir()

    def _in_order(self, plan: LoadPlan) -> list[ReadItem]:
        def place(item: ReadItem) -> tuple[str, int]:
            piece = self._pieces.get(item.storage_index)
            return (piece.file, piece.at) if piece else ("", 0)

        return sorted(plan.items, key=place)

    def _read(self, item: ReadItem, into: torch.Tensor | None) -> None:
        """A box inside a saved piece: the run of bytes from its first to its last element is read."""
        path, sizes = item.storage_index.fqn, tuple(item.lengths)
        piece, dtype = self._pieces[item.storage_index], self.leaves[path].dtype
        assert dtype is not None
        if not math.prod(sizes):
            return
        if into is not None and into.dtype != dtype:
            raise CheckpointError(
                explain(
                    misfit(replace(self.leaves[path], dtype=into.dtype), self.leaves),
                    where=self.path,
                    rule="what is read has the dtype that was saved",
                    remedy="load it as it is, and cast afterwards",
                )
            )
        steps = strides(piece.sizes)
        first = sum(at * step for at, step in zip(item.storage_offsets, steps, strict=True))
        count = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        direct = into is not None and count == math.prod(sizes) and into.is_contiguous() and into.is_cpu
        run = into if direct else torch.empty(count, dtype=dtype)
        assert run is not None
        try:
            self._files[piece.file].read(piece.at + first * dtype.itemsize, as_bytes(run))
        except CheckpointError as error:
            raise CheckpointError(f"tensor {path!r}\n{error}") from None
        if into is not None and not direct:
            into.copy_(run.as_strided(sizes, steps))


def _described(leaf: Leaf, boxes: list[ChunkStorageMetadata]) -> Any:
    if leaf.dtype is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape), boxes)
