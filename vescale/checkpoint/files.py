"""What is on disk: raw bytes with a checksum a block, and JSON lines that say what they are.

    step_00000100/
      index.jsonl    one line a leaf of the tree, one a file, and a checksum of these lines
      00000.bin      the pieces that rank 0 wrote, end to end
      00000.jsonl    one line a tensor: where its pieces are; checksums of 00000.bin, and of these lines

A piece is a box of a global tensor, row-major. Every byte of every file is under a checksum (CRC-32), those
of data in blocks, so that a reader checks what it reads and reads little more than what it wants.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._errors import CheckpointError, explain
from ..spmd.bits import in_a_row

INDEX = "index.jsonl"  # written last: with it a directory is a checkpoint
BLOCK = 1 << 18  # bytes under one checksum: a small tensor costs a read of this size
ALIGNMENT = 16  # bytes: the largest element, so that what is read can be viewed as what it is


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor in a file: its elements stand at byte `at`, row-major."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


def damaged(found: object, where: object) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(
        explain(
            found,
            where=where,
            rule="a checkpoint is read only as it was written: sizes and checksums are compared",
            remedy="load an earlier checkpoint, or a copy of this one",
        )
    )


# Lines.


def write_lines(path: Path, lines: Sequence[Any]) -> str:
    """Write JSON lines and a last line with their checksum, which is returned; on disk when this returns."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    checksum = f"{zlib.crc32(text):08x}"
    with open(path, "wb") as file:
        file.write(text + json.dumps({"crc32": checksum}).encode() + b"\n")
        sync(file)
    return checksum


def read_lines(path: Path, checksum: str | None = None) -> list[Any]:
    """The lines that `write_lines` wrote; CheckpointError when they are others than those of `checksum`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise damaged(f"{path.name} can't be read: {error.strerror}", path) from None
    body, last = text[: text[:-1].rfind(b"\n") + 1], text[text[:-1].rfind(b"\n") + 1 :]
    found = f"{zlib.crc32(body):08x}"
    if last != json.dumps({"crc32": found}).encode() + b"\n":
        raise damaged(f"{path.name}, whose lines are not those of its checksum", path)
    if checksum is not None and checksum != found:
        raise damaged(f"{path.name}, which is the file of another checkpoint", path)
    return [json.loads(line) for line in body.splitlines()]


# Data.


class DataWriter:
    """Writes tensors end to end, and keeps the checksum of each block."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self.checksums: list[str] = []
        self._open = 0  # of the block that is not full yet

    def write(self, tensor: Tensor) -> int:
        """Append a tensor in row-major order, aligned; where it starts."""
        self._append(bytes(-self.bytes % ALIGNMENT))
        at = self.bytes
        self._append(as_bytes(tensor).numpy().data)
        return at

    def finish(self) -> None:
        """Everything is on disk when this returns."""
        if self.bytes % BLOCK:
            self.checksums.append(f"{self._open:08x}")
        sync(self.file)

    def _append(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        data = memoryview(data)
        while len(data):
            part = data[: BLOCK - self.bytes % BLOCK]
            self._open = zlib.crc32(part, self._open)
            self.bytes += len(part)
            data = data[len(part) :]
            if not self.bytes % BLOCK:
                self.checksums.append(f"{self._open:08x}")
                self._open = 0


class DataFile:
    """Reads what a `DataWriter` wrote; every block is checked as it is read."""

    def __init__(self, path: Path, size: int, block: int, checksums: Sequence[str]) -> None:
        self.path, self.size, self.block, self.checksums = path, size, block, checksums
        # Where the last block starts of which a part was wanted, and its bytes.
        self._held = -1, torch.empty(0, dtype=torch.uint8)

    def read(self, start: int, into: Tensor) -> None:
        """Fill contiguous bytes with those of the file from `start` on.

        CheckpointError when the file is shorter, longer, or has other bytes.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.size or start + len(into) > size:
                    raise damaged(f"{self.path.name} has {size:,} bytes, not {self.size:,}", self.path)
                self._read(file, start, into)
        except OSError as error:
            raise damaged(f"{self.path.name} can't be read: {error}", self.path) from None

    def _read(self, file: Any, start: int, into: Tensor) -> None:
        at, stop = start, start + len(into)
        while at < stop:
            first = at - at % self.block
            last = min(first + self.block, self.size)
            here = into[at - start : min(last, stop) - start]
            if len(here) == last - first:  # a whole block, straight to where it is wanted
                self._read_block(file, first, here)
            else:  # small neighbours share a block
                if self._held[0] != first:
                    self._held = first, torch.empty(last - first, dtype=torch.uint8)
                    self._read_block(file, *self._held)
                here.copy_(self._held[1][at - first : at - first + len(here)])
            at = last

    def _read_block(self, file: Any, first: int, block: Tensor) -> None:
        read_into(file, first, block)
        if f"{zlib.crc32(block.numpy().data):08x}" != self.checksums[first // self.block]:
            self._held = -1, self._held[1]
            text = f"{self.path.name} has other bytes than were written, from byte {first:,} on"
            raise damaged(text, self.path)


def read_into(file: Any, start: int, into: Tensor) -> None:
    """Fill a contiguous tensor with the bytes of an unbuffered file from `start` on; OSError at its end."""
    left = as_bytes(into).numpy().data
    file.seek(start)
    while len(left):
        count = file.readinto(left)
        if not count:
            raise OSError("the file ends too early")
        left = left[count:]


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in row-major order as bytes on the CPU; of a contiguous tensor there, its own memory."""
    return in_a_row(tensor.detach().cpu()).view(torch.uint8)


def sync(file: BinaryIO) -> None:
    """Wait until a file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
