"""Modules: `vs.functional`, and `vs.parallelize` of a module, against the plain module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale as vs
from tests.gpt import TP, batch, make_model, ragged, train_step
from vescale._errors import ArgumentError, TraceError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.plan import Staged

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ROWS = {"x": P(dp=Shard(0))}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


class Net(nn.Module):
    """A bit of everything: batch norm, tied weights, a buffer that is replaced, one that isn't persistent."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x, *, power=2):
        self.calls = self.calls + 1
        return (self.norm(self.first(x)) * self.last(x) * self.scale).pow(power).sum()


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.norm(self.conv(x)).relu().mean((2, 3))), y)


def make(kind=Net):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def plan_of(params=None, inputs=ROWS, mesh=MESH, **options):
    return vs.Plan(mesh, params, inputs, **options)


def full(tree):
    return {name: t.full_tensor() if isinstance(t, vs.DTensor) else t for name, t in tree.items()}


def assert_close(ours, theirs, bound=1e-14):
    assert ours.keys() == theirs.keys()
    for name, value in full(ours).items():
        assert value.dtype == theirs[name].dtype
        assert (value - theirs[name]).abs().max() <= bound * max(1.0, theirs[name].abs().max()), name


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


# functional.


def test_functional_is_the_module():
    module, plain = make(), make()
    fn, params, buffers = vs.functional(module)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert "last.weight" not in params
    assert list(buffers) == [name for name, _ in module.named_buffers()]
    out, after = fn(params, buffers, X, power=4)
    assert torch.equal(out, plain(X, power=4))
    for name, buffer in plain.named_buffers():
        assert torch.equal(after[name], buffer), name
    # Nothing that was given, and nothing of the module, was written.
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert buffers["calls"] == 0
    assert module.calls is not after["calls"]
    assert not any(p.requires_grad for p in params.values())


def test_functional_under_transforms():
    """Both uses of a tied weight add to its gradient; statistics come out of a gradient; higher orders."""
    module, plain = make(), make()
    fn, params, buffers = vs.functional(module)
    (value, after), grads = vs.value_and_grad(fn, has_aux=True)(params, buffers, X)
    loss = plain(X)
    loss.backward()
    assert torch.equal(value, loss)
    assert_close(grads, gradients(plain), 0)
    assert_close(after, dict(plain.named_buffers()), 0)
    twice = torch.func.grad(lambda p: vs.grad(lambda q: fn(q, buffers, X)[0])(p)["norm.bias"].sum())(params)
    assert twice["norm.bias"].abs().max() > 0
    module.eval()
    rows = vs.vmap(lambda x: fn(params, buffers, x[None])[0])(X)
    assert torch.allclose(rows.sum(), fn(params, buffers, X)[0])


def test_functional_refuses():
    with pytest.raises(ArgumentError, match="not its class"):
        vs.functional(Net)
    fn, params, buffers = vs.functional(make())
    with pytest.raises(ArgumentError, match=r"first\.wieght: no parameter or buffer"):
        fn({**params, "first.wieght": X}, buffers, X)
    with pytest.raises(ArgumentError, match="buffers of type Tensor"):
        fn(params, X)


def test_parameters_that_are_not_used_get_zeros():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, side):
            return (self.left if side else self.right)(x).sum()

    module = make(Two)
    fn, params, buffers = vs.functional(module)
    step = vs.value_and_grad(lambda params, x, side: fn(params, buffers, x, side)[0])
    for static in (True, False):
        sharded = vs.parallelize(step, plan_of({".*": P(tp=Shard(0))}), static=static)
        for side in (True, False, True):
            _, theirs = step(params, X, side)
            _, ours = sharded(params, X, side)
            assert_close(ours, theirs)
            assert not ours["right.weight" if side else "left.weight"].full_tensor().any()


# Inside a program.


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", [Net, CNN])
def test_statistics_are_those_of_the_global_batch(kind, static):
    module, plain = make(kind), make(kind)
    inputs = (
        (X,)
        if kind is Net
        else (torch.linspace(-3, 4, 576).view(8, 2, 6, 6).sin().double(), torch.arange(8) % 3)
    )
    names = ("x", "y")[: len(inputs)]
    fn, params, buffers = vs.functional(module)
    rules = {".*norm.*": P(), ".*": P(tp=Shard(0))} if kind is Net else {}
    plan = plan_of(rules, {name: P(dp=Shard(0)) for name in names})

    def step(params, buffers, x, y=None):
        given = (x,) if y is None else (x, y)
        (value, buffers), grads = vs.value_and_grad(fn, has_aux=True)(params, buffers, *given)
        return {name: p - 0.01 * grads[name] for name, p in params.items()}, buffers, value

    sharded = vs.parallelize(step, plan, static=static)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    params = vs.distribute(params, plan)
    for _ in range(3):
        params, buffers, value = sharded(params, buffers, *inputs)
        optimizer.zero_grad()
        loss = plain(*inputs)
        loss.backward()
        optimizer.step()
        assert abs(value.item() - loss.item()) <= 1e-12 * abs(loss.item())
        assert_close(buffers, dict(plain.named_buffers()), 1e-13)
    assert_close(params, dict(plain.named_parameters()), 1e-12)


