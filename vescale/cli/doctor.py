"""What is installed here, what works, and a self-test of some seconds.

The self-test runs a train step on simulated ranks against plain torch, sends a token around two
processes over gloo, and compares keyed random numbers with published ones. The exit status is 0 when all
of it passes.

    python -m vescale doctor
    torchrun --nproc-per-node 4 -m vescale doctor      also: do these ranks hear each other?
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from .. import rng
from ..spmd import heartbeat, world
from ..spmd.mesh import make_mesh
from . import selftest
from .table import show

HELP = "what is installed, what works, and a self-test"

_NEEDED = ("torch", "numpy", "optree", "einops")
_EXTRAS = ("rich", "matplotlib", "safetensors", "transformers", "triton")
_SWITCHES = ("VESCALE_TIMEOUT", "VESCALE_HEARTBEAT", "VESCALE_RNG_KERNEL", "VESCALE_VERIFY")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `ok` is None for what is neither right nor wrong."""

    section: str
    name: str
    value: str
    ok: bool | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--no-self-test", action="store_true", help="only say what is installed")


def run(options: argparse.Namespace) -> int:
    """Print what is found; 0 when nothing of it is wrong."""
    under_torchrun = world.size() > 1
    ranks = list(_ranks()) if under_torchrun else []
    if under_torchrun and dist.get_rank() != 0:
        return int(any(finding.ok is False for finding in ranks))
    findings = [*_versions(), *_backends(), *_world(), *ranks, *_threads()]
    if not options.no_self_test:
        findings += _self_test(without_processes=under_torchrun)
    marks = {True: "ok", False: "FAILED", None: ""}
    rows = [(f.section, f.name, f.value, marks[f.ok]) for f in findings]
    show(f"vescale {import_module('vescale').__version__}", ("", "", "", ""), rows)
    return int(any(finding.ok is False for finding in findings))


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", platform.python_version())
    for name in (*_NEEDED, *_EXTRAS):
        try:
            yield Finding("versions", name, version(name), True if name in _NEEDED else None)
        except PackageNotFoundError:
            yield Finding("versions", name, "not installed", False if name in _NEEDED else None)


def _backends() -> Iterator[Finding]:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield Finding("backends", "gloo", "yes" if gloo else "no: no processes on cpu", gloo)
    yield Finding("backends", "nccl", "yes" if nccl else "no: no processes on cuda")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("backends", "cuda", ", ".join(devices) or "no devices")
    rng.bits(rng.key(0), (1 << 14,))  # large enough for the kernel to be built
    yield Finding("backends", "random numbers on cpu", rng.kernel_status())


def _world() -> Iterator[Finding]:
    found = {name: os.environ[name] for name in _TORCHRUN if name in os.environ}
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    yield Finding("world", "torchrun", shown or "no: meshes are simulated")
    switches = [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    yield Finding("world", "switches", " ".join(switches) or "none set")


def _ranks() -> Iterator[Finding]:
    """Under torchrun: all ranks make a mesh, and listen to each other's hearts."""
    mesh = make_mesh({"ranks": world.size()})
    heart = heartbeat.current()
    assert heart is not None  # more than one process, and an open mesh
    heart.listen(None, heart.members)
    end = time.monotonic() + min(world.timeout(), 20)
    while len(heart.heard()) < mesh.size - 1 and time.monotonic() < end:
        time.sleep(heart.period / 4)
    heard = [other.rank for other in heart.heard()]
    silent = sorted({*range(mesh.size)} - {mesh.rank} - {*heard})
    told = f"all {mesh.size} ranks beat" if not silent else f"nothing heard of rank {silent}"
    yield Finding("world", "heartbeat", f"{told}, every {heart.period:g} s", not silent)
    dist.barrier()  # nobody leaves while others still listen
    yield Finding("world", "timeout", f"{world.timeout():g} s")


def _threads() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = f"{torch.get_num_threads()} in torch, {usable} of {os.cpu_count()} cores usable"
    yield Finding("threads", "", f"{told}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}")


def _self_test(without_processes: bool = False) -> Iterator[Finding]:
    tests: dict[str, Callable[[], str]] = {
        "random numbers": selftest.random_numbers,
        "a train step": selftest.train_step,
    }
    if not without_processes:
        tests["two processes"] = selftest.ring
    for name, test in tests.items():
        began = time.monotonic()
        try:
            told, ok = test(), True
        except Exception as error:  # whatever it is, the table says so
            told, ok = f"{type(error).__name__}: {error}", False
        yield Finding("self-test", name, f"{told} ({time.monotonic() - began:.1f} s)", ok)
