"""Directories that are whole or not there: what makes a save atomic, and which one is the latest.

    runs/
      step_00000100/              whole
      step_00000200/              whole
      .step_00000300.partial/     being written, or left by a save that was killed: nobody reads it
      .step_00000200.replaced/    for a moment, while a checkpoint of the same name takes its place

A save writes into the partial directory, waits until everything is on disk, and renames it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .._errors import ArgumentError, CheckpointError, explain
from .files import INDEX, sync_directory

_STEP = re.compile(r"step_(\d+)")


def destination(path: str | os.PathLike) -> Path:
    """Where a checkpoint at `path` is: a link is followed, and stays. ArgumentError for what is no path."""
    found = Path(path).absolute() if isinstance(path, (str, os.PathLike)) and str(path) else Path()
    if found.is_symlink() or found.name == "..":
        found = found.resolve()
    if not found.name:
        raise ArgumentError(
            explain(
                f"path={path!r}",
                where="checkpoint",
                rule="a path is a string or os.PathLike that names a directory",
                remedy='for example "runs/first", or "runs" with step=100',
            )
        )
    return found


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step_{step:08d}"


def latest(directory: str | os.PathLike) -> Path | None:
    """The checkpoint of the last step in a directory of steps, None when there is none.

    >>> import tempfile, vescale as vs
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for step in range(0, 300, 100):
    ...         _ = vs.checkpoint.save({"step": step}, root, step=step, keep=2)
    ...     [path.name for path in steps(root)], latest(root).name
    (['step_00000100', 'step_00000200'], 'step_00000200')
    """
    found = steps(directory)
    return found[-1] if found else None


def steps(directory: str | os.PathLike) -> list[Path]:
    """The checkpoints of a directory of steps, oldest first."""
    root = Path(directory)
    names = {entry.name for entry in root.iterdir()} if root.is_dir() else set()
    names |= {name.removeprefix(".").removesuffix(".replaced") for name in names}
    paths = [root / name for name in names if _STEP.fullmatch(name)]
    return sorted((path for path in paths if is_checkpoint(existing(path))), key=_number)


def is_checkpoint(path: Path) -> bool:
    """Whether there is one, by its index."""
    return (path / INDEX).is_file()


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def existing(path: Path) -> Path:
    """Where a checkpoint lies: at its path, or beside it when a save was killed that was replacing it."""
    return _replaced(path) if not path.exists() and _replaced(path).exists() else path


def begin(path: Path) -> None:
    """An empty partial directory for `path`; what killed saves have left is removed."""
    if _STEP.fullmatch(path.name):
        for left in path.parent.glob(".step_*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    if existing(path) != path:
        _replaced(path).rename(path)
    if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            explain(
                "a directory of other things" if path.is_dir() else "a file",
                where=path,
                rule="a save replaces a checkpoint, and nothing else",
                remedy="save to a path of its own; into a directory of steps with step=",
            )
        )
    shutil.rmtree(_replaced(path), ignore_errors=True)
    shutil.rmtree(partial(path), ignore_errors=True)
    partial(path).mkdir(parents=True)


def commit(path: Path, keep: int | None) -> None:
    """The partial directory becomes `path`; of a directory of steps the `keep` newest are left."""
    sync_directory(partial(path))
    if path.exists():
        path.rename(_replaced(path))
    partial(path).rename(path)
    sync_directory(path.parent)
    shutil.rmtree(_replaced(path), ignore_errors=True)
    if keep is not None:
        for old in [one for one in steps(path.parent) if _number(one) <= _number(path)][:-keep]:
            # Not a checkpoint from here on, also when the removal is killed halfway.
            shutil.rmtree(partial(old), ignore_errors=True)
            shutil.rmtree(old.rename(partial(old)), ignore_errors=True)


def partial(path: Path) -> Path:
    """Where `path` is written."""
    return path.with_name(f".{path.name}.partial")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
