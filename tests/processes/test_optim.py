"""Optimizers over gloo: the bits of simulated ranks, with a clipped norm, an inf norm and a skipped step."""

import pytest
import torch

import vescale as vs
from vescale import P, RaggedShard, Shard, optim

pytestmark = pytest.mark.processes


def run(bad: float | None, order: float, backend: str | None):
    """Three steps, the second with a bad value on one rank: parameters, state, norms."""
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, **({"backend": backend} if backend else {}))
    ragged, one = RaggedShard((0,), (3, 1)), RaggedShard((0,), (0, 1))
    rules = {"w": P(tp=Shard(1), dp=ragged), "v": P(dp=one), ".*": P()}
    plan = vs.Plan(mesh, rules)
    draw = lambda seed, *shape: torch.randn(shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    params = {"w": draw(0, 8, 6), "v": draw(1, 5), "s": draw(2)}
    opt = optim.chain(optim.clip_by_global_norm(1.0, order), optim.skip_if_nonfinite(optim.adamw(0.1)))

    def step(params, opt_state, grads):
        norm = optim.global_norm(grads, order)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, norm

    program, here = vs.parallelize(step, plan), vs.distribute(params, plan)
    state, norms = opt.init(here), []
    for seed in range(3):
        grads = {"w": draw(10 + seed, 8, 6), "v": draw(20 + seed, 5), "s": draw(30 + seed)}
        if bad is not None and seed == 1:
            grads["v"][4] = bad
        grads = vs.distribute(grads, plan)
        here, state, norm = program(here, state, grads)
        norms += [norm.full_tensor(), torch.as_tensor(optim.global_norm(grads, order))]
    (_, inner) = state
    return [x.full_tensor() for x in [*here.values(), *inner["exp_avg"].values(), inner["step"]]] + norms


@pytest.mark.parametrize("order", [2.0, float("inf")], ids=str)
@pytest.mark.parametrize("bad", [None, float("nan")], ids=str)
def test_processes_have_the_bits_of_simulated_ranks(pool, bad, order):
    expected = run(bad, order, "simulated")
    for found in pool.run(run, bad, order, None):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
