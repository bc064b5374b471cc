"""Muon on shards of every kind against torch's and a plain one; and what its programs communicate."""

import importlib
import re

import pytest
import torch

import vescale as vs
from tests import toy
from tests.muon_cases import CUTS_OF_BOTH, LR, by_torch, draw, equal, named, plainly, step_of
from vescale import _tree
from vescale.optim.orthogonalize import flops
from vescale.spmd.matrices import Matrices
from vescale.spmd.program.passes import without

P, S, R = vs.P, vs.Shard, vs.RaggedShard
STEPS = 3


def on_mesh(axes, specs, params, opt, donate=()):
    """The step on a mesh, its arguments for the parameters, and specs for all of them."""
    mesh = vs.make_mesh(axes, backend="simulated")
    plan = vs.Plan(mesh, specs, {f"grads.{name}": spec for name, spec in specs.items()})
    state = opt.init(params)
    return vs.parallelize(step_of(opt), plan, donate=donate), vs.distribute(params, plan), state


def run(axes, specs, params, gradients, opt):
    """Parameters after the steps, whole; and the program."""
    step, placed, state = on_mesh(axes, specs, params, opt)
    layouts = {name: p.layout for name, p in placed.items()}
    for grads in gradients:
        placed, state = step(placed, state, grads)
        assert {name: p.layout for name, p in placed.items()} == layouts
        assert {name: m.layout for name, m in state["momentum"].items()} == layouts
    return {name: p.full_tensor() for name, p in placed.items()}, step.lower(placed, state, gradients[0])


def started(lowered):
    """The collectives in order: (to or from owners, kind and axes, how many values)."""
    found = []
    for line in lowered.as_text().splitlines():
        if match := re.match(r"t\d+ = start (\w+ over \S+) \((.*?)\)  # \S+ (to|from) ", line):
            found.append((match[3], match[1], match[2].count(",") + 1))
    return found


# In plain torch.

SHAPES = [(4, 4), (3, 5), (7, 2), (64, 96), (70, 33), (1, 5), (5, 1)]


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": LR},
        {"lr": 0.3, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "adjust_lr": "match_rms_adamw"},
        {
            "lr": 1e-3,
            "ns_steps": 3,
            "ns_coefficients": (3.0, -3.2, 1.2),
            "eps": 1e-3,
            "adjust_lr": "original",
        },
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_torch(hyper, dtype):
    params, gradients = draw(*SHAPES, dtype=dtype), [draw(*SHAPES, seed=s, dtype=dtype) for s in (1, 2, 3, 4)]
    opt = vs.optim.muon(**hyper)
    ours, state = dict(params), opt.init(params)
    for grads in gradients:
        ours, state = step_of(opt)(ours, state, grads)
    theirs = {"adjust_lr_fn" if name == "adjust_lr" else name: value for name, value in hyper.items()}
    equal(ours, by_torch(params, gradients, **theirs))


def test_a_learning_rate_that_is_a_tensor_or_a_schedule_gives_the_same_bits():
    params, gradients = draw(*SHAPES), [draw(*SHAPES, seed=seed) for seed in (1, 2)]
    results = []
    for lr in (LR, torch.tensor(LR, dtype=torch.float64), lambda step: LR + 0 * step):
        opt = vs.optim.muon(lr)
        ours, state = dict(params), opt.init(params)
        for grads in gradients:
            ours, state = step_of(opt)(ours, state, grads)
        results.append(ours)
    equal(results[1], results[0])
    equal(results[2], results[0])


def test_it_finds_the_least_of_a_quadratic():
    target = draw((6, 4), (2, 3, 5))
    opt = vs.optim.muon(lambda step: 0.2 * 0.97**step, weight_decay=0.0)
    params = {name: torch.zeros_like(p) for name, p in target.items()}
    state = opt.init(params)
    for _ in range(200):
        grads = {name: 2 * (p - target[name]) for name, p in params.items()}
        params, state = step_of(opt)(params, state, grads)
    for name, p in params.items():
        assert (p - target[name]).norm() < 0.01 * target[name].norm()


# On shards.

CUTS = {
    "even rows": ({"dp": 4}, [P(dp=S(0)), P(dp=S(0)), P(dp=S(0))]),
    "columns": ({"dp": 4}, [P(dp=S(1)), P(dp=S(1)), P(dp=S(2))]),
    "uneven, more ranks than rows": ({"dp": 8}, [P(dp=S(1)), P(dp=S(0)), P(dp=S(0))]),
    "two axes on one dim": (
        {"dp": 2, "tp": 2},
        [P(dp=S(0), tp=S(0)), P(tp=S(0), dp=S(1)), P(dp=S(0), tp=S(0))],
    ),
    **CUTS_OF_BOTH,
}


