"""Passes in whole programs: the same bits with and without them; memory that is updated, and that is not."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests import gpt
from vescale import _tree
from vescale._errors import ArgumentError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.program import passes
from vescale.spmd.program.passes import registry

ALL = (*passes.names(passes.DECISIONS), *passes.names(passes.LISTING))
MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ONE = vs.make_mesh({"dp": 1}, backend="simulated")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

PLANS = {
    "one rank": vs.Plan(ONE),
    "dp": vs.Plan(MESH, inputs={"batch": P(dp=Shard(0))}),
    "tp": vs.Plan(MESH, params=gpt.TP | {".*": P()}),
    "ragged": vs.Plan(
        MESH, params=gpt.ragged(gpt.TP, RaggedShard((0,), (5, 3))), inputs={"batch": P(dp=Shard(0))}
    ),
}


def trained(plan, left_out, steps=2, **options):
    """The parameters, states and losses of some steps of training, without these passes."""
    model = gpt.make_model()
    opt = vs.optim.adamw(1e-2)
    step = vs.parallelize(gpt.train_step(model, opt), plan, **options)
    params = vs.distribute(gpt.parameters(model), plan)
    state, losses = opt.init(params), []
    with passes.without(*left_out):
        for seed in range(steps):
            params, state, loss = step(params, state, gpt.batch(seed))
            losses.append(loss)
    return [leaf.full_tensor() for leaf in _tree.leaves((params, state, losses))]


@pytest.mark.parametrize("name", PLANS)
def test_training_has_the_bits_that_it_has_without_passes(name):
    wanted = trained(PLANS[name], ALL)
    for left_out in [(), ("in_place",), ("fuse_foreach",), ("join_addcdiv", "dead_code")]:
        found = trained(PLANS[name], left_out, donate=("params", "opt_state"))
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), left_out


@pytest.mark.parametrize("name", PLANS)
def test_parameters_and_state_are_updated_in_place(name):
    plan = PLANS[name]
    model, opt = gpt.make_model(), vs.optim.adamw(1e-2)
    step = vs.parallelize(gpt.train_step(model, opt), plan, donate=("params", "opt_state"))
    params = vs.distribute(gpt.parameters(model), plan)
    state = opt.init(params)
    params, state, _ = step(params, state, gpt.batch())  # the step count comes back as a DTensor
    where = [piece.data_ptr() for leaf in _tree.leaves((params, state)) for piece in leaf.locals]
    params, state, _ = step(params, state, gpt.batch())
    assert where == [piece.data_ptr() for leaf in _tree.leaves((params, state)) for piece in leaf.locals]


# Collectives in two halves.

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@contextmanager
def started_early(kinds):
    early = passes.Pass("early", passes.DECISIONS, lambda data: passes.start_early(data, kinds))
    passes.register(early)
    try:
        yield
    finally:
        registry.unregister("early")


@pytest.mark.parametrize("kinds", [pytest.param(KINDS[:1], marks=pytest.mark.slow), KINDS], ids=len)
@pytest.mark.parametrize("name", ["dp", "tp", "ragged"])
def test_training_with_collectives_that_start_early(name, kinds):
    wanted = trained(PLANS[name], ())
    with started_early(kinds):
        found = trained(PLANS[name], (), donate=("params", "opt_state"))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_what_is_started_early_is_waited_for_late():
    rows = vs.Plan(MESH, inputs={"x": P(dp=Shard(0))})
    run = vs.parallelize(
        lambda x: (y := vs.constrain(x * 2, P())) + (x * 3).sum(0).exp() @ y.t().sum(1), rows
    )
    wanted = run(X).full_tensor()
    with started_early(KINDS):
        early = vs.parallelize(run.__wrapped__, rows)
        found, lowered = early(X).full_tensor(), early.lower(X)
    assert torch.equal(wanted, found)
    lines = lowered.as_text().splitlines()
    start = next(place for place, line in enumerate(lines) if "start all_gather" in line)
    wait = next(place for place, line in enumerate(lines) if "wait (" in line)
    assert wait > start + 1
    assert [one.kind for one in lowered.collectives()] == [one.kind for one in run.lower(X).collectives()]
    assert "yield" in lowered.source()


def test_the_verifier_looks_after_tickets():
    run = vs.parallelize(lambda x: vs.constrain(x, P()) + 1, vs.Plan(MESH, inputs={"x": P(dp=Shard(0))}))
    before = run.lower(X)._partitioned
    after = passes.start_early(before)
    passes.verify(before, after, "start_early")
    start, wait, *rest = after.steps
    for steps, words in [
        ((wait, start, *rest), "was not started so"),
        ((start, start, wait, *rest), "is started twice"),
        ((start, *rest), "before it is made"),
    ]:
        with pytest.raises(passes.InvalidProgram, match=words):
            passes.verify(before, replace(after, steps=steps), "some_pass")
    nobody_waits = replace(after, steps=(start, *before.steps))
    with pytest.raises(passes.InvalidProgram, match="nobody waits for t"):
        passes.verify(before, nobody_waits, "some_pass", rewrites=True)


# What shares memory with a donated argument.


def halved(x, y):
    return x * 0.5, (y + 1).exp()


def on_ranks(value, mesh=MESH, spec=None):
    return vs.distribute_tensor(value, mesh, P(dp=Shard(0)) if spec is None else spec)


def test_what_is_not_donated_is_as_it_was():
    run = vs.parallelize(halved, vs.Plan(MESH), donate=("x",))
    x, y = on_ranks(X), on_ranks(X + 1)
    here = x.locals[0].data_ptr()
    first, second = run(x, y)
    assert first.locals[0].data_ptr() == here
    assert torch.equal(y.full_tensor(), X + 1)
    assert torch.equal(first.full_tensor(), X * 0.5)
    assert torch.equal(second.full_tensor(), (X + 1 + 1).exp())


@pytest.mark.parametrize("donate", [("x",), ("y",), ("x", "y")], ids="".join)
def test_a_tensor_that_is_passed_twice(donate):
    run = vs.parallelize(halved, vs.Plan(MESH), donate=donate)
    x = on_ranks(X)
    first, second = run(x, x)
    assert torch.equal(first.full_tensor(), X * 0.5)
    assert torch.equal(second.full_tensor(), (X + 1).exp())
    assert first.locals[0].data_ptr() != second.locals[0].data_ptr()


def test_a_view_of_a_donated_argument_in_the_same_call():
    run = vs.parallelize(halved, vs.Plan(MESH), donate=("x",))
    x = on_ranks(X)
    first, second = run(x, x.detach())
    assert torch.equal(first.full_tensor(), X * 0.5)
    assert torch.equal(second.full_tensor(), (X + 1).exp())


def test_ranks_that_share_memory():
    """A replica that the caller made of one tensor for all ranks."""
    run = vs.parallelize(lambda x: x * 0.5, vs.Plan(MESH), donate=("x",))
    piece = X.clone()
    x = vs.from_local([piece] * 4, MESH, P())
    found = run(x)
    assert all(torch.equal(local, X * 0.5) for local in found.locals)


def test_a_donated_plain_tensor_stays_the_callers():
    run = vs.parallelize(halved, vs.Plan(ONE), donate=("x", "y"))
    x, y, count = X.clone(), X.clone(), torch.tensor(3.0)
    run(x, y)
    assert torch.equal(x, X)
    assert torch.equal(y, X)
    step = vs.parallelize(lambda n: n + 1, vs.Plan(ONE), donate=("n",))
    assert step(step(count)).full_tensor() == 5  # 0-d values: plain and DTensor are one signature
    assert count == 3


def test_closed_over_tensors_are_never_written():
    table = X.clone()
    run = vs.parallelize(lambda x: ((x * 2 + table) * 3, table * 2), vs.Plan(ONE), donate=("x",))
    for _ in range(2):
        first, second = run(on_ranks(X, ONE))
        assert torch.equal(first.full_tensor(), (X * 2 + X) * 3)
        assert torch.equal(second.full_tensor(), X * 2)
    assert torch.equal(table, X)


def test_a_closed_over_tensor_that_is_the_memory_of_a_donated_argument():
    table = X.clone()
    run = vs.parallelize(lambda x: (x * 2, table + 1), vs.Plan(ONE), donate=("x",))
    first, second = run(vs.from_local(table, ONE, P()))
    assert torch.equal(first.full_tensor(), X * 2)
    assert torch.equal(second.full_tensor(), X + 1)


OPS = [
    lambda x, y: x * 0.5,
    lambda x, y: x + y,
    lambda x, y: torch.lerp(x, y, 0.25),
    lambda x, y: x + x / (y * y + 1),
    lambda x, y: x.t().contiguous().t() if x.dim() == 2 else x,
    lambda x, y: x.reshape(-1).view(x.shape) * 2,
    lambda x, y: x - x.sum(0),
    lambda x, y: vs.constrain(x, P()),
    lambda x, y: vs.constrain(x, P(dp=Shard(0))).exp(),
]


@settings(max_examples=25)
@given(data=st.data())
def test_random_programs_on_a_mesh(data):
    choices = [
        tuple(data.draw(st.integers(0, 99)) for _ in range(3)) for _ in range(data.draw(st.integers(1, 10)))
    ]
    picked = [data.draw(st.integers(0, 99)) for _ in range(data.draw(st.integers(1, 3)))]
    donate = tuple(data.draw(st.sets(st.sampled_from("xyz"))))
    specs = [data.draw(st.sampled_from([P(), P(dp=Shard(0)), P(tp=Shard(1)), P(dp=Shard(1))])) for _ in "xyz"]

    def fn(x, y, z):
        values = [x, y, z]
        for op, a, b in choices:
            values.append(OPS[op % len(OPS)](values[a % len(values)], values[b % len(values)]))
        return [values[-1 - index % len(values)] for index in picked]

    found = {}
    for name, left_out in (("without", ALL), ("with", ())):
        given_ = {arg: on_ranks(X + i, MESH, spec) for i, (arg, spec) in enumerate(zip("xyz", specs))}
        with passes.without(*left_out):
            results = vs.parallelize(fn, vs.Plan(MESH), donate=donate)(**given_)
        found[name] = [piece.clone() for result in results for piece in result.locals]
        for i, arg in enumerate("xyz"):
            if arg not in donate:
                assert torch.equal(given_[arg].full_tensor(), X + i)
    for wanted, piece in zip(found["without"], found["with"], strict=True):
        assert torch.equal(wanted.nan_to_num(7.0), piece.nan_to_num(7.0))


# Donation and the cache.


def test_using_a_donated_argument_again_names_it_and_the_call():
    run = vs.parallelize(lambda tree: {"a": tree["a"] * 2}, vs.Plan(MESH), donate=("tree",))
    old = on_ranks(X)
    run(run({"a": old}))
    with pytest.raises(ArgumentError, match=r"argument 'tree\.a' of call 1 of"):
        run({"a": old})


def test_a_thousand_calls_leave_nothing_behind():
    run = vs.parallelize(lambda x: x * 2, vs.Plan(ONE), donate=("x",))
    other = vs.parallelize(lambda x, by: x * by, vs.Plan(ONE))
    x = on_ranks(X, ONE, P())
    counts = []
    for _ in range(3):
        for number in range(500):
            x = run(x)
            other(x, 1 + number % 2)  # two signatures in turn
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 50
    assert (run.cache_info().size, run.cache_info().misses) == (1, 1)
    assert (other.cache_info().size, other.cache_info().misses) == (2, 2)


def test_what_leaves_the_cache_leaves_memory():
    import linecache

    run = vs.parallelize(lambda x, by: x * by, vs.Plan(ONE))
    x = on_ranks(X, ONE)
    for number in range(80):
        run(x, number)
    gc.collect()
    files = [name for name in linecache.cache if name.startswith("<vescale program")]
    for number in range(80, 160):
        run(x, number)
    gc.collect()
    assert len([name for name in linecache.cache if name.startswith("<vescale program")]) <= len(files)
    assert run.cache_info().size == 64
    gone = weakref.ref(next(iter(run._cache._programs.values())).program.runs[0])
    run._cache._programs.clear()
    gc.collect()
    assert gone() is None


# Errors of a running program.


class Lookup(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 3)

    def forward(self, index):
        return self.table(index)


def test_an_error_in_a_program_names_the_line_and_the_module():
    model = torch.nn.Sequential(Lookup())
    run = vs.parallelize(lambda index: model(index) * 2, vs.Plan(ONE))
    run(torch.tensor([0, 3]))
    with pytest.raises(IndexError, match="index out of range") as caught:
        run(torch.tensor([0, 4]))
    (note,) = caught.value.__notes__
    assert "0.table" in note
    assert "test_passes.py:" in note
    assert "in forward" in note


def test_an_error_behind_a_collective_names_its_line_too():
    table = torch.arange(4.0).view(4, 1)
    run = vs.parallelize(
        lambda x: table.index_select(0, x.sum(0, keepdim=True)), vs.Plan(MESH, inputs={"x": P(dp=Shard(0))})
    )
    run(torch.tensor([1, 2]))
    with pytest.raises(IndexError) as caught:
        run(torch.tensor([2, 2]))
    assert "test_passes.py:" in caught.value.__notes__[0]
