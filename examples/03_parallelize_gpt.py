"""One-device code on any mesh: a GPT's train step, not a line of it changed, under three plans.

    python examples/03_parallelize_gpt.py

Claim: the first loss and every gradient are those of plain torch to rounding, on each mesh; the program is
traced once; and it communicates what a hand-written implementation does.
"""

from collections import Counter

import torch
from gpt import GPT, make_plan, read_rows, read_text, row_starts

import vescale as vs

BLOCKS = 2
MESHES = [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}]


def main() -> None:
    torch.manual_seed(0)
    model = GPT(BLOCKS, width=64).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    text, _ = read_text()
    batches = [read_rows(text, starts)[:, :33] for starts in row_starts(text, steps=3, batch=8, seed=0)]
    optimizer = vs.optim.adamw(1e-3)

    def train_step(params, state, batch):
        """Ordinary torch, for one device."""
        loss, grads = vs.value_and_grad(lambda p, b: torch.func.functional_call(model, p, b))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    def losses(step, params):
        state, seen = optimizer.init(params), []
        for batch in batches:
            params, state, loss = step(params, state, batch)
            seen.append(loss.item())
        return seen

    alone = losses(train_step, weights)  # the same function, called as it is
    for axes in MESHES:
        plan = make_plan(vs.make_mesh(axes))
        step, params = vs.parallelize(train_step, plan), vs.distribute(weights, plan)
        gap = max(abs(a - b) / a for a, b in zip(alone, losses(step, params), strict=True))
        assert gap < 1e-12, (axes, gap)
        assert step.cache_info().misses == 1
        table = step.lower(params, optimizer.init(params), batches[0]).collectives()
        counts = Counter(call.axis for call in table if call.kind == "all_reduce")
        if "tp" in axes:
            assert counts["tp"] == 4 * BLOCKS, table  # after attention and after the MLP, and back
        made = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(call.kind for call in table).items()))
        print(f"{axes!s:20} loss {alone[0]:.4f} to {alone[-1]:.4f}, within {gap:.0e} of plain torch; {made}")


if __name__ == "__main__":
    main()
