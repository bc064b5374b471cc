"""Muon over shards that cut matrices: each is brought together on a rank, orthogonalized, and goes back.

    python examples/05_muon.py

Claim: under FSDP the parameters have, step by step, the bits that torch.optim.Muon gives whole matrices
on one device; and what moves, goes in one collective to owners and one back.
"""

import torch
from gpt import GPT

import vescale as vs

RANKS, STEPS = 4, 5
HYPERPARAMETERS = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1}


def main() -> None:
    torch.manual_seed(0)
    model = GPT(blocks=2, width=64)
    matrices = {
        n: p.detach().clone() for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2
    }
    gradients = [{name: torch.randn_like(w) for name, w in matrices.items()} for _ in range(STEPS)]

    plain = {name: torch.nn.Parameter(w.clone()) for name, w in matrices.items()}
    theirs = torch.optim.Muon(plain.values(), **HYPERPARAMETERS)

    mesh = vs.make_mesh({"dp": RANKS})
    plan = vs.Plan(mesh, params_arg="params", fsdp=vs.FSDP("dp", wrap=r"blocks\.\d+"))
    ours = vs.optim.muon(**HYPERPARAMETERS)

    def train_step(params, state, gradients):
        updates, state = ours.update(gradients, state, params)
        return vs.optim.apply_updates(params, updates), state

    step = vs.parallelize(train_step, plan, donate=("params", "state"))
    params = vs.distribute(matrices, plan)
    cut = [n for n, w in params.items() if sum(w.to_local(rank).numel() > 0 for rank in range(RANKS)) > 1]
    state = ours.init(params)
    for given in gradients:
        params, state = step(params, state, given)
        for name, p in plain.items():
            p.grad = given[name].clone()
        theirs.step()
        assert all(torch.equal(params[name].full_tensor(), plain[name]) for name in plain)
    lowered = step.lower(params, state, gradients[0])
    starts = [line for line in lowered.as_text().splitlines() if "= start" in line]
    assert len(starts) == 2, starts  # one collective to owners, one back
    moved = sum(call.bytes for call in lowered.collectives())
    whole = sum(w.numel() for w in matrices.values()) * 2  # in bfloat16
    print("\n".join(starts))
    print(
        f"{len(matrices)} matrices, {len(cut)} of them cut: {STEPS} steps with torch's bits; a step "
        f"moves {moved / whole:.2f} of the matrices' bytes to owners and back"
    )


if __name__ == "__main__":
    main()
