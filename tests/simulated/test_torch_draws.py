"""Torch's own random ops on every mesh and layout: the bits of one device, and its generator after.

The oracle is plain torch from the same seed. Each case is drawn twice: the second draw shows the state.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale as vs
from vescale._errors import TraceError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import P, RaggedShard, Shard

SHAPE = (7, 6)
X = torch.linspace(0.01, 1, 42).view(SHAPE)
MORE = torch.linspace(0.01, 1, 7 * 6 * 4).view(7, 6, 2, 2)


def part_of(x):
    y = torch.zeros_like(x)
    y[:, 1:4].uniform_()
    y[2].normal_()
    return y


# Functions of x, which is SHAPE; what they do beside drawing is exact, whatever the layout.
DRAWS = {
    "rand": lambda x: torch.rand(SHAPE) + x,
    "rand of float64": lambda x: torch.rand(SHAPE, dtype=torch.float64) + x,
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(SHAPE) + x,
    "randn of bfloat16": lambda x: torch.randn(SHAPE, dtype=torch.bfloat16) + x,
    "randn of complex64": lambda x: torch.view_as_real(torch.randn(SHAPE, dtype=torch.complex64)),
    "randn of a few": lambda x: torch.randn(5).sum() * 0 + torch.randn(6) + x,
    "randn_like of float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint": lambda x: torch.randint(-3, 10, SHAPE) + x,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randperm": lambda x: torch.randperm(42).view(SHAPE) + x,
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial, replacement": lambda x: torch.multinomial(x, 9, True),
    "poisson": lambda x: torch.poisson(x),
    "binomial": lambda x: torch.binomial((x * 9).ceil(), x),
    "rand of complex128": lambda x: torch.view_as_real(torch.rand(SHAPE, dtype=torch.complex128)),
    "normal_ of complex64": lambda x: torch.view_as_real(torch.empty(SHAPE, dtype=torch.complex64).normal_()),
    "fill of a slice": lambda x: torch.cat([x[:3], torch.empty_like(x[3:]).uniform_()]),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(2.0, x),
    "normal of both": lambda x: torch.normal(x, x[:1]),
    "normal of a size": lambda x: torch.normal(1.0, 2.0, SHAPE) + x,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal_ of what was there": lambda x: (x * 2).normal_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "bernoulli_ of float64": lambda x: torch.empty_like(x).bernoulli_(x.double()),
    "bernoulli_ of booleans": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(0.3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    "random_ to": lambda x: torch.empty_like(x).random_(100),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout, out of training": lambda x: F.dropout(x, 0.3, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "xavier_normal_": lambda x: nn.init.xavier_normal_(torch.empty(SHAPE)) + x,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(torch.empty(SHAPE)) + x,
    "sparse_": lambda x: nn.init.sparse_(torch.empty(SHAPE), 0.3) + x,
    "several": lambda x: torch.rand(SHAPE) * torch.randn(SHAPE) + F.dropout(x, 0.2),
    "a draw that nobody reads": lambda x: (torch.rand(3), x + torch.rand(6))[1],
    "views of one": part_of,
}
# In the order of memory.
STRIDED = {
    "normal_ of a transpose": lambda x: torch.empty(6, 7).normal_().t() + x,
    "normal_ in a transpose": lambda x: torch.empty(6, 7).t().normal_() + x,
    "uniform_ in a transpose": lambda x: torch.empty(6, 7).t().uniform_() + x,
    "rand_like of a transpose": lambda x: torch.rand_like(torch.empty(6, 7).t()) + x,
    "dropout of a transpose": lambda x: F.dropout((x * 2).t(), 0.5).t(),
    "normal_ of channels last": lambda x: (
        torch.empty(2, 7, 3, 6).to(memory_format=torch.channels_last).normal_()[0, :, 0] + x
    ),
}
ONE_AXIS = [
    lambda n: P(),
    lambda n: P(a=Shard(0)),  # 7 rows: uneven, and empty on the last of 4 ranks
    lambda n: P(a=Shard(1)),
    lambda n: P(a=RaggedShard((0,), (0, 7) + (0,) * (n - 2) if n > 1 else (7,))),
]
TWO_AXES = [P(a=Shard(0), b=Shard(1)), P(b=Shard(0), a=Shard(0)), P(b=Shard(1), a=RaggedShard((0,), (7, 0)))]
CASES = [
    *(((("a", n),), spec(n)) for n in (1, 2, 3, 4) for spec in ONE_AXIS),
    *(((("a", 2), ("b", 2)), spec) for spec in TWO_AXES),
]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))  # NaNs too


def check(fn, x, axes, spec, static, times=2):
    """fn on a mesh is fn on one device, `times` times in a row, and leaves the generator where that does."""
    mesh = vs.make_mesh(dict(axes), backend="simulated")
    try:
        placed = vs.distribute_tensor(x, mesh, spec)
    except vs.VescaleError:
        pytest.skip("no such layout")
    torch.manual_seed(11)
    expected = [fn(x) for _ in range(times)]
    state = torch.get_rng_state()
    run = vs.parallelize(fn, vs.Plan(mesh), static=static)
    torch.manual_seed(11)
    for right in expected:
        assert_same(run(placed).full_tensor(), right)
    assert torch.equal(torch.get_rng_state(), state)
    return run, placed


@pytest.mark.parametrize("name", [*DRAWS, *STRIDED])
def test_a_program_draws_what_one_device_draws(name):
    for axes, spec in CASES:
        check({**DRAWS, **STRIDED}[name], X, axes, spec, static=True)


# On DTensors a write to a row that its rank doesn't have in a view is refused, as any write is.
@pytest.mark.parametrize("name", [name for name in DRAWS if name != "views of one"])
def test_so_do_ops_one_by_one(name):
    for axes, spec in CASES[1:-1:2]:
        check(DRAWS[name], X, axes, spec, static=False)


@pytest.mark.parametrize("fn", [F.dropout2d, F.feature_alpha_dropout], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("static", [True, False])
def test_dropout_of_features(fn, static):
    for spec in (P(a=Shard(0)), P(a=Shard(1)), P(a=Shard(2), b=Shard(0))):
        check(lambda x: fn(x, 0.4, True), MORE, (("a", 2), ("b", 2)), spec, static)


# x says how much they draw, or is cut as well.
OPERANDS_MOVE = {"multinomial", "multinomial, replacement", "poisson", "binomial", "rrelu"}
OPERANDS_MOVE |= {"normal of both", "fill of a slice"}


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in OPERANDS_MOVE])
def test_nothing_is_communicated_to_draw(name):
    for axes, spec in CASES[5:7]:
        mesh = vs.make_mesh(dict(axes), backend="simulated")
        lowered = vs.parallelize(DRAWS[name], vs.Plan(mesh)).lower(vs.distribute_tensor(X, mesh, spec))
        assert not lowered.collectives()


def test_a_rank_keeps_its_own_elements_only():
    mesh = vs.make_mesh({"a": 4}, backend="simulated")
    x = vs.distribute_tensor(torch.ones(64, 6), mesh, P(a=Shard(0)))
    text = vs.parallelize(lambda x: F.dropout(x, 0.5), vs.Plan(mesh)).lower(x).as_text()
    assert "{a=Shard(dim=0)} = draw bernoulli_(0.5) of float32[64,6]" in text.replace(
        "Shard(0)", "Shard(dim=0)"
    )


def test_two_layouts_of_one_draw():
    """It is drawn once, in both."""
    mesh = vs.make_mesh({"a": 2}, backend="simulated")

    def fn(x, y):
        noise = torch.rand(8, 6)
        return x + noise, y + noise

    x, y = torch.zeros(8, 6), torch.ones(8, 6)
    placed = vs.distribute_tensor(x, mesh, P(a=Shard(0))), vs.distribute_tensor(y, mesh, P(a=Shard(1)))
    run = vs.parallelize(fn, vs.Plan(mesh))
    torch.manual_seed(0)
    expected, state = fn(x, y), torch.get_rng_state()
    torch.manual_seed(0)
    for found, right in zip(run(*placed), expected, strict=True):
        assert_same(found.full_tensor(), right)
    assert torch.equal(torch.get_rng_state(), state)
    assert not run.lower(*placed).collectives()


def test_the_seed_is_no_part_of_a_program():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    run = vs.parallelize(lambda x: x + torch.rand(7, 6), vs.Plan(mesh, inputs={"x": P(a=Shard(0))}))
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found = run(X).full_tensor()
        torch.manual_seed(seed)
        assert_same(found, X + torch.rand(7, 6))
    assert run.cache_info().misses == 1


UNREAD = {
    "rand": lambda x: torch.rand(5),
    "dropout": lambda x: F.dropout(x),
    "in place": lambda x: x.clone().uniform_(),
    "randperm": lambda x: torch.randperm(7),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "poisson": torch.poisson,
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_reads_is_drawn_all_the_same(name):
    check(lambda x: (UNREAD[name](x), x + torch.rand(SHAPE))[1], X, (("a", 2),), P(a=Shard(0)), static=True)


def test_tracing_draws_nothing():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    state = torch.get_rng_state()
    vs.parallelize(lambda x: x + torch.rand(7, 6) + torch.randperm(6), vs.Plan(mesh)).lower(X)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [torch.rand, torch.ones, lambda n: vs.rng.normal(vs.rng.key(0), (n,))])
def test_a_view_of_what_is_made_where_it_is_needed(draw):
    """42 numbers as 7 rows, which two ranks don't have as halves of the 42."""
    for spec in (P(a=Shard(0)), P(a=Shard(1)), P(a=RaggedShard((0,), (0, 7)))):
        check(lambda x: draw(42).view(7, 6) + x, X, (("a", 2),), spec, static=True)


