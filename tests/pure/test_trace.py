"""Tracing: the ATen calls of a function, where each comes from, and what can't be traced."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import vescale as vs
from tests.graphs import evaluate, ops, traced
from vescale import _tree
from vescale._errors import ShardingError, TraceError
from vescale.spmd.placements import P, Shard
from vescale.spmd.program.trace import Tracing, current_trace

X = torch.arange(6.0).view(2, 3) + 1
Y = torch.arange(6.0).view(3, 2) - 2


def line_of(fn, text):
    """file:line of the line of fn that has the text."""
    lines, start = inspect.getsourcelines(fn)
    (number,) = [start + at for at, line in enumerate(lines) if text in line]
    return f"test_trace.py:{number} "


def test_the_calls_in_order():
    graph = traced(lambda a, b: (a @ b).exp().sum(0), X, Y)
    assert ops(graph) == ["mm", "exp", "sum.dim_IntList"]
    assert [meta.shape for meta in graph.metas] == [(2, 3), (3, 2), (2, 2), (2, 2), (2,)]
    assert "v2: float32[2,2] = aten.mm.default(v0, v1)" in str(graph)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (a @ b).relu(),
        lambda a, b: a.sum(1).split(1),
        lambda a, b: vs.grad(lambda w: F.gelu(w @ b).sum())(a),
        lambda a, b: vs.grad(lambda v: vs.grad(lambda w: (w @ b).pow(3).sum())(v).sum())(a),
        lambda a, b: torch.func.vmap(torch.dot)(a, b.t()),
        lambda a, b: {"x": a, "y": [b, None, 3]},
        lambda a, b: F.layer_norm(a, (3,), b[:, 0], b[:, 1]),
    ],
)
def test_running_the_graph_gives_the_bits_of_the_function(fn):
    for ours, theirs in zip(evaluate(traced(fn, X, Y), X, Y), _tree.leaves(fn(X, Y)), strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_two_inputs_that_look_alike_stay_two():
    graph = traced(lambda a, b: a - b, X, X)
    assert list(graph.nodes[0].refs()) == [0, 1]


# Where a node comes from.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def forward(self, x):
        return self.layers(x) * 2  # doubled


def test_nodes_know_the_line_of_the_user():
    def fn(x):
        y = x.exp()  # first
        return F.softmax(y, -1)  # second

    first, second = traced(fn, X).nodes
    assert first.origin.line == line_of(fn, "# first") + "in fn"
    assert second.origin.line == line_of(fn, "# second") + "in fn"


def test_nodes_know_their_module():
    net = Net()
    graph = traced(lambda x: net(x) + 1, X)
    found = {op: node.origin.module for op, node in zip(ops(graph), graph.nodes)}
    assert found["addmm"] == "layers.0"
    assert found["tanh"] == "layers.1"
    assert found["mul.Tensor"] == found["add.Tensor"] == ""  # the outermost one's name, as in torch
    doubled = next(node for node in graph.nodes if node.op is torch.ops.aten.mul.Tensor)
    assert doubled.origin.line == line_of(Net.forward, "# doubled") + "in forward"


def test_nodes_know_forward_from_backward():
    def step(x, w):
        loss, gradient = vs.value_and_grad(lambda w: (x @ w).exp().sum())(w)
        return loss, w - gradient

    graph = traced(step, X, Y)
    regions = {}
    for op, node in zip(ops(graph), graph.nodes):
        regions.setdefault(op, []).append(node.origin.region)
    assert regions["mm"] == ["forward", "backward"]
    assert regions["exp"] == ["forward"]
    assert regions["sub.Tensor"] == [""]


def test_the_trace_is_current_inside_only():
    seen = []
    traced(lambda x: seen.append(current_trace()) or x, X)
    assert isinstance(seen[0], Tracing)
    assert current_trace() is None
    with pytest.raises(ZeroDivisionError):
        traced(lambda x: 1 / 0, X)
    assert current_trace() is None


def test_module_hooks_are_gone_afterwards():
    tracing = Tracing()
    net = Net()
    traced(net, X, tracing=tracing)
    assert list(tracing.seen) == [net, net.layers, *net.layers]
    tracing.seen.clear()
    net(X)
    assert not tracing.seen


def test_modules_of_one_name_are_all_seen():
    """What a program may depend on: two modules of a function are both the outermost one's."""
    tracing, first, second = Tracing(), nn.Dropout(0.1).eval(), nn.Dropout(0.2).eval()
    traced(lambda x: second(first(x)), X, tracing=tracing)
    assert list(tracing.seen) == [first, second]


