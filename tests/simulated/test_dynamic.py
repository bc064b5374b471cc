"""`vs.parallelize(..., static=False)`: real values op by op, and the bits and layouts of static mode."""

import contextlib
import io

import pytest
import torch
from torch import nn

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, ragged, train_step
from vescale import _tree
from vescale._errors import ArgumentError, PlanError, TraceError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.plan import Staged

MESHES = [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}]
MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ROWS = vs.Plan(MESH, inputs={"x": P(dp=Shard(0))})
X = torch.arange(-3.0, 5.0).view(4, 2)  # sums of these are exact


def assert_same(ours, theirs):
    """Bits, layouts and structure."""
    (ours, spec), (theirs, other) = _tree.flatten(ours), _tree.flatten(theirs)
    assert spec == other
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, vs.DTensor):
            assert type(a) is type(b)
            assert a == b
            continue
        assert a.layout is b.layout
        assert a.dtype == b.dtype
        for piece, expected in zip(a.locals, b.locals, strict=True):
            assert torch.equal(piece, expected)


def both(fn, plan, **options):
    return vs.parallelize(fn, plan, **options), vs.parallelize(fn, plan, static=False, **options)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_gpt_step_has_the_bits_of_static_mode(axes, cut):
    """Weights, optimizer state, losses, over several steps, in every layout."""
    mesh = vs.make_mesh(axes, backend="simulated")
    rules = TP if "tp" in axes else {}
    if cut and "dp" in axes:
        rules = ragged(rules, RaggedShard((0,), (5, 3)))
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))} if "dp" in axes else {})
    model, opt = make_model(), vs.optim.adamw(1e-3)
    static, dynamic = both(train_step(model, opt), plan)
    params = vs.distribute(parameters(model), plan)
    ours = theirs = (params, opt.init(params))
    for seed in range(2):
        *ours, loss = dynamic(*ours, batch(seed))
        *theirs, expected = static(*theirs, batch(seed))
        assert_same((*ours, loss), (*theirs, expected))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("staged", [False, True])
def test_an_mlp_step_has_the_bits_of_static_mode(axes, staged):
    mesh = vs.make_mesh(axes, backend="simulated")
    run = {"up": P(tp=Shard(0)), "down": P(tp=Shard(1))} if "tp" in axes else {"up|down": P()}
    rules = run
    if staged and "dp" in axes:
        cut = RaggedShard((0,), (3, 1))
        rules = {rule: Staged(init=P(**dict(spec.items()), dp=cut), run=spec) for rule, spec in run.items()}
    plan = vs.Plan(mesh, rules, {"x": P(dp=Shard(0))} if "dp" in axes else {})

    def step(params, x):
        def loss(params, x):
            y = torch.nn.functional.relu(x @ params["up"].t()) @ params["down"].t()
            return (y - x).square().mean()

        value, grads = vs.value_and_grad(loss)(params, x)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, value

    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(s, generator=generator) for name, s in {"up": (16, 8), "down": (8, 16)}.items()
    }
    # Over 1 KB: less than that may become a pending sum in a program, and is then added elsewhere.
    x = torch.randn(128, 8, generator=generator)
    static, dynamic = both(step, plan)
    ours = theirs = vs.distribute(params, plan)
    for _ in range(3):
        ours, value = dynamic(ours, x)
        theirs, expected = static(theirs, x)
        assert_same((ours, value), (theirs, expected))


def test_values_are_real():
    """Prints, `.item()`, control flow on values, also inside a gradient; static mode refuses all of it."""
    seen = []

    def step(w, x):
        def loss(w):
            y = (x * w).sum()
            seen.append(y.item())
            if y > 0:
                print("positive", y.item())
                y = y * 2
            while y.abs() > 1:
                y = y / 2
            return y

        return vs.value_and_grad(loss)(w)

    static, dynamic = both(step, ROWS)
    for w in (torch.ones(2), torch.tensor([1.0, 3.0]), -torch.tensor([1.0, 3.0])):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            expected, theirs = step(w, X)
            value, grad = dynamic(w, X)
        assert seen[-1] == seen[-2]
        assert torch.equal(value.full_tensor(), expected)
        assert torch.equal(grad.full_tensor(), theirs)
        assert out.getvalue().count("positive") in (0, 2)
    with pytest.raises(TraceError, match="without values"):
        static(torch.ones(2), X)


def test_the_function_sees_dtensors_as_the_plan_places_them():
    layouts = {}

    def fn(params, x):
        layouts.update(x=x.layout.spec, w=params["w"].layout.spec)
        return x @ params["w"]

    plan = ROWS | vs.Plan(MESH, {"w": P(tp=Shard(1))})
    vs.parallelize(fn, plan, static=False)({"w": torch.ones(2, 4)}, X)
    assert layouts == {"x": P(dp=Shard(0)), "w": P(tp=Shard(1))}