@pytest.mark.parametrize("case", CUTS)
def test_every_sharding(case):
    """bfloat16 has the bits of torch.optim.Muon, float32 is near a plain float32; layouts stay."""
    axes, specs = CUTS[case][0], named(CUTS[case][1])
    shapes = [(8, 6), (10, 7), (4, 5, 6)]
    params, gradients = draw(*shapes), [draw(*shapes, seed=seed) for seed in range(1, STEPS + 1)]
    found, _ = run(axes, specs, params, gradients, vs.optim.muon(LR))
    matrices = lambda tree: {k: v for k, v in tree.items() if v.dim() == 2}  # noqa: E731
    stack = lambda tree: dict(enumerate(tree["w2"]))  # noqa: E731
    equal(matrices(found), by_torch(matrices(params), list(map(matrices, gradients)), lr=LR))
    equal(stack(found), by_torch(stack(params), list(map(stack, gradients)), lr=LR))
    found, _ = run(axes, specs, params, gradients, vs.optim.muon(LR, ns_dtype=torch.float32))
    expected = plainly(params, gradients)
    for name in params:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def test_op_by_op_and_outside_programs():
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    shapes = [(8, 6), (10, 7), (4, 5, 6)]
    params, grads, opt = draw(*shapes), draw(*shapes, seed=1), vs.optim.muon(LR)
    expected, _ = step_of(opt)(params, opt.init(params), grads)
    mesh = vs.make_mesh(axes, backend="simulated")
    place = lambda tree: {n: vs.distribute_tensor(v, mesh, specs[n]) for n, v in tree.items()}  # noqa: E731
    plan = vs.Plan(mesh, specs)
    for step in (step_of(opt), vs.parallelize(step_of(opt), plan, static=False)):
        placed = place(params)
        found, state = step(placed, opt.init(placed), place(grads))
        equal({name: p.full_tensor() for name, p in found.items()}, expected)
        assert all(found[n].layout is state["momentum"][n].layout is placed[n].layout for n in found)


# Communication.


def test_one_collective_to_owners_and_one_back():
    shapes = [(8, 6), (6, 8), (10, 4), (4, 8)]
    specs = {"w0": P(dp=S(0)), "w1": P(dp=S(1)), "w2": P(dp=R((0,), (2, 3))), "w3": P(dp=S(0))}
    params, grads = draw(*shapes), draw(*shapes, seed=1)
    _, lowered = run({"dp": 2}, specs, params, [grads], vs.optim.muon(LR))
    assert started(lowered) == [("to", "all_to_all over dp", 4), ("from", "all_to_all over dp", 4)]
    assert len(lowered.collectives()) == 8
    assert {c.reason for c in lowered.collectives()} == {"plan"}
    # Two in bfloat16 is what goes there; each rank owns two of the four.
    assert "bfloat16" in {c.value.partition("[")[0] for c in lowered.collectives()}


WHOLE = {
    "experts": ((8, 3, 5), P(dp=S(0)), None),
    "experts, uneven": ((6, 3, 5), P(dp=S(0)), None),
    "experts, ragged": ((8, 3, 5), P(dp=R((0,), (1, 4, 0, 3))), None),
    "experts, rows": ((8, 3, 5), P(dp=R((0, 1), (3, 12, 0, 9))), None),
    "experts, elements": ((4, 3, 5), P(dp=R((0, 1, 2), (30, 15, 0, 15))), None),
    "heads": ((24, 5), P(dp=R((0,), (8, 4, 0, 12))), "(h d=4) k -> h d k"),
    "heads of columns": ((5, 24), P(dp=S(1)), "r (h d=3) -> h r d"),
    "halves of columns, together": ((8, 6), P(dp=R.on_rank(3, 4)), "r (g c=3) -> g r c"),
    "on one rank": ((8, 6), P(dp=R.on_rank(2, 4)), None),
    "whole block": ((8, 6), P(dp=R((0,), (0, 1, 0, 0))), None),
    "replicated": ((8, 6), P(), None),
}


@pytest.mark.parametrize("case", WHOLE)
def test_matrices_that_are_whole_on_a_rank_do_not_move(case):
    shape, spec, text = WHOLE[case]
    params, gradients = draw(shape), [draw(shape, seed=seed) for seed in (1, 2)]
    opt = vs.optim.muon(LR, matrix_dims={"w0": text} if text else None)
    found, lowered = run({"dp": 4}, {"w0": spec}, params, gradients, opt)
    assert not lowered.collectives()
    expected, state = dict(params), opt.init(params)
    for grads in gradients:
        expected, state = step_of(opt)(expected, state, grads)
    equal(found, expected)


