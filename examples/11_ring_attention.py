"""Ring attention: causal attention over a sequence that no rank holds whole.

    python examples/11_ring_attention.py

Every rank keeps its queries; keys and values travel around the ring. A softmax is put together block by
block from its running maximum and sum (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise
Transformers"). Claim: value and gradients are those of full attention.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import vescale as vs

mesh = vs.make_mesh({"sp": 4})
SEQUENCE = vs.P(sp=vs.Shard(2))  # tensors are (batch, heads, sequence, width)


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Local shards in, the local shard of the attention out."""
    size, here = vs.axis_size("sp"), vs.axis_index("sp")
    length, width = q.shape[2], q.shape[3]
    rows = here * length + torch.arange(length)
    total = torch.zeros_like(q)
    weight, top = q.new_zeros(q.shape[:3]), q.new_full(q.shape[:3], -torch.inf)
    for step in range(size):
        owner = (here - step) % size  # whose keys have come this far
        columns = owner * length + torch.arange(length)
        scores = q @ k.transpose(2, 3) / math.sqrt(width)
        scores = scores.masked_fill(columns[None, :] > rows[:, None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1).detach())
        safe = torch.where(new_top.isinf(), 0.0, new_top)  # a block that is masked whole
        powers = torch.exp(scores - safe[..., None])
        old = torch.exp(top - safe)
        total = total * old[..., None] + powers @ v
        weight, top = weight * old + powers.sum(-1), new_top
        if step < size - 1:
            ring = [(rank, (rank + 1) % size) for rank in range(size)]
            k, v = vs.ppermute(k, "sp", ring), vs.ppermute(v, "sp", ring)
    return total / weight[..., None]


ring = vs.shard_map(ring_attention, mesh=mesh, in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE)


def main() -> None:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 3, 32, 8, dtype=torch.float64) for _ in range(4))

    def gradients(attention):
        return vs.grad(lambda q, k, v: (attention(q, k, v) * g).sum(), argnums=(0, 1, 2))(q, k, v)

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    gap = (ring(q, k, v).full_tensor() - whole(q, k, v)).abs().max().item()
    slopes = max((a - b).abs().max().item() for a, b in zip(gradients(ring), gradients(whole)))
    assert gap < 1e-12, gap
    assert slopes < 1e-12, slopes
    print(f"a ring of {mesh.size}: within {gap:.1e} of full attention, gradients within {slopes:.1e}")


if __name__ == "__main__":
    main()
