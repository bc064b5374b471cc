"""What shard_map promises: types, gradients, specs in every form, the cache, and errors by their text."""

import dataclasses
from typing import Annotated

import pytest
import torch
from torch import Tensor, nn

import vescale as vs
from vescale import _tree
from vescale._errors import ArgumentError, ShardingError, TraceError
from vescale.spmd.placements import P, Partial, RaggedShard, Shard

ROWS = P(dp=Shard(0))
RAGGED = P(dp=RaggedShard((0,), (3, 1)))


@pytest.fixture(scope="module")
def mesh():
    return vs.make_mesh({"dp": 2}, backend="simulated")


@pytest.fixture(scope="module")
def grid():
    return vs.make_mesh({"dp": 2, "tp": 3}, backend="simulated")


def locals_of(tensor):
    return [tensor.to_local(rank) for rank in tensor.mesh.local_ranks]


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape) - 3


def kinds(table):
    return [item.kind for item in table]


# Gradients.


def test_the_gradient_of_a_summed_loss_is_the_full_sum_on_both_ranks(mesh):
    w, d = torch.tensor(1.0), torch.tensor([0.0, 1.0])

    def loss(w, d):
        return vs.psum(((w**2 + 1) * d).sum(), "dp")

    inside = vs.shard_map(lambda w, d: vs.grad(loss)(w, d), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    assert [float(local) for local in locals_of(inside(w, d))] == [2.0, 2.0]
    outside = vs.shard_map(loss, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    assert float(vs.grad(outside)(w, d)) == 2.0


def test_a_replicated_weight_gets_the_reduced_gradient(mesh):
    w, x = numbers(3, 2), numbers(4, 3)
    run = vs.shard_map(
        vs.grad(lambda w, x: vs.psum((x @ w).square().sum(), "dp")),
        mesh=mesh, in_specs=(P(), ROWS), out_specs=P(),
    )  # fmt: skip
    expected = vs.grad(lambda w: (x @ w).square().sum())(w)
    assert all(torch.equal(local, expected) for local in locals_of(run(w, x)))


def test_gradients_flow_back_into_the_layouts_of_dtensors(mesh):
    w = vs.distribute_tensor(numbers(3, 2), mesh, P()).requires_grad_()
    x = vs.distribute_tensor(numbers(4, 3), mesh, RAGGED).requires_grad_()
    run = vs.shard_map(lambda w, x: (x @ w).square(), mesh=mesh, in_specs=(P(), RAGGED), out_specs=RAGGED)
    run(w, x).sum().backward()
    plain_w, plain_x = numbers(3, 2).requires_grad_(), numbers(4, 3).requires_grad_()
    (plain_x @ plain_w).square().sum().backward()
    for found, given, expected in ((w.grad, w, plain_w.grad), (x.grad, x, plain_x.grad)):
        assert found.layout is given.layout
        assert torch.equal(found.full_tensor(), expected)


def cubic(w, x):
    return vs.psum((torch.tanh(x * w) ** 3).sum(), "dp")


def plain_cubic(w, x):
    return (torch.tanh(x * w) ** 3).sum()


def derivative(fn, order):
    """The order-th derivative with respect to w; of a gradient, that of its sum."""
    if not order:
        return fn
    inner = derivative(fn, order - 1)
    return vs.grad(lambda w, x: inner(w, x).sum())


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_higher_derivatives(mesh, order, where):
    w, x = torch.tensor([0.3, -0.2], dtype=torch.float64), numbers(4, 2) / 8
    expected = derivative(plain_cubic, order)(w, x)
    if where == "inside":
        run = vs.shard_map(derivative(cubic, order), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
        found = run(w, x).full_tensor()
    else:
        mapped = vs.shard_map(cubic, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
        found = derivative(mapped, order)(w, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_through_autograd(mesh):
    mapped = vs.shard_map(cubic, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    found = []
    for fn in (lambda w, x: mapped(w, x).full_tensor(), plain_cubic):
        w, x = torch.tensor([0.3, -0.2], dtype=torch.float64).requires_grad_(), numbers(4, 2) / 8
        (first,) = torch.autograd.grad(fn(w, x), w, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), w)[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_remat_inside(mesh, order):
    def loss(w, x):
        return vs.psum(vs.remat(lambda w, x: (torch.tanh(x * w) ** 3).sum())(w, x), "dp")

    w, x = torch.tensor([0.3, -0.2], dtype=torch.float64), numbers(4, 2) / 8
    run = vs.shard_map(derivative(loss, order), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    expected = derivative(plain_cubic, order)(w, x)
    torch.testing.assert_close(run(w, x).full_tensor(), expected, rtol=1e-12, atol=1e-12)


def test_remat_around_a_collective(mesh):
    def loss(w, x):
        return vs.remat(lambda w, x: vs.psum((x * w).square().sum(), "dp"))(w, x)

    w, x = numbers(2), numbers(4, 2)
    run = vs.shard_map(vs.grad(loss), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    assert torch.equal(run(w, x).full_tensor(), vs.grad(lambda w: (x * w).square().sum())(w))


def test_vmap_inside_and_a_jacobian(mesh):
    w, x = numbers(3), numbers(4, 3)

    def each(w, x):
        return vs.vmap(lambda row: vs.psum((row * w).square().sum(), "dp"))(x)

    run = vs.shard_map(each, mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    halves = (x * w).square().sum(1).split(2)
    assert torch.equal(run(w, x).full_tensor(), halves[0] + halves[1])
    jacobian = vs.shard_map(torch.func.jacrev(each), mesh=mesh, in_specs=(P(), ROWS), out_specs=P())
    expected = torch.func.jacrev(lambda w: sum(half @ w**2 for half in (x**2).split(2)))(w)
    assert torch.equal(jacobian(w, x).full_tensor(), expected)


def test_has_aux(mesh):
    def loss(w, x):
        y = x * w
        return vs.psum(y.sum(), "dp"), {"y": y}

    run = vs.shard_map(
        lambda w, x: vs.value_and_grad(loss, has_aux=True)(w, x),
        mesh=mesh, in_specs=(P(), ROWS), out_specs=((P(), {"y": ROWS}), P()),
    )  # fmt: skip
    (value, aux), gradient = run(torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert float(value) == 20.0
    assert float(gradient) == 10.0
    assert aux["y"].full_tensor().tolist() == [2.0, 4.0, 6.0, 8.0]


class Doubled(torch.autograd.Function):
    """A backward of its own, with an op that mixes an invariant constant with a varying gradient."""

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, g * x * 2


def test_a_custom_backward_adds_no_collective_of_its_own(mesh):
    def product(x):
        return torch.func.vjp(lambda x: Doubled.apply(x, torch.ones(2)), x)[1](x)[0]

    run = vs.shard_map(product, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    assert len(run.collectives(torch.ones(4, 2))) == 0
    assert torch.equal(run(torch.ones(4, 2)).full_tensor(), torch.full((4, 2), 2.0))


def test_a_custom_backward_of_an_invariant_weight_is_summed_once(mesh):
    run = vs.shard_map(
        vs.grad(lambda w, x: vs.psum(Doubled.apply(x, w).sum(), "dp")),
        mesh=mesh, in_specs=(P(), ROWS), out_specs=P(),
    )  # fmt: skip
    w, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).view(4, 2)
    assert kinds(run.collectives(w, x)) == ["psum"]  # of the gradient; the loss itself is not asked for
    assert torch.equal(run(w, x).full_tensor(), 2 * x.sum(0))


# Types.


def test_a_carry_that_becomes_varying_is_joined(mesh):
    def total(x):
        carry = torch.zeros(2)
        for row in x:
            carry = carry + row
        return vs.psum(carry, "dp")

    run = vs.shard_map(total, mesh=mesh, in_specs=(ROWS,), out_specs=P())
    assert torch.equal(run(torch.ones(4, 2)).full_tensor(), torch.full((2,), 4.0))


def test_an_in_place_carry_is_named(mesh):
    def total(x, start):
        carry = start(torch.zeros(2))
        for row in x:
            carry += row
        return vs.psum(carry, "dp")

    run = vs.shard_map(total, mesh=mesh, in_specs=(ROWS, P()), out_specs=P())
    with pytest.raises(
        TraceError, match=r"writes a value that varies over dp.*\n.*in total\n.*\n.*pvary\(x, 'dp'\)"
    ):
        run(torch.ones(4, 2), _identity)
    assert torch.equal(run(torch.ones(4, 2), _vary).full_tensor(), torch.full((2,), 4.0))


def _identity(x):
    return x


def _vary(x):
    return vs.pvary(x, "dp")


def test_psum_of_an_invariant_value_is_n_times_it(grid):
    run = vs.shard_map(lambda x: vs.psum(x, ("dp", "tp")), mesh=grid, in_specs=(P(),), out_specs=P())
    assert float(run(torch.tensor(2.0))) == 12.0
    assert float(vs.grad(run)(torch.tensor(2.0))) == 6.0


def test_what_is_not_reduced_has_the_bits_of_plain_torch(mesh):
    x, w = torch.randn(8, 4), torch.randn(4)

    def fn(x, w):
        return (x * w).exp().tanh() / (1 + x.square()).sqrt()

    for spec, narrow in ((ROWS, P()), (RAGGED, P()), (P(dp=Shard(1)), P(dp=Shard(0)))):
        run = vs.shard_map(fn, mesh=mesh, in_specs=(spec, narrow), out_specs=spec)
        assert torch.equal(run(x, w).full_tensor(), fn(x, w))


def test_a_backward_is_that_of_the_forward_though_the_mode_changed(mesh):
    module = Doubling()
    run = vs.shard_map(lambda x: module(x), mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    x = torch.ones(4, requires_grad=True)
    y = run(x).sum()
    module.eval()
    y.backward()
    assert x.grad.tolist() == [2.0] * 4


def test_classes_of_ranks_may_read_other_tensors(mesh):
    a, b = torch.tensor(2.0), torch.tensor(3.0)
    run = vs.shard_map(
        lambda x: x * a if len(x) > 1 else x * b * a, mesh=mesh, in_specs=(RAGGED,), out_specs=RAGGED
    )
    assert run(torch.ones(4)).full_tensor().tolist() == [2.0, 2.0, 2.0, 6.0]
    inside = vs.parallelize(lambda x: run(x) + 1, vs.Plan(mesh))
    assert inside(torch.ones(4)).full_tensor().tolist() == [3.0, 3.0, 3.0, 7.0]


# Specs and arguments.


@_tree.register
@dataclasses.dataclass(frozen=True)
class Pair:
    left: object
    right: object


def test_trees_prefixes_none_leaves_and_registered_dataclasses(mesh):
    def fn(tree, pair):
        return Pair(tree["a"] * 2, [tree["b"][0], None]), {"sum": pair.left + pair.right, "none": None}

    run = vs.shard_map(
        fn, mesh=mesh, in_specs=({"a": ROWS, "b": P()}, ROWS), out_specs=(Pair(ROWS, P()), ROWS)
    )
    x = torch.arange(4.0)
    pair, rest = run({"a": x, "b": [x, None]}, Pair(x, x))
    assert torch.equal(pair.left.full_tensor(), 2 * x)
    assert torch.equal(pair.right[0].full_tensor(), x)
    assert pair.right[1] is None
    assert rest["none"] is None
    assert torch.equal(rest["sum"].full_tensor(), 2 * x)


def test_keyword_arguments_defaults_and_static_values(mesh):
    def fn(x, *, by=2, mode="times"):
        return x * by if mode == "times" else x + by

    run = vs.shard_map(fn, mesh=mesh, in_specs={"x": ROWS, "by": P(), "mode": P()}, out_specs=ROWS)
    x = torch.arange(4.0)
    assert torch.equal(run(x).full_tensor(), x * 2)
    assert torch.equal(run(x=x, by=3).full_tensor(), x * 3)
    assert torch.equal(run(x, by=torch.tensor(5.0), mode="plus").full_tensor(), x + 5)
    assert run.cache_info().misses == 3


def test_a_tuple_of_specs_is_bound_like_arguments(mesh):
    def fn(x, *rest):
        return x + sum(rest)

    run = vs.shard_map(fn, mesh=mesh, in_specs=(ROWS, P(), P()), out_specs=ROWS)
    x = torch.arange(4.0)
    assert torch.equal(run(x, torch.tensor(1.0), torch.tensor(2.0)).full_tensor(), x + 3)


def test_static_results_come_back_as_they_are(mesh):
    run = vs.shard_map(lambda x: (x, x.shape[0], "text"), mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    assert run(torch.ones(4))[1:] == (2, "text")


def test_a_closed_over_tensor_is_read_at_each_call(mesh):
    scale = torch.tensor(2.0)
    run = vs.shard_map(lambda x: x * scale, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    assert run(torch.ones(2)).full_tensor().tolist() == [2.0, 2.0]
    scale.fill_(3.0)
    assert run(torch.ones(2)).full_tensor().tolist() == [3.0, 3.0]
    scale = torch.tensor(4.0)  # another tensor in the same cell
    assert run(torch.ones(2)).full_tensor().tolist() == [4.0, 4.0]
    assert run.cache_info().misses == 1


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


def test_a_module_inside_is_read_at_each_call(mesh):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), Doubling()).requires_grad_(False).eval()
    run = vs.shard_map(lambda x: module(x), mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    x = torch.ones(4, 2)
    assert torch.equal(run(x).full_tensor(), module(x))
    module[0].weight = nn.Parameter(torch.eye(2), requires_grad=False)
    assert torch.equal(run(x).full_tensor(), x)
    assert torch.equal(run(x).full_tensor(), x)
    assert run.cache_info().misses == 1
    assert torch.equal(run.__wrapped__(x), x)
    module.train()
    assert torch.equal(run(x).full_tensor(), 2 * x)
    module.eval()
    assert torch.equal(run(x).full_tensor(), x)
    assert run.cache_info().misses == 2
    module[1] = nn.ReLU()
    assert torch.equal(run(-x).full_tensor(), 0 * x)


def test_annotations(mesh):
    @vs.shard_map(mesh=mesh)
    def both(x: Annotated[Tensor, ROWS], w: P(dp=Shard(0)), by: P() = 2) -> Annotated[Tensor, P()]:
        return vs.psum((x * w).sum() * by, "dp")

    assert float(both(torch.arange(4.0), torch.ones(4))) == 12.0
    assert both.__name__ == "both"


def test_annotations_of_a_tuple(mesh):
    def both(x: Annotated[Tensor, ROWS]) -> tuple[Annotated[Tensor, ROWS], Annotated[Tensor, P()]]:
        return x * 2, vs.psum(x, "dp")

    doubled, total = vs.shard_map(both, mesh=mesh)(torch.arange(4.0))
    assert doubled.full_tensor().tolist() == [0, 2, 4, 6]
    assert total.full_tensor().tolist() == [2, 4]


def test_postponed_annotations(mesh):
    local = ROWS

    def fn(x: "Annotated[Tensor, local]", w: "P()") -> "Annotated[Tensor, ROWS]":
        assert local is not None  # a postponed annotation sees what the function closes over
        return x * w

    assert vs.shard_map(fn, mesh=mesh)(torch.ones(4), torch.tensor(2.0)).full_tensor().tolist() == [2.0] * 4


def test_an_annotation_that_cannot_be_resolved(mesh):
    def fn(x: "Annotated[Tensor, nowhere]") -> P():  # noqa: F821
        return x

    with pytest.raises(ArgumentError, match=r"nowhere.*can't be resolved[^$]*in_specs="):
        vs.shard_map(fn, mesh=mesh)


def test_an_argument_without_a_spec(mesh):
    def fn(x: Annotated[Tensor, ROWS], y: Tensor) -> P():
        return x

    with pytest.raises(ArgumentError, match=r"no spec for y"):
        vs.shard_map(fn, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"no spec for the result"):
        vs.shard_map(lambda x: x, mesh=mesh, in_specs=(ROWS,))


def test_mapped_functions_call_others(mesh):
    def inner(x):
        return vs.psum(x, "dp")

    run = vs.shard_map(lambda x: inner(x) + inner(x * 2), mesh=mesh, in_specs=(ROWS,), out_specs=P())
    assert run(torch.arange(4.0)).full_tensor().tolist() == [6.0, 12.0]


def test_axis_names_map_some_axes(grid):
    run = vs.shard_map(
        lambda x: vs.psum(x, "tp"), mesh=grid, in_specs=(P(tp=Shard(0)),), out_specs=P(), axis_names=("tp",)
    )
    assert run(torch.arange(6.0)).full_tensor().tolist() == [6.0, 9.0]
    with pytest.raises(ArgumentError, match=r"mentions axis 'dp'[^$]*axis_names"):
        vs.shard_map(lambda x: x, mesh=grid, in_specs=(ROWS,), out_specs=P(), axis_names=("tp",))
    over = vs.shard_map(
        lambda x: vs.psum(x, "dp"), mesh=grid, in_specs=(P(),), out_specs=P(), axis_names=("tp",)
    )
    with pytest.raises(ArgumentError, match=r"psum over axis 'dp'[^$]*mapped here: tp"):
        over(torch.ones(2))


def test_without_the_check_the_first_of_the_values_is_taken(mesh):
    run = vs.shard_map(lambda x: x, mesh=mesh, in_specs=(ROWS,), out_specs=P(), check=False)
    assert run(torch.arange(4.0)).full_tensor().tolist() == [0.0, 1.0]


def test_partial_in_specs(mesh):
    run = vs.shard_map(
        lambda x, y: (vs.psum(x, "dp"), y.sum()),
        mesh=mesh, in_specs=(P(dp=Partial()), ROWS), out_specs=(P(), P(dp=Partial())),
    )  # fmt: skip
    contributions = vs.from_local([torch.ones(2), torch.full((2,), 2.0)], mesh, P(dp=Partial()))
    total, summed = run(contributions, torch.arange(4.0))
    assert total.full_tensor().tolist() == [3.0, 3.0]
    assert summed.layout.spec == P(dp=Partial())
    assert float(summed.full_tensor()) == 6.0


def test_many_calls_one_miss(mesh):
    run = vs.shard_map(lambda x, w: x * w, mesh=mesh, in_specs=(ROWS, P()), out_specs=ROWS)
    for _ in range(20):
        run(torch.ones(4), torch.ones(()))
    assert (run.cache_info().misses, run.cache_info().hits) == (1, 19)
    x = torch.ones(4, requires_grad=True)
    for _ in range(20):
        run(x, torch.ones(())).sum().backward()
    assert run._pullbacks.info().misses == 1


def test_ranks_of_different_sizes_have_programs_with_one_sequence_of_collectives(grid):
    spec = P(tp=RaggedShard((0,), (3, 0, 1)))

    def fn(x):
        whole = vs.all_gather(x, "tp")
        total = vs.psum(x.sum() * len(x), ("dp", "tp"))
        return vs.psum_scatter(whole * 2, "tp", sizes=[1, 2, 1]) * total

    run = vs.shard_map(fn, mesh=grid, in_specs=(spec,), out_specs=P(tp=RaggedShard((0,), (1, 2, 1))))
    x = torch.arange(8.0).view(4, 2)
    total = 2 * (3 * x[:3].sum() + x[3:].sum())
    assert torch.equal(run(x).full_tensor(), x * 6 * total)
    entry = run._entry(run._arguments.bind((x,), {}))
    assert entry.traced.apart == ("tp",)
    assert len(entry.traced.variants) == 3
    assert len(set(entry.program.sources)) == 3  # one a class, not one a rank
    exchanges = [
        [line for line in source.splitlines() if "yield" in line] for source in entry.program.sources
    ]
    assert len({len(lines) for lines in exchanges}) == 1


# Errors, before anything runs.


def refused(run, *args, error, text):
    with pytest.raises(error, match=text):
        run(*args)


def test_a_result_that_varies(mesh):
    run = vs.shard_map(lambda x: {"a": x * 2, "b": x}, mesh=mesh, in_specs=(ROWS,), out_specs=P())
    with pytest.raises(ShardingError) as found:
        run(torch.ones(4))
    assert "a varies over dp" in str(found.value)
    assert "b varies over dp" in str(found.value)
    assert "vs.psum over 'dp'" in str(found.value)


def test_an_axis_that_is_not_in_the_mesh(mesh):
    with pytest.raises(Exception, match=r"'tp'[^$]*dp"):
        vs.shard_map(lambda x: x, mesh=mesh, in_specs=(P(tp=Shard(0)),), out_specs=P())
    run = vs.shard_map(lambda x: vs.psum(x, "tp"), mesh=mesh, in_specs=(P(),), out_specs=P())
    refused(run, torch.ones(2), error=ArgumentError, text=r"psum over axis 'tp'[^$]*test_shard_map[^$]*dp")


def test_specs_that_do_not_fit_the_tree(mesh):
    run = vs.shard_map(lambda tree: tree["a"], mesh=mesh, in_specs=({"a": ROWS, "c": P()},), out_specs=ROWS)
    refused(run, {"a": torch.ones(2), "b": torch.ones(2)}, error=ArgumentError, text=r"in_specs of 'tree'")
    run = vs.shard_map(lambda x, y: x, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    refused(run, torch.ones(2), torch.ones(2), error=ArgumentError, text=r"1 in_specs for the arguments x, y")
    run = vs.shard_map(lambda x: (x, x), mesh=mesh, in_specs=(ROWS,), out_specs=(ROWS, ROWS, ROWS))
    refused(run, torch.ones(2), error=ArgumentError, text=r"out_specs")
    with pytest.raises(ArgumentError, match=r"in_specs\.0\.a = 'dp'"):
        vs.shard_map(lambda x: x, mesh=mesh, in_specs=({"a": "dp"},), out_specs=P())


def test_all_dims_that_do_not_divide_at_once(mesh):
    run = vs.shard_map(lambda tree, x: x, mesh=mesh, in_specs=(RAGGED, RAGGED), out_specs=RAGGED)
    with pytest.raises(ArgumentError) as found:
        run({"a": torch.ones(4), "b": torch.ones(6)}, torch.ones(7))
    assert "tree.b of shape (6,)" in str(found.value)
    assert "x of shape (7,)" in str(found.value)
    assert "tree.a" not in str(found.value)


def test_a_dtensor_in_another_layout(mesh):
    run = vs.shard_map(lambda x: x, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS)
    x = vs.distribute_tensor(torch.ones(4), mesh, P())
    refused(
        run,
        x,
        error=ArgumentError,
        text=r"x has the layout P\(\)[^$]*x\.redistribute\(vs\.P\(dp=Shard\(0\)\)\)",
    )
    other = vs.distribute_tensor(torch.ones(4), vs.make_mesh({"dp": 2}, backend="simulated"), ROWS)
    refused(run, other, error=ArgumentError, text=r"lives on")


def test_redistribute_moves_dtensors_to_their_spec(mesh):
    run = vs.shard_map(lambda x: x * 2, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS, redistribute=True)
    x = vs.distribute_tensor(torch.arange(4.0), mesh, P()).requires_grad_()
    y = run(x)
    assert y.full_tensor().tolist() == [0, 2, 4, 6]
    y.sum().backward()
    assert x.grad.layout is x.layout
    assert x.grad.full_tensor().tolist() == [2.0] * 4


def test_a_collective_under_control_flow_that_depends_on_data(mesh):
    def fn(x):
        return vs.psum(x, "dp") if x.sum() > 0 else x

    run = vs.shard_map(fn, mesh=mesh, in_specs=(ROWS,), out_specs=P())
    refused(run, torch.ones(4), error=TraceError, text=r"value of a traced tensor[^$]*in fn[^$]*torch\.where")


def test_a_branch_on_the_axis_index(mesh):
    def fn(x):
        return vs.psum(x, "dp") if vs.axis_index("dp") == 0 else vs.pmax(x, "dp")

    run = vs.shard_map(fn, mesh=mesh, in_specs=(ROWS,), out_specs=P())
    refused(run, torch.ones(4), error=TraceError, text=r"value of a traced tensor[^$]*in fn")


def test_a_branch_on_the_local_shape(mesh):
    def other(x):
        x = x.sum() if len(x) else x.new_zeros(())
        return vs.psum(x, "dp") if len(x.shape) else vs.pmax(x, "dp")

    def kind(x):
        return vs.psum(x.sum(), "dp") if len(x) > 1 else vs.pmax(x.sum(), "dp")

    def more(x):
        total = vs.psum(x.sum(), "dp")
        return vs.psum(total, "dp") if len(x) > 1 else total

    assert vs.shard_map(other, mesh=mesh, in_specs=(RAGGED,), out_specs=P())(torch.ones(4)).shape == ()
    for fn, names in ((kind, ("psum of", "pmax of")), (more, ("psum of", "no further collective"))):
        run = vs.shard_map(fn, mesh=mesh, in_specs=(RAGGED,), out_specs=P())
        with pytest.raises(TraceError, match="ranks that run different collectives") as found:
            run(torch.ones(4))
        assert all(name in str(found.value) for name in (*names, "dp 0", "dp 1", fn.__name__))


def test_the_same_collective_over_other_axes_or_members(grid):
    spec = P(dp=RaggedShard((0,), (3, 1)))

    def axes(x):
        return vs.psum(x.sum(), "dp" if len(x) > 1 else "tp")

    def pairs(x):
        return vs.ppermute(x.sum(), "dp", [(0, 1)] if len(x) > 1 else [(1, 0)])

    def roots(x):
        return vs.broadcast(x.sum(), "dp", root=0 if len(x) > 1 else 1)

    def dtypes(x):
        return vs.psum(x.sum() if len(x) > 1 else x.sum().double(), "dp")

    for fn, texts in (
        (axes, ("psum of torch.float32 over dp at", "psum of torch.float32 over tp at")),
        (pairs, ("by [(0, 1)] over dp", "by [(1, 0)] over dp")),
        (roots, ("from 0 over dp", "from 1 over dp")),
        (dtypes, ("psum of torch.float32", "psum of torch.float64")),
    ):
        run = vs.shard_map(fn, mesh=grid, in_specs=(spec,), out_specs=P(), check=False)
        with pytest.raises(TraceError, match="ranks that run different collectives") as found:
            run(torch.ones(4))
        assert all(text in str(found.value) for text in texts)


@pytest.mark.parametrize(
    "call",
    [
        lambda: vs.psum(torch.ones(2), "dp"),
        lambda: vs.all_gather(torch.ones(2), "dp"),
        lambda: vs.axis_index("dp"),
        lambda: vs.axis_size("dp"),
        lambda: vs.all_gather_ragged(torch.ones(2), torch.tensor(1), "dp"),
    ],
)
def test_collectives_outside(call):
    with pytest.raises(TraceError, match=r"outside a mapped function[^$]*vs\.shard_map"):
        call()


def test_a_gradient_with_respect_to_a_contribution(mesh):
    run = vs.shard_map(lambda x: vs.psum(x, "dp"), mesh=mesh, in_specs=(P(dp=Partial()),), out_specs=P())
    refused(run, torch.ones(2, requires_grad=True), error=ArgumentError, text=r"gradient with respect to x")


def test_a_closed_over_tensor_that_requires_grad(mesh):
    w = torch.ones(2, requires_grad=True)
    run = vs.shard_map(lambda x: x * w, mesh=mesh, in_specs=(P(),), out_specs=P())
    for x in (torch.ones(2, requires_grad=True), torch.ones(2)):
        refused(run, x, error=ArgumentError, text=r"closed-over tensor of shape \(2,\) that requires grad")
    with torch.no_grad():
        assert run(torch.ones(2)).full_tensor().tolist() == [1.0, 1.0]


def test_a_gradient_through_a_maximum(mesh):
    run = vs.shard_map(lambda x: vs.pmax(x, "dp").sum(), mesh=mesh, in_specs=(ROWS,), out_specs=P())
    refused(vs.grad(run), torch.ones(4), error=TraceError, text=r"gradient through pmax[^$]*detach")


def test_shapes_that_a_collective_does_not_take(mesh):
    for fn, text in (
        (lambda x: vs.psum(x, "dp"), r"psum of shapes \(3,\), \(1,\)"),
        (lambda x: vs.all_gather(x, "dp", dim=1), r"all_gather along dim 1 of \(3,\)"),
        (lambda x: vs.ppermute(x, "dp", [(0, 1), (1, 1)]), r"perm="),
        (lambda x: vs.broadcast(x.sum(), "dp", root=2), r"root=2"),
        (lambda x: vs.psum_scatter(x.sum().expand(4), "dp", sizes=[1, 2]), r"into \[1, 2\]"),
        (lambda x: vs.all_gather(x, "dp", to="all"), r"to='all'"),
        (lambda x: vs.psum(x.sum(), ("dp", "dp")), r"named once"),
    ):
        run = vs.shard_map(fn, mesh=mesh, in_specs=(RAGGED,), out_specs=RAGGED, check=False)
        refused(run, torch.ones(4), error=ArgumentError, text=text)
