"""Every keyed draw in every layout on every mesh: the bits of one device, and nothing is communicated."""

import pytest
import torch

import vescale as vs
from vescale import rng
from vescale._errors import VescaleError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import InterleavedShard, P, RaggedShard, Shard

SHAPE = (7, 6)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25])
LOGITS = torch.linspace(-2, 3, 7 * 6 * 5).view(*SHAPE, 5)
X = torch.linspace(-1, 1, 42).view(SHAPE)

# Each makes a tensor of SHAPE from a key.
DRAWS = {
    "bits": lambda key: rng.bits(key, SHAPE),
    "bits of int16": lambda key: rng.bits(key, SHAPE, torch.int16),
    "uniform": lambda key: rng.uniform(key, SHAPE),
    "uniform of float64": lambda key: rng.uniform(key, SHAPE, torch.float64, -1, 2),
    "uniform of bfloat16": lambda key: rng.uniform(key, SHAPE, torch.bfloat16),
    "normal": lambda key: rng.normal(key, SHAPE),
    "normal of float64": lambda key: rng.normal(key, SHAPE, torch.float64),
    "truncated_normal": lambda key: rng.truncated_normal(key, -1, 0.5, SHAPE),
    "exponential": lambda key: rng.exponential(key, SHAPE),
    "gumbel": lambda key: rng.gumbel(key, SHAPE, torch.float64),
    "bernoulli": lambda key: rng.bernoulli(key, 0.3, SHAPE),
    "randint": lambda key: rng.randint(key, SHAPE, -3, 10),
    "randint of more than 2^32": lambda key: rng.randint(key, SHAPE, -(2**62), 2**63),
    "categorical": lambda key: rng.categorical(key, torch.zeros(*SHAPE, 5)),
    "permutation": lambda key: rng.permutation(key, 42).view(SHAPE),
    "choice": lambda key: rng.choice(key, 9, SHAPE),
    "choice with p": lambda key: rng.choice(key, 5, SHAPE, p=torch.arange(5.0)),
    "choice without replacement": lambda key: rng.choice(key, 50, SHAPE, replace=False),
    "choice without, with p": lambda key: rng.choice(key, 50, SHAPE, False, torch.arange(1.0, 51)),
    "dropout": lambda key: rng.dropout(key, torch.ones(SHAPE), 0.3),
    "of a split key": lambda key: rng.normal(rng.split(key, 3)[1], SHAPE),
    "of a folded key": lambda key: rng.normal(rng.fold_in(rng.clone(key), 3), SHAPE),
}
ONE_AXIS = [
    lambda n: P(),
    lambda n: P(a=Shard(0)),  # 7 rows: uneven, and empty on the last of 4 ranks or fewer
    lambda n: P(a=Shard(1)),
    lambda n: P(a=RaggedShard((0,), (0, 7) + (0,) * (n - 2) if n > 1 else (7,))),
    lambda n: P(a=RaggedShard((0, 1), (5, 0) + (37,) + (0,) * (n - 3) if n > 2 else (42,) + (0,) * (n - 1))),
    lambda n: P(a=InterleavedShard(1, (2, 4))),
]
TWO_AXES = [
    P(a=Shard(0), b=Shard(1)),
    P(b=Shard(0), a=Shard(0)),
    P(a=Shard(1)),
    P(b=Shard(1), a=RaggedShard((0,), (7, 0))),
    P(a=RaggedShard((0, 1), (0, 42))),
]
CASES = [
    *(((("a", n),), spec(n)) for n in (1, 2, 3, 4) for spec in ONE_AXIS),
    *(((("a", 2), ("b", 2)), spec) for spec in TWO_AXES),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_in_a_program(draw):
    fn = DRAWS[draw]
    want = fn(rng.key(7))
    for axes, spec in CASES:
        mesh = vs.make_mesh(dict(axes), backend="simulated")
        run = vs.parallelize(fn, vs.Plan(mesh, outputs={"": spec}))
        found = run(rng.key(7))
        assert found.layout is Layout(mesh.abstract, spec, SHAPE)
        assert torch.equal(found.full_tensor(), want), (axes, spec)
        assert not run.lower(rng.key(7)).collectives(), (axes, spec)


# Those that follow an operand.

FOLLOWING = {
    "dropout": lambda key, x: rng.dropout(key, x, 0.4),
    "bernoulli": lambda key, x: rng.bernoulli(key, x.abs()),
    "noise": lambda key, x: x + rng.truncated_normal(key, -1, 1, x.shape),
    "shift": lambda key, x: x + rng.randint(key, x.shape, 0, 2**40),
}


# Layouts that any op of two operands leaves: sections of other sizes, one dim split unevenly by two axes.
MOVED = [P(a=InterleavedShard(1, (2, 4))), P(b=Shard(0), a=Shard(0))]


@pytest.mark.parametrize("draw", FOLLOWING)
def test_where_an_operand_is(draw):
    fn = FOLLOWING[draw]
    want = fn(rng.key(3), X)
    for axes, spec in CASES:
        mesh = vs.make_mesh(dict(axes), backend="simulated")
        x = vs.distribute_tensor(X, mesh, spec)
        run = vs.parallelize(fn, vs.Plan(mesh))
        found = run(rng.key(3), x)
        assert torch.equal(found.full_tensor(), want)
        if spec not in MOVED:
            assert not run.lower(rng.key(3), x).collectives()
            assert mesh.size == 1 or found.layout.spec == x.layout.spec
        eager = fn(rng.key(3), x)  # op by op
        assert torch.equal(eager.full_tensor(), want)


@pytest.mark.parametrize("spec", [P(), P(a=Shard(0)), P(a=Shard(1)), P(a=Shard(2))])
def test_categorical(spec):
    mesh = vs.make_mesh({"a": 3}, backend="simulated")
    run = vs.parallelize(lambda key, x: rng.categorical(key, x), vs.Plan(mesh))
    logits = vs.distribute_tensor(LOGITS, mesh, spec)
    assert torch.equal(run(rng.key(1), logits).full_tensor(), rng.categorical(rng.key(1), LOGITS))
    moves = run.lower(rng.key(1), logits).collectives()
    assert bool(moves) == (spec == P(a=Shard(2)))  # the largest of a split dim has to be looked for
    assert torch.equal(rng.categorical(rng.key(1), logits).full_tensor(), rng.categorical(rng.key(1), LOGITS))


@pytest.mark.parametrize("spec", [P(), P(a=Shard(0)), P(a=Shard(1))])
def test_samples_of_a_sharded_tensor(spec):
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    x = vs.distribute_tensor(X, mesh, spec)
    for fn in (
        lambda key, x: rng.permutation(key, x),
        lambda key, x: rng.permutation(key, x, dim=1),
        lambda key, x: rng.choice(key, x, (2, 2), dim=1),
        lambda key, x: rng.choice(key, x, (3,), replace=False, dim=1, p=torch.arange(1.0, 7)),
    ):
        want = fn(rng.key(2), X)
        run = vs.parallelize(fn, vs.Plan(mesh))
        assert torch.equal(run(rng.key(2), x).full_tensor(), want)
        assert torch.equal(fn(rng.key(2), x).full_tensor(), want)


def test_a_key_that_is_a_dtensor():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    key = rng.Key(vs.distribute_tensor(rng.key(7).data, mesh, P()))
    for name, fn in DRAWS.items():
        found = fn(key)
        assert torch.equal(found.full_tensor(), fn(rng.key(7))), name


def test_the_gradient_of_dropout():
    mesh = vs.make_mesh({"a": 2, "b": 2}, backend="simulated")
    x = vs.distribute_tensor(X, mesh, P(a=Shard(0), b=Shard(1)))
    weight = torch.linspace(1, 2, 42).view(SHAPE)

    def loss(x, key):
        return (rng.dropout(key, x, 0.4) * weight).sum()

    want = (rng.dropout(rng.key(5), torch.ones(SHAPE), 0.4) != 0) * weight * (1 / 0.6)
    run = vs.parallelize(vs.grad(loss), vs.Plan(mesh))
    assert torch.equal(run(x, rng.key(5)).full_tensor(), want)
    assert not run.lower(x, rng.key(5)).collectives()
    assert torch.equal(vs.grad(loss)(x, rng.key(5)).full_tensor(), want)
    assert torch.equal(
        vs.parallelize(vs.grad(vs.remat(loss)), vs.Plan(mesh))(x, rng.key(5)).full_tensor(), want
    )


@pytest.mark.parametrize("static", [True, False])
def test_in_a_mapped_function(static):
    """A rank draws the numbers of its local shape; with the index of its axis, other ones than the others."""
    mesh = vs.make_mesh({"a": 2}, backend="simulated")

    def fn(key, x):
        shared, apart = rng.split(key)
        first, second = rng.split(rng.fold_in(apart, vs.axis_index("a")))
        return rng.dropout(shared, x, 0.5) + rng.randint(first, x.shape, 0, 2**40), rng.uniform(second, (3,))

    mapped = vs.shard_map(
        fn, mesh=mesh, in_specs=(P(), P(a=Shard(0))), out_specs=P(a=Shard(0)), static=static
    )
    with rng.check_key_reuse():
        found = mapped(rng.key(3), torch.ones(4, 3))
    parts = []
    for index in range(2):
        shared, apart = rng.split(rng.key(3))
        first, second = rng.split(rng.fold_in(apart, index))
        noise = rng.dropout(shared, torch.ones(2, 3), 0.5) + rng.randint(first, (2, 3), 0, 2**40)
        parts.append((noise, rng.uniform(second, (3,))))
    for got, want in zip(found, zip(*parts)):
        whole = got.full_tensor() if isinstance(got, vs.DTensor) else got
        assert torch.equal(whole, torch.cat(want))


@pytest.mark.parametrize("draw", DRAWS)
def test_mapped_over_keys(draw):
    mesh = vs.make_mesh({"a": 3}, backend="simulated")
    keys = torch.stack([one.data for one in rng.split(rng.key(1), 4)])
    fn = DRAWS[draw]
    many = vs.vmap(lambda data: fn(rng.Key(data)))
    want = torch.stack([fn(rng.Key(data)) for data in keys])
    assert torch.equal(many(keys), want)
    assert torch.equal(vs.parallelize(many, vs.Plan(mesh))(keys).full_tensor(), want)


# Keys used twice


def twice(key):
    return rng.normal(key, SHAPE) + rng.uniform(key, SHAPE)


def test_a_key_used_twice_in_a_program():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")
    with rng.check_key_reuse(), pytest.raises(rng.KeyReuseError, match=r"test_rng\.py:\d+") as error:
        vs.parallelize(twice, vs.Plan(mesh))(rng.key(1))
    assert isinstance(error.value, VescaleError)
    assert "vs.rng.uniform at" in str(error.value)
    assert "first used: vs.rng.normal at" in str(error.value)
    with rng.check_key_reuse():  # what was meant
        vs.parallelize(fine, vs.Plan(mesh))(rng.key(1))


def fine(key):
    first, second = rng.split(key)
    return rng.normal(first, SHAPE) + rng.uniform(second, SHAPE) + rng.uniform(rng.clone(second), SHAPE)


def test_rematerialising_is_no_reuse():
    mesh = vs.make_mesh({"a": 2}, backend="simulated")

    def loss(x, key):
        return (rng.dropout(key, x, 0.5) * x).sum()

    with rng.check_key_reuse():
        plain = vs.grad(vs.remat(loss))(X, rng.key(4))
        found = vs.parallelize(vs.grad(vs.remat(loss)), vs.Plan(mesh))(X, rng.key(4))
    assert torch.equal(found.full_tensor(), plain)
