"""What lanes cost: a train step with 8 lanes and without, alternating in one run:

    python benchmarks/lanes.py [--rounds 9] [--widths 64 256] [--processes]

The GPT of examples/train_gpt.py with 2 blocks, batch 16 x 64, AdamW, donated parameters, one thread a rank.
On one simulated rank, replicated and with FSDP (of which the program without lanes has nothing to do there),
and with `--processes` on two gloo processes with FSDP. A round is a step of each; the ratio is the median
over rounds of the time with 8 lanes to the time without.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import vescale as vs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, VOCAB

BLOCKS, ROWS, CONTEXT, LANES, WARMUP = 2, 16, 64, 8, 2


def training(mesh: vs.Mesh, width: int, fsdp: bool, lanes: dict[str, int] | None) -> Callable[[], None]:
    """A function that takes one step."""
    torch.manual_seed(0)
    model, opt = GPT(BLOCKS, width, CONTEXT), vs.optim.adamw(1e-3)

    def fn(params, state, batch):
        loss_fn = lambda params: torch.func.functional_call(model, params, batch)  # noqa: E731
        loss, grads = vs.value_and_grad(loss_fn)(params)
        updates, state = opt.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    sharded = vs.FSDP("dp", r"blocks\.\d+") if fsdp else None
    plan = vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=sharded)
    step = vs.parallelize(fn, plan, donate=("params", "state"), lanes=lanes)
    params = vs.distribute({name: p.detach() for name, p in model.named_parameters()}, step.plan)
    state, batch = opt.init(params), torch.randint(VOCAB, (ROWS, CONTEXT + 1))

    def run() -> None:
        nonlocal params, state
        params, state, _ = step(params, state, batch)

    return run


def ratio(mesh: vs.Mesh, width: int, fsdp: bool, rounds: int) -> float:
    """Time with lanes to time without, the median over rounds."""
    runs = [training(mesh, width, fsdp, lanes) for lanes in (None, {"dp": LANES})]
    times: list[list[float]] = [[], []]
    for number in range(WARMUP + rounds):
        for run, found in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            found += [time.perf_counter() - start] if number >= WARMUP else []
    return statistics.median(with_lanes / plain for plain, with_lanes in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.processes and "LOCAL_RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([*command, *sys.argv], env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)
    mesh = vs.make_mesh({"dp": 2 if given.processes else 1})
    where = "2 processes" if given.processes else "1 simulated rank"
    for width in given.widths:
        for fsdp in (True,) if given.processes else (False, True):
            found = ratio(mesh, width, fsdp, given.rounds)
            if 0 in mesh.local_ranks:
                told = "FSDP" if fsdp else "replicated"
                print(f"{where:<18} width {width:<5} {told:<12} {LANES} lanes / none: {found:.2f}")
    mesh.close()


if __name__ == "__main__":
    main()
