"""Every optimizer of `tests/optimizers.py` against every property that an optimizer must have."""

import pytest
import torch

import vescale as vs
from tests import gpt
from tests.optimizers import MESHES, OPTIMIZERS, plan_on
from vescale import _tree
from vescale.optim import apply_updates, partition
from vescale.spmd.program import program as programs
from vescale.spmd.program.emit import Call
from vescale.spmd.program.passes import verifying

each = pytest.mark.parametrize("name", OPTIMIZERS)
COLUMNS = {"matrix": vs.P(tp=vs.Shard(1))}


def make_params(dtype=torch.float32):
    draw = lambda seed, *shape: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)  # noqa: E731
    return {
        "matrix": draw(0, 8, 6),
        "more": {"wide": draw(1, 3, 10), "vector": draw(2, 5)},
        "none": torch.zeros(0, 3, dtype=dtype),
        "scalar": draw(3),
    }


def grads_of(params, seed):
    draw = lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + p.dim())).to(p)  # noqa: E731
    return _tree.tree_map(draw, params)


def update_step(opt):
    def step(params, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, params)
        return apply_updates(params, updates), opt_state

    return step


def looks(tree):
    """What a tree's tensors look like, and where they live."""
    return [
        (path, x.shape, x.dtype, x.layout if isinstance(x, vs.DTensor) else None)
        for path, x in zip(_tree.paths(tree), _tree.leaves(tree))
    ]


@each
def test_converges_on_a_quadratic(name):
    """(A p - b)^2, badly scaled, from far away: at least twenty times nearer in loss after 200 steps."""
    case = OPTIMIZERS[name]
    opt, goal = case.make(case.quadratic), make_params()
    weigh = {"matrix": 3.0, "more": {"wide": 1.0, "vector": 0.3}, "none": 1.0, "scalar": 1.0}

    def loss_fn(params):
        terms = _tree.tree_map(lambda p, q, w: (w * (p - q)).square().sum(), params, goal, weigh)
        return torch.stack(_tree.leaves(terms)).sum()

    params = _tree.tree_map(torch.zeros_like, goal)
    state, first = opt.init(params), loss_fn(params).item()
    for _ in range(200):
        _, grads = vs.value_and_grad(loss_fn)(params)
        updates, state = opt.update(grads, state, params)
        params = apply_updates(params, updates)
    assert loss_fn(params).item() < first / 20


@each
def test_converges_on_a_gpt(name):
    """Under FSDP, donated, on one batch: the loss is clearly lower after 8 steps, and one program did it."""
    case = OPTIMIZERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        opt, model = case.make(case.gpt), gpt.GPT(1, 16, gpt.CONTEXT)
    mesh = vs.make_mesh({"dp": 2})
    rows = {"batch": vs.P(dp=vs.Shard(0))}
    plan = vs.Plan(mesh, inputs=rows, fsdp=vs.FSDP("dp", r"blocks\.\d+"))
    step = vs.parallelize(gpt.train_step(model, opt), plan, donate=("params", "opt_state"))
    params = vs.distribute(gpt.parameters(model), plan)
    state, losses = opt.init(params), []
    before = looks((params, state))
    with verifying(False):  # the tests of FSDP do, and it takes as long again
        for _ in range(8):
            params, state, loss = step(params, state, gpt.batch())
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert looks((params, state)) == before
    assert step.cache_info().misses == 1


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_kept(name, dtype):
    case = OPTIMIZERS[name]
    if dtype not in case.dtypes:
        pytest.skip("not taken")
    opt, params = case.make(case.quadratic), make_params(dtype)
    state = opt.init(params)
    new, after = update_step(opt)(params, state, grads_of(params, 0))
    assert looks(new) == looks(params)
    assert looks(after) == looks(state)
    for x in _tree.leaves((new, after)):
        assert not x.is_floating_point() or torch.isfinite(x).all()
    assert not torch.equal(new["matrix"], params["matrix"])


@each
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_a_step_is_the_same_on_every_mesh(name, axes):
    """Three steps in buffers, also of empty and 0-d parameters: plain torch's bits, and the layouts stay."""
    case = OPTIMIZERS[name]
    opt, plan, params = case.make(case.quadratic), plan_on(axes, COLUMNS), make_params()
    step = vs.parallelize(update_step(opt), plan)
    theirs, ours = (params, opt.init(params)), vs.distribute(params, plan)
    ours = (ours, opt.init(ours))
    before = looks(ours)
    owned = {x.layout for x in ours[0].values() if isinstance(x, vs.DTensor)}
    for seed in range(3):
        grads = grads_of(params, seed)
        theirs = update_step(opt)(*theirs, grads)
        ours = step(*ours, vs.distribute(grads, plan))
    assert looks(ours) == before
    assert step.cache_info().misses == 1
    for path, x, wanted in zip(_tree.paths(ours), _tree.leaves(ours), _tree.leaves(theirs), strict=True):
        found, room = x.full_tensor(), case.bound * wanted.abs().max().item() if wanted.numel() else 0.0
        torch.testing.assert_close(found, wanted, rtol=0, atol=room, msg=path)
        if tuple(wanted.shape) == (8, 6):  # state lies where its parameter does
            assert x.layout in owned


