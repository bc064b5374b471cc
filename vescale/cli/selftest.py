"""The self-tests of `doctor`: each returns what it has seen, and raises when that is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import optim, rng
from ..rng.philox import philox4x32_ints
from ..spmd.collectives import axis_index, ppermute
from ..spmd.distribute import distribute
from ..spmd.mesh import make_mesh
from ..spmd.parallelize import parallelize
from ..spmd.placements import P, Shard
from ..spmd.plan import Plan
from ..spmd.shard_map import shard_map
from ..spmd.transforms import value_and_grad
from ..testing.pool import RankPool

Words = tuple[int, int, int, int]

# Published with Random123: counter, key, words of Philox4x32-10.
KNOWN: tuple[tuple[Words, tuple[int, int], Words], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def random_numbers() -> str:
    """The engine against published words, and a large draw against the engine."""
    for counter, key, words in KNOWN:
        if philox4x32_ints(counter, key) != words:
            raise AssertionError(f"Philox gives other words than published for counter {counter}")
    seed, count = rng.key(7), 1 << 14
    drawn = rng.bits(rng.clone(seed), (count,), torch.int32)
    words = (int(seed.data[0]), int(seed.data[1]))
    for block in (0, 1, count // 4 - 1):
        for place, word in enumerate(philox4x32_ints((block, 0, 0, 0), words)):
            if int(drawn[4 * block + place]) & 0xFFFFFFFF != word:
                raise AssertionError(f"element {4 * block + place} of a draw is another than by definition")
    return f"{len(KNOWN)} published blocks, {count:,} numbers"


def train_step() -> str:
    """A step of an MLP with AdamW, on 2 x 2 simulated ranks and by plain torch: all bits are compared.

    Values are small whole numbers, and their sums exact: the order of reductions doesn't show.
    """
    opt = optim.adamw(0.5)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.relu(x @ params["up"]) @ params["down"]).square().sum()

    def step(params, state, x):
        value, grads = value_and_grad(loss)(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    whole = lambda *shape: torch.arange(torch.Size(shape).numel()).remainder(5).sub(2).float().view(shape)  # noqa: E731
    params, x = {"up": whole(8, 12), "down": whole(12, 8)}, whole(16, 8)
    mesh = make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    plan = Plan(
        mesh,
        params={"up": P(tp=Shard(1)), "down": P(tp=Shard(0))},
        inputs={"x": P(dp=Shard(0))},
    )
    placed = distribute(params, plan)
    after, _, value = parallelize(step, plan)(placed, opt.init(placed), x)
    expected, _, wanted = step(params, opt.init(params), x)
    pairs = {"loss": (value, wanted), **{name: (after[name], expected[name]) for name in params}}
    for name, (ours, theirs) in pairs.items():
        if not torch.equal(ours.full_tensor(), theirs):
            raise AssertionError(f"{name} on 2 x 2 simulated ranks has other bits than in plain torch")
    return "2 x 2 simulated ranks have the bits of plain torch"


def ring(seconds: float = 20) -> str:
    """A token goes around two processes over gloo."""
    with RankPool(2, timeout=seconds) as pool:
        tokens = pool.run(pass_on)
    if tokens != [1.0, 0.0]:
        raise AssertionError(f"the processes hold {tokens} after a shift by one, not [1.0, 0.0]")
    return "a token went around over gloo"


def pass_on() -> float:
    """In each process: its index, sent to the next."""
    mesh = make_mesh({"ring": 2})

    def shift(x: Tensor) -> Tensor:
        return ppermute(x + axis_index("ring"), "ring", [(0, 1), (1, 0)])

    moved = shard_map(shift, mesh=mesh, in_specs=P(ring=Shard(0)), out_specs=P(ring=Shard(0)))(torch.zeros(2))
    token = moved.to_local().item()
    mesh.close()
    return token
