"""Our files as a storage of torch's distributed checkpoint (DCP).

DCP's planners ask tensors what they hold (the protocol of `vs.DTensor`) and decide which part of which saved
box goes where; these two classes write and read. `Reader` is public: a program that has DCP and not our
`load` reads a checkpoint with it, into tensors of torch's own.
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import torch
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
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .._errors import CheckpointError, explain
from ..spmd.regions import strides
from .contents import Leaf
from .directories import existing
from .files import BLOCK, DataFile, DataWriter, Piece, damaged, read_lines, write_lines

FORMAT, VERSION, INDEX = "vescale checkpoint", 1, "index.jsonl"


class Writer(StorageWriter):
    """Writes the data file of one rank, and its lines; `write_index` is for the rank that ends the save."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.name = path, f"{rank:05d}"

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the pieces of a plan, on disk when this returns."""
        items = sorted(plan.items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ())))
        lines: dict[str, list[Any]] = {}
        results = []
        with open(self.path / f"{self.name}.bin", "wb") as file:
            data = DataWriter(file)
            for item in items:
                value = planner.resolve_data(item)
                assert isinstance(value, torch.Tensor), item
                assert item.tensor_data is not None, item
                chunk = item.tensor_data.chunk
                at = data.write(value)
                lines.setdefault(item.index.fqn, []).append([[*chunk.offsets], [*chunk.sizes], at])
                results.append(WriteResult(item.index, data.bytes - at, at))
            data.finish()
        head = {"file": f"{self.name}.bin", "bytes": data.bytes, "block": BLOCK, "crc32": data.checksums}
        told = [{"path": path, "pieces": pieces} for path, pieces in lines.items()]
        checksum = write_lines(self.path / f"{self.name}.jsonl", [head, *told])
        #: What the index says of this file.
        self.record = {"file": f"{self.name}.jsonl", "crc32": checksum}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Our index is not made of what DCP collects: see `write_index`."""
        raise NotImplementedError("vs.checkpoint.save writes the index")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """A checkpoint is a directory."""
        return True


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
            self._files[name] = DataFile(path / name, first["bytes"], first["crc32"])
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
                into = planner.resolve_tensor(item)
                into.copy_(self._read(item))
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check(self, plan: LoadPlan) -> None:
        """Read all that a plan wants and keep nothing: CheckpointError where `read_data` would raise it."""
        for item in self._in_order(plan):
            if item.type is LoadItemType.TENSOR:
                self._read(item)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """A checkpoint is a directory."""
        return Path(checkpoint_id).is_dir()

    def _in_order(self, plan: LoadPlan) -> list[ReadItem]:
        def place(item: ReadItem) -> tuple[str, int]:
            piece = self._pieces.get(item.storage_index)
            return (piece.file, piece.at) if piece else ("", 0)

        return sorted(plan.items, key=place)

    def _read(self, item: ReadItem) -> torch.Tensor:
        """A box inside a saved piece: only the run of bytes from its first to its last element is read."""
        path = item.storage_index.fqn
        piece, dtype = self._pieces[item.storage_index], self.leaves[path].dtype
        assert dtype is not None
        steps = strides(piece.sizes)
        offset, sizes = tuple(item.storage_offsets), tuple(item.lengths)
        first = sum(at * step for at, step in zip(offset, steps, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if not math.prod(sizes):
            return torch.empty(sizes, dtype=dtype)
        try:
            start, stop = (piece.at + place * dtype.itemsize for place in (first, last + 1))
            data = self._files[piece.file].read(start, stop)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {path!r}\n{error}") from None
        return data.view(dtype).as_strided(sizes, steps)


def _described(leaf: Leaf, boxes: list[ChunkStorageMetadata]) -> Any:
    if leaf.dtype is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape), boxes)
