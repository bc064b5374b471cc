"""What calling a mapped function costs beside its ops, three ways, in one run:

    python benchmarks/shard_map.py [--rounds 30] [--check]

20 small ops and 2 collectives on two gloo processes,
(a) as one function under `vs.shard_map`;
(b) written by hand with torch.distributed, on plain local tensors;
(c) under torch's `local_map` on DTensors, with the same torch.distributed calls inside.

Then the 20 ops alone on a mesh of one rank, where nothing but the host's work is left. Rounds of the three
alternate, so that a slow spell of the machine meets all of them; a ratio is the median over rounds of the
ratio of the rounds' median calls. `--check` fails when (a)/(b) is above 1.1 on two processes.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import vescale as vs

# Renamed in torch 2.13, which warns at the old name.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LIMIT, CALLS, WARMUP = 1.1, 50, 5
ROWS, WIDTH = 64, 32
A, B, C = "(a) vs.shard_map", "(b) by hand", "(c) torch local_map"

Collective = Callable[[Tensor], Tensor]


def ops(x: Tensor, w: Tensor, rounds: int) -> Tensor:
    """Four small ops a round."""
    for _ in range(rounds):
        x = torch.relu(torch.tanh(x) * w + 1.0)
    return x


def work(x: Tensor, w: Tensor, psum: Collective, gather: Collective) -> Tensor:
    """20 ops and the two collectives."""
    x = ops(x, w, 2)
    x = ops(x + psum(x), w, 2)
    whole = gather(x)
    return (whole * w - 1.0).sum()


def alone(x: Tensor, w: Tensor) -> Tensor:
    """20 ops."""
    return ops(x, w, 5)


def reduced(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def gathered(x: Tensor) -> Tensor:
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    gather_single(whole, x)
    return whole


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    return work(x, w, reduced, gathered)


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return work(x, w, lambda x: vs.psum(x, "dp"), lambda x: vs.all_gather(x, "dp", to="invariant"))


def contestants(size: int) -> dict[str, Callable[[], Any]]:
    """The three, each with its arguments."""
    x, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((ROWS, WIDTH), (WIDTH,))
    )
    # One rank talks to nobody: simulated, though a process group is there.
    mesh = vs.make_mesh({"dp": size}, backend="simulated" if size == 1 else None)
    torch_mesh = init_device_mesh("cpu", (size,))
    rows, whole = vs.P(dp=vs.Shard(0)), vs.P()
    ours = vs.distribute_tensor(x, mesh, rows), vs.distribute_tensor(w, mesh, whole)
    theirs = distribute_tensor(x, torch_mesh, [Shard(0)]), distribute_tensor(w, torch_mesh, [Replicate()])
    plain = tuple(tensor.to_local().clone() for tensor in theirs)
    fn, out = (alone, rows) if size == 1 else (mapped, whole)
    hand, torch_out = (alone, [Shard(0)]) if size == 1 else (by_hand, [Replicate()])
    run = vs.shard_map(fn, mesh=mesh, in_specs=(rows, whole), out_specs=out)
    under_torch: Callable[..., Any] = local_map(
        hand, out_placements=(torch_out,), in_placements=([Shard(0)], [Replicate()]), device_mesh=torch_mesh
    )
    return {A: lambda: run(*ours), B: lambda: hand(*plain), C: lambda: under_torch(*theirs)}


def time_calls(run: Callable[[], Any]) -> float:
    """Median seconds of a call in one round."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rank(index: int, size: int, store: str, rounds: int, answer: Any) -> None:
    """One process: measures, and the first one answers."""
    torch.set_num_threads(1)  # ops this small gain nothing from more, and it is steadier
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=size)
    runs = contestants(size)
    values = [[run() for _ in range(WARMUP)][-1] for run in runs.values()]
    first, *others = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    assert all(torch.allclose(first, other, rtol=1e-4) for other in others)  # the same work
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(time_calls(run))
    if index == 0:
        answer.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """The median call of each round of each contestant, on `size` processes."""
    spawn = get_context("spawn")
    answer = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            spawn.Process(target=rank, args=(index, size, f"{directory}/store", rounds, answer))
            for index in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")
    return answer.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    slow = False
    for size, what in ((2, "20 ops, 2 collectives, 2 processes"), (1, "20 ops alone, one rank")):
        times = measure(size, args.rounds)
        print(f"{what}, {args.rounds} rounds of {CALLS} calls")
        for name, rounds in times.items():
            ratios = {
                other: statistics.median(t / r for t, r in zip(rounds, times[other])) for other in (B, C)
            }
            shown = "  ".join(f"{ratio:5.2f} x {other[:3]}" for other, ratio in ratios.items())
            print(f"  {name:20}{1e6 * statistics.median(rounds):8.1f} us   {shown}")
            slow |= size == 2 and name == A and ratios[B] > LIMIT
    if args.check and slow:
        sys.exit(f"(a)/(b) is above {LIMIT}")


if __name__ == "__main__":
    main()
