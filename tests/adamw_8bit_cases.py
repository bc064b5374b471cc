"""Parameters and layouts for 8-bit AdamW, and the reference that every mesh must equal bit for bit."""

import functools

import torch

import vescale as vs
from tests import quantize_reference as reference
from vescale import _tree

LR, STEPS = 1e-2, 2
# Tiles that fit, that are short at both ends, that begin anew in each matrix; runs; and what stays float32.
SHAPES = {
    "mat": (96, 64),
    "tall": (130, 40),
    "stack": (3, 40, 48),
    "vec": (5000,),
    "small": (9, 7),
    "one": (),
    "none": (0, 5),
}


def make_params(names=tuple(SHAPES), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


def make_grads(step, names=tuple(SHAPES), dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    draw = lambda name: torch.randn(SHAPES[name], generator=generator)  # noqa: E731
    return {name: (draw(name) * torch.exp(3 * draw(name))).to(dtype) for name in names}


@functools.cache
def expected(names=tuple(SHAPES), dtype=torch.float32, steps=STEPS, **options):
    """Parameters, and (codes, scales) or values of both moments by name."""
    opt = reference.AdamW8bit(make_params(names, dtype), LR, **options)
    for step in range(steps):
        opt.step(make_grads(step, names, dtype))
    return opt.params, opt.moments


def update_step(opt):
    def step(params, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state

    return step


def whole(x):
    return x.full_tensor() if isinstance(x, vs.DTensor) else x


def check(params, state, wanted):
    """Bits of parameters, codes and scales."""
    wanted_params, moments = wanted
    for name, p in wanted_params.items():
        torch.testing.assert_close(whole(params[name]), p, rtol=0, atol=0)
        for moment, kept in zip(("exp_avg", "exp_avg_sq"), moments[name], strict=True):
            if not isinstance(kept, tuple):
                torch.testing.assert_close(whole(state[moment][name]), kept, rtol=0, atol=0)
                continue
            codes, scales = whole(state[moment][name]), whole(state[f"{moment}_scale"][name])
            torch.testing.assert_close(codes, kept[0], rtol=0, atol=0)
            torch.testing.assert_close(scales.reshape(-1), kept[1], rtol=0, atol=0)


def layouts(tree):
    return [leaf.layout if isinstance(leaf, vs.DTensor) else None for leaf in _tree.leaves(tree)]


def ragged(*cuts):
    return lambda dims: vs.P(dp=vs.RaggedShard.from_sizes(dims, cuts))


TILES = {".*": vs.Tile(32, 32)}
UNEVEN = {
    "mat": ragged(32, 0, 64, 0)((0,)),
    "tall": ragged(64, 0, 64, 2)((0,)),
    "stack": ragged(32, 48, 0, 40)((0, 1)),
    "vec": ragged(1024, 2048, 1928, 0)((0,)),
    "small": ragged(0, 9, 0, 0)((0,)),
}
# name: mesh, block, parameters, what the plan says
CASES = {
    "1 rank": ({"dp": 1}, (32, 32), tuple(SHAPES), {"params": {"mat": vs.P(dp=vs.Shard(0))}}),
    "replicate": ({"dp": 2}, (32, 32), tuple(SHAPES), {}),
    "ragged, uneven and empty": ({"dp": 4}, (32, 32), tuple(SHAPES), {"params": UNEVEN}),
    "elements of a ragged cut": (
        {"dp": 2},
        (32, 32),
        ("mat", "tall"),
        {"params": {"mat": ragged(64 * 32, 64 * 64)((0, 1)), "tall": ragged(40 * 128, 80)((0, 1))}},
    ),
    "whole on one rank": (
        {"dp": 2},
        (32, 32),
        ("mat", "tall"),
        {"params": {".*": vs.P(dp=vs.RaggedShard.on_rank(1, 2))}},
    ),
    "fsdp 2": ({"dp": 2}, (32, 32), tuple(SHAPES), {"fsdp": vs.FSDP("dp", block=TILES, max_padding=9)}),
    "fsdp 4": ({"dp": 4}, (32, 32), tuple(SHAPES), {"fsdp": vs.FSDP("dp", block=TILES, max_padding=9)}),
    "hsdp": (
        {"replica": 2, "dp": 2},
        (32, 32),
        tuple(SHAPES),
        {"fsdp": vs.FSDP(("replica", "dp"), block=TILES, max_padding=9)},
    ),
    "tp": (
        {"tp": 2},
        (32, 32),
        tuple(SHAPES),
        {"params": {"mat": vs.P(tp=vs.Shard(1)), "stack": vs.P(tp=vs.Shard(0))}},
    ),
    "fsdp and tp": (
        {"dp": 2, "tp": 2},
        (32, 32),
        ("mat", "vec", "small", "one"),
        {"params": {"mat": vs.P(tp=vs.Shard(1))}, "fsdp": vs.FSDP("dp", block=TILES, max_padding=9)},
    ),
    "runs, fsdp 4": (
        {"dp": 4},
        512,
        ("mat", "tall", "vec", "small"),
        {"fsdp": vs.FSDP("dp", block={".*": vs.Elements(512)}, max_padding=9)},
    ),
    "runs of rows": ({"dp": 2}, 16, ("mat", "stack"), {"fsdp": vs.FSDP("dp")}),
    "tiles of a row": ({"dp": 2}, (1, 32), ("tall", "stack"), {"fsdp": vs.FSDP("dp")}),
}


def run(mesh, case, static=True, donate=("params", "opt_state"), key=None, names=(), dtype=torch.float32):
    """Parameters, state, the lowered step, and layouts of the state after init and after each update."""
    _, block, every, said = CASES[case]
    plan, names = vs.Plan(mesh, **said), names or every
    opt = vs.optim.adamw_8bit(LR, block=block, stochastic_rounding=key)
    params = vs.distribute(make_params(names, dtype), plan)
    state = opt.init(params)
    step = vs.parallelize(update_step(opt), plan, donate=donate if static else (), static=static)
    seen, lowered = [layouts(state)], None
    for number in range(STEPS):
        params, state = step(params, state, make_grads(number, names, dtype))
        seen.append(layouts(state))
    if static:
        lowered = step.lower(params, state, make_grads(0, names, dtype))
    return params, state, lowered, seen
