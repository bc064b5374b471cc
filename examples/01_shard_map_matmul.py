"""A matmul over shards, three ways: what is split decides what is communicated.

    python examples/01_shard_map_matmul.py

Claim: each gives the product of one device, and its gradients, with the one collective that it says.
"""

from typing import Annotated

import torch
from torch import Tensor

import vescale as vs

mesh = vs.make_mesh({"x": 4})
ROWS, COLUMNS, WHOLE = vs.P(x=vs.Shard(0)), vs.P(x=vs.Shard(1)), vs.P()
UNEVEN = vs.P(x=vs.RaggedShard((0,), (3, 0, 4, 1)))  # of 8 rows: three, none, four, one


@vs.shard_map(mesh=mesh)
def gather_first(a: Annotated[Tensor, ROWS], b: Annotated[Tensor, COLUMNS]) -> Annotated[Tensor, ROWS]:
    """Rows of a, columns of b: b is needed whole."""
    return a @ vs.all_gather(b, "x", dim=1)


@vs.shard_map(mesh=mesh)
def reduce_after(a: Annotated[Tensor, COLUMNS], b: Annotated[Tensor, ROWS]) -> Annotated[Tensor, WHOLE]:
    """Split along the summed dim: each rank has one term of the sum."""
    return vs.psum(a @ b, "x")


@vs.shard_map(mesh=mesh)
def scatter_after(a: Annotated[Tensor, COLUMNS], b: Annotated[Tensor, UNEVEN]) -> Annotated[Tensor, ROWS]:
    """The summed dim again, of which ranks have unequal parts of b; each wants rows of the result only."""
    own = vs.all_to_all(a, "x", split_dim=0, concat_dim=1)  # a by columns -> by rows: whole rows here
    return own @ vs.all_gather(b, "x")


def main() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def slopes(product):
        return vs.grad(lambda a, b: product(a, b).square().sum(), argnums=(0, 1))(a, b)

    wanted = slopes(torch.matmul)
    kinds = {gather_first: ["all_gather"], reduce_after: ["psum"]}
    kinds[scatter_after] = ["all_gather", "all_to_all"]
    for product, kind in kinds.items():
        gap = (product(a, b).full_tensor() - a @ b).abs().max().item()
        off = max((ours - theirs).abs().max().item() for ours, theirs in zip(slopes(product), wanted))
        assert gap < 1e-12, (product, gap)
        assert off < 1e-10, (product, off)
        made = product.collectives(a, b)
        assert sorted(call.kind for call in made) == kind, made
        print(f"{', '.join(kind):23} product within {gap:.0e}, gradients within {off:.0e} of one device")


if __name__ == "__main__":
    main()