@each
@pytest.mark.parametrize("inside", [True, False], ids=["op by op", "outside"])
def test_a_step_on_real_values(name, inside):
    """The bits and layouts of a program, with `static=False` and on DTensors without any."""
    case = OPTIMIZERS[name]
    opt, plan, params = case.make(case.quadratic), plan_on({"dp": 2}), make_params()
    step = update_step(opt)
    run = vs.parallelize(step, plan, static=False) if inside else step
    ours = vs.distribute(params, plan)
    state, grads = opt.init(ours), vs.distribute(grads_of(params, 0), plan)
    found, expected = run(ours, state, grads), vs.parallelize(step, plan, strict=True)(ours, state, grads)
    assert looks(found) == looks(expected) == looks((ours, state))
    for x, y in zip(_tree.leaves(found), _tree.leaves(expected), strict=True):
        room = case.bound * y.full_tensor().abs().max().item() if y.numel() else 0.0
        torch.testing.assert_close(x.full_tensor(), y.full_tensor(), rtol=0, atol=room)


@each
def test_state_is_born_in_its_layout(name):
    """Of DTensors, of plain tensors inside a program, and of tensors without values."""
    opt, params = OPTIMIZERS[name].make(0.1), make_params()
    plan = plan_on({"dp": 2, "tp": 2}, COLUMNS)
    here = opt.init(vs.distribute(params, plan))
    inside = vs.parallelize(lambda params: opt.init(params), plan)(params)
    assert looks(inside) == looks(here)
    for x, y in zip(_tree.leaves(here), _tree.leaves(inside), strict=True):
        assert torch.equal(x.full_tensor(), y.full_tensor())
    abstract = opt.init(_tree.tree_map(lambda p: p.to("meta"), params))
    assert all(x.is_meta for x in _tree.leaves(abstract))
    assert [entry[:3] for entry in looks(abstract)] == [entry[:3] for entry in looks(opt.init(params))]


@each
def test_a_step_can_be_lowered_without_values_and_ranks(name):
    opt, mesh = OPTIMIZERS[name].make(0.1), vs.AbstractMesh(("dp",), (64,))
    params = {f"w{n}": torch.empty(256, 64, device="meta") for n in range(2)}
    plan = vs.Plan(mesh, fsdp=vs.FSDP("dp"))
    lowered = vs.parallelize(update_step(opt), plan).lower(params, opt.init(params), params)
    assert "lerp" in lowered.as_text() or "mul" in lowered.as_text()


@each
def test_frozen_parameters(name):
    opt = partition(lambda path, p: path == "more.wide", {True: None, False: OPTIMIZERS[name].make(0.1)})
    plan, params = plan_on({"dp": 2}), make_params()
    step = vs.parallelize(update_step(opt), plan, donate=("params", "opt_state"))
    ours = vs.distribute(params, plan)
    state = opt.init(ours)
    assert not [path for path in _tree.paths(state) if "wide" in path]
    before = looks(state)
    for seed in range(2):
        ours, state = step(ours, state, vs.distribute(grads_of(params, seed), plan))
    assert torch.equal(ours["more"]["wide"].full_tensor(), params["more"]["wide"])
    assert not torch.equal(ours["matrix"].full_tensor(), params["matrix"])
    assert looks(state) == before
    assert step.cache_info().misses == 1


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case.elementwise])
def test_a_bucket_is_updated_in_a_few_calls(name, monkeypatch):
    """As many with 12 parameters as with 5: calls are for links of the chain, not for parameters."""
    kept = []

    def generate(instructions, *rest, real=programs.generate):
        kept.append(instructions)
        return real(instructions, *rest)

    monkeypatch.setattr(programs, "generate", generate)

    def count(number):
        opt, plan = OPTIMIZERS[name].make(0.1), plan_on({"dp": 2})
        params = {f"w{n}": torch.ones(8, 4) for n in range(number)}
        params = vs.distribute(params, plan)
        step = vs.parallelize(update_step(opt), plan, donate=("params", "opt_state"))
        state = opt.init(params)
        kept.clear()
        step.lower(params, state, vs.distribute(params, plan)).source()
        return sum(isinstance(call, Call) for call in kept[0])

    assert count(5) == count(12) < 40