# A module on a mesh.


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("rules", [TP, ragged(TP, RaggedShard((0,), (5, 3)))], ids=["tp", "ragged"])
def test_a_module_trains_with_torchs_optimizer(rules, static):
    plain = make_model(torch.float64)
    model = vs.parallelize(
        make_model(torch.float64), plan_of(rules, {"batch": P(dp=Shard(0))}), static=static
    )
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for seed in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        loss, expected = model(batch(seed)), plain(batch(seed))
        loss.backward()
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-12 * expected.item()
        for name, p in model.named_parameters():
            assert p.grad.layout is p.layout
            assert (p.grad.full_tensor() - plain.get_parameter(name).grad).abs().max() < 1e-12, name
        ours.step()
        theirs.step()


def test_a_module_and_its_functional_form_have_one_gradient():
    """Bit for bit: the two halves of a program are the program."""
    plan = plan_of(TP, {"batch": P(dp=Shard(0))})
    model = vs.parallelize(make_model(), plan)
    fn, params, buffers = vs.functional(model)
    step = vs.parallelize(vs.value_and_grad(lambda params, batch: fn(params, {}, batch)[0]), plan)
    value, grads = step(params, batch())
    loss = model(batch())
    loss.backward()
    assert buffers == {}
    assert torch.equal(loss.full_tensor(), value.full_tensor())
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), grads[name].full_tensor()), name


