"""What a train step costs beside its kernels, three ways, in one run:

    python benchmarks/dispatch.py [--rounds 30] [--check]

(a) the plain module with autograd and torch.optim.AdamW(foreach=True);
(b) the functional step as a `vescale` program on a mesh of one rank, its parameters and state donated;
(c) the plain module on torch's DTensor, everything replicated on a mesh of one rank.

The model is the GPT of examples/train_gpt.py with 4 blocks. At width 64 and 1 x 16 bytes the step is bound by
dispatch; with more the kernels weigh in. Times are those of the process on its one thread, so that others'
load counts little. Rounds of the three alternate, so that a slow spell of the machine meets all of them; a
ratio is the median over rounds of the ratio of the rounds' fastest steps. Below that: what the host does a
call and a miss. `--check` fails when a ratio or a cost is above its limit.
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
from gpt import GPT, VOCAB
from train_gpt import LR, functional_step

STEPS, WARMUP = 10, 3
# (width, rows, length): the most that (b)/(a) may be
LIMITS = {(64, 1, 16): 0.9, (64, 4, 64): 0.95, (128, 4, 64): 1.0}
LEAVES, RANKS = 1000, 10_240


def make_model(width: int, length: int) -> GPT:
    torch.manual_seed(0)
    return GPT(blocks=4, width=width, context=length)


def training_loop(model: nn.Module) -> Callable[[Tensor], Tensor]:
    opt = torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)

    def step(batch: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(batch)
        loss.backward()
        opt.step()
        return loss

    return step


def plain(width: int, length: int, batch: Tensor) -> Callable[[], Tensor]:
    step = training_loop(make_model(width, length))
    return lambda: step(batch)


def program(width: int, length: int, batch: Tensor) -> Callable[[], Tensor]:
    model = make_model(width, length)
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


def torch_dtensor(width: int, length: int, batch: Tensor) -> Callable[[], Tensor]:
    mesh = init_device_mesh("cpu", (1,))
    step = training_loop(distribute_module(make_model(width, length), mesh))  # replicates every parameter
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


def fastest(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """The fastest step of each round of each contestant."""
    width, rows, length = shape
    batch = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    runs = {name: make(width, length, batch) for name, make in CONTESTANTS.items()}
    losses = {name: [run().item() for _ in range(WARMUP)][-1] for name, run in runs.items()}
    reference = losses["(a) plain torch"]
    assert all(abs(loss / reference - 1) < 1e-5 for loss in losses.values()), losses  # the same work
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(fastest(run, STEPS))
    gc.enable()
    return times


def instruction_cost() -> tuple[float, float]:
    """Microseconds of an instruction of a program beside those of the same op written in Python."""
    count = 200

    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(count):
            x = torch.maximum(x, y)
        return x

    mesh = vs.make_mesh({"dp": 1}, backend="simulated")
    run = vs.parallelize(chain, vs.Plan(mesh))
    x = torch.ones(4)
    placed = [vs.distribute_tensor(x, mesh, vs.P()) for _ in range(2)]
    run(*placed)
    call = fastest(lambda: run(*placed), 200)
    return 1e6 * call / count, 1e6 * fastest(lambda: chain(x, x), 200) / count


def lookup_cost() -> float:
    """Milliseconds to flatten a tree of many leaves and to look its program up."""
    mesh = vs.make_mesh({"dp": 1}, backend="simulated")
    names = [f"blocks.{i // 10}.weight.{i % 10}" for i in range(LEAVES)]
    tree = {
        name: vs.distribute_tensor(torch.zeros(i % 7 + 1, 2), mesh, vs.P()) for i, name in enumerate(names)
    }
    run = vs.parallelize(lambda tree: tree, vs.Plan(mesh))
    tree = run(tree)
    return 1e3 * fastest(lambda: run._find((tree,), {}), 200)


def miss_cost() -> tuple[float, float]:
    """Milliseconds a node to trace and partition the train step, and how much more many ranks take."""
    model = make_model(64, 16)
    step, _, init = functional_step(model)
    batch = torch.randint(VOCAB, (RANKS, 17), generator=torch.Generator().manual_seed(0))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def lower(ranks: int) -> tuple[float, int]:
        mesh = vs.make_mesh({"dp": ranks}, backend="simulated")
        run = vs.parallelize(step, vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}))
        state = init(params)
        nodes = len(run.lower(params, state, batch).as_text().splitlines())
        return fastest(lambda: run.lower(params, state, batch), 3), nodes

    few, nodes = lower(8)
    return 1e3 * few / nodes, lower(RANKS)[0] / few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # ops this small gain nothing from more, and it is steadier
    slow: list[str] = []

    def report(what: str, found: float, limit: float, unit: str) -> None:
        print(f"{what:58}{found:7.3f} {unit}, at most {limit:.3g}")
        if found > limit:
            slow.append(what)

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        teach_dtensor_attention()
        for (width, rows, length), limit in LIMITS.items():
            times = measure((width, rows, length), args.rounds)
            reference = times["(a) plain torch"]
            print(f"width {width}, 4 blocks, batch {rows} x {length}, {args.rounds} rounds of {STEPS} steps")
            for name, found in times.items():
                ratio = statistics.median(t / r for t, r in zip(found, reference))
                print(f"  {name:18}{1e3 * statistics.median(found):7.2f} ms   {ratio:5.2f} x (a)")
                if name.startswith("(b)"):
                    report("  (b)/(a)", ratio, limit, "")
        dist.destroy_process_group()
    program_us, python_us = instruction_cost()
    report("an instruction, where Python takes " + f"{python_us:.2f} us", program_us, 1.5 * python_us, "us")
    report(f"signature and lookup of {LEAVES:,} leaves", lookup_cost(), 0.3, "ms")
    per_node, growth = miss_cost()
    report("trace and partition, a node", per_node, 4, "ms")
    report(f"lowering for {RANKS:,} ranks, over 8", growth, 2, "x")
    if args.check and slow:
        sys.exit(f"above the limit: {', '.join(slow)}")


if __name__ == "__main__":
    main()
