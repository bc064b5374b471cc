"""What composes optimizers, on plain tensors: chains, partitions, masks, schedules, skipped steps."""

import math

import pytest
import torch

import vescale as vs
from vescale import _tree
from vescale.optim import (
    adam,
    adamw,
    adamw_8bit,
    all_finite,
    apply_updates,
    chain,
    clip_by_global_norm,
    decay,
    freeze,
    global_norm,
    loss_scale,
    muon,
    partition,
    scale,
    schedules,
    sgd,
    skip_if_nonfinite,
)

INF, NAN = math.inf, math.nan


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_params():
    blocks = [{"weight": draw(4, 3, seed=n), "bias": draw(3, seed=9 + n)} for n in range(2)]
    return {"blocks": blocks, "head": draw(3, seed=20), "none": torch.zeros(0, 2), "scale": torch.tensor(1.5)}


def grads_of(params, seed=50):
    return _tree.tree_map(lambda p: draw(*p.shape, seed=seed + p.numel(), dtype=p.dtype), params)


def run(opt, params, count=3, state=None):
    state = opt.init(params) if state is None else state
    for number in range(count):
        updates, state = opt.update(grads_of(params, 50 + number), state, params)
        params = apply_updates(params, updates)
    return params, state


def same(a, b):
    """Structure, dtypes and bits, the sign of zero too."""
    (ours, spec), (theirs, other) = _tree.flatten(a), _tree.flatten(b)
    assert spec == other
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)
        assert not x.is_floating_point() or torch.equal(x.signbit(), y.signbit())


# ---- chain, scale, decay


def test_a_chain_is_its_parts_one_after_the_other():
    params = make_params()
    opt = chain(clip_by_global_norm(0.5), adamw(1e-2), scale(0.5))
    clip, inner, halve = clip_by_global_norm(0.5), adamw(1e-2), scale(0.5)
    state, theirs, their_state = opt.init(params), params, inner.init(params)
    for number in range(3):
        grads = grads_of(params, number)
        updates, state = opt.update(grads, state, params)
        params = apply_updates(params, updates)
        by_hand, _ = clip.update(grads, {}, theirs)
        by_hand, their_state = inner.update(by_hand, their_state, theirs)
        theirs = apply_updates(theirs, halve.update(by_hand, {}, theirs)[0])
    same(params, theirs)
    same(state, ({}, their_state, {}))


def test_an_empty_chain_changes_nothing():
    grads = make_params()
    assert chain().update(grads, (), grads) == (grads, ())


def test_two_optimizers_in_a_chain_are_an_error():
    params = make_params()
    opt = chain(sgd(0.1), adam(0.1))
    with pytest.raises(vs.VescaleError, match="a chain has one"):
        opt.update(params, opt.init(params), params)


@pytest.mark.parametrize(
    "by", [0.25, torch.tensor(0.25), schedules.constant(0.25)], ids=["number", "0-d", "schedule"]
)
def test_scaled_updates_go_a_part_of_the_way(by):
    """Decay and step alike: exact, since a quarter is a power of two."""
    params = _tree.tree_map(torch.Tensor.double, make_params())
    grads = grads_of(params)
    whole, quarter = adamw(0.1, weight_decay=0.5), chain(adamw(0.1, weight_decay=0.5), scale(by))
    there = apply_updates(params, whole.update(grads, whole.init(params), params)[0])
    part = apply_updates(params, quarter.update(grads, quarter.init(params), params)[0])
    expected = _tree.tree_map(lambda p, q: p + 0.25 * (q - p), params, there)
    for found, wanted in zip(_tree.leaves(part), _tree.leaves(expected)):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)


def test_decay_before_an_optimizer_is_that_of_the_gradient():
    params = make_params()
    same(run(chain(decay(0.3), sgd(0.1)), params)[0], run(sgd(0.1, weight_decay=0.3), params)[0])


def test_decay_behind_an_optimizer_is_decoupled():
    params = make_params()
    ours = run(chain(adamw(1e-2, weight_decay=0.0), decay(1e-2 * 0.3)), params)[0]
    same(ours, run(adamw(1e-2, weight_decay=0.3), params)[0])


