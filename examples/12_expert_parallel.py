"""An expert-parallel layer: tokens travel to the rank of their expert and back, as many as there are.

    python examples/12_expert_parallel.py

Claim: the layer gives what the dense computation gives, gradients too, also when an expert gets no token.
"""

import torch
from torch import Tensor

import vescale as vs

EXPERTS, WIDTH = 8, 6
mesh = vs.make_mesh({"ep": 4})
TOKENS, OWN = vs.P(ep=vs.Shard(0)), vs.P(ep=vs.Shard(0))


def dense(x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
    """One device: each token times the matrix of its expert."""
    return torch.einsum("td,tde->te", x, weights[choice])


def expert_parallel(x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
    """Each rank has some of the tokens and some of the experts."""
    ranks, own = vs.axis_size("ep"), weights.shape[0]
    order = torch.argsort(choice, stable=True)  # rows for rank 0 first, then rank 1, ...
    counts = (choice[:, None] // own == torch.arange(ranks)).sum(0)
    arrived, received = vs.all_to_all_ragged(x[order], counts, "ep")
    experts, _ = vs.all_to_all_ragged(choice[order], counts, "ep")
    local = (experts - vs.axis_index("ep") * own).clamp(0, own - 1)  # rows past the last: any will do
    done = torch.einsum("td,tde->te", arrived, weights[local])
    back, _ = vs.all_to_all_ragged(done, received, "ep", capacity=x.shape[0], pair_capacity=x.shape[0])
    return back[torch.argsort(order)]


layer = vs.shard_map(expert_parallel, mesh=mesh, in_specs=(TOKENS, TOKENS, OWN), out_specs=TOKENS)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    weights = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
    choice = torch.randint(EXPERTS - 1, (20,))  # the last expert gets no token
    choice[:5] = 2  # and one of them many
    assert not (choice == EXPERTS - 1).any()

    def gradients(layer):
        return vs.grad(lambda x, w: layer(x, choice, w).square().sum(), argnums=(0, 1))(x, weights)

    gap = (layer(x, choice, weights).full_tensor() - dense(x, choice, weights)).abs().max().item()
    slopes = max((a - b).abs().max().item() for a, b in zip(gradients(layer), gradients(dense)))
    assert gap < 1e-12, gap
    assert slopes < 1e-12, slopes
    print(f"{EXPERTS} experts on {mesh.size} ranks: within {gap:.1e} of dense, gradients within {slopes:.1e}")


if __name__ == "__main__":
    main()
