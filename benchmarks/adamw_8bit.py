"""Training with 8-bit and with float32 moments, alternating in one run:

    python benchmarks/adamw_8bit.py [--steps 300] [--seeds 3] [--rounds 40] [--check]

The GPT of examples/train_gpt.py, width 128 and 4 blocks, on one device, batch 8 x 128 of its text, lr 1e-3.
Printed: the loss curve of `vs.optim.adamw_8bit` over that of `vs.optim.adamw` (means of 25 steps; also
rounding at random, and the held-out files at the end), bytes of the state, and the time of an update alone:
medians of rounds that alternate, one thread. `--check` fails when the last 25 steps, or the held-out files,
differ by more than 1%, or the state has more than 0.27 of the bytes.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import vescale as vs
from vescale import _tree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, read_rows, read_text, row_starts

ROWS, WINDOW = 8, 25
PEER, OURS, RANDOM = "adamw", "8-bit", "8-bit, random"


def optimizers(lr):
    key = vs.rng.key(0)
    random = vs.optim.adamw_8bit(lr, stochastic_rounding=key)
    return {PEER: vs.optim.adamw(lr), OURS: vs.optim.adamw_8bit(lr), RANDOM: random}


def train(opt, steps, seed):
    """Losses by step, the loss on held-out files, and the state."""
    torch.manual_seed(seed)
    model, (text, held_out) = GPT(), read_text()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, batch)

    def train_step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, loss

    plan = vs.Plan(vs.make_mesh({"dp": 1}, backend="simulated"))
    step, losses = vs.parallelize(train_step, plan, donate=("params", "opt_state")), []
    params = vs.distribute(params, plan)
    state = opt.init(params)
    for starts in row_starts(text, steps, ROWS, seed):
        params, state, loss = step(params, state, read_rows(text, starts))
        losses.append(loss.item())
    test = read_rows(held_out, row_starts(held_out, 1, 64, 0)[0])
    with torch.no_grad():
        held = loss_fn(_tree.tree_map(lambda p: p.full_tensor(), params), test)
    return losses, held.item(), state


def nbytes(state):
    return sum(leaf.numel() * leaf.element_size() for leaf in _tree.leaves(state))


def window(losses, end):
    return statistics.fmean(losses[max(0, end - WINDOW) : end])


def update_times(rounds):
    """Seconds of a program that is the update alone, by optimizer."""
    params = {name: p.detach() for name, p in GPT().named_parameters()}
    plan, runs = vs.Plan(vs.make_mesh({"dp": 1}, backend="simulated")), {}
    for name, opt in optimizers(1e-3).items():

        def step(params, opt_state, grads, opt=opt):
            updates, opt_state = opt.update(grads, opt_state, params)
            return vs.optim.apply_updates(params, updates), opt_state

        placed = vs.distribute(_tree.tree_map(torch.clone, params), plan)
        grads = vs.distribute(_tree.tree_map(torch.randn_like, params), plan)
        run = vs.parallelize(step, plan, donate=("params", "opt_state"))
        runs[name] = [run, *run(*run(placed, opt.init(placed), grads), grads), grads]
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, kept in runs.items():
            run, placed, state, grads = kept
            start = time.perf_counter()
            kept[1:3] = run(placed, state, grads)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, failed = Console(width=120), []
    ends = [*range(WINDOW, options.steps, max(WINDOW, options.steps // 6)), options.steps]
    table = Table("loss, / adamw's", *(f"step {end}" for end in ends), "held out")
    sizes = {}
    for seed in range(options.seeds):
        seen = {name: train(opt, options.steps, seed) for name, opt in optimizers(1e-3).items()}
        sizes = {name: nbytes(state) for name, (_, _, state) in seen.items()}
        peer, peer_held, _ = seen[PEER]
        row = [f"{window(peer, end):.4f}" for end in ends]
        table.add_row(f"{PEER}, seed {seed}", *row, f"{peer_held:.4f}")
        for name in (OURS, RANDOM):
            losses, held, _ = seen[name]
            ratios = [window(losses, end) / window(peer, end) for end in ends] + [held / peer_held]
            table.add_row(name, *(f"{ratio:.4f}" for ratio in ratios))
            failed += [f"{name}: {ratio:.4f}" for ratio in ratios[-2:] if abs(ratio - 1) > 0.01]
    times = update_times(options.rounds)
    costs = Table("", "bytes of state", "/ adamw's", "ms an update", "/ adamw's")
    for name in times:
        part = sizes[name] / sizes[PEER]
        failed += [f"{name}: {part:.4f} of the bytes"] if name != PEER and part > 0.27 else []
        ratio = f"{times[name] / times[PEER]:.2f}"
        costs.add_row(name, f"{sizes[name]:,}", f"{part:.4f}", f"{1e3 * times[name]:.2f}", ratio)
    console.print(table, costs)
    if options.check and failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
