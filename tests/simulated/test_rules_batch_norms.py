"""Batch, group and layer norms: statistics of the global batch, values of plain torch, silent channels."""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from tests.graphs import ops, traced
from tests.rule_cases import Case, family, mesh_of, normal, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

IMAGE, GRADIENT = whole(6, 8, 3, 2), whole(6, 8, 3, 2, seed=1)
WEIGHT, BIAS, MEAN, VARIANCE = whole(8), whole(8, seed=1), whole(8, seed=2), whole(8, low=1, high=9)
TRAINING = aten.native_batch_norm(IMAGE, WEIGHT, BIAS, None, None, True, 0.1, 1e-5)
EVAL = aten.native_batch_norm(IMAGE, WEIGHT, BIAS, MEAN, VARIANCE, False, 0.1, 1e-5)
GROUPS = aten.native_group_norm(IMAGE, WEIGHT, BIAS, 6, 8, 6, 4, 1e-5)
LAYERS = aten.native_layer_norm(IMAGE, [3, 2], None, None, 1e-5)
SIZE = (6, 8, 6)

CASES = [
    # Sums of many squares, made in another order than one device's, and divided.
    Case(aten.native_batch_norm, (IMAGE, WEIGHT, BIAS, None, None, True, 0.1, 1e-5), "100", ulps=8),
    Case(aten._native_batch_norm_legit, (IMAGE, WEIGHT, BIAS, True, 0.1, 1e-5), "100", ulps=8),
    Case(aten._native_batch_norm_legit, (whole(6, 8), None, None, True, 0.1, 1e-5), "1", ulps=8),
    Case(
        aten._native_batch_norm_legit_functional,
        (IMAGE, WEIGHT, BIAS, MEAN, VARIANCE, True, 0.1, 1e-5),
        "10000",
        ulps=8,
    ),
    Case(
        aten.native_batch_norm,
        (IMAGE, WEIGHT, BIAS, MEAN, VARIANCE, False, 0.1, 1e-5),
        "0.... 10000 2....",
        ulps=2,
    ),
    Case(
        aten._native_batch_norm_legit_no_training,
        (IMAGE, None, None, MEAN, VARIANCE, 0.1, 1e-5),
        "0.. 100 3..",
        ulps=2,
    ),
    Case(
        aten.native_batch_norm_backward,
        (GRADIENT, IMAGE, WEIGHT, None, None, *TRAINING[1:], True, 1e-5, [True, True, True]),
        "11000",
        ulps=16,
    ),
    Case(
        aten.native_batch_norm_backward,
        (GRADIENT, IMAGE, None, None, None, *TRAINING[1:], True, 1e-5, [True, False, False]),
        "1100",
        ulps=16,
    ),
    Case(
        aten.native_batch_norm_backward,
        (GRADIENT, IMAGE, WEIGHT, MEAN, VARIANCE, *EVAL[1:], False, 1e-5, [True, True, True]),
        "00..... 11000.. 22.....",
        ulps=8,
    ),
    Case(aten.native_group_norm, (IMAGE, WEIGHT, BIAS, *SIZE, 4, 1e-5), "0..", even="100", ulps=2),
    Case(aten.native_group_norm, (IMAGE, None, None, *SIZE, 8, 1e-5), "0 1", ulps=2),
    Case(
        aten.native_group_norm_backward,
        (GRADIENT, IMAGE, *GROUPS[1:], WEIGHT, *SIZE, 4, [True, True, True]),
        "0000.",
        even="11110",
        ulps=8,
    ),
    Case(
        aten.native_group_norm_backward,
        (GRADIENT, IMAGE, *GROUPS[1:], None, *SIZE, 4, [True, False, False]),
        "0000",
        even="1111",
        ulps=8,
    ),
    Case(aten.native_layer_norm, (IMAGE, [3, 2], None, None, 1e-5), "0 1", ulps=2),
    Case(
        aten.native_layer_norm_backward,
        (GRADIENT, IMAGE, [3, 2], *LAYERS[1:], None, None, [True, False, False]),
        "0000 1111",
        ulps=2,
    ),
]