# Generators of one's own.

CLOSED = torch.Generator()


@pytest.mark.parametrize("static", [True, False])
def test_a_generator_is_an_argument(static):
    def fn(x, generator):
        return x + torch.rand(SHAPE, generator=generator) + torch.rand(SHAPE)

    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    run = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(a=Shard(0))}), static=static)
    for seed in range(3):
        mine, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        for _ in range(2):
            torch.manual_seed(9)
            found = run(X, mine).full_tensor()
            torch.manual_seed(9)
            assert_same(found, fn(X, other))
        assert torch.equal(mine.get_state(), other.get_state())
    if static:
        assert run.cache_info().misses == 1


def test_two_generators():
    def fn(x, one, other):
        return torch.rand(SHAPE, generator=one) + torch.rand(SHAPE, generator=other) * 2 + x

    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    run = vs.parallelize(fn, vs.Plan(mesh))
    generators, others = ([torch.Generator().manual_seed(n) for n in (1, 2)] for _ in range(2))
    assert_same(run(X, *generators).full_tensor(), fn(X, *others))
    assert_same(run(X, generators[0], generators[0]).full_tensor(), fn(X, others[0], others[0]))
    assert_same(run(X, torch.default_generator, generators[1]).full_tensor() * 0, X * 0)


def test_a_closed_over_generator_is_read_again():
    global CLOSED
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    run = vs.parallelize(lambda x: x + torch.rand(SHAPE, generator=CLOSED), vs.Plan(mesh))
    for seed in range(2):
        CLOSED = torch.Generator().manual_seed(seed)  # another one
        assert_same(
            run(X).full_tensor(), X + torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed))
        )
    assert run.cache_info().misses == 1