@pytest.mark.parametrize("text", ["(h d=4) k -> h d k", "r (h d=5) -> h r d", "(g r=4) (h c=5) -> g h r c"])
@pytest.mark.parametrize(
    "spec", [P(dp=S(0)), P(dp=S(1)), P(dp=R((0,), (5, 2, 0, 1))), P(dp=R((0, 1), (70, 2, 8, 0)))]
)
def test_views_as_matrices_whatever_is_cut(text, spec):
    """Against the same matrices as parameters of their own."""
    params, gradients = draw((8, 10)), [draw((8, 10), seed=seed) for seed in (1, 2)]
    how = Matrices.of(text)
    apart = lambda tree: dict(enumerate(how.split(tree["w0"])))  # noqa: E731
    expected = by_torch(apart(params), list(map(apart, gradients)), lr=LR)
    found, _ = run({"dp": 4}, {"w0": spec}, params, gradients, vs.optim.muon(LR, matrix_dims={"w.": text}))
    equal(apart(found), expected)


def test_waves_overlap_in_two_slots(monkeypatch):
    waves = importlib.import_module("vescale.spmd.program.passes.owner_waves")
    monkeypatch.setattr(waves, "WAVE_BYTES", 96)  # one matrix of 8 x 6 in bfloat16 a rank
    shapes = [(8, 6)] * 6 + [(4, 3, 5)]
    specs = {f"w{i}": P(dp=S(0)) for i in range(7)}
    params, gradients = draw(*shapes), [draw(*shapes, seed=1)]
    opt = vs.optim.muon(LR)
    found, lowered = run({"dp": 2}, specs, params, gradients, opt)
    over = "all_to_all over dp", 2
    assert started(lowered) == [(way, *over) for way in ("to", "to", "from", "to", "from", "from")]
    lines = lowered.as_text().splitlines()
    order = "".join(
        "s" if "= start" in line else "w" if "= wait" in line else "o"
        for line in lines
        if "= start" in line or "= wait" in line or "orthogonalize" in line
    )
    # The stack, which doesn't move, while wave 0 is on its way; then wave 1 is while wave 0 is computed, ..
    assert order == "soswoosswoowswoowsw"
    expected, _ = step_of(opt)(params, opt.init(params), gradients[0])
    equal(found, expected)
    with without("owner_waves"):
        again, apart = run({"dp": 2}, specs, params, gradients, opt)
    assert not started(apart)
    assert len(apart.collectives()) == len(lowered.collectives()) == 12
    equal(again, expected)


def test_waves_hold_less_memory(monkeypatch):
    waves = importlib.import_module("vescale.spmd.program.passes.owner_waves")
    params = draw(*[(16, 16)] * 16)
    specs, peaks = dict.fromkeys(params, P(dp=S(0))), []
    for wave_bytes in (1 << 20, 16 * 16 * 2):
        monkeypatch.setattr(waves, "WAVE_BYTES", wave_bytes)
        step, placed, state = on_mesh({"dp": 2}, specs, params, vs.optim.muon(LR), ("params", "opt_state"))
        lowered = step.lower(placed, state, params)
        peaks.append((len(started(lowered)), lowered.memory_analysis().peak))
    (few, most), (many, least) = peaks
    assert (few, many) == (2, 16)
    # What has arrived was eight matrices, and is two at most.
    assert most - least >= 6 * 16 * 16 * 2


def test_two_updates_one_after_the_other_are_two_groups():
    """What the second needs of the first is there before it is sent."""
    shapes = [(8, 6), (6, 8)]
    params, grads = draw(*shapes), draw(*shapes, seed=1)
    specs, opt = {name: P(dp=S(0)) for name in params}, vs.optim.muon(LR)

    def twice(params, opt_state, grads):
        for _ in range(2):
            updates, opt_state = opt.update(grads, opt_state, params)
            grads = vs.optim.apply_updates(grads, vs.optim.Updates(1.0, updates.delta))
        return vs.optim.apply_updates(params, updates), opt_state

    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    step = vs.parallelize(twice, vs.Plan(mesh, specs, {f"grads.{n}": spec for n, spec in specs.items()}))
    found, _ = step(params, opt.init(params), grads)
    expected, _ = twice(params, opt.init(params), grads)
    equal({name: p.full_tensor() for name, p in found.items()}, expected)
    assert [way for way, *_ in started(step.lower(params, opt.init(params), grads))] == ["to", "from"] * 2


def test_operations_are_counted():
    params = draw((8, 6), (4, 3, 5))
    specs = {"w0": P(dp=R.on_rank(0, 2)), "w1": P(dp=S(0))}
    _, lowered = run({"dp": 2}, specs, params, [params], vs.optim.muon(LR))
    assert lowered.cost_analysis(rank=1).flops == 2 * flops(3, 5, 5)
    assert lowered.cost_analysis(rank=0).flops == flops(8, 6, 5) + 2 * flops(3, 5, 5)