test_values, test_promises, test_two_axes = family(CASES, free=(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sharded_batch_has_the_statistics_of_all_of_it(dtype):
    """Two reductions forward and two backward, of one number a channel."""
    mesh = mesh_of(3)

    def loss(parameters, x, direction):
        return (F.batch_norm(x, None, None, *parameters, training=True) * direction).sum()

    parameters = normal(8).to(dtype), normal(8, seed=1).to(dtype)
    image, direction = normal(6, 8, 3, 2).to(dtype), normal(6, 8, 3, 2, seed=1).to(dtype)
    step = vs.parallelize(vs.grad(loss), vs.Plan(mesh))
    operands = [vs.distribute_tensor(x, mesh, P(dp=Shard(0))) for x in (image, direction)]
    found = step(parameters, *operands)
    leaves = [x.double().requires_grad_() for x in parameters]
    loss(leaves, image.double(), direction.double()).backward()
    for ours, leaf in zip(found, leaves):
        error = (ours.full_tensor().double() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error < 16 * torch.finfo(dtype).eps
    moves = step.lower(parameters, *operands).collectives()
    assert {(move.kind, move.value.partition("[")[2]) for move in moves} == {("all_reduce", "8]")}
    assert len(moves) == 4


def test_instance_norm_follows_a_sharded_batch():
    mesh = mesh_of(2)
    image, weight = normal(6, 8, 3, 2), normal(8)
    run = vs.parallelize(lambda x, weight: F.instance_norm(x, weight=weight), vs.Plan(mesh))
    placed = vs.distribute_tensor(image, mesh, P(dp=Shard(0)))
    expected = F.instance_norm(image, weight=weight)
    assert torch.allclose(run(placed, weight).full_tensor(), expected, rtol=1e-14, atol=1e-14)
    assert not run.lower(placed, weight).collectives()


def trained(model, parameters, buffers, x):
    buffers = {name: buffer.clone() for name, buffer in buffers.items()}
    result = torch.func.functional_call(model, (parameters, buffers), x)
    return result, buffers


@pytest.mark.parametrize("spec", [P(), P(dp=Shard(0)), P(dp=Shard(1))], ids=str)
def test_running_statistics_are_results(spec):
    """Cloned inside and returned, buffers are what training would have made of them; the caller's stay."""
    mesh = mesh_of(2)
    model = torch.nn.BatchNorm2d(8, dtype=torch.float64)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    run = vs.parallelize(lambda *args: trained(model, *args), vs.Plan(mesh))
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    result, new = run(parameters, buffers, vs.distribute_tensor(IMAGE, mesh, spec))
    assert all(torch.equal(buffers[name], before[name]) for name in before)
    expected = model(IMAGE)
    assert torch.allclose(result.full_tensor(), expected, rtol=1e-14, atol=1e-14)
    for name, buffer in model.named_buffers():
        assert torch.allclose(new[name].full_tensor(), buffer, rtol=1e-14, atol=1e-14)
        assert name == "num_batches_tracked" or not torch.equal(buffer, before[name])


def test_a_hidden_write_is_refused():
    """The op's schema doesn't say that it writes, and torch counts no version for it."""
    mesh = mesh_of(2)
    mean, variance = torch.zeros(8).double(), torch.ones(8).double()
    with pytest.raises(vs.VescaleError, match="running statistics"):
        vs.parallelize(lambda x, m, v: F.batch_norm(x, m, v, training=True), vs.Plan(mesh))(
            IMAGE, mean, variance
        )
    with pytest.raises(vs.VescaleError, match="running statistics"):
        vs.parallelize(lambda x: F.batch_norm(x, mean, variance[:], training=True), vs.Plan(mesh))(IMAGE)
    assert torch.equal(mean, torch.zeros(8).double())


def test_forms_that_write_become_values():
    """cudnn's form and the one that says what it writes, forward and backward."""

    def cudnn(x, gradient, weight, bias, mean, variance):
        mean, variance = mean.clone(), variance.clone()
        y, *saved = aten.cudnn_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)
        reserve = saved.pop()
        return (
            y,
            mean,
            *aten.cudnn_batch_norm_backward(x, gradient, weight, mean, variance, *saved, 1e-5, reserve),
        )

    def native(x, gradient, weight, bias, mean, variance):
        mean, variance = mean.clone(), variance.clone()
        y, *saved = aten._native_batch_norm_legit(x, weight, bias, mean, variance, True, 0.1, 1e-5)
        mask = [True, True, True]
        return (
            y,
            mean,
            *aten.native_batch_norm_backward(gradient, x, weight, mean, variance, *saved, True, 1e-5, mask),
        )

    tensors = IMAGE, GRADIENT, WEIGHT, BIAS, MEAN, VARIANCE
    for fn in (cudnn, native):
        wanted = {"_native_batch_norm_legit_functional", "native_batch_norm_backward"}
        assert wanted <= set(ops(traced(fn, *tensors)))
        mesh = mesh_of(2)
        found = vs.parallelize(fn, vs.Plan(mesh))(*tensors)
        for ours, theirs in zip(found, native(*tensors), strict=True):
            assert torch.equal(ours.full_tensor(), theirs)