def test_constraints_activations_and_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 4)

        def forward(self, x):
            return self.fc(x) * 2

    net = Net()
    fn, params, buffers = vs.functional(net)
    params = {
        name: (4 * p).round() for name, p in params.items()
    }  # sums are exact: they may be split otherwise

    def step(params, x):
        def loss(params):
            y = fn(params, buffers, x)[0]
            y = vs.constrain(y.square(), P(dp=Shard(1)))
            return y.sum(), y

        (_, y), grads = vs.value_and_grad(loss, has_aux=True)(params)
        return {"y": y, "mean": y.mean(0), "grads": grads, "word": "here", "number": 3, "made": torch.ones(3)}

    plan = ROWS | vs.Plan(
        MESH,
        {"fc.weight": P(tp=Shard(0))},
        outputs={"mean": P(tp=Shard(0))},
        activations={r"fc\.output": P(dp=Shard(0))},
    )
    static, dynamic = both(step, plan)
    assert_same(dynamic(params, X), static(params, X))
    for bad in (vs.Plan(MESH, activations={"nothing.output": P()}), vs.Plan(MESH, inputs={"z": P()})):
        with pytest.raises(PlanError, match="nothing"):
            vs.parallelize(step, bad, static=False)(params, X)


def test_unused_parameters_and_paths():
    def step(params, x):
        def loss(params):
            return (x * params["a"]).sum() if x.max() > 1 else (x * params["b"]).sum()

        return vs.value_and_grad(loss)(params)

    dynamic = vs.parallelize(step, ROWS, static=False)
    params = {name: torch.ones(2) for name in "abc"}
    for x in (X, X - 9):
        _, grads = dynamic(params, x)
        _, expected = step(params, x)
        for name in params:
            assert torch.equal(grads[name].full_tensor(), expected[name])


def test_results_have_no_history_and_memory_of_their_own():
    w = vs.distribute_tensor(torch.ones(4, 2), MESH, P(dp=Shard(0))).requires_grad_()
    same, plain = X.clone(), X.clone().requires_grad_()
    dynamic = vs.parallelize(lambda w, x, y: (w * x, y, x), ROWS, static=False)
    for result in dynamic(w, plain, same):
        assert not result.requires_grad
    _, found, _ = dynamic(w, plain, same)
    found.add_(1)
    assert torch.equal(same, X)


def test_arguments_are_not_written():
    def writes(x):
        x.add_(1)
        return x

    given = X.clone()
    dynamic = vs.parallelize(writes, ROWS, static=False)
    with pytest.raises(TraceError, match=r"in-place update of the argument 'x'"):
        dynamic(given)
    assert torch.equal(given, X)
    assert vs.parallelize(lambda x: (x + 1).mul_(2).sum(), ROWS, static=False)(X).item() == 24


def test_donated_arguments_are_used_up():
    dynamic = vs.parallelize(
        lambda params, x: (params["w"] + x.sum(0), x), ROWS, donate=("params",), static=False
    )
    params = {"w": vs.distribute_tensor(torch.ones(2), MESH, P())}
    dynamic(params, X)
    with pytest.raises(ArgumentError, match="given away"):
        params["w"] + 1


def test_layouts_are_checked():
    dynamic = vs.parallelize(lambda x: x.sum(), ROWS, static=False)
    with pytest.raises(PlanError, match="the plan says"):
        dynamic(vs.distribute_tensor(X, MESH, P()))
    assert dynamic(vs.distribute_tensor(X, MESH, P(dp=Shard(0)))).item() == X.sum().item()


def test_shard_map_and_keyed_draws_inside():
    def step(x):
        noise = vs.rng.normal(vs.rng.key(0), (4, 2))
        total = vs.shard_map(
            lambda x: vs.psum(x.sum(), "dp"), mesh=MESH, in_specs=(P(dp=Shard(0)),), out_specs=P()
        )(x)
        return x + noise, total

    static, dynamic = both(step, ROWS)
    ours, theirs = dynamic(X), static(X)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_as_a_decorator_and_its_name():
    @vs.parallelize(ROWS, static=False)
    def double(x):
        """Twice x."""
        return x * 2

    assert double.__doc__ == "Twice x."
    assert torch.equal(double(X).full_tensor(), X * 2)
    assert torch.equal(double(x=X).full_tensor(), X * 2)
    # What static mode would run is still to be seen.
    assert "aten.mul" in double.lower(X).as_text()


def test_in_inference_mode():
    dynamic = vs.parallelize(lambda x: (x * 2).sum(), ROWS, static=False)
    with torch.inference_mode():
        assert dynamic(X + 1).item() == 24
    assert dynamic(X + 1).item() == 24


def test_a_module_op_by_op_has_the_gradients_of_static_mode():
    plan = vs.Plan(MESH, ragged(TP, RaggedShard((0,), (5, 3))), {"batch": P(dp=Shard(0))})
    models = [vs.parallelize(make_model(), plan, static=static) for static in (True, False)]
    for model in models:
        model(batch()).backward()
    static, dynamic = ({name: p.grad for name, p in model.named_parameters()} for model in models)
    assert_same(dynamic, static)