# Constraints.


def test_constraints_are_nodes_of_the_graph_and_identities_outside():
    spec = P(dp=Shard(0))
    graph = traced(lambda x: vs.constrain(x, spec) + 1, X)
    assert ops(graph) == ["vescale::constrain", "add.Tensor"]
    assert [pin.spec for pin in graph.constraints] == [spec]
    assert vs.constrain(X, spec) is X


def test_the_gradient_of_a_constrained_value_is_constrained():
    graph = traced(vs.grad(lambda x: (vs.constrain(x, P()) * 2).sum()), X)
    assert ops(graph).count("vescale::constrain") == 2


def test_activation_rules_constrain_inputs_and_outputs_of_modules():
    rule = re.compile(r"layers\.0\.(input|output)")
    tracing = Tracing(activations=[(rule, P(dp=Shard(0))), (re.compile("head.input"), P())])
    net = Net()
    assert ops(traced(net, X, tracing=tracing)).count("vescale::constrain") == 2
    assert tracing.used_activations == {0}


# What a function closes over.


def test_closed_over_tensors_are_hidden_inputs():
    weight, bias = torch.ones(3), nn.Parameter(torch.ones(2, 3))
    graph = traced(lambda x: x * weight + bias - weight, X)
    assert [id(tensor) for _, tensor in graph.hidden] == [id(weight), id(bias)]
    assert torch.equal(evaluate(graph, X)[0], X * weight + bias.detach() - weight)
    weight.fill_(5)  # read at each call
    assert torch.equal(evaluate(graph, X)[0], X * weight + bias.detach() - weight)


def test_closed_over_tensors_in_a_gradient_keep_their_strides():
    weight = torch.arange(12.0).view(4, 3).t()
    graph = traced(vs.grad(lambda x: (x @ weight).square().sum()), X)
    assert torch.equal(evaluate(graph, X)[0], 2 * (X @ weight) @ weight.t())


def test_a_constant_made_inside_is_a_hidden_input_too():
    graph = traced(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), X)
    assert torch.equal(evaluate(graph, X)[0], X * torch.tensor([1.0, 2.0, 3.0]))


def test_a_result_that_is_closed_over():
    weight = torch.ones(3)
    assert evaluate(traced(lambda x: (x, weight), X), X)[1] is weight


def test_no_other_kind_of_tensor_is_closed_over():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    weight = vs.distribute_tensor(torch.ones(3), mesh, P())
    with pytest.raises(TraceError, match="closed-over DTensor"):
        traced(lambda x: x * weight, X)


# In-place ops.


def test_temporaries_may_be_changed_in_place():
    def fn(x):
        y = x.clone()
        y[0] += 1
        y.mul_(x).relu_()
        return y.t().contiguous().view(-1).add_(y.sum())

    graph = traced(fn, X)
    assert not [op for op in ops(graph) if "_." in op or op.endswith("_")]
    assert torch.equal(evaluate(graph, X)[0], fn(X))


def test_temporaries_may_be_changed_in_a_gradient():
    fn = vs.value_and_grad(lambda x: x.mul(2).add_(1).square().sum())
    graph = traced(fn, X)
    for ours, theirs in zip(evaluate(graph, X), fn(X)):
        assert torch.equal(ours, theirs)


def directly(x):
    y = x * 2
    x.add_(1)  # here
    return y * 2


def through_a_view(x):
    row = x.view(6)[1:3]
    row.zero_()  # here
    return x * 2


def as_the_last_thing(x):
    return x.mul_(2)  # here


def by_index(x):
    x[0] = 1  # here
    return x


@pytest.mark.parametrize("fn", [directly, through_a_view, as_the_last_thing, by_index])
def test_an_input_is_not_mutated(fn):
    with pytest.raises(TraceError, match="in-place update of the argument 'a'") as caught:
        traced(fn, X.clone())
    assert line_of(fn, "# here") in str(caught.value)
    assert "out of place" in str(caught.value)


