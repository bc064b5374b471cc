"""SGD, Adam and AdamW with all their options, in one run with torch's: bit for bit."""

import copy

import pytest
import torch
from torch import nn

import vescale as vs
from vescale import _tree

STEPS = 12
CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.03, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.03, "momentum": 0.9}),
    ("SGD", {"lr": 0.03, "momentum": 0.8, "nesterov": True, "weight_decay": 0.05}),
    ("Adam", {"lr": 1e-2}),
    ("Adam", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.3}),
]
OURS = {"SGD": vs.optim.sgd, "Adam": vs.optim.adam, "AdamW": vs.optim.adamw}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 33), nn.Linear(33, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d: float64 scalars must not promote it

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale


def make(dtype):
    torch.manual_seed(0)
    module = Net().to(dtype)
    return module, [(torch.randn(6, 7, dtype=dtype), torch.randn(6, 5, dtype=dtype)) for _ in range(STEPS)]


def both(name, hyper, dtype, lr_at=None, mask=None):
    """Parameters and state after each step: torch's, and ours with the same gradients."""
    module, batches = make(dtype)
    theirs = copy.deepcopy(module)
    groups = [{"params": [p for n, p in theirs.named_parameters() if mask and "a." not in n]}]
    groups[0]["weight_decay"] = 0.0
    groups.append({"params": [p for n, p in theirs.named_parameters() if not mask or "a." in n]})
    reference = getattr(torch.optim, name)(
        [group for group in groups if group["params"]], foreach=False, fused=False, **hyper
    )
    ours = {n: p.detach().clone() for n, p in module.named_parameters()}
    given = {**hyper, **({"lr": lr_at} if lr_at else {}), **({"mask": mask} if mask else {})}
    opt = OURS[name](**given)
    state = opt.init(ours)
    for number, (x, y) in enumerate(batches):
        for group in reference.param_groups:
            group["lr"] = (
                lr_at(torch.tensor(float(number), dtype=torch.float64)).item() if lr_at else group["lr"]
            )
        reference.zero_grad()
        (theirs(x) - y).square().mean().backward()
        grads = {n: p.grad for n, p in theirs.named_parameters()}
        updates, state = opt.update(grads, state, ours)
        ours = vs.optim.apply_updates(ours, updates)
        reference.step()
        for n, p in theirs.named_parameters():
            assert torch.equal(ours[n], p.detach()), (number, n)
            assert ours[n].dtype is dtype
    for key in set(state) - {"step"}:
        for n, p in theirs.named_parameters():
            assert torch.equal(state[key][n], reference.state[p][key])
    assert state["step"].item() == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
def test_bits_of_torch(name, hyper, dtype):
    both(name, hyper, dtype)


@pytest.mark.parametrize("name", OURS)
def test_a_schedule_has_the_bits_of_its_numbers(name):
    """A 0-d tensor is the product and sum that a number is, rounded alike."""
    both(name, {"lr": 1.0}, torch.float32, vs.optim.schedules.cosine(0.05, steps=10, warmup=3))


@pytest.mark.parametrize("name", OURS)
def test_a_mask_is_a_group_of_its_own(name):
    both(name, {"lr": 0.05, "weight_decay": 0.2}, torch.float32, mask=r"a\..*")


@pytest.mark.parametrize("name", OURS)
def test_16_bits_stay_near_torch(name):
    module, batches = make(torch.bfloat16)
    reference = getattr(torch.optim, name)(module.parameters(), lr=1e-2, foreach=False)
    ours = {n: p.detach().clone() for n, p in module.named_parameters()}
    opt = OURS[name](1e-2)
    state = opt.init(ours)
    for x, y in batches[:4]:
        reference.zero_grad()
        (module(x) - y).square().mean().backward()
        updates, state = opt.update({n: p.grad for n, p in module.named_parameters()}, state, ours)
        ours = vs.optim.apply_updates(ours, updates)
        reference.step()
    for n, p in module.named_parameters():
        torch.testing.assert_close(ours[n], p.detach(), rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("name", OURS)
def test_errors_name_the_optimizer(name):
    make, where = OURS[name], rf"vs\.optim\.{name.lower()}"
    for bad in ({"lr": -1.0}, {"lr": torch.ones(2)}, {"lr": "fast"}, {"lr": 0.1, "weight_decay": -1.0}):
        with pytest.raises(vs.VescaleError, match=where):
            make(**bad)
    opt, params = make(0.1), {"w": torch.ones(2)}
    updates, state = opt.update(params, opt.init(params), params)
    with pytest.raises(vs.VescaleError, match="a chain has one"):
        opt.update(updates, state, params)
    with pytest.raises(vs.VescaleError, match="grads"):
        opt.update([torch.ones(2)], state, params)


def test_nesterov_needs_momentum():
    with pytest.raises(vs.VescaleError, match="momentum"):
        vs.optim.sgd(0.1, nesterov=True)


def test_an_empty_tree():
    for make in OURS.values():
        opt = make(0.1)
        updates, state = opt.update({}, opt.init({}), {})
        assert vs.optim.apply_updates({}, updates) == {}
        assert _tree.leaves(state)[0].item() == 1