def test_the_tape_joins_other_ops():
    """Several results, some unused, integers among them; ops around it; arguments that need a gradient."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x, shift):
            y = self.fc(x) + shift["by"]
            return {"y": y, "best": y.argmax(-1), "unused": x * 2, "word": "here"}

    plain = make(Split)
    model = vs.parallelize(make(Split), plan_of({"fc.weight": P(tp=Shard(0))}))
    shift, theirs = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = vs.distribute_tensor(X, MESH, P(dp=Shard(0))).requires_grad_()
    other = X.clone().requires_grad_()
    for _ in range(2):  # gradients add up
        found = model(x, {"by": shift * 2})
        expected = plain(other, {"by": theirs * 2})
        assert found["word"] == "here"
        assert torch.equal(found["best"].full_tensor(), expected["best"])
        assert not found["best"].requires_grad
        found["y"].square().sum().backward()
        expected["y"].square().sum().backward()
    assert type(shift.grad) is torch.Tensor
    assert torch.allclose(shift.grad, theirs.grad, rtol=1e-14)
    assert x.grad.layout is x.layout
    assert torch.allclose(x.grad.full_tensor(), other.grad, rtol=1e-14)
    assert_close(gradients(model), gradients(plain))


def test_a_graph_is_used_once_unless_kept():
    model = vs.parallelize(make(), plan_of())
    loss = model(X)
    loss.backward(retain_graph=True)
    first = full(gradients(model))
    loss.backward()
    assert_close(gradients(model), {name: 2 * grad for name, grad in first.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused():
    model = vs.parallelize(make(), plan_of())
    with pytest.raises(ArgumentError, match="differentiated once"):
        torch.autograd.grad(model(X), list(model.parameters()), create_graph=True)


def test_a_write_between_forward_and_backward_is_seen():
    model = vs.parallelize(make(), plan_of())
    loss = model(X)
    with torch.no_grad():
        model.params["norm.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parameters_get_no_gradient_and_no_reduction():
    module = make(CNN)
    module.conv.requires_grad_(False)
    plan = plan_of({}, {"x": P(dp=Shard(0)), "y": P(dp=Shard(0))})
    frozen, whole = vs.parallelize(module, plan), vs.parallelize(make(CNN), plan)
    inputs = torch.ones(8, 2, 5, 5).double(), torch.zeros(8, dtype=torch.int64)
    frozen(*inputs).backward()
    assert {name for name, p in frozen.named_parameters() if p.grad is None} == {"conv.weight", "conv.bias"}

    def reduced(model):
        return [c for c in model.lower(*inputs).collectives() if "gradient of" in c.cause]

    assert not any("conv" in c.cause for c in reduced(frozen))
    assert not any(
        "conv" in line for line in frozen.lower(*inputs).as_text().splitlines() if "backward" in line
    )
    # It may be thawed, and then has a program of its own.
    frozen.params["conv.weight"].requires_grad_()
    frozen(*inputs).backward()
    assert frozen.params["conv.weight"].grad is not None
    for p in whole.parameters():
        p.requires_grad_(False)
    assert not whole(*inputs).requires_grad


def test_buffers_are_updated_and_placed():
    plain = make()
    model = vs.parallelize(make(), plan_of(inputs={**ROWS, "buffers.norm.running_mean": P(tp=Shard(0))}))
    assert model.buffers["norm.running_mean"].layout.spec == P(tp=Shard(0))
    for record in (True, False, True):
        with torch.set_grad_enabled(record):
            assert abs(model(X).item() - plain(X).item()) < 1e-12
        assert_close(model.buffers, dict(plain.named_buffers()))
        assert model.buffers["norm.running_mean"].layout.spec == P(tp=Shard(0))
    model.eval()
    plain.eval()
    before = full(model.buffers)
    assert abs(model(X).item() - plain(X).item()) < 1e-12
    after = full(model.buffers)
    assert all(torch.equal(before[name], after[name]) for name in before if name != "calls")
    assert not any(buffer.requires_grad for buffer in model.buffers.values())


def test_the_state_dict_is_the_modules():
    plain, model = make(), vs.parallelize(make(), plan_of({"first.weight": P(tp=Shard(0))}))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert torch.equal(state["last.weight"].full_tensor(), state["first.weight"].full_tensor())
    assert_close(state, plain.state_dict(), 0)
    doubled = {name: 2 * t for name, t in plain.state_dict().items()}
    layouts = {name: p.layout for name, p in model.named_parameters()}
    model.load_state_dict(doubled)
    assert_close(model.state_dict(), doubled, 0)
    model.load_state_dict(state)
    assert {name: p.layout for name, p in model.named_parameters()} == layouts
    bad = dict(doubled, extra=X)
    bad["first.bias"] = X
    del bad["calls"]
    before = full(model.state_dict())
    with pytest.raises(ArgumentError, match="calls is missing") as error:
        model.load_state_dict(bad)
    assert "extra is unknown" in str(error.value)
    assert "first.bias has shape (8, 3), not (4,)" in str(error.value)
    assert_close(model.state_dict(), before, 0)


def test_the_plan_speaks_of_forwards_own_names():
    """Inputs by argument name, results by their path in what forward returns, activations by module path."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x, scale=1.0):
            y = self.fc(x) * scale
            return {"y": y, "z": y.sum(0)}

    plan = plan_of(
        {"fc.bias": P(tp=Shard(0))}, outputs={"y": P(tp=Shard(1))}, activations={r"fc\.output": P()}
    )
    model = vs.parallelize(make(Pair), plan)
    found = model(X, scale=2.0)
    assert found["y"].layout.spec == P(tp=Shard(1))
    assert torch.allclose(found["y"].full_tensor(), make(Pair)(X, 2.0)["y"], rtol=1e-14)
    whole = vs.parallelize(make(Pair), plan_of(outputs={"": P()}))
    assert all(result.layout.spec == P() for result in whole(X).values())


# Nothing stale.


@pytest.mark.parametrize("record", [True, False])
def test_flags_and_attributes_are_read_at_each_call(record):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.rate, self.shift = nn.Linear(3, 3), 0.5, torch.ones(3).double()

        def forward(self, x):
            y = self.fc(x) + self.shift
            return (y * self.rate if self.training else y).sum()

    plain, module = make(Gated), make(Gated)
    model = vs.parallelize(module, plan_of())

    def same():
        with torch.set_grad_enabled(record):
            assert abs(model(X).item() - plain(X).item()) < 1e-12

    same()
    for change in (
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: setattr(m, "rate", 0.25),
        lambda m: setattr(m, "shift", torch.zeros(3).double()),
        lambda m: setattr(m, "fc", nn.Sequential(nn.Identity(), nn.Identity())),
    ):
        change(plain)
        change(module)
        if not isinstance(plain.fc, nn.Linear):
            with pytest.raises(ArgumentError, match="no parameter or buffer"):
                same()
            break
        same()
    assert model.training


def test_a_replaced_closed_over_tensor_is_the_one_that_is_used():
    holder = {"w": torch.ones(3, dtype=torch.float64)}
    weight = holder["w"]

    class Closed(nn.Module):
        def forward(self, x):
            return (x * weight).sum()

    model = vs.parallelize(Closed(), plan_of())
    assert abs(model(X).item() - X.sum().item()) < 1e-14
    weight = 3 * weight
    assert abs(model(X).item() - 3 * X.sum().item()) < 1e-13


