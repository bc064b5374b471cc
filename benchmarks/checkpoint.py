"""Saving and loading a training state: vs.checkpoint, torch's DCP and torch.save, in turns.

    python benchmarks/checkpoint.py [--width 512] [--rounds 7] [--check]

One process and one thread. The state is a GPT's parameters with two moments each, float32. Ours is cut over 4
simulated ranks, once by FSDP and once with every tensor in 4 ragged pieces; the peers have plain whole
tensors: `dcp.save` and `dcp.load` of a flat dict, `torch.save` with an fsync and `torch.load`. All are on
disk when the save returns, and ours alone has checksums, which a load compares. Loads make new tensors
(dcp's: into zeros).

Rounds alternate; times are the fastest of the rounds, and a ratio is theirs over ours, so above 1 ours is
faster. The size is that of all files over the payload. `--check` fails outside the targets: 0.8 x the
speed of DCP in either direction, and 1.02 x the payload.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import vescale as vs
from vescale import _tree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT

BLOCKS, CONTEXT, RANKS = 4, 64, 4
SPEED, SIZE = 0.8, 1.02


def ours(values: dict[str, Tensor], plan: vs.Plan) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    params = vs.distribute(values, plan)
    tree = {"params": params, "state": vs.optim.adamw(1e-3).init(params)}
    shapes = vs.checkpoint.abstract(_tree.tree_map(lambda p: p.to("meta"), values), plan)
    target = {"params": shapes, "state": vs.optim.adamw(1e-3).init(shapes)}
    return lambda path: vs.checkpoint.save(tree, path), lambda path: vs.checkpoint.load(target, path)


def torch_dcp(flat: dict[str, Tensor]) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    def load(path: Path) -> None:
        state_dict_loader.load({name: torch.zeros_like(x) for name, x in flat.items()}, checkpoint_id=path)

    return lambda path: state_dict_saver.save(dict(flat), checkpoint_id=path), load


def torch_save(flat: dict[str, Tensor]) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    def save(path: Path) -> None:
        path.mkdir()
        with open(path / "all.pt", "wb") as file:
            torch.save(flat, file)
            file.flush()
            os.fsync(file.fileno())

    return save, lambda path: torch.load(path / "all.pt")


def timed(call: Callable[[Path], Any], path: Path) -> float:
    start = time.perf_counter()
    call(path)
    return time.perf_counter() - start


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    values = {name: p.detach() for name, p in GPT(BLOCKS, options.width, CONTEXT).named_parameters()}
    flat = {f"{kind}.{name}": p.clone() for kind in ("params", "m", "v") for name, p in values.items()}
    payload = sum(x.nbytes for x in flat.values())
    mesh = vs.make_mesh({"dp": RANKS}, backend="simulated")
    cut = vs.P(dp=vs.RaggedShard((0,), (3, 2, 2, 1)))
    fsdp, ragged = vs.Plan(mesh, fsdp=vs.FSDP("dp", r"blocks\.\d+")), vs.Plan(mesh, {".*": cut})
    contestants = {
        "vs.checkpoint, FSDP": ours(values, fsdp),
        "vs.checkpoint, ragged": ours(values, ragged),
        "torch DCP": torch_dcp(flat),
        "torch.save": torch_save(flat),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(options.rounds):
            for name, (save, load) in contestants.items():
                path = Path(root) / "checkpoint"
                seconds[name].append((timed(save, path), timed(load, path)))
                sizes[name] = size_of(path) / payload
                shutil.rmtree(path)
    title = f"{payload / 1e6:.0f} MB in {len(flat)} tensors, {options.rounds} rounds"
    table = Table("", "save, ms", "load, ms", "save, x DCP", "load, x DCP", "size", title=title)
    failed = False
    fastest = {name: [min(run[way] for run in runs) for way in (0, 1)] for name, runs in seconds.items()}
    for name, found in fastest.items():
        ratios = [theirs / mine for theirs, mine in zip(fastest["torch DCP"], found, strict=True)]
        times = [f"{one * 1e3:.0f}" for one in found]
        table.add_row(name, *times, *(f"{ratio:.2f}" for ratio in ratios), f"{sizes[name]:.4f}")
        failed |= name.startswith("vs.") and (min(ratios) < SPEED or sizes[name] > SIZE)
    Console(width=110).print(table)
    return int(failed and options.check)


if __name__ == "__main__":
    sys.exit(main())