def test_a_generator_in_ops_on_dtensors():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    mine, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    x = vs.distribute_tensor(X, mesh, P(a=Shard(0)))
    for _ in range(2):
        x.normal_(generator=mine)
        assert_same(x.full_tensor(), X.clone().normal_(generator=other))
    assert torch.equal(mine.get_state(), other.get_state())


# Ops on DTensors.


@pytest.mark.parametrize("spec", [P(), P(a=Shard(0)), P(a=Shard(1)), P(a=RaggedShard((0,), (0, 7)))], ids=str)
def test_writes_of_dtensors(spec):
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    for write in (
        lambda x: x.normal_(),
        lambda x: x.bernoulli_(0.3),
        nn.init.trunc_normal_,
        lambda x: nn.init.trunc_normal_(x, a=1.0, b=2.0),
        nn.init.orthogonal_,
        nn.init.kaiming_normal_,
    ):
        expected, x = X.clone(), vs.distribute_tensor(X, mesh, spec)
        torch.manual_seed(3)
        write(expected)
        after = torch.rand(2)
        torch.manual_seed(3)
        write(x)
        assert x.layout == Layout(mesh.abstract, spec, SHAPE)
        assert_same(x.full_tensor(), expected)
        assert torch.equal(torch.rand(2), after)


# Gradients.


class Net(nn.Module):
    """Dropout everywhere that a transformer has it; returns each mask with its loss."""

    def __init__(self, width=16, heads=4, remat=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.heads, self.remat = nn.Dropout(0.1), heads, remat

    def drop(self, x, masks):
        made = self.dropout(x)
        masks.append((made == 0) & (x != 0))
        return made

    def forward(self, x):
        masks = []
        x = self.drop(x, masks)
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        masks.append(y == 0)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)), masks)

        def feed(x, *weights):
            up, up_bias, down, down_bias = weights
            hidden = F.dropout(F.linear(x, up, up_bias).relu(), 0.1)
            return F.dropout(F.linear(hidden, down, down_bias), 0.1), (hidden == 0).to(x.dtype)

        weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        made, mask = (vs.remat(feed) if self.remat else feed)(x, *weights)
        masks.append(mask)
        return ((x + made) ** 2).mean(), masks


