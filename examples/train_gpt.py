"""Train a byte-level GPT on Python's own standard library, sharded by the plan of gpt.py.

    python examples/train_gpt.py                                    # four ranks, simulated in this process
    python examples/train_gpt.py --mesh dp=4 --steps 300            # other meshes: dp=N, tp=N, or both
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2         # real processes

The model and the loss are ordinary torch for one device. Parameters lie ragged over dp at rest, and are
split over tp in use. The same global batches are trained by plain torch beside it, for comparison.
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from gpt import CONTEXT, GPT, feed, make_plan, read_rows, read_text, row_starts
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import vescale as vs

LR = 1e-3


# ---- the train step: functional for `vs.parallelize`, and as one writes it without
def functional_step(model: nn.Module):
    opt = vs.optim.adamw(LR)

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, batch)

    def train_step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, loss

    return train_step, loss_fn, opt.init


def plain_step(model: nn.Module):
    opt = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)

    def step(batch: Tensor) -> float:
        opt.zero_grad()
        loss = model(batch)
        loss.backward()
        opt.step()
        return loss.item()

    return step


def train(mesh, steps=100, batch=8, seed=0, dtype="float32", compare=True) -> SimpleNamespace:
    """Train beside plain torch; returns what was seen, among it curves of losses by step."""
    torch.manual_seed(seed)
    model, first = GPT().to(getattr(torch, dtype)), 0 in mesh.local_ranks
    plain = plain_step(model) if compare and first else None
    train_step, loss_fn, init = functional_step(model)
    plan = make_plan(mesh)
    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"))
    evaluate = vs.parallelize(loss_fn, plan)
    params = vs.distribute({n: p.detach().clone() for n, p in model.named_parameters()}, plan)
    opt_state = init(params)
    text, held_out = read_text()
    test = feed(held_out, row_starts(held_out, 1, 32, seed)[0], mesh)
    curves = {"vescale": {}, "plain torch, one device": {}, "held-out files": {}}
    (ours, theirs, validation), spent = curves.values(), 0.0
    with Progress(disable=not first) as progress:
        for i, starts in enumerate(progress.track(row_starts(text, steps, batch, seed))):
            if i % max(1, steps // 10) == 0:
                validation[i] = evaluate(params, test).item()
            rows, start = feed(text, starts, mesh), time.perf_counter()
            params, opt_state, loss = step(params, opt_state, rows)
            ours[i] = loss.item()
            spent += (time.perf_counter() - start) * (i > 0)  # the first step is traced
            rate = i * batch * CONTEXT / max(spent, 1e-9)
            if plain:
                theirs[i] = plain(read_rows(text, starts))
            progress.update(progress.task_ids[0], description=f"loss {ours[i]:.4f}, {rate:,.0f} tokens/s")
    validation[steps] = evaluate(params, test).item()
    collectives = step.lower(params, opt_state, rows).collectives()
    gap = max((abs(ours[i] - theirs[i]) / abs(theirs[i]) for i in theirs), default=0.0)
    return SimpleNamespace(step=step, collectives=collectives, curves=curves, gap=gap, rate=rate)


def report(seen: SimpleNamespace, title: str, picture: Path) -> None:
    table = Table("loss, nats a byte", "first", "last", title=title)
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for width, (name, curve) in zip((6, 2, 2), seen.curves.items()):  # the second lies on the first
        if losses := list(curve.values()):
            table.add_row(name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}")
            axes.plot(list(curve), losses, label=name, linewidth=width)
    axes.set(title=title, xlabel="step", ylabel="nats a byte")
    axes.legend()
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=120)
    words = f"{seen.rate:,.0f} tokens/s; relative difference <= {seen.gap:.1e}; {seen.step.cache_info()}"
    Console().print(table, words, f"curves: {picture}", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for flag, x in {"mesh": "dp=2,tp=2", "steps": 100, "batch": 8, "seed": 0, "dtype": "float32"}.items():
        parser.add_argument(f"--{flag}", type=type(x), default=x, help=f"default: {x}")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    options = vars(parser.parse_args())
    shape = options.pop("mesh")
    mesh = vs.make_mesh({axis: int(n) for axis, n in (item.split("=") for item in shape.split(","))})
    seen = train(mesh, **options)
    if 0 in mesh.local_ranks:
        report(seen, f"GPT on {shape}, {mesh.backend}, {options['dtype']}", Path("out/train_gpt.png"))
    mesh.close()


if __name__ == "__main__":
    main()
