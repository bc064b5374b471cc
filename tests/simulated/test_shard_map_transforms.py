"""What a hostile reader found once: gradients, memory and counts at the edges of a mapped function."""

import pytest
import torch

import vescale as vs
from vescale import P, Partial, Shard

MESH = vs.make_mesh({"dp": 2}, backend="simulated")
ROWS, WHOLE = P("dp"), P()
X = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 7
W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
SLOPE = vs.grad(lambda w: (X * w).sin().sum())(W)


def mapped(fn, in_specs, out_specs, **options):
    return vs.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


def test_remat_of_a_closure_over_a_varying_value():
    def total(x, w):
        return vs.psum(vs.remat(lambda w: (x * w).sin())(w).sum(), "dp")

    torch.testing.assert_close(vs.grad(mapped(total, (ROWS, WHOLE), WHOLE), argnums=1)(X, W), SLOPE)
    inside = mapped(lambda x, w: vs.grad(lambda w: total(x, w))(w), (ROWS, WHOLE), WHOLE)
    torch.testing.assert_close(inside(X, W).full_tensor(), SLOPE)


@pytest.mark.parametrize(("op", "share"), [("sum", 1), ("avg", 2)])
def test_the_gradient_of_a_pending_reduction(op, share):
    fn = mapped(lambda x, w: (x * w).sin().sum(), (ROWS, WHOLE), P(dp=Partial(op)))
    torch.testing.assert_close(vs.grad(lambda w: fn(X, w) * 1)(W), SLOPE / share)


def test_an_extreme_value_has_no_gradient():
    fn = mapped(lambda x: x.sum(), (ROWS,), P(dp=Partial("max")))
    with pytest.raises(vs.VescaleError, match="not a smooth choice"):
        vs.grad(lambda x: fn(x) * 1)(X)


def test_an_unchecked_result_counts_once():
    fn = mapped(lambda x, w: vs.all_gather((x * w).sin(), "dp").sum(), (ROWS, WHOLE), WHOLE, check=False)
    torch.testing.assert_close(vs.grad(fn, argnums=1)(X, W), SLOPE)


def test_results_have_memory_of_their_own():
    x = X.clone()
    first, second = mapped(lambda x: (x, x), (ROWS,), ROWS)(x)
    first.add_(1)
    leaf = X.clone().requires_grad_()
    mapped(lambda x: x, (ROWS,), ROWS)(leaf).add_(1)
    placed = vs.distribute_tensor(X, MESH, ROWS)
    mapped(lambda x: x.t(), (ROWS,), P(dp=Shard(1)))(placed).add_(1)
    for value in (x, second.full_tensor(), leaf.detach(), placed.full_tensor()):
        assert torch.equal(value, X)


def test_transforms_outside_follow_arguments_only():
    def loss(x, w):
        return mapped(lambda x: vs.psum((x * w).sum(), "dp"), (ROWS,), WHOLE)(x)

    with pytest.raises(vs.VescaleError, match="pass it as an argument"):
        vs.grad(loss, argnums=1)(X, W)
    with pytest.raises(vs.VescaleError, match="pass it as an argument"):
        vs.parallelize(loss, vs.Plan(MESH))(X, W)
    with pytest.raises(vs.VescaleError, match=r"vs\.vmap inside"):
        vs.vmap(mapped(lambda x: x * 2, (ROWS,), ROWS))(torch.ones(5, 4, 3))


COUNTS = {
    "all_gather": (lambda x, c: vs.all_gather_ragged(x, c[0], "dp")[0], [3, 0]),
    "all_to_all": (lambda x, c: vs.all_to_all_ragged(x, c[0], "dp")[0], [[2, 1], [0, 0]]),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_rows_that_are_not_there_are_not_silent(name):
    fn, counts = COUNTS[name]
    result = mapped(fn, (ROWS, ROWS), ROWS)(X, torch.tensor(counts))
    assert result.full_tensor().isnan().any()


def test_a_shuffle_is_a_permutation():
    with pytest.raises(vs.VescaleError, match="permutation"):
        mapped(lambda x: vs.pshuffle(x, "dp", [0, 0]), (ROWS,), ROWS)(X)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_optimizer_that_writes_to_out(amsgrad):
    ours = torch.nn.Parameter(vs.distribute_tensor(X, MESH, ROWS))
    theirs = torch.nn.Parameter(X.clone())
    for parameter in (ours, theirs):
        optimizer = torch.optim.Adam([parameter], amsgrad=amsgrad)
        (parameter * parameter).sum().backward()
        optimizer.step()
    assert torch.equal(ours.detach().full_tensor(), theirs.detach())


def test_a_power_in_place():
    x = vs.distribute_tensor(X, MESH, ROWS)
    assert torch.equal(x.pow_(2).full_tensor(), X**2)
