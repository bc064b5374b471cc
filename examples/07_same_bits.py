"""The same bits on any mesh: sums are taken in a tree over 8 lanes, however many ranks host them.

    python examples/07_same_bits.py

Claim: every loss, gradient and parameter of each step is bitwise the same on 1, 2, 4 and 8 ranks, with
dropout, and with Muon. Without lanes it is not: sums are reordered. `train_gpt.py --lanes 8 --hash` says the
same of longer runs.
"""

import hashlib

import torch
from gpt import GPT, read_rows, read_text, row_starts

import vescale as vs

RANKS, STEPS = (1, 2, 4, 8), 2
OPTIMIZERS = {
    "AdamW": vs.optim.adamw(1e-3),
    "Muon": vs.optim.partition(
        lambda path, p: p.dim() == 2 and path.startswith("blocks"),
        {True: vs.optim.muon(0.02), False: vs.optim.adamw(1e-3)},
    ),
}


def run(ranks: int, optimizer: vs.optim.Optimizer, lanes: dict[str, int] | None) -> str:
    """The hash of every bit of a short training run."""
    torch.manual_seed(0)
    model, mesh = GPT(blocks=1, width=64, dropout=0.1), vs.make_mesh({"dp": ranks})

    def train_step(params, state, batch):
        loss, grads = vs.value_and_grad(lambda p, b: torch.func.functional_call(model, p, b))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss, grads

    fsdp = vs.FSDP("dp", wrap=r"blocks\.\d+")
    plan = vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)
    step = vs.parallelize(train_step, plan, donate=("params", "state"), lanes=lanes)
    params = vs.distribute({n: p.detach().clone() for n, p in model.named_parameters()}, step.plan)
    state, text, digest = optimizer.init(params), read_text()[0], hashlib.blake2b(digest_size=16)
    for starts in row_starts(text, STEPS, batch=8, seed=0):
        params, state, loss, grads = step(params, state, read_rows(text, starts)[:, :33])
        for tensor in (loss, *grads.values(), *params.values()):
            digest.update(tensor.full_tensor().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)  # a matmul's bits depend on it
    for name, optimizer in OPTIMIZERS.items():
        hashes = {run(ranks, optimizer, {"dp": 8}) for ranks in RANKS}
        assert len(hashes) == 1, hashes
        print(f"{name}, dropout, lanes=8, on {', '.join(map(str, RANKS))} ranks: {hashes.pop()}")
    apart = {run(ranks, OPTIMIZERS["AdamW"], lanes=None) for ranks in (1, 4)}
    assert len(apart) == 2, apart
    print(f"without lanes, on 1 and 4 ranks: {' and '.join(sorted(apart))}")


if __name__ == "__main__":
    main()
