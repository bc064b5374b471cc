"""Torch's own random ops in programs on a cuda mesh: the bits of one GPU.

python -m pytest tests/gpu/test_torch_draws.py
"""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from vescale import P, Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda device to compare with"),
]

DRAWS = {
    "rand": lambda x: torch.rand(7, 6, device="cuda") + x,
    "randn_like": lambda x: torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "randint": lambda x: torch.randint(9, (7, 6), device="cuda") + x,
    "randperm": lambda x: torch.randperm(6, device="cuda") + x,
    "dropout": lambda x: F.dropout(x, 0.3),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("spec", [P(), P(dp=Shard(0)), P(dp=Shard(1))], ids=str)
def test_a_program_draws_what_one_device_draws(name, spec):
    mesh = vs.make_mesh({"dp": 2}, device="cuda", backend="simulated")
    x = torch.linspace(0.01, 1, 42, device="cuda").view(7, 6)
    run = vs.parallelize(DRAWS[name], vs.Plan(mesh))
    placed = vs.distribute_tensor(x, mesh, spec)
    torch.manual_seed(3)
    expected, state = [DRAWS[name](x) for _ in range(2)], torch.cuda.get_rng_state()
    torch.manual_seed(3)
    for right in expected:
        assert torch.equal(run(placed).full_tensor(), right)
    assert torch.equal(torch.cuda.get_rng_state(), state)
