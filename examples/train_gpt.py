"""Train a byte-level GPT on Python's own standard library, sharded by the plan in `make_plan`.

    python examples/train_gpt.py                                    # four ranks, simulated in this process
    python examples/train_gpt.py --mesh dp=4 --steps 300            # other meshes: dp=N, tp=N, or both
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2         # real processes

The model and the loss are ordinary torch for one device. Parameters lie ragged over dp at rest, and are
split over tp in use. The same global batches are trained by plain torch beside it, for comparison.
"""

import argparse
import sysconfig
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import vescale as vs

HEADS, CONTEXT, VOCAB, LR = 4, 128, 256, 1e-3


# ---- the model: nothing in it knows of meshes
class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 128, context: int = CONTEXT):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        """The loss on rows of bytes: at each place, the next byte is to be predicted."""
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = self.blocks(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        return F.cross_entropy(self.head(self.lnf(x)).flatten(0, 1), targets.flatten())


# ---- the text: what every machine with Python has, every tenth file held out
def read_text() -> tuple[Tensor, ...]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    kept = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == h) for h in (0, 1)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in kept)


def row_starts(text: Tensor, steps: int, batch: int, seed: int) -> Tensor:
    """Where each row of each global batch begins: the same on every rank and every mesh."""
    return torch.randint(len(text) - CONTEXT, (steps, batch), generator=torch.Generator().manual_seed(seed))


def read_rows(text: Tensor, starts: Tensor) -> Tensor:
    return torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()]).long()


# ---- the plan: all that parallelism takes
def make_plan(mesh: vs.Mesh) -> vs.Plan:
    dp = dict(zip(mesh.axis_names, mesh.shape)).get("dp", 1)
    total = 2 << (dp - 1).bit_length()  # a power of two, which divides every dim 0; rank 0 gets the most
    ragged = {"dp": vs.RaggedShard((0,), (total - dp + 1, *[1] * (dp - 1)))}
    here = lambda **axes: {a: p for a, p in axes.items() if a in mesh.axis_names}  # noqa: E731
    sharded = {
        r".*\.qkv\.(weight|bias)": here(tp=vs.InterleavedShard(0, 3)),  # each rank: its heads of q, k and v
        r".*\.fc1\.(weight|bias)": here(tp=vs.Shard(0)),
        r".*\.(proj|fc2)\.weight": here(tp=vs.Shard(1)),
        r".*": {},
    }
    params = {k: vs.Staged(init=vs.P(**run, **here(**ragged)), run=vs.P(**run)) for k, run in sharded.items()}
    return vs.Plan(mesh, params=params, inputs={"batch": vs.P(**here(dp=vs.Shard(0)))})


def feed(text: Tensor, starts: Tensor, mesh: vs.Mesh) -> Tensor:
    """A batch for the program. A process reads its own rows only; a simulated mesh hosts all ranks."""
    if mesh.backend == "simulated" or "dp" not in mesh.axis_names:
        return read_rows(text, starts)
    mine = starts.reshape(mesh["dp"].size, -1)[mesh.coordinate("dp")]
    return vs.from_local(read_rows(text, mine), mesh, vs.P(dp=vs.Shard(0)))


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
