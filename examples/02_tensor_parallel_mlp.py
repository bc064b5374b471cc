"""A tensor-parallel MLP in both styles: shards and collectives by hand, or one-device code and a plan.

    python examples/02_tensor_parallel_mlp.py

Claim: both give the same bits, value and gradients, with the same four reductions.
"""

from typing import Annotated

import torch
from torch import Tensor

import vescale as vs

mesh = vs.make_mesh({"dp": 2, "tp": 2})
ROWS, COLUMN, ROW = vs.P(dp=vs.Shard(0)), vs.P(tp=vs.Shard(1)), vs.P(tp=vs.Shard(0))


def loss(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Ordinary torch, for one device."""
    return (torch.tanh(x @ up) @ down).square().sum()


@vs.shard_map(mesh=mesh)
def by_hand(
    x: Annotated[Tensor, ROWS], up: Annotated[Tensor, COLUMN], down: Annotated[Tensor, ROW]
) -> tuple[Annotated[Tensor, vs.P()], Annotated[Tensor, COLUMN], Annotated[Tensor, ROW]]:
    """Each rank has rows of x, columns of `up` and rows of `down`, and says what it communicates."""

    def local_loss(up: Tensor, down: Tensor) -> Tensor:
        y = vs.psum(torch.tanh(x @ up) @ down, "tp")  # each rank has part of the sum over the hidden units
        return vs.psum(y.square().sum(), "dp")

    value, (d_up, d_down) = vs.value_and_grad(local_loss, argnums=(0, 1))(up, down)
    return value, d_up, d_down


def by_plan(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, (d_up, d_down) = vs.value_and_grad(loss, argnums=(1, 2))(x, up, down)
    return value, d_up, d_down


plan = vs.Plan(
    mesh, inputs={"x": ROWS, "up": COLUMN, "down": ROW}, outputs={"0": vs.P(), "1": COLUMN, "2": ROW}
)
planned = vs.parallelize(by_plan, plan)


def main() -> None:
    torch.manual_seed(0)
    args = [torch.randn(*shape, dtype=torch.float64) for shape in ((8, 16), (16, 32), (32, 16))]
    ours = [result.full_tensor() for result in by_hand(*args)]
    theirs = [result.full_tensor() for result in planned(*args)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), "the two styles differ"
    expected = by_plan(*args)  # plain torch: the same function, called on one device
    gap = max((a - b).abs().max().item() for a, b in zip(ours, expected))
    assert gap < 1e-10, gap
    print(f"same bits in both styles; within {gap:.1e} of one device")
    by_hand_makes = sorted(call.axis for call in by_hand.collectives(*args))
    by_plan_makes = sorted(call.axis for call in planned.lower(*args).collectives())
    assert by_hand_makes == by_plan_makes == ["dp", "dp", "dp", "tp"]
    print(by_hand.collectives(*args), planned.lower(*args).collectives(), sep="\n")


if __name__ == "__main__":
    main()
