"""State that is born in the layout it keeps, and trees on several meshes at once."""

import pytest
import torch

import vescale as vs
from vescale import _tree, optim

KEYED = {
    "muon": lambda: optim.muon(0.1),
    "rounding at random": lambda: optim.adamw_8bit(
        0.1, block=4, min_elements=8, stochastic_rounding=vs.rng.key(0)
    ),
}
EVERY = {
    "sgd": lambda: optim.sgd(0.1, 0.9),
    "adamw": lambda: optim.adamw(0.1),
    "adamw_8bit": lambda: optim.adamw_8bit(0.1, block=1, min_elements=4),
    "muon": lambda: optim.muon(0.1),
    "skipped": lambda: optim.skip_if_nonfinite(optim.adam(0.1)),
    "scaled": lambda: optim.loss_scale(optim.adam(0.1), init=4.0),
}


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"a": (4, 6), "b": (8, 3), "c": (3, 3)}.items()
    }


def stepping(opt):
    def step(params, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    return step


@pytest.mark.parametrize("name", KEYED)
def test_the_first_step_is_compiled_for_the_next_ones_too(name):
    opt, plan = (
        KEYED[name](),
        vs.Plan(vs.make_mesh({"dp": 2}), fsdp=vs.FSDP("dp", block={".*": vs.Elements(4)})),
    )
    step = vs.parallelize(stepping(opt), plan)
    params = vs.distribute({name: x for name, x in draw(0).items() if name != "c"}, plan)
    state = opt.init(params)
    born = [x.layout for x in _tree.leaves(state)]  # all of them DTensors
    for seed in (1, 2):
        grads = {name: x for name, x in draw(seed).items() if name in params}
        params, state = step(params, state, vs.distribute(grads, plan))
    assert [x.layout for x in _tree.leaves(state)] == born
    assert step.cache_info().misses == 1


@pytest.mark.parametrize("name", EVERY)
def test_parameters_on_two_meshes_and_on_none(name):
    """Outside programs, with the bits of plain torch."""
    here, there = vs.make_mesh({"dp": 2}), vs.make_mesh({"tp": 4})

    def placed(tree):
        rows = vs.distribute_tensor(tree["a"], here, vs.P(dp=vs.Shard(0)))
        return {**tree, "a": rows, "b": vs.distribute_tensor(tree["b"], there, vs.P(tp=vs.Shard(0)))}

    opt, theirs, ours = EVERY[name](), draw(0), placed(draw(0))
    their_state, our_state = opt.init(theirs), opt.init(ours)
    for seed in (1, 2):
        theirs, their_state = stepping(opt)(theirs, their_state, draw(seed))
        ours, our_state = stepping(opt)(ours, our_state, placed(draw(seed)))
    found, expected = _tree.leaves((ours, our_state)), _tree.leaves((theirs, their_state))
    for x, wanted in zip(found, expected, strict=True):
        assert torch.equal(x.full_tensor() if isinstance(x, vs.DTensor) else x, wanted)
