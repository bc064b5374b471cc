"""A convolutional network, data parallel: the values of one device, and nothing travels but what must."""

import torch
import torch.nn.functional as F
from torch import nn

import vescale as vs
from tests.rule_cases import mesh_of, normal
from vescale.spmd.placements import P, Shard


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.norm2 = nn.BatchNorm2d(channels, track_running_stats=False)

    def forward(self, x):
        return x + F.silu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = F.interpolate(F.max_pool2d(block(x), 2), scale_factor=2, mode="bilinear")
        x = F.pixel_shuffle(F.pixel_unshuffle(self.up(F.pad(x, (1, 1, 1, 1), "reflect")), 2), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_only_statistics_and_gradients_travel():
    mesh = mesh_of(2)
    torch.manual_seed(0)
    network = Network().double()
    parameters = dict(network.named_parameters())

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(network, parameters, x), y)

    x, y = normal(4, 3, 8, 8), torch.tensor([0, 4, 2, 2])
    step = vs.parallelize(vs.value_and_grad(loss), vs.Plan(mesh))
    placed = [vs.distribute_tensor(tensor, mesh, P(dp=Shard(0))) for tensor in (x, y)]
    value, gradients = step(parameters, *placed)
    expected = loss(parameters, x, y)
    expected.backward()
    assert torch.allclose(value.full_tensor(), expected.detach(), rtol=1e-14, atol=0)
    for name, parameter in parameters.items():
        error = (gradients[name].full_tensor() - parameter.grad).abs().max()
        assert error <= 1e-13 * max(parameter.grad.abs().max().item(), 1), name
    lowered = step.lower(parameters, *placed)
    moves = lowered.collectives()
    assert {move.kind for move in moves} == {"all_reduce"}
    # A batch norm reduces its mean and its variance, and in the backward two sums, which are also the
    # gradients of its weight and bias. The loss reduces its sum and the number of targets.
    norms = len(network.blocks)
    assert len(moves) == 4 * norms + (len(parameters) - 2 * norms) + 2
