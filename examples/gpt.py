"""A byte-level GPT, a text that every machine with Python has, and a plan: what several examples share.

Nothing in the model knows of meshes, and the plan is all that parallelism takes.
"""

import sysconfig
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale as vs

HEADS, CONTEXT, VOCAB = 4, 128, 256


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
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 128, context: int = CONTEXT, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)))
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
