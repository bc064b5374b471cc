"""Train a byte-level GPT on Python's own standard library, sharded by the plan of gpt.py.

    python examples/train_gpt.py                                    # four ranks, simulated in this process
    python examples/train_gpt.py --mesh dp=4 --steps 300            # other meshes: dp=N, tp=N, or both
    python examples/train_gpt.py --optimizer muon                   # or adamw_8bit, shampoo
    python examples/train_gpt.py --save-every 50                    # and then, on any mesh, --resume
    python examples/train_gpt.py --mesh dp=2 --lanes 8 --hash       # the same hash with dp=1, 2, 4 and 8
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2         # real processes

The model and the loss are ordinary torch for one device. Parameters lie ragged over dp at rest, and are
split over tp in use. AdamW's batches are trained by plain torch beside it, for comparison.
"""

import argparse
import hashlib
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from curves import report
from gpt import CONTEXT, GPT, feed, make_plan, read_rows, read_text, row_starts
from rich.progress import Progress
from torch import Tensor, nn

import vescale as vs

LR = 1e-3
MATRICES = r"blocks\..*\.weight"  # what Muon and Shampoo are for; the rest has AdamW
OPTIMIZERS = ("adamw", "adamw_8bit", "muon", "shampoo")
LABELS = {r".*\.ln\d\.weight": "other", MATRICES: "matrix", r".*": "other"}


# ---- the train step: functional for `vs.parallelize`, and as one writes it without
def make_optimizer(name: str) -> vs.optim.Optimizer:
    if name == "adamw":
        return vs.optim.adamw(LR)
    if name == "adamw_8bit":
        return vs.optim.adamw_8bit(LR, block=(8, 32))  # no shard of the plan cuts such a tile
    matrix = {"muon": lambda: vs.optim.muon(0.02), "shampoo": lambda: vs.optim.shampoo(LR)}[name]()
    return vs.optim.partition(LABELS, {"matrix": matrix, "other": vs.optim.adamw(LR)})


def functional_step(model: nn.Module, optimizer: str = "adamw", gradients: bool = False) -> tuple:
    opt = make_optimizer(optimizer)

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, batch)

    def train_step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        seen = {"loss": loss, "gradients": grads} if gradients else loss
        return vs.optim.apply_updates(params, updates), opt_state, seen

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


def train(
    mesh, steps=100, batch=8, seed=0, dtype="float32", compare=True, optimizer="adamw", dropout=0.0,
    lanes=0, hash=False, save_every=0, resume=False, folder=Path("out/train_gpt"), blocks=4,
) -> SimpleNamespace:  # fmt: skip
    """Train, AdamW beside plain torch; returns what was seen, among it curves of losses by step."""
    generator = torch.manual_seed(seed)
    model, first = GPT(blocks, dropout=dropout).to(getattr(torch, dtype)), 0 in mesh.local_ranks
    alike = compare and optimizer == "adamw" and not (dropout or resume)
    plain = plain_step(model) if alike and first else None
    train_step, loss_fn, init = functional_step(model, optimizer, gradients=hash)
    plan, by_lane = make_plan(mesh), {"dp": lanes} if lanes else None
    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"), lanes=by_lane)
    evaluate = vs.parallelize(loss_fn, plan, lanes=by_lane)
    params = vs.distribute({n: p.detach().clone() for n, p in model.named_parameters()}, plan)
    opt_state, done, digest = init(params), 0, hashlib.blake2b(digest_size=16)
    if resume:  # from whatever mesh, in whatever layouts it was saved
        saved = {"params": params, "opt_state": opt_state, "done": 0, "torch": generator}
        saved = vs.checkpoint.load(saved, vs.checkpoint.latest(folder) or f"{folder}: no step is there")
        params, opt_state, done = saved["params"], saved["opt_state"], saved["done"]
        generator.set_state(saved["torch"].get_state())
        if done >= steps:
            raise SystemExit(f"{folder} has {done} steps already, of --steps {steps}")

    def validate() -> float:
        model.eval()
        loss = evaluate(params, test).item()
        model.train()
        return loss

    text, held_out = read_text()
    test = feed(held_out, row_starts(held_out, 1, 32, seed)[0], mesh)
    curves = {"vescale": {}, "plain torch, one device": {}, "held-out files": {}}
    (ours, theirs, validation), spent, rate = curves.values(), 0.0, 0.0
    with Progress(disable=not first) as progress:
        for i, starts in enumerate(progress.track(row_starts(text, steps, batch, seed)[done:]), done):
            if i % max(1, steps // 10) == 0:
                validation[i] = validate()
            rows, start = feed(text, starts, mesh), time.perf_counter()
            params, opt_state, seen = step(params, opt_state, rows)
            ours[i] = (seen["loss"] if hash else seen).item()
            spent += (time.perf_counter() - start) * (i > done)  # the first step is traced
            rate = (i - done) * batch * CONTEXT / max(spent, 1e-9)
            if plain:
                theirs[i] = plain(read_rows(text, starts))
            if hash:
                for tensor in (seen["loss"], *seen["gradients"].values(), *params.values()):
                    digest.update(tensor.full_tensor().contiguous().view(-1).view(torch.uint8).numpy())
            if save_every and (i + 1) % save_every == 0:
                saved = {"params": params, "opt_state": opt_state, "done": i + 1, "torch": generator}
                vs.checkpoint.save(saved, folder, step=i + 1, keep=2)
            progress.update(progress.task_ids[0], description=f"loss {ours[i]:.4f}, {rate:,.0f} tokens/s")
    validation[steps] = validate()
    collectives = step.lower(params, opt_state, rows).collectives()
    gap = max((abs(ours[i] - theirs[i]) / abs(theirs[i]) for i in theirs), default=0.0)
    hashed = digest.hexdigest() if hash else None
    return SimpleNamespace(step=step, collectives=collectives, curves=curves, gap=gap, rate=rate, hash=hashed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags = {"mesh": "dp=2,tp=2", "steps": 100, "batch": 8, "seed": 0, "dtype": "float32", "blocks": 4}
    for flag, x in (flags | {"dropout": 0.0, "lanes": 0, "save-every": 0}).items():
        parser.add_argument(f"--{flag}", type=type(x), default=x, help=f"default: {x}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    for flag, x in {"compare": True, "hash": False, "resume": False}.items():
        parser.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, default=x)
    options = vars(parser.parse_args())
    shape = options.pop("mesh")
    mesh = vs.make_mesh({axis: int(n) for axis, n in (item.split("=") for item in shape.split(","))})
    seen = train(mesh, **options)
    if 0 in mesh.local_ranks:
        report(seen, f"GPT on {shape}, {mesh.backend}, {options['optimizer']}", Path("out/train_gpt.png"))
        if seen.hash:
            print("hash of all losses, gradients and parameters:", seen.hash)
    mesh.close()


if __name__ == "__main__":
    main()
