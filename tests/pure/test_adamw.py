"""The functional AdamW against torch's, bit for bit; and what an optimizer must be."""

import copy

import pytest
import torch
from torch import nn

import vescale as vs
from vescale import _tree

HYPER = [
    {"lr": 1e-3},
    {"lr": 3e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
    {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0},
    {"lr": 0.1, "betas": (0.0, 0.98), "eps": 1e-12, "weight_decay": 0.3},
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 33)
        self.norm = nn.LayerNorm(33)
        self.b = nn.Linear(33, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d: float64 scalars must not promote it

    def forward(self, x):
        return self.b(self.norm(torch.tanh(self.a(x)))) * self.scale


def run_torch(module, batches, hyper, lrs=None):
    """Parameters after each step, by torch's own optimizer."""
    module = copy.deepcopy(module)
    opt = torch.optim.AdamW(module.parameters(), foreach=False, fused=False, **hyper)
    history = []
    for i, (x, y) in enumerate(batches):
        if lrs:
            opt.param_groups[0]["lr"] = lrs[i]
        opt.zero_grad()
        (module(x) - y).square().mean().backward()
        opt.step()
        history.append({n: p.detach().clone() for n, p in module.named_parameters()})
    states = {n: opt.state[p] for n, p in module.named_parameters()}
    return history, states


def run_ours(module, batches, opt):
    params = {n: p.detach() for n, p in module.named_parameters()}

    def loss(params, x, y):
        return (torch.func.functional_call(module, params, x) - y).square().mean()

    state, history = opt.init(params), []
    for x, y in batches:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(leaves, x, y), tuple(leaves.values()))))
        updates, state = opt.update(grads, state, params)
        params = vs.optim.apply_updates(params, updates)
        history.append(params)
    return history, state


def make(dtype, steps=25, seed=0):
    torch.manual_seed(seed)
    module = Net().to(dtype)
    return module, [(torch.randn(6, 7, dtype=dtype), torch.randn(6, 5, dtype=dtype)) for _ in range(steps)]


def assert_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hyper", HYPER)
def test_bits_of_torch(dtype, hyper):
    module, batches = make(dtype)
    theirs, their_state = run_torch(module, batches, hyper)
    ours, state = run_ours(module, batches, vs.optim.adamw(**hyper))
    for mine, their in zip(ours, theirs):
        assert_bits(mine, their)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_bits(state[key], {n: s[key] for n, s in their_state.items()})
    assert state["step"].item() == 25


@pytest.mark.parametrize("hyper", HYPER)
def test_scalars_for_many_steps(hyper):
    """600 steps of one parameter: the bias corrections keep the bits of Python's floats."""
    torch.manual_seed(0)
    batches = [(torch.randn(1, dtype=torch.float64),) * 2 for _ in range(600)]
    module = nn.Linear(1, 1, dtype=torch.float64)
    theirs, _ = run_torch(module, batches, hyper)
    ours, _ = run_ours(module, batches, vs.optim.adamw(**hyper))
    assert_bits(ours[-1], theirs[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_as_tensor_and_as_schedule(dtype):
    module, batches = make(dtype)
    lrs = [1e-2 * (i + 1) / 10 for i in range(25)]
    theirs, _ = run_torch(module, batches, {"lr": 1.0, "weight_decay": 0.1}, lrs)
    ours, _ = run_ours(module, batches, vs.optim.adamw(lambda step: 1e-2 * (step + 1) / 10, weight_decay=0.1))
    assert_bits(ours[-1], theirs[-1])

    theirs, _ = run_torch(module, batches, {"lr": 1e-2})
    lr = torch.tensor(1e-2, dtype=torch.float64)
    assert_bits(run_ours(module, batches, vs.optim.adamw(lr))[0][-1], theirs[-1])


def test_bfloat16_stays_near_torch():
    module, batches = make(torch.bfloat16, steps=5)
    theirs, _ = run_torch(module, batches, {"lr": 1e-2})
    ours, _ = run_ours(module, batches, vs.optim.adamw(1e-2))
    for name, p in ours[-1].items():
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p, theirs[-1][name], rtol=2**-5, atol=2**-7)


def test_changes_nothing_it_was_given():
    opt = vs.optim.adamw(1e-2)
    params = {"w": torch.randn(3)}
    grads, state = {"w": torch.randn(3)}, opt.init(params)
    trees = (grads, state, params)
    before = copy.deepcopy(trees)
    updates, _ = opt.update(*trees)
    vs.optim.apply_updates(params, updates)
    for a, b in zip(_tree.leaves(trees), _tree.leaves(before)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_state_is_a_fixed_point_also_on_meta():
    opt = vs.optim.adamw(1e-2)
    for device in ("cpu", "meta"):
        params = {"a": [torch.ones(2, 3, device=device)], "s": torch.ones((), device=device)}
        state = opt.init(params)
        updates, after = opt.update(params, state, params)
        new = vs.optim.apply_updates(params, updates)
        for old, fresh in ((state, after), (params, new)):
            assert _tree.flatten(old)[1] == _tree.flatten(fresh)[1]
            for x, y in zip(_tree.leaves(old), _tree.leaves(fresh)):
                assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def test_decay_mask_is_a_prefix():
    params = {"w": torch.ones(2), "b": {"x": torch.ones(2)}}
    zero = _tree.tree_map(torch.zeros_like, params)
    new = vs.optim.apply_updates(params, vs.optim.Updates({"w": 0.5, "b": 1.0}, zero))
    assert new["w"].tolist() == [0.5, 0.5]
    assert new["b"]["x"].tolist() == [1.0, 1.0]


def test_empty_tree():
    opt = vs.optim.adamw(1e-2)
    updates, state = opt.update({}, opt.init({}), {})
    assert vs.optim.apply_updates({}, updates) == {}
    assert state["step"].item() == 1


def test_few_aten_calls():
    """Eight calls a parameter and two to apply them; the scalars once for all."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def count(n):
        opt = vs.optim.adamw(1e-2)
        params = {str(i): torch.ones(2) for i in range(n)}
        state = opt.init(params)
        calls.clear()
        with Count():
            vs.optim.apply_updates(params, opt.update(params, state, params)[0])
        return len(calls)

    assert count(11) - count(1) == 10 * 10
    assert count(1) <= 10 + 12


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": 1.0, "betas": (1.0, 0.9)},
        {"lr": 1.0, "eps": -1.0},
        {"lr": torch.ones(2)},
    ],
)
def test_bad_hyper_parameters(bad):
    with pytest.raises(vs.VescaleError, match=r"vs\.optim\.adamw"):
        vs.optim.adamw(**bad)


def test_gradients_of_another_structure():
    opt = vs.optim.adamw(1e-2)
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(vs.VescaleError, match="grads"):
        opt.update({"w": torch.ones(2)}, opt.init(params), params)
