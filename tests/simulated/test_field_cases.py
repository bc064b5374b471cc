"""Cases that programs in the field met: each against plain torch, in programs and, where it can, op by op."""

import pytest
import torch
from torch import nn

import vescale as vs
from tests.gpt import TP, batch, make_model, parameters, train_step
from vescale import _tree
from vescale._errors import TraceError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import P, RaggedShard, Shard

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
FOUR = vs.make_mesh({"dp": 4}, backend="simulated")
X = torch.arange(32.0).view(8, 4)


def whole(tree):
    return _tree.tree_map(lambda x: x.full_tensor() if isinstance(x, vs.DTensor) else x, tree)


def assert_same(ours, theirs, tolerance=0.0):
    ours, theirs = _tree.leaves(whole(ours)), _tree.leaves(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b) if not tolerance else (a - b).abs().max() <= tolerance


def both_ways(fn, specs, *tensors, mesh=MESH, tolerance=0.0):
    """fn in a program and op by op on DTensors, with tensors placed by `specs`; both against plain torch."""
    expected = fn(*tensors)
    placed = [vs.distribute_tensor(x, mesh, spec) for x, spec in zip(tensors, specs, strict=True)]
    compiled = vs.parallelize(lambda *xs: fn(*xs), vs.Plan(mesh))(*placed)
    assert_same(compiled, expected, tolerance)
    assert_same(fn(*placed), expected, tolerance)


# Decisions that are kept: one op, its operands in another order or of another kind.


@pytest.mark.parametrize("first", [0, 1])
def test_a_number_minus_a_tensor_and_a_tensor_minus_a_number(first):
    """With the same shapes and layouts, one after the other: neither takes the other's decision."""
    order = [lambda x: 2 - x, lambda x: x - 2, lambda x: 2 / (x + 1), lambda x: (x + 1) / 2]
    for fn in order[first:] + order[:first]:
        both_ways(fn, [P(dp=Shard(0))], X)


@pytest.mark.parametrize("turned", [False, True])
def test_operands_swap_places(turned):
    """x / y, then y / x; the layouts are equal, and so are those of x - row and row - x."""
    y, row = X.flip(0) + 1, X[:1] + 1
    specs = [P(dp=Shard(0)), P(dp=Shard(0))]
    fns = [(lambda a, b: a / b, specs, y), (lambda a, b: b / a, specs, y)]
    fns += [(lambda a, b: a - b, [specs[0], P()], row), (lambda a, b: b - a, [specs[0], P()], row)]
    for fn, where, other in fns[::-1] if turned else fns:
        both_ways(fn, where, X + 1, other)


def test_a_number_and_a_scalar_tensor_are_told_apart():
    scalar = torch.tensor(2.0, dtype=torch.float64)
    for fn in (lambda x, s: x * 2, lambda x, s: x * s, lambda x, s: s - x, lambda x, s: x - s):
        both_ways(fn, [P(dp=Shard(0)), P()], X, scalar)
    for number in (2, 2.0, True):
        both_ways(lambda x, n=number: x.long() * n, [P(dp=Shard(0))], X)


# Parameters that are used sometimes, or never.


def gradients(fn, params, x, rules):
    plan = vs.Plan(MESH, rules, {"x": P(dp=Shard(0))})
    step = vs.parallelize(lambda params, x, flag: vs.value_and_grad(fn)(params, x, flag), plan)
    for flag in (True, False, True):
        ours, theirs = step(params, x, flag), vs.value_and_grad(fn)(params, x, flag)
        assert_same(ours, theirs, tolerance=1e-10)
        for name, gradient in ours[1].items():
            assert isinstance(gradient, vs.DTensor)
            assert gradient.layout.spec == (rules[name].init if name in rules else P())
    assert step.cache_info().misses == 2


def test_a_parameter_on_some_paths_only():
    rested = {"a": vs.Staged(init=P(dp=RaggedShard((0,), (3, 1))), run=P())}
    params = {"a": X[:4].double(), "b": torch.ones(4, 4, dtype=torch.float64)}
    gradients(
        lambda p, x, flag: ((x @ p["a"]) if flag else (x @ p["b"]).sin()).sum(), params, X.double(), rested
    )


def test_a_parameter_that_nobody_uses_has_zeros():
    rested = {"a": vs.Staged(init=P(dp=RaggedShard((0,), (3, 1))), run=P())}
    params = {"a": X[:4].double(), "b": torch.ones(3, dtype=torch.float64)}
    gradients(lambda p, x, flag: x.sum() * (2 if flag else 3), params, X.double(), rested)