TP = {
    "qkv.weight": P(tp=Shard(0)),
    "qkv.bias": P(tp=Shard(0)),
    "up.weight": P(tp=Shard(0)),
    "up.bias": P(tp=Shard(0)),
    "(out|down).weight": P(tp=Shard(1)),
    ".*": P(),
}


def train_step(model):
    def step(params, x):
        def loss_fn(params, x):
            return torch.func.functional_call(model, params, (x,))

        (loss, masks), grads = vs.value_and_grad(loss_fn, has_aux=True)(params, x)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, loss, masks

    return step


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("static", [True, False])
def test_training_with_dropout(static, remat):
    """dp=2 x tp=2: every mask of every step is that of one device; losses to float64's rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(remat=remat).double()
        x = torch.randn(4, 8, 16, dtype=torch.float64)
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    plan = vs.Plan(mesh, params=TP, inputs={"x": P(dp=Shard(0))})
    step = train_step(model)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = vs.distribute(params, plan)
    run = vs.parallelize(step, plan, static=static)
    generator = torch.get_rng_state()
    for seed in range(3):
        torch.manual_seed(seed)
        params, loss, masks = step(params, x)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        sharded, found, theirs = run(sharded, x)
        assert torch.equal(torch.get_rng_state(), state)
        for mask, their in zip(masks, theirs, strict=True):
            assert torch.equal(their.full_tensor(), mask)
        assert 0 < sum(mask.sum() for mask in masks) < sum(mask.numel() for mask in masks)
        torch.testing.assert_close(found.full_tensor(), loss, rtol=1e-12, atol=1e-12)
        for name, p in params.items():
            torch.testing.assert_close(sharded[name].full_tensor(), p, rtol=1e-10, atol=1e-12)
    torch.set_rng_state(generator)


@pytest.mark.parametrize("wrap", [lambda fn: fn, vs.remat], ids=["plain", "remat"])
def test_a_mask_is_the_same_in_the_gradient(wrap):
    """The gradient of a sum of dropped elements is the mask: on one device, in a program, op by op."""

    def fn(x):
        dropped = wrap(lambda x: F.dropout(x, 0.5) + torch.rand(6))
        return vs.grad(lambda x: dropped(x).sum())(x), torch.rand(6)

    def right(x):
        mask = F.dropout(torch.ones(SHAPE), 0.5)
        torch.rand(6)
        return mask, torch.rand(6)

    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    plan = vs.Plan(mesh, inputs={"x": P(a=Shard(0))})
    torch.manual_seed(2)
    expected = right(X)
    for run in (fn, vs.parallelize(fn, plan), vs.parallelize(fn, plan, static=False)):
        torch.manual_seed(2)
        for found, value in zip(run(X), expected, strict=True):
            assert_same(found.full_tensor() if isinstance(found, vs.DTensor) else found, value)


def test_remat_draws_again_from_a_generator_that_is_passed():
    def fn(x, generator):
        def drawn(x, generator):
            return x * torch.rand(SHAPE, generator=generator)

        return vs.grad(lambda x: vs.remat(drawn)(x, generator).sum())(x)

    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    generators = [torch.Generator().manual_seed(4) for _ in range(3)]
    expected = torch.rand(SHAPE, generator=generators[0])
    assert_same(fn(X, generators[1]), expected)
    assert_same(vs.parallelize(fn, vs.Plan(mesh))(X, generators[2]).full_tensor(), expected)
    assert len({bytes(generator.get_state().tolist()) for generator in generators}) == 1


@pytest.mark.parametrize("static", [True, False, None], ids=["static", "op by op", "plain"])
def test_remat_inside_remat(static):
    """Twice, with draws before, between and inside: gradients and the generator are those without remat."""

    def layer(x, w):
        return F.dropout(torch.tanh(x @ w), 0.3)

    def step(x, w, wrap):
        one = lambda x, w: F.dropout(wrap(layer)(x, w), 0.2)  # noqa: E731
        two = lambda x, w: wrap(one)(wrap(layer)(x, w), w)  # noqa: E731
        return vs.grad(lambda w: (wrap(two)(x, w) * torch.rand(SHAPE)).sum())(w)

    x, w = X.double(), torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
    torch.manual_seed(3)
    expected, state = step(x, w, lambda fn: fn), torch.get_rng_state()
    run = again = lambda x, w: step(x, w, vs.remat)
    if static is not None:
        plan = vs.Plan(vs.make_mesh({"a": 2}, backend="simulated"), inputs={"x": P(a=Shard(0))})
        run = vs.parallelize(again, plan, static=static)
    torch.manual_seed(3)
    found = run(x, w)
    found = found.full_tensor() if isinstance(found, vs.DTensor) else found
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)


def test_remat_of_a_closed_over_generator_is_refused():
    generator, mesh = torch.Generator(), vs.make_mesh({"a": 2}, backend="simulated")

    def fn(x):
        return vs.grad(
            lambda x: vs.remat(lambda x: (x * torch.rand(SHAPE, generator=generator)).sin())(x).sum()
        )(x)

    with pytest.raises(TraceError, match=r"inside vs\.remat"):
        vs.parallelize(fn, vs.Plan(mesh))(X)


@pytest.mark.parametrize("static", [True, False])
def test_a_module_and_its_backward(static):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 6), nn.Dropout(0.1)).double()
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    sharded = vs.parallelize(model, vs.Plan(mesh, inputs={"input": P(a=Shard(0))}), static=static)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(X.double())
        expected.sum().backward()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        found = sharded(X.double())
        found.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(found.full_tensor() == 0, expected == 0)
    for name, p in model.named_parameters():
        gradient = sharded.params[name].grad
        assert isinstance(gradient, vs.DTensor)
        torch.testing.assert_close(gradient.full_tensor(), p.grad)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap(randomness):
    def fn(x):
        return vs.vmap(lambda row: F.dropout(row, 0.5) + torch.rand(6), randomness=randomness)(x)

    for axes, spec in CASES[4:7]:
        check(fn, X, axes, spec, static=True)


def test_vmap_refuses_to_guess():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    with pytest.raises(RuntimeError, match="randomness"):
        vs.parallelize(vs.vmap(lambda row: row + torch.rand(6)), vs.Plan(mesh))(X)


@pytest.mark.parametrize("static", [True, False])
def test_shard_map_refuses(static):
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    specs = P(a=Shard(0))
    rows = vs.shard_map(lambda x: F.dropout(x), mesh=mesh, in_specs=(specs,), out_specs=specs)
    with pytest.raises(vs.VescaleError, match=r"vs\.rng\.fold_in"):
        vs.parallelize(lambda x: rows(x), vs.Plan(mesh, inputs={"x": specs}), static=static)(torch.ones(4, 6))


def test_passes_keep_draws_in_order():
    from vescale.spmd.program import passes

    with passes.verifying():
        for name in ("several", "dropout", "a draw that nobody reads"):
            check(DRAWS[name], X, (("a", 2),), P(a=Shard(0)), static=True)


def test_costs_and_memory_are_told():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    lowered = vs.parallelize(lambda x: F.dropout(x, 0.5), vs.Plan(mesh, inputs={"x": P(a=Shard(0))})).lower(
        torch.ones(8, 6)
    )
    assert any("bernoulli_" in event.name for event in lowered.cost_analysis().events)
    assert lowered.memory_analysis().peak >= 3 * 4 * 6 * 4


def test_the_verifier_sees_draws_that_go_or_pass_each_other():
    from vescale.spmd.program.partition import Draw
    from vescale.spmd.program.passes import InvalidProgram, verify
    from vescale.spmd.program.program import listing

    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    run = vs.parallelize(lambda x: (torch.rand(6), x + torch.rand(6))[1], vs.Plan(mesh))
    decided = run._decide(run._arguments.bind((X,), {})).partitioned
    first, second = (index for index, step in enumerate(decided.steps) if isinstance(step, Draw))
    steps = list(decided.steps)
    swapped = list(steps)
    swapped[first], swapped[second] = steps[second], steps[first]
    for others in (swapped, steps[:first] + steps[first + 1 :]):
        with pytest.raises(InvalidProgram, match="effects"):
            verify(decided, replace(decided, steps=tuple(others)), "a pass")
    made = listing(decided, 0)
    kept = tuple(step for step in made.instructions if getattr(step, "targets", (0,)))
    assert len(kept) == len(made.instructions) - 1  # the draw that nobody reads has no results
    with pytest.raises(InvalidProgram, match="effects"):
        verify(made, replace(made, instructions=kept), "a pass")