# ---- labels and masks

MASKS = {
    "regex": r".*weight",
    "function": lambda path, p: path.endswith("weight"),
    "tree": {"blocks": [{"weight": True, "bias": False}] * 2, "head": False, "none": False, "scale": False},
    "prefix": {"blocks": {"weight": True, "bias": False}, "head": False, "none": False, "scale": False},
    "regexes": {r".*weight": True, r".*": False},
}


@pytest.mark.parametrize("how", MASKS)
def test_masks(how):
    params, mask = make_params(), MASKS[how]
    if how == "prefix":
        params["blocks"] = params["blocks"][0]
    zero = _tree.tree_map(torch.zeros_like, params)
    opt = adamw(0.5, weight_decay=1.0, mask=mask)
    new = apply_updates(params, opt.update(zero, opt.init(params), params)[0])
    for path, before, after in zip(_tree.paths(params), _tree.leaves(params), _tree.leaves(new)):
        assert torch.equal(after, before * 0.5 if path.endswith("weight") else before)


def test_a_partition_is_its_optimizers_side_by_side():
    params = make_params()
    opt = partition({r".*weight": "matrix", ".*": "rest"}, {"matrix": sgd(0.1, 0.9), "rest": adamw(1e-2)})
    new, state = run(opt, params)
    names = _tree.paths(params)
    for label, inner in (("matrix", sgd(0.1, 0.9)), ("rest", adamw(1e-2))):
        mine = [name for name in names if name.endswith("weight") == (label == "matrix")]
        flat = dict(zip(names, _tree.leaves(params)))
        alone, alone_state = (
            {name: flat[name] for name in mine},
            inner.init({name: flat[name] for name in mine}),
        )
        for number in range(3):
            grads = dict(zip(names, _tree.leaves(grads_of(params, 50 + number))))
            updates, alone_state = inner.update({name: grads[name] for name in mine}, alone_state, alone)
            alone = apply_updates(alone, updates)
        found = dict(zip(names, _tree.leaves(new)))
        same({name: found[name] for name in mine}, alone)
        same(state[label], alone_state)


def test_partitions_of_transforms():
    """Before an optimizer and behind it: rates by label."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    rates = partition(lambda path, p: path, {"a": scale(0.5), "b": chain()})
    for opt in (chain(rates, sgd(1.0)), chain(sgd(1.0), rates)):
        updates, _ = opt.update({"a": torch.ones(2), "b": torch.ones(2)}, opt.init(params), params)
        new = apply_updates(params, updates)
        assert new["a"].tolist() == [0.5, 0.5]
        assert new["b"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("frozen", [None, freeze()], ids=["none", "freeze"])
def test_frozen_parameters_have_no_state_and_keep_their_bits(frozen):
    params = {"a": torch.tensor([-0.0, 1.0, NAN]), "b": torch.ones(2)}
    opt = chain(clip_by_global_norm(1.0), partition({"a": 0, "b": 1}, {0: frozen, 1: adamw(0.1)}), decay(0.1))
    new, state = run(opt, params)
    assert torch.equal(new["a"].view(torch.int32), params["a"].view(torch.int32))
    assert not torch.equal(new["b"], params["b"])
    assert not [path for path in _tree.paths(state) if path.endswith(".a")]


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (lambda path, p: "x", "blocks.0.bias.*'x'"),
        ({r".*weight": "a"}, r"no regex matches.*blocks\.0\.bias"),
        ({r".*wieght": "a", ".*": "a"}, r"wieght.*near: blocks\.1\.weight"),
        ({"(": "a"}, "regular expression"),
        ({"blocks": "a", "head": ["a", "a"], "none": "a", "scale": "a"}, "prefix"),
    ],
    ids=["no optimizer", "no label", "no match", "no regex", "another tree"],
)
def test_bad_labels(labels, match):
    with pytest.raises(vs.VescaleError, match=match):
        partition(labels, {"a": sgd(0.1)}).init(make_params())


def test_bad_masks():
    params = make_params()
    for bad in ("wieght", {"wieght": True}, [True]):
        opt = sgd(0.1, weight_decay=0.1, mask=bad)
        with pytest.raises(vs.VescaleError, match=r"vs\.optim\.sgd"):
            opt.update(params, opt.init(params), params)


def test_two_parameters_of_one_path():
    params = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(vs.VescaleError, match=r"two parameters at a\.b"):
        partition("x", {"x": sgd(0.1)}).init(params)


# ---- schedules


def reference(name, step):
    """The same in Python's numbers."""
    if name == "linear":
        return 0.5 + (0.1 - 0.5) * min(step / 8, 1)
    if name == "cosine":
        if step < 3:
            return 0.5 * (step + 1) / 3
        return 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi * min((step - 3) / 7, 1)))
    if step < 3:
        return 0.5 * (step + 1) / 3
    return 0.5 + (0.1 - 0.5) * min(max(step - 5, 0) / 4, 1)