def test_zeros_reach_the_optimizer():
    """An unused parameter decays and gets moments, as in torch with zero gradients."""
    opt, params = vs.optim.adamw(1e-2, weight_decay=0.1), {"used": X.double(), "unused": X.double()}

    def step(params, state):
        _, grads = vs.value_and_grad(lambda p: p["used"].square().sum())(params)
        updates, state = opt.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state

    plan = vs.Plan(MESH, {"unused": P(dp=Shard(0))})
    run = vs.parallelize(lambda params, state: step(params, state), plan)
    ours = theirs = params, opt.init(params)
    for _ in range(2):
        ours, theirs = run(*ours), step(*theirs)
    assert_same(ours, theirs)


# Parameters of odd shapes, dtypes and strides.

ODD = {
    "no elements": (torch.empty(0, 4), P(dp=Shard(0))),
    "no columns": (torch.empty(4, 0), P(dp=Shard(0))),
    "a scalar": (torch.tensor(3.0), P()),
    "integers": (torch.arange(8), P(dp=Shard(0))),
    "booleans": (torch.tensor([True, False, True, True]), P(dp=Shard(0))),
    "bfloat16": (X.bfloat16(), P(dp=Shard(0), tp=Shard(1))),
    "transposed": (X.t(), P(dp=Shard(0))),
    "strided": (X[::2, 1::2], P(dp=Shard(0))),
    "ragged and transposed": (X.t(), P(dp=RaggedShard((0,), (3, 1)))),
    "expanded": (torch.ones(1, 4).expand(8, 4), P(dp=Shard(0))),
    "fewer rows than ranks": (X[:1], P(dp=Shard(0))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_parameters(name):
    value, spec = ODD[name]
    params = {"odd": value, "w": torch.ones(4, 4)}

    def fn(params, x):
        odd = params["odd"]
        other = odd.logical_not() if odd.dtype is torch.bool else odd * 2
        return {"odd": odd, "w": params["w"]}, other, (x @ params["w"]).sum()

    plan = vs.Plan(MESH, {"odd": spec}, {"x": P(dp=Shard(0))})
    placed = vs.distribute(params, plan)
    run = vs.parallelize(lambda params, x: fn(params, x), plan)
    for given in (params, placed):
        out, other, total = run(given, X)
        assert_same((out, other, total), fn(params, X))
        assert out["odd"].layout is Layout(MESH.abstract, spec, tuple(value.shape))
    assert_same(placed["odd"] if value.dtype is torch.bool else placed["odd"] * 1, value)
    if value.is_floating_point():
        loss = lambda p: (p["odd"] * p["odd"]).float().sum() + p["w"].sum()  # noqa: E731
        step = vs.parallelize(lambda params: vs.value_and_grad(loss)(params), vs.Plan(MESH, {"odd": spec}))
        ours, theirs = step(placed), vs.value_and_grad(loss)(params)
        assert_same(ours[1], theirs[1])
        assert abs(ours[0].item() - theirs[0].item()) <= 1e-3 * abs(theirs[0].item())


# Views through which a split must be followed exactly.


def test_columns_that_are_split_viewed_as_other_rows():
    """(12, 8) with its columns split, as (16, 6): no layout of the result says what a rank has."""
    x = torch.arange(96.0).view(12, 8)
    for spec in (P(dp=Shard(1)), P(dp=Shard(0)), P(dp=Shard(1), tp=Shard(1)), P(tp=Shard(0), dp=Shard(1))):
        both_ways(lambda x: x.view(16, 6) * 2, [spec], x)
        both_ways(lambda x: (x * 2).reshape(16, 6).sum(1), [spec], x)


@pytest.mark.parametrize("dim", [0, 1])
def test_six_rows_over_four_ranks_flattened(dim):
    """Uneven rows: two ranks have two, one has two, the last has none."""
    x = torch.arange(6 * 256.0).view(6, 256)
    for shape in ((-1,), (2, 3, 256), (3, 512), (6, 16, 16)):
        both_ways(lambda x, shape=shape: x.reshape(shape) + 1, [P(dp=Shard(dim))], x, mesh=FOUR)


# Contractions.


def test_the_bias_of_a_row_parallel_layer_is_added_once():
    x, w, b = (torch.arange(n * 8.0).view(-1, 8) for n in (4, 8, 1))
    specs = [P(tp=Shard(1)), P(tp=Shard(1)), P()]
    fn = lambda x, w, b: nn.functional.linear(x, w, b[0])  # noqa: E731
    both_ways(fn, specs, x, w, b)  # whole numbers: sums are exact in any order
    grads = lambda x, w, b: vs.grad(lambda b: fn(x, w, b).sum())(b)  # noqa: E731
    placed = [vs.distribute_tensor(t, MESH, spec) for t, spec in zip((x, w, b), specs, strict=True)]
    assert_same(vs.parallelize(grads, vs.Plan(MESH))(*placed), grads(x, w, b))


BOTH = [P(dp=Shard(1), tp=Shard(1)), P(tp=Shard(1), dp=Shard(1)), P(dp=Shard(1)), P(tp=Shard(1)), P()]


@pytest.mark.parametrize("right", [P.of((a, Shard(0)) for a, _ in spec.items()) for spec in BOTH], ids=str)
@pytest.mark.parametrize("left", BOTH, ids=str)
def test_a_contraction_over_a_dim_that_axes_split_in_either_order(left, right):
    """dp inside tp holds other rows than tp inside dp: they may not meet as they are."""
    a, b = torch.arange(64.0).view(8, 8), torch.arange(64.0).view(8, 8).flip(0)
    both_ways(lambda a, b: a @ b, [left, right], a, b)


# Replicas.


def test_norm_weights_stay_equal_on_every_rank_under_sequence_parallel():
    """A norm's gradient is a sum over positions that the ranks share out: every rank has the bits of it."""
    mesh = vs.make_mesh({"tp": 4}, backend="simulated")
    model, opt = make_model(torch.float64), vs.optim.adamw(1e-2)
    split = {r"blocks\.\d+\.(input|output)": P(tp=Shard(1))}
    plan = vs.Plan(mesh, TP, activations=split)
    plain = train_step(model, opt)
    step = vs.parallelize(train_step(model, opt), plan)
    theirs = parameters(model), opt.init(parameters(model))
    params = vs.distribute(theirs[0], plan)
    state = opt.init(params)
    for seed in range(3):
        params, state, _ = step(params, state, batch(seed))
        *theirs, _ = plain(*theirs, batch(seed))
    norms = [name for name in params if ".ln" in name or name.startswith("norm")]
    assert len(norms) >= 8
    for tree in (params, state["exp_avg"], state["exp_avg_sq"]):
        for tensor in (tree[name] for name in tree if tree[name].layout.spec == P()):
            first, *others = tensor.locals
            assert all(torch.equal(first, other) for other in others)
    for name, value in params.items():
        assert (value.full_tensor() - theirs[0][name]).abs().max() < 1e-6


# What a trace refuses, it says.


def test_a_branch_on_a_value_names_the_line():
    with pytest.raises(TraceError, match=r"test_field_cases\.py"):
        vs.parallelize(lambda x: x + 1 if x.sum() > 0 else x, vs.Plan(MESH))(X)


# Found by random programs.


@pytest.mark.parametrize("spec", [P(dp=Shard(0), tp=Shard(1)), P(dp=Shard(0), tp=Shard(0)), P(tp=Shard(0))])
def test_a_view_asked_for_in_rows_that_do_not_divide(spec):
    """Seven rows over two ranks are no part of the 42 elements that they are a view of."""
    for fn in (lambda x: (-x).view(7, 6), lambda x: torch.arange(42.0).view(7, 6) * 2):
        run = vs.parallelize(fn, vs.Plan(MESH, outputs={"": spec}))
        found = run(torch.arange(42.0))
        assert found.layout is Layout(MESH.abstract, spec, (7, 6))
        assert_same(found, fn(torch.arange(42.0)))
        assert not run.lower(torch.arange(42.0)).collectives()


@pytest.mark.parametrize("spec", [P(), P(dp=Shard(0)), P(tp=Shard(0), dp=Shard(1))])
def test_the_gradient_of_a_write_to_a_view_of_what_lies_transposed(spec):
    """Autograd takes it with as_strided, of a tensor with the strides of what is viewed."""

    def loss(x):
        y = x.transpose(0, 1) * 1
        y[1:3] = 0
        y[:, 1].mul_(2)
        return (y * y).sum()

    x = vs.distribute_tensor(X, MESH, spec)
    assert_same(vs.parallelize(vs.grad(loss), vs.Plan(MESH))(x), vs.grad(loss)(X))


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugate", "negative"])
def test_what_torch_only_notes_on_a_tensor_is_in_the_memory_of_its_pieces(make):
    """A collective sends memory as it is, without the bit that says that it is to be conjugated."""
    z = torch.complex(X, X + 1)
    want = make(z).resolve_neg().resolve_conj()
    placed = vs.distribute_tensor(z, MESH, P(dp=Shard(0)))
    again = vs.from_local([make(piece) for piece in placed.locals], MESH, P(dp=Shard(0)), z.shape)
    entered = vs.parallelize(lambda x: x * 1, vs.Plan(MESH, inputs={"x": P(tp=Shard(0))}))(make(z))
    for tensor in (make(placed), again, vs.distribute_tensor(make(z), MESH, P(dp=Shard(1))), entered):
        assert not any(piece.is_conj() or piece.is_neg() for piece in tensor.locals)
        assert_same(tensor, want)
        assert_same(tensor.redistribute(P(tp=Shard(1))), want)


class _Trainer:
    """An object whose method is run: it holds a tensor, and another one deep in a container."""

    def __init__(self):
        self.scale, self.state = torch.ones(4), {"deep": [torch.ones(4)]}

    def step(self, x):
        return x * self.scale * self.state["deep"][0]

    __call__ = step


@pytest.mark.parametrize("way", [lambda t: t.step, lambda t: lambda x: t.step(x), lambda t: t])
def test_a_closed_over_tensor_that_is_replaced_in_an_object_or_a_container(way):
    """It is read anew at each call, however deep it lies; of another shape or kind, it is traced anew."""
    trainer = _Trainer()
    run = vs.parallelize(way(trainer), vs.Plan(MESH, inputs={"x": P(dp=Shard(0))}))
    changes = [
        lambda: setattr(trainer, "scale", torch.full((4,), 2.0)),
        lambda: trainer.state["deep"].__setitem__(0, torch.full((4,), 3.0)),
        lambda: trainer.state.update(deep=(torch.arange(4.0),)),
        lambda: setattr(trainer, "scale", torch.arange(8.0)[:, None]),
        lambda: setattr(trainer, "scale", 5.0),
        lambda: trainer.state.update(deep=[trainer.state["deep"][0].double()]),
    ]
    misses = []
    for change in (lambda: None, *changes):
        change()
        assert_same(run(X), trainer.step(X))
        misses.append(run.cache_info().misses)
    assert misses == [1, 1, 1, 1, 2, 3, 4]


def test_a_tensor_in_two_places_of_which_one_is_replaced():
    """Which of them the function reads is not known before it is traced again."""
    weight = torch.ones(4)
    held = [weight]
    run = vs.parallelize(lambda x: x * held[0] + 0 * weight, vs.Plan(MESH))
    assert_same(run(X), X)
    held[0] = torch.full((4,), 2.0)
    assert_same(run(X), X * 2)


def test_parameters_that_are_read_without_their_module():
    linear, scale = nn.Linear(4, 4, bias=False), torch.ones(4)
    plan = vs.Plan(MESH, inputs={"x": P(dp=Shard(0))})

    def step(x):
        return vs.grad(lambda x: (nn.functional.linear(x, linear.weight) * scale).sum())(x)

    run = vs.parallelize(step, plan)
    assert_same(run(X), step(X))
    linear.weight, scale = nn.Parameter(torch.eye(4)), torch.arange(4.0)
    assert_same(run(X), step(X))


def test_a_mapped_function_reads_what_it_closes_over_anew():
    held = {"weight": torch.eye(4)}
    mapped = vs.shard_map(lambda x: x @ held["weight"], mesh=MESH, in_specs=P(), out_specs=P())
    for weight in (torch.eye(4), torch.ones(4, 4), torch.ones(4, 3)):
        held["weight"] = weight
        assert_same(mapped(X), X @ weight)


def test_an_index_of_nothing_may_have_any_rank():
    """torch takes it in gather, and in the scatter_add of its gradient."""
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    x, index = torch.randn(5), torch.empty(2, 0, dtype=torch.int64)
    placed = vs.distribute_tensor(x, mesh, vs.P(dp=vs.Shard(0)))
    where = vs.distribute_tensor(index, mesh, vs.P(dp=vs.Shard(1)))

    def loss(x, index):
        return torch.gather(x, 0, index).sum()

    value, gradient = vs.parallelize(vs.value_and_grad(loss), vs.Plan(mesh))(placed, where)
    assert value.item() == 0
    assert torch.equal(gradient.full_tensor(), torch.zeros(5))