def test_nothing_closed_over_is_mutated():
    weight = torch.ones(3)

    def fn(x):
        weight.add_(1)  # here
        return x * weight

    with pytest.raises(TraceError, match=r"closed-over tensor of shape \(3,\)") as caught:
        traced(fn, X)
    assert line_of(fn, "# here") in str(caught.value)
    assert torch.equal(weight, torch.ones(3))  # tracing has no values to add


# What needs a value.


def branches(x):
    if x.sum() > 0:  # here
        return x
    return -x


def counts(x):
    return x * int(x.max())  # here


def reads(x):
    return x * x[0, 0].item()  # here


def selects(x):
    return x[x > 2]  # here


def finds(x):
    return x.nonzero()  # here


@pytest.mark.parametrize("fn", [branches, counts, reads, selects, finds])
def test_values_are_not_there(fn):
    with pytest.raises(TraceError, match="without values") as caught:
        traced(fn, X)
    assert line_of(fn, "# here") in str(caught.value)
    assert "torch.where" in str(caught.value)


# What is known without values: what comes of constants alone.


def consecutive(x):
    places = torch.arange(3) + 1
    return x + 1 if places[0] == 1 and int(places.sum()) == 6 else x


@pytest.mark.parametrize(
    "fn",
    [consecutive, vs.grad(lambda x: (consecutive(x) * x).sum()), vs.vmap(lambda x: consecutive(x[None]))],
)
def test_constants_are_known(fn):
    assert torch.equal(evaluate(traced(fn, X), X)[0], fn(X))
    assert not torch.equal(fn(X), X)


def written(x):
    places = torch.arange(3)
    places[0].fill_(5)  # a write through a view
    return x if places[0] == 5 else -x  # here


def drawn(x):
    return x if torch.rand(()) < 2 else -x  # here


def compared(x):
    return x if consecutive(x)[0, 0] > 0 else -x  # here


@pytest.mark.parametrize("fn", [written, drawn, compared])
def test_writes_draws_and_inputs_are_not_known(fn):
    with pytest.raises(TraceError, match="without values"):
        traced(fn, X)
    with pytest.raises(TraceError, match="without values"):
        traced(vs.grad(lambda x: fn(x).sum()), X)


def test_the_users_own_errors_pass():
    with pytest.raises(RuntimeError, match="reduction dim"):
        traced(lambda a, b: a @ b, X, X)


def test_values_are_not_read_behind_the_trace_either():
    with pytest.raises(TraceError, match="without values"):
        traced(lambda a, at: a.tensor_split(at), X, torch.tensor([1]))


def test_nothing_is_sparse():
    with pytest.raises(TraceError, match="makes a tensor of the layout"):
        traced(lambda a: a.to_sparse(), X)


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_autograd_function_of_the_old_form_is_named_in_a_gradient():
    with pytest.raises(TraceError, match="setup_context"):
        traced(vs.grad(lambda a: OldStyle.apply(a).sum()), X)


def test_a_checkpoint_of_torch_is_told_of_remat():
    with pytest.raises(TraceError, match=r"vs\.remat\(fn\)"):
        traced(vs.grad(lambda a: checkpoint(torch.tanh, a, use_reentrant=False).sum()), X)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a.as_strided((3, 2), (1, 3)),
        lambda a: (a * 2).as_strided((2, 2), (1, 1), 2),
        lambda a: torch.as_strided_copy(a + 1, (2,), (4,)),
        lambda a: a.t().as_strided((2, 3), (1, 2)),
        lambda a: a.view(1, 2, 3).permute(2, 0, 1).mul(2).as_strided((4,), (1,), 1),
    ],
)
def test_strides_of_a_value_that_is_all_of_its_memory(fn):
    graph = traced(fn, X)
    assert torch.equal(evaluate(graph, X)[0], fn(X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a[1].as_strided((2,), (1,)),  # its memory starts elsewhere
        lambda a: a[:1].as_strided((2, 3), (3, 1)),  # its memory goes on
    ],
)
def test_strides_of_other_memory_are_refused(fn):
    with pytest.raises(ShardingError, match="whose elements are not all of its memory"):
        traced(fn, X)
