"""The safetensors format, as Hugging Face's libraries write models in it.

A file is the length of a header (8 bytes, little endian), the header (JSON: name, dtype, shape and byte range
of each tensor), and the tensors, row-major and end to end. Several files have an index,
`model.safetensors.index.json`, that says which tensor is in which. The format is simple and stable, so it is
read and written here directly: a rank wants ranges of bytes, which the package `safetensors` doesn't give.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError, CheckpointError, explain, nearest
from .files import read_into

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = "__metadata__"  # in a header, what is no tensor

Rename = Callable[[str], str | None] | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its elements stand row-major from byte `at` of the file on."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, runs: Iterable[tuple[int, int]], into: Tensor) -> None:
        """Fill a flat tensor of this dtype with runs of elements, start..stop each, end to end."""
        at = 0
        with open(self.file, "rb", buffering=0) as file:
            for start, stop in runs:
                read_into(file, self.at + start * self.dtype.itemsize, into[at : at + stop - start])
                at += stop - start
        assert at == into.numel(), (self, at)


def find_files(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> dict[Path, list[str]]:
    """The files that are meant: themselves, those of an index, or those of a directory.

    With each the tensors that an index says are in it. Raises CheckpointError for a file that is not there.
    """
    many: Any = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    many = list(many) if isinstance(many, Iterable) else [many]
    if not all(isinstance(path, (str, os.PathLike)) for path in many):
        raise ArgumentError(
            explain(
                f"paths={paths!r}",
                where="safetensors",
                rule="paths are one string or os.PathLike, or several",
                remedy=f"a directory, {INDEX}, or the safetensors files themselves",
            )
        )
    found: dict[Path, list[str]] = {}
    for path in map(Path, many):
        index = path / INDEX if path.is_dir() else path
        if index.name.endswith(".json") and (index == path or index.exists()):
            found |= _indexed(index)
        else:
            found |= {file: [] for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])}
    missing = [str(path) for path in found if not path.exists()]
    if missing or not found:
        raise CheckpointError(
            explain(
                f"no file {', '.join(missing)}" if missing else f"no safetensors file in {many}",
                where="safetensors",
                rule=f"a model is a directory, {INDEX}, or the safetensors files themselves",
                remedy="download what is missing, or mend the path",
            )
        )
    return found


def _indexed(index: Path) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            found.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            explain(
                f"{index.name}: {error!r}",
                where=index,
                rule='an index is JSON with a "weight_map" from tensors to files',
                remedy="download it again",
            )
        ) from None
    return found


def read_header(path: Path, promised: Sequence[str] = ()) -> dict[str, Entry]:
    """The tensors of a file. CheckpointError for a file that is cut short, is none, or lacks a tensor."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, size))
    try:
        header = json.loads(text)
        header.pop(METADATA, None)
        described = {name: _entry(path, told, 8 + length) for name, told in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, f"a header that is none ({error!r})") from None
    entries = {name: entry for name, (entry, _) in described.items()}
    for name in promised:
        if name not in entries:
            raise _broken(path, f"no tensor {name!r}, which is in it by the index")
    for name, entry in entries.items():
        stop = described[name][1]
        if stop - entry.at != entry.nbytes:
            raise _broken(path, f"tensor {name!r} of {stop - entry.at} bytes, not {entry.nbytes}")
        if stop > size:
            raise _broken(path, f"{size:,} bytes, and tensor {name!r} ends at byte {stop:,}")
    return entries


def _entry(path: Path, told: Any, data: int) -> tuple[Entry, int]:
    """A tensor as the header tells of it, and the byte where it ends; `data` is that where data starts."""
    start, stop = told["data_offsets"]
    shape = tuple(told["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError(f"shape {told['shape']}, bytes {told['data_offsets']}")
    if told["dtype"] not in DTYPES:
        raise ValueError(f"a dtype {told['dtype']!r} that torch lacks")
    return Entry(path, DTYPES[told["dtype"]], shape, data + start), data + stop


def _broken(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"{path.name} has {found}",
            where=path,
            rule="a safetensors file is a header that describes it, and all of the tensors in it",
            remedy="download or save it again",
        )
    )


def renamed(names: Sequence[str], rename: Rename) -> dict[str, str]:
    """New name -> name, for the names that are kept. Raises ArgumentError for two that become one.

    `rename` is a function (None leaves a name out), or regexes with their replacements: the first that
    fullmatches a name counts, and one that matches no name is an error.

    >>> renamed(["model.norm.weight", "lm_head.weight"], {r"model\\.(.*)": r"\\1"})
    {'norm.weight': 'model.norm.weight', 'lm_head.weight': 'lm_head.weight'}
    """
    if rename is None:
        return {name: name for name in names}
    if not callable(rename) and not isinstance(rename, Mapping):
        raise _bad_rename(f"{type(rename).__name__} {rename!r}")
    rules = {} if callable(rename) else rename
    unused = dict.fromkeys(rules)

    def by_rules(name: str) -> str | None:
        for rule in [rule for rule in rules if re.fullmatch(rule, name)][:1]:
            unused.pop(rule, None)
            match = re.fullmatch(rule, name)
            assert match is not None
            return match.expand(rules[rule])
        return name

    new: dict[str, str] = {}
    function = rename if callable(rename) else by_rules
    for name in names:
        try:
            to = function(name)
        except re.error as error:
            raise _bad_rename(f"a regex or its replacement, for {name!r}: {error}") from None
        if to is not None and not isinstance(to, str):
            raise _bad_rename(f"{name!r}, renamed to {to!r}")
        if to in new:
            raise ArgumentError(
                explain(
                    f"{new[to]!r} and {name!r}, both renamed to {to!r}",
                    where="rename",
                    rule="each tensor has a name of its own",
                    remedy="mend the rename, or leave one out by returning None",
                )
            )
        if to is not None:
            new[to] = name
    if unused:
        raise ArgumentError(
            explain(
                f"rules that match no name: {', '.join(map(repr, unused))}",
                where="rename",
                rule="a rule is a regex that fullmatches the name of at least one tensor",
                remedy=nearest(next(iter(unused)), names),
            )
        )
    return new


def _bad_rename(found: str) -> ArgumentError:
    return ArgumentError(
        explain(
            found,
            where="rename",
            rule="a function from a name to a name, or to None, or {regex: replacement}",
            remedy=r'for example rename={r"model\.(.*)": r"\1"}',
        )
    )


def header_of(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The head of a file that holds these tensors, and the byte at which each of them starts in the file."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        told[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}
