"""Convolutions: batch and channels in every placement, also grouped and transposed, forward and backward."""

import torch

import vescale as vs
from tests.rule_cases import Case, family, mesh_of, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

IMAGE, LINE = whole(4, 6, 5, 7), whole(5, 6, 9)
# (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
PLAIN = (IMAGE, whole(8, 6, 3, 3), whole(8), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
STRIDED = (LINE, whole(4, 6, 3), None, [2], [0], [2], False, [0], 1)
GROUPED = (IMAGE, whole(12, 1, 3, 3), whole(12), [1, 1], [0, 0], [1, 1], False, [0, 0], 6)
TWO_GROUPS = (LINE, whole(12, 3, 3), whole(12), [1], [1], [1], False, [0], 2)
TRANSPOSED = (IMAGE, whole(6, 4, 2, 2), whole(4), [2, 2], [0, 0], [1, 1], True, [1, 1], 1)
TRANSPOSED_GROUPS = (LINE, whole(6, 2, 3), None, [2], [1], [1], True, [0], 6)
VOLUME = (whole(2, 4, 3, 4, 3), whole(2, 4, 2, 2, 2), whole(2), [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)


def backward(args, mask=(True, True, True)):
    """The backward op of a forward call's arguments."""
    x, weight, _, *rest = args
    gradient = whole(*aten.convolution(*args).shape, seed=2)
    sizes = [gradient.shape[1]] if mask[2] else None
    return gradient, x, weight, sizes, *rest, list(mask)


CASES = [
    # batch; output channels; input channels, whose sum has the bias once
    Case(aten.convolution, PLAIN, "0.. .00 11. P.P .PP"),
    Case(aten.convolution, STRIDED, "0. .0 11 P. .P"),
    Case(aten.convolution, TRANSPOSED, "0.. .10 10. P.P"),
    Case(aten.convolution, VOLUME, "0.. .00 11."),
    # whole groups at a time
    Case(aten.convolution, GROUPED, "0.. P.P", even="100"),
    Case(aten.convolution, TWO_GROUPS, "0.. P.P"),
    Case(aten.convolution, TRANSPOSED_GROUPS, "0. P.", even="10"),
    Case(aten._convolution, (*PLAIN, False, False, False, False), "0.. .00 11."),
    Case(aten.convolution_backward, backward(PLAIN), "00. 1.0", even=".11"),
    Case(aten.convolution_backward, backward(PLAIN, (True, False, False)), "00. 1.0 .11 P.."),
    Case(aten.convolution_backward, backward(PLAIN, (False, True, False)), "00. 1.0 .11 P.."),
    Case(aten.convolution_backward, backward(STRIDED, (True, True, False)), "00. 1.0 .11"),
    Case(aten.convolution_backward, backward(GROUPED), "00.", even="110"),
    Case(aten.convolution_backward, backward(TWO_GROUPS), "00."),
    Case(aten.convolution_backward, backward(TRANSPOSED), "00. 1.1", even=".10"),
    Case(aten.convolution_backward, backward(TRANSPOSED_GROUPS, (True, True, False)), "00.", even="110"),
    Case(aten.convolution_backward, backward(VOLUME), "00. 1.0", even=".11"),
]


test_values, test_promises, test_two_axes = family(CASES, ranks=(3, 2))


def test_each_weight_is_reduced_once():
    """Data parallel: of two convolutions only the gradients of weights and biases travel."""
    mesh = mesh_of(2)

    def loss(parameters, x):
        x = torch.nn.functional.conv2d(x, parameters["w1"], parameters["b1"], padding=1).relu()
        return torch.nn.functional.conv2d(x, parameters["w2"], groups=2).square().sum()

    parameters = {"w1": whole(4, 6, 3, 3), "b1": whole(4), "w2": whole(4, 2, 3, 3)}
    step = vs.parallelize(vs.value_and_grad(loss), vs.Plan(mesh))
    image = vs.distribute_tensor(IMAGE, mesh, P(dp=Shard(0)))
    value, gradients = step(parameters, image)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    expected = loss(leaves, IMAGE)
    expected.backward()
    assert torch.equal(value.full_tensor(), expected.detach())
    for name, gradient in gradients.items():
        assert torch.equal(gradient.full_tensor(), leaves[name].grad)
    moves = step.lower(parameters, image).collectives()
    assert [move.kind for move in moves] == ["all_reduce"] * 4


def test_a_channel_parallel_pair_is_summed_once():
    """Tensor parallel: output channels of the first, input channels of the second, one sum at the end."""
    mesh = mesh_of(2)

    def block(x, w1, b1, w2, b2):
        hidden = torch.nn.functional.conv2d(x, w1, b1).relu()
        return torch.nn.functional.conv2d(hidden, w2, b2)

    tensors = IMAGE, whole(8, 6, 2, 2), whole(8), whole(4, 8, 2, 2), whole(4)
    specs = P(), P(dp=Shard(0)), P(dp=Shard(0)), P(dp=Shard(1)), P()
    run = vs.parallelize(block, vs.Plan(mesh))
    operands = [vs.distribute_tensor(tensor, mesh, spec) for tensor, spec in zip(tensors, specs)]
    assert torch.equal(run(*operands).full_tensor(), block(*tensors))
    (move,) = run.lower(*operands).collectives()
    assert move.kind == "all_reduce"
