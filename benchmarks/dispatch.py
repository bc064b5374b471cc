"""What a train step costs beside its kernels, three ways, in one run:

    python benchmarks/dispatch.py [--rounds 30] [--check]

(a) the plain module with autograd and torch.optim.AdamW;
(b) the functional step as a `vescale` program on a mesh of one rank;
(c) the plain module on torch's DTensor, everything replicated on a mesh of one rank.

The model is the GPT of examples/train_gpt.py with 4 blocks of width 64. At 1 x 16 bytes the step is bound by
dispatch; at 4 x 64 the kernels weigh in. Rounds of the three alternate, so that a slow spell of the machine
meets all of them; a ratio is the median over rounds of the ratio of the rounds' median steps. `--check`
fails when (b)/(a) is above 1.1.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, register_sharding

import vescale as vs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, LR, VOCAB, functional_step

LIMIT, STEPS, WARMUP = 1.1, 10, 3
SHAPES = [(1, 16), (4, 64)]


def make_model(length: int) -> GPT:
    torch.manual_seed(0)
    return GPT(blocks=4, width=64, context=length)


def training_loop(model: nn.Module) -> Callable[[Tensor], Tensor]:
    opt = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(batch: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(batch)
        loss.backward()
        opt.step()
        return loss

    return step


def plain(length: int, batch: Tensor) -> Callable[[], Tensor]:
    step = training_loop(make_model(length))
    return lambda: step(batch)


def program(length: int, batch: Tensor) -> Callable[[], Tensor]:
    model = make_model(length)
    train_step, _, init = functional_step(model)
    # Simulated even here, where DTensor has started a process group: one rank talks to nobody.
    plan = vs.Plan(vs.make_mesh({"dp": 1}, backend="simulated"))
    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"))
    params = vs.distribute({n: p.detach().clone() for n, p in model.named_parameters()}, plan)
    opt_state = init(params)

    def run() -> Tensor:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        return loss

    return run


def torch_dtensor(length: int, batch: Tensor) -> Callable[[], Tensor]:
    mesh = init_device_mesh("cpu", (1,))
    step = training_loop(distribute_module(make_model(length), mesh))  # replicates every parameter
    rows = distribute_tensor(batch, mesh, [Replicate()])

    def run() -> Tensor:
        with implicit_replication():  # the positions, made in forward
            return step(rows)

    return run


def teach_dtensor_attention() -> None:
    """DTensor has no rule for the attention kernel of the cpu; without, it could not run the same work."""

    def replicated(outputs: int, tensors: int, numbers: int):
        return lambda *_, **__: [([Replicate()] * outputs, [Replicate()] * tensors + [None] * numbers)]

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(forward)(replicated(outputs=2, tensors=3, numbers=2))
    register_sharding(backward)(replicated(outputs=3, tensors=6, numbers=2))


CONTESTANTS = {"(a) plain torch": plain, "(b) vescale": program, "(c) torch DTensor": torch_dtensor}


def time_steps(run: Callable[[], Tensor]) -> float:
    """Median seconds of a step in one round."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(shape: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """The median step of each round of each contestant."""
    rows, length = shape
    batch = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    runs = {name: make(length, batch) for name, make in CONTESTANTS.items()}
    losses = {name: [run().item() for _ in range(WARMUP)][-1] for name, run in runs.items()}
    reference = losses["(a) plain torch"]
    assert all(abs(loss / reference - 1) < 1e-5 for loss in losses.values()), losses  # the same work
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(time_steps(run))
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # ops this small gain nothing from more, and it is steadier
    slow = False
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        teach_dtensor_attention()
        for shape in SHAPES:
            times = measure(shape, args.rounds)
            reference = times["(a) plain torch"]
            print(f"width 64, 4 blocks, batch {shape[0]} x {shape[1]}, {args.rounds} rounds of {STEPS} steps")
            for name, rounds in times.items():
                ratio = statistics.median(t / r for t, r in zip(rounds, reference))
                print(f"  {name:18}{1e3 * statistics.median(rounds):7.2f} ms   {ratio:5.2f} x (a)")
                slow |= name.startswith("(b)") and ratio > LIMIT
        dist.destroy_process_group()
    if args.check and slow:
        sys.exit(f"(b)/(a) is above {LIMIT}")


if __name__ == "__main__":
    main()
