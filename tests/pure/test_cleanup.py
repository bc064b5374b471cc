"""Cleanup drops what computes nothing and keeps every value."""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from tests.graphs import evaluate, ops, traced
from vescale.spmd.program.cleanup import cleanup, drop_dead, join_cross_entropy, share_views

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([1, 0, 5, 2])


def loss(x, target, **options):
    return F.cross_entropy(x, target, **options)


CASES = {
    "t of t": (lambda x: x.t().t() + 1, (X,)),
    "t twice": (lambda x: (x.t() @ x, x.t() + 1), (X,)),
    "alias": (lambda x: x.detach() * 2, (X,)),
    "view to the same shape": (lambda x: x.view(4, 6) * 2, (X,)),
    "views of one shape": (lambda x: (x.view(24) + 1, x.view(24) * 2, x.view(6, 4) + 1), (X,)),
    "an output that is an input": (lambda x: (x, x.detach()), (X,)),
    "dead code": (lambda x: (x.exp(), x + 1)[1], (X,)),
    "a matmul's gradient": (lambda x: vs.grad(lambda w: (w.t() @ w).sum())(x), (X,)),
    "cross entropy": (vs.value_and_grad(loss), (X, TARGET)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_stay_and_nodes_do_not_grow(case):
    fn, tensors = CASES[case]
    graph = traced(fn, *tensors)
    cleaned = cleanup(graph)
    for before, after in zip(evaluate(graph, *tensors), evaluate(cleaned, *tensors), strict=True):
        assert torch.equal(before, after)
    assert len(cleaned.nodes) < len(graph.nodes) or case == "an output that is an input"
    assert cleaned.inputs == graph.inputs


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("t of t", ["t", "add.Tensor"]),
        ("t twice", ["t", "mm", "add.Tensor"]),
        ("alias", ["mul.Tensor"]),
        ("view to the same shape", ["mul.Tensor"]),
        ("views of one shape", ["view", "add.Tensor", "mul.Tensor", "view", "add.Tensor"]),
        ("an output that is an input", []),
        ("dead code", ["add.Tensor"]),
    ],
)
def test_what_is_left(case, left):
    fn, tensors = CASES[case]
    found = ops(cleanup(traced(fn, *tensors)))
    assert found == (left if case != "t of t" else ["add.Tensor"])


def test_passes_are_idempotent():
    fn, tensors = CASES["a matmul's gradient"]
    once = cleanup(traced(fn, *tensors))
    assert cleanup(once).nodes == once.nodes


def test_no_pass_touches_its_argument():
    fn, tensors = CASES["cross entropy"]
    graph = traced(fn, *tensors)
    before = str(graph)
    for run in (share_views, join_cross_entropy, drop_dead):
        run(graph)
    assert str(graph) == before


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_backward_of_a_cross_entropy_is_one_node(reduction):
    graph = cleanup(
        traced(
            vs.grad(loss),
            X,
            TARGET,
        )
    )
    assert "vescale::cross_entropy_backward" in ops(graph)
    assert "nll_loss_backward" not in ops(graph)


@pytest.mark.parametrize(
    "other",
    [
        {"reduction": "none"},
        {"weight": torch.ones(6)},
    ],
    ids=str,
)
def test_other_cross_entropies_are_left_alone(other):
    graph = cleanup(traced(vs.grad(lambda x, t: loss(x, t, **other).sum()), X, TARGET))
    assert "nll_loss_backward" in ops(graph)


def test_a_gradient_that_somebody_else_reads_is_not_joined():
    def both(x, target):
        log_probs = F.log_softmax(x, -1)
        inner = vs.grad(lambda y: F.nll_loss(y, target))(log_probs)
        return inner, torch.ops.aten._log_softmax_backward_data(inner, log_probs, -1, x.dtype)

    assert "nll_loss_backward" in ops(cleanup(traced(both, X, TARGET)))


def test_unread_keyed_draws_are_dropped():
    """They have no state that a later draw would miss."""
    graph = cleanup(traced(lambda x: (vs.rng.normal(vs.rng.key(0), (4,)), x + 1)[1], X))
    assert ops(graph) == ["add.Tensor"]
