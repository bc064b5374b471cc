"""A toy model of two blocks and a head, as plain functions: small, so that odd cases of it are cheap."""

import torch

import vescale as vs
from vescale import _tree

ROWS, WIDTH, OUT = 16, 6, 3
WRAP = r"blocks\.\d+"


def make_params(dtype=torch.float64, blocks=2):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype) / 2  # noqa: E731
    block = lambda: {"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)}  # noqa: E731
    return {
        "blocks": {str(number): block() for number in range(blocks)},
        "head": {"w": draw(WIDTH, OUT), "b": draw(OUT)},
    }


def make_batch(dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_fn(params, batch, blocks=2):
    """The mean over rows of a sum of squares."""
    x = batch
    for number in range(blocks):
        block = params["blocks"][str(number)]
        x = torch.tanh(x @ block["w"] + block["b"])
    return (x @ params["head"]["w"] + params["head"]["b"]).square().sum(1).mean()


def close(ours, theirs, bound=1e-10):
    """DTensors against tensors: every leaf within a bound."""
    for found, expected in zip(_tree.leaves(ours), _tree.leaves(theirs), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=bound)


def train_step(axes, rules=None, fsdp=None):
    """A train step with AdamW on simulated ranks that donates its state, and its arguments."""
    rows = {"batch": vs.P(dp=vs.Shard(0))}
    plan = vs.Plan(vs.make_mesh(axes, backend="simulated"), rules or {}, rows, fsdp=fsdp)
    opt = vs.optim.adamw(1e-2)

    def step(params, state, batch):
        loss, gradients = vs.value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(gradients, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    params = vs.distribute(make_params(), plan)
    return vs.parallelize(step, plan, donate=("params", "state")), (params, opt.init(params), make_batch())