# In a train step.


def matrices_and_others(tree):
    paths, leaves, _ = _tree.flatten_with_path(tree)
    both = ({}, {})
    for path, leaf in zip(paths, leaves, strict=True):
        both[leaf.dim() < 2][path] = leaf
    return both


MUON, ADAMW = vs.optim.muon(0.02, ns_dtype=torch.float32), vs.optim.adamw(1e-3)


def train_step(params, opt_state, batch):
    loss, grads = vs.value_and_grad(toy.loss_fn)(params, batch)
    found, state = {}, {}
    for name, opt, own, theirs in zip(
        ("muon", "adamw"), (MUON, ADAMW), matrices_and_others(params), matrices_and_others(grads), strict=True
    ):
        updates, state[name] = opt.update(theirs, opt_state[name], own)
        found |= vs.optim.apply_updates(own, updates)
    paths, _, spec = _tree.flatten_with_path(params)
    return _tree.unflatten(spec, [found[path] for path in paths]), state, loss


@pytest.mark.parametrize(
    ("axes", "axis", "rules"),
    [
        ({"dp": 4}, "dp", None),
        ({"replica": 2, "dp": 2}, ("replica", "dp"), None),
        ({"dp": 2, "tp": 2}, "dp", {r"blocks\..*\.w": P(tp=S(0))}),
    ],
)
def test_training_under_fsdp(axes, axis, rules):
    rows = P(**{name: S(0) for name in axes if name != "tp"})
    plan = vs.Plan(
        vs.make_mesh(axes, backend="simulated"), rules, {"batch": rows}, fsdp=vs.FSDP(axis, toy.WRAP)
    )
    params = toy.make_params(torch.float32)

    def start(params):
        return {
            name: opt.init(own)
            for name, opt, own in zip(("muon", "adamw"), (MUON, ADAMW), matrices_and_others(params))
        }

    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"))
    placed, state = vs.distribute(params, plan), start(vs.distribute(params, plan))
    plain, plain_state = params, start(params)
    losses = []
    for number in range(STEPS):
        batch = toy.make_batch(torch.float32, number)
        plain, plain_state, expected = train_step(plain, plain_state, batch)
        placed, state, loss = step(placed, state, batch)
        losses.append(loss)
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    toy.close(placed, plain, 1e-4)  # small singular values grow, and with them what sums are rounded by
    lowered = step.lower(placed, state, batch)
    ways = [way for way, *_ in started(lowered)]
    assert ways[0] == "to"
    assert ways.count("from") >= 1
    if "replica" in axes:  # each replica does the same, and tells no other
        assert {axis for _, axis, _ in started(lowered)} == {"all_to_all over dp"}


# What is no matrix.


@pytest.mark.parametrize(
    ("shape", "matrix_dims", "says"),
    [
        ((3,), None, r"w0 of shape \(3,\)(.|\n)*vs\.optim\.partition"),
        ((), None, r"w0 of shape \(\)(.|\n)*vs\.optim\.partition"),
        ((4, 3, 2, 2), None, r"matrix_dims=\{'w0': 'o i y x -> o \(i y x\)'\}"),
        ((4, 3), {"w": "r c -> r c"}, "near: w0"),
        ((4, 3), {"w0": "(h d=3) k -> h d k"}, "where: w0"),
    ],
)
def test_what_is_no_matrix_is_an_error_with_a_remedy(shape, matrix_dims, says):
    opt = vs.optim.muon(LR, matrix_dims=matrix_dims)
    params = {"w0": torch.zeros(shape)}
    for call in (
        lambda: opt.init(params),
        lambda: opt.update(params, {"step": 0, "momentum": params}, params),
    ):
        with pytest.raises(vs.VescaleError, match=says):
            call()


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": -1.0},
        {"lr": "fast"},
        {"lr": torch.ones(2)},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"ns_steps": 100},
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_dtype": torch.int32},
        {"eps": 0.0},
        {"adjust_lr": "adam"},
    ],
)
def test_hyperparameters_out_of_range(hyper):
    with pytest.raises(vs.VescaleError, match=next(iter(hyper))):
        vs.optim.muon(**{"lr": LR, **hyper})


def test_init_of_abstract_parameters_and_of_none():
    state = vs.optim.muon(LR).init({"w": torch.empty(3, 4, device="meta")})
    assert state["momentum"]["w"].device.type == "meta"
    opt = vs.optim.muon(LR)
    updates, _ = opt.update({}, opt.init({}), {})
    assert vs.optim.apply_updates({}, updates) == {}
    empty = {"w": torch.zeros(0, 4)}
    updates, _ = opt.update(empty, opt.init(empty), empty)
    assert vs.optim.apply_updates(empty, updates)["w"].shape == (0, 4)