def test_other_shapes_and_modes_are_other_programs():
    model = vs.parallelize(make_model(), plan_of(TP, {"batch": P(dp=Shard(0))}))
    for _ in range(2):
        model(batch())
        model(batch()[:4])
        with torch.no_grad():
            model(batch())
    forward, both = model.cache_info()
    assert (forward.misses, forward.hits, both.misses, both.hits) == (1, 1, 2, 2)


def test_in_inference_mode():
    plain = make_model()
    model = vs.parallelize(make_model(), plan_of(TP, {"batch": P(dp=Shard(0))}))
    double = vs.parallelize(lambda x: (x * 2).sum(), plan_of())
    with torch.inference_mode():
        assert abs(model(batch()).item() - plain(batch()).item()) < 1e-5
        assert double(torch.ones(4, 3)).item() == 24
        made = torch.ones(4, 3)
        assert double(made).item() == 24
    assert double(torch.ones(4, 3)).item() == 24
    model(batch()).backward()
    # What closes over tensors that were made there, also later.
    closed = vs.parallelize(lambda x: (x * made).sum(), plan_of())
    assert closed(torch.ones(4, 3)).item() == 12
    with torch.inference_mode():
        assert closed(torch.ones(4, 3)).item() == 12


# What is refused.


def test_inside_a_traced_function_parameters_are_arguments():
    model = vs.parallelize(make(), plan_of())
    outer = vs.parallelize(lambda x: model(x), plan_of())
    with pytest.raises(TraceError, match=r"vs\.functional\(model\)"):
        outer(X)
    with pytest.raises(TraceError, match=r"vs\.functional\(model\)"):
        torch.func.grad(lambda x: model(x))(X)


def test_results_of_odd_containers_are_refused():
    class Output(dict):
        pass

    class Odd(nn.Module):
        def forward(self, x):
            return Output(y=x * 2)

    with pytest.raises(TraceError, match="a result of type Output"):
        vs.parallelize(Odd(), plan_of())(X)


def test_modules_refuse_donation_and_taken_names():
    with pytest.raises(ArgumentError, match="donate"):
        vs.parallelize(make(), plan_of(), donate=("x",))

    class Takes(nn.Module):
        def forward(self, buffers):
            return buffers

    with pytest.raises(ArgumentError, match="rename the argument"):
        vs.parallelize(Takes(), plan_of(inputs={}))


def test_staged_parameters_are_gathered_once_and_scattered_once():
    rules = {".*weight": Staged(init=P(dp=RaggedShard((0,), (1, 1))), run=P())}

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).square().sum()

    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    model = vs.parallelize(make(Linear), plan_of(rules, mesh=mesh))
    x = torch.ones(4, 4).double()
    kinds = [c.kind for c in model.lower(x).collectives()]
    assert kinds.count("all_gather") == 1
    assert kinds.count("reduce_scatter") == 1
    model(x).backward()
    plain = make(Linear)
    plain(x).backward()
    assert_close(gradients(model), gradients(plain))


def test_the_original_module_is_left_alone():
    module = make()
    before = copy.deepcopy(module.state_dict())
    model = vs.parallelize(module, plan_of())
    model(X).backward()
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_the_train_step_of_a_sharded_module():
    """`vs.functional` of it gives DTensors, for a functional step."""
    plan = plan_of(TP, {"batch": P(dp=Shard(0))})
    model, opt = make_model(), vs.optim.adamw(1e-3)
    sharded = vs.parallelize(model, plan)
    _, params, _ = vs.functional(sharded)
    step = vs.parallelize(train_step(model, opt), plan)
    after, _, _ = step(params, opt.init(params), batch())
    assert all(after[name].layout is p.layout for name, p in sharded.named_parameters())


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("made", ["of a module", "by init"])
def test_a_deep_copy_has_parameters_of_its_own(made, static):
    """What an average of the weights over the steps is kept in."""
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    plan = vs.Plan(mesh, params={"weight": P(dp=Shard(0))})
    if made == "by init":
        model = vs.init(nn.Linear, 4, 6, plan=plan, seed=0)
    else:
        model = vs.parallelize(nn.Linear(4, 6), plan, static=static)
    model.params["bias"].requires_grad_(False)
    x = torch.ones(2, 4)
    before = model(x).full_tensor().detach().clone()
    twin = copy.deepcopy(model)
    assert twin.params["weight"].layout is model.params["weight"].layout
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(twin(x).full_tensor(), before)
    with torch.no_grad():
        twin.params["weight"].zero_()
    assert torch.equal(model(x).full_tensor(), before)
    assert torch.equal(twin(x).full_tensor(), model.params["bias"].full_tensor().expand(2, 6))
