"""The world of torch.distributed: whether there is one, starting it, ending it if it was started here."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _compat
from .._errors import ArgumentError, explain

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_started: list[dist.ProcessGroup] = []  # the world, if it was initialised here


def size() -> int:
    """How many processes there are, initialised or about to be; 0 outside torchrun and without a group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _TORCHRUN) else 0


def start(device: torch.device | str | None = None) -> torch.device:
    """Initialise the process group from torchrun's environment."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type != "cuda":
        _init("gloo")
        return where
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > torch.cuda.device_count():
        raise ArgumentError(
            explain(
                f"{here} processes and {torch.cuda.device_count()} cuda devices on this node",
                where="make_mesh",
                rule="each process has a device of its own",
                remedy='start fewer processes, or make_mesh(..., device="cpu")',
            )
        )
    where = _local_gpu(where)
    # No device_id: it would make new_group split the world's communicator, a call of all its ranks.
    _init("nccl")
    return where


def _init(backend: str) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=_asked() or 300.0))
    assert dist.group.WORLD is not None
    _started.append(dist.group.WORLD)


def timeout() -> float:
    """Seconds after which a rank that waits for others gets an error: a hang is a failure.

    `VESCALE_TIMEOUT`, else the timeout of the process group, which is 300 when it is made here.
    """
    return _asked() or _compat.group_timeout(dist.group.WORLD).total_seconds()


def store_timeout(store: Any) -> float:
    """Seconds that a rank waits for what others write into the store: `VESCALE_TIMEOUT`, else the store's."""
    return _asked() or store.timeout.total_seconds()


def _asked() -> float | None:
    return seconds_asked("VESCALE_TIMEOUT", "the timeout", 300)


def seconds_asked(variable: str, what: str, example: int) -> float | None:
    """The seconds that an environment variable says, None where it isn't set. Raises ArgumentError."""
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(
            explain(
                f"{variable}={text!r}",
                where="make_mesh",
                rule=f"{what} is a positive number of seconds",
                remedy=f"for example {variable}={example}",
            )
        )
    return seconds


def device(where: torch.device | str | None = None) -> torch.device:
    """The device of a process group that is there already."""
    if where is None:
        where = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return _local_gpu(torch.device(where))


def _local_gpu(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device


def end() -> None:
    """Destroy the process group if it was started here and is still the world."""
    if _started and _started.pop() is dist.group.WORLD:
        dist.destroy_process_group()