SCHEDULES = {
    "linear": schedules.linear(0.5, 0.1, 8),
    "cosine": schedules.cosine(0.5, steps=10, warmup=3, end=0.1),
    "warmup_stable_decay": schedules.warmup_stable_decay(0.5, warmup=3, stable=2, decay=4, end=0.1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    for step in range(15):
        found = SCHEDULES[name](torch.tensor(float(step), dtype=torch.float64))
        assert found.dtype is torch.float64
        assert found.item() == pytest.approx(reference(name, step), rel=1e-14)


def test_bad_schedules():
    for bad in (
        lambda: schedules.linear(1.0, 0.0, 0),
        lambda: schedules.cosine(1.0, steps=3, warmup=3),
        lambda: schedules.warmup_stable_decay(1.0, -1, 2, 3),
        lambda: schedules.joined([schedules.constant(1.0)], [3]),
    ):
        with pytest.raises(vs.VescaleError, match=r"vs\.optim\.schedules"):
            bad()


# ---- norms and clipping


@pytest.mark.parametrize("order", [2.0, INF], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_clipping_is_that_of_torch(order, dtype):
    params = _tree.tree_map(lambda p: p.to(dtype), make_params())
    theirs = [torch.nn.Parameter(p) for p in _tree.leaves(params) if p.numel()]
    for p in theirs:
        p.grad = p.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7, order)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(global_norm(params, order).to(norm), norm, rtol=4 * eps, atol=0)
    clipped, _ = clip_by_global_norm(0.7, order).update(params, {}, params)
    for ours, p in zip([x for x in _tree.leaves(clipped) if x.numel()], theirs, strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours, p.grad, rtol=4 * eps, atol=0)
    same(clip_by_global_norm(1e6, order).update(params, {}, params)[0], params)


@pytest.mark.parametrize("order", [2.0, INF], ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_what_is_not_finite_comes_out_as_in_torch(bad, order):
    grads = {"a": torch.tensor([1.0, bad]), "b": torch.tensor([2.0, -3.0])}
    theirs = [torch.nn.Parameter(g) for g in grads.values()]
    for p in theirs:
        p.grad = p.detach().clone()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0, order)
    ours = clip_by_global_norm(1.0, order).update(grads, {}, grads)[0]
    for found, p in zip(ours.values(), theirs):
        torch.testing.assert_close(found, p.grad, equal_nan=True, rtol=0, atol=0)
    assert not all_finite(grads)


def test_norms_of_nothing():
    assert global_norm({}).item() == 0
    assert global_norm([torch.zeros(0, 3)], INF).item() == 0
    assert all_finite([])
    assert global_norm([torch.ones(1), torch.ones(1, dtype=torch.float64)]).dtype is torch.float64


def test_mixed_dtypes_keep_their_own():
    grads = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}
    found = clip_by_global_norm(1.0).update(grads, {}, grads)[0]
    assert [g.dtype for g in found.values()] == [torch.bfloat16, torch.float64]


def test_bad_norms():
    for bad in (
        lambda: clip_by_global_norm(0.0),
        lambda: clip_by_global_norm(1.0, 3),
        lambda: global_norm({}, 1),
    ):
        with pytest.raises(vs.VescaleError, match=r"vs\.optim"):
            bad()


def test_the_norm_has_a_gradient():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (found,) = torch.autograd.grad(global_norm({"x": x}), x)
    torch.testing.assert_close(found, torch.tensor([0.6, 0.8]))


# ---- skipped steps

INNER = {
    "sgd": lambda: sgd(0.1, 0.9),
    "negative rate": lambda: chain(sgd(0.1), scale(-1.0)),
    "adamw": lambda: adamw(0.1, amsgrad=True),
    "schedule": lambda: adam(schedules.linear(0.1, 0.0, 9)),
    "8 bit": lambda: adamw_8bit(0.1, block=(2, 2), min_elements=4, stochastic_rounding=vs.rng.key(1)),
    "matrices": lambda: partition(lambda path, p: p.dim() > 1, {True: muon(0.1), False: sgd(0.1, 0.9)}),
    "partition": lambda: partition(
        {r".*weight": 0, "head": 2, ".*": 1}, {0: sgd(0.1), 1: adamw(0.1), 2: None}
    ),
}


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
@pytest.mark.parametrize("name", INNER)
def test_a_skipped_step_changes_no_bit(name, bad):
    params = make_params()
    params["blocks"][0]["bias"][0] = -0.0
    opt, plain = skip_if_nonfinite(INNER[name]()), INNER[name]()
    params, state = run(opt, params, 2)
    grads = grads_of(params)
    grads["blocks"][1]["bias"][2] = bad
    updates, after = opt.update(grads, state, params)
    same(after, state)
    same(apply_updates(params, updates), params)
    # And a step that is taken is that of the optimizer alone.
    ours, theirs = run(opt, params, 1, after), run(plain, params, 1, state)
    same(ours, theirs)


def scaler_run(batches):
    """torch's own scaler around its SGD: parameters and scales after each step."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for batch in batches:
        opt.zero_grad()
        scaler.scale((weight * batch).sum()).backward()
        scaler.step(opt)
        scaler.update()
        yield weight.detach().clone(), scaler.get_scale()


def test_loss_scaling_is_that_of_torch():
    """Growth after two steps in a row, backoff after an overflow, and parameters that wait."""
    fine, over = torch.tensor([0.3, 0.7]), torch.tensor([INF, 0.1])
    batches = [fine, fine, fine, over, fine, over, over, fine, fine, fine, fine]
    opt = loss_scale(sgd(0.1, 0.9), init=16.0, interval=2)
    params = {"w": torch.tensor([1.0, -2.0])}
    state = opt.init(params)
    for batch, (weight, size) in zip(batches, scaler_run(batches), strict=True):
        _, grads = vs.value_and_grad(lambda p, x, by: (p["w"] * x).sum() * by)(params, batch, state["scale"])
        updates, state = opt.update(grads, state, params)
        params = apply_updates(params, updates)
        assert torch.equal(params["w"], weight)
        assert state["scale"].item() == size


def test_a_skipped_step_of_loss_scaling_changes_the_scale_only():
    opt, params = loss_scale(adamw(0.1), init=8.0), make_params()
    params, state = run(opt, params)
    bad = _tree.tree_map(lambda p: torch.full_like(p, NAN), params)
    updates, after = opt.update(bad, state, params)
    same(apply_updates(params, updates), params)
    same(after["inner"], state["inner"])
    assert (after["scale"].item(), after["taken"].item()) == (4.0, 0)


def test_the_scale_never_overflows():
    opt, params = loss_scale(sgd(0.1), init=2.0**127, interval=1), {"w": torch.zeros(2)}
    state = opt.update(params, opt.init(params), params)[1]
    assert (state["scale"].item(), state["taken"].item()) == (2.0**127, 0)


def test_bad_loss_scales():
    for bad in ({"init": 0.0}, {"growth": 0.5}, {"backoff": 0.0}, {"interval": 0}):
        with pytest.raises(vs.VescaleError, match=r"vs\.optim\.loss_scale"):
            loss_scale(sgd(0.1), **bad)
