"""FSDP whose shards respect blocks: no tile of 32 x 32 is ever cut, and nothing is copied to move a bucket.

    python examples/04_fsdp_ragged_blocks.py

Claim: each block of the model moves in one gather each way and one reduction; shards end between
tiles, so that each is whole on a rank; and the losses are those of plain torch to rounding.
"""

from collections import Counter

import torch
from gpt import GPT, read_rows, read_text, row_starts

import vescale as vs

BLOCKS, RANKS, TILE = 2, 4, 32


def main() -> None:
    torch.manual_seed(0)
    model = GPT(BLOCKS, width=64).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = vs.make_mesh({"dp": RANKS})
    matrices = r"blocks\..*(qkv|proj|fc1|fc2)\.weight"
    fsdp = vs.FSDP("dp", wrap=r"blocks\.\d+", block={matrices: vs.Tile(TILE, TILE)})
    plan = vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)
    print(plan.resolve(weights))

    params = vs.distribute(weights, plan)
    for name in (name for name in params if name.endswith("fc1.weight")):
        layout = params[name].layout
        rows = [layout.local_shape(rank)[0] for rank in range(RANKS)]
        assert all(n % TILE == 0 for n in rows), (name, rows)  # whole bands of tiles
        print(f"{name}: {rows} rows on the ranks")

    optimizer = vs.optim.adamw(1e-3)

    def train_step(params, state, batch):
        loss, grads = vs.value_and_grad(lambda p, b: torch.func.functional_call(model, p, b))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    step = vs.parallelize(train_step, plan, donate=("params", "state"))
    text, _ = read_text()
    batches = [read_rows(text, starts)[:, :33] for starts in row_starts(text, steps=3, batch=8, seed=0)]
    state, alone, own = optimizer.init(params), weights, optimizer.init(weights)
    table = step.lower(params, state, batches[0]).collectives()
    for batch in batches:
        params, state, loss = step(params, state, batch)
        alone, own, expected = train_step(alone, own, batch)
        assert abs(loss.item() - expected.item()) < 1e-12 * expected.item()
    counts = Counter(call.kind for call in table)
    buckets = BLOCKS + 1  # the last: what is below no block
    assert counts["reduce_scatter"] == buckets, table
    assert counts["all_gather"] == buckets + BLOCKS, table  # blocks once more, for the backward
    print(f"3 steps as plain torch; a step has {dict(counts)} for {buckets} buckets")


if __name__ == "__main__":
    main()
