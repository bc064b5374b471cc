"""vs.init on real ranks: the bits of plain torch, and each rank's memory is its shards and one parameter."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale as vs
from tests.processes.test_world import world_mesh
from vescale import P, RaggedShard, Shard

pytestmark = pytest.mark.processes

WIDTH, LAYERS = 768, 20
ONE = 4 * WIDTH * WIDTH


def make():
    """Initialised twice, as big models are: by the layers, then by the model."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)
    for layer in list(model)[::2]:
        layer.weight.data.mul_(0.5)
    return model


def resident(what):
    """Bytes of this process's memory, now (VmRSS) or at most since it was last asked for (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if what in line)
    return 1024 * int(line.split()[1])


def build():
    """The peak above what there was before, and checksums of the shards."""
    mesh = world_mesh((("dp", 4),))
    plan = vs.Plan(mesh, {"[02].weight": P(dp=RaggedShard((0,), (1, 1, 1, 1))), ".*": P(dp=Shard(0))})
    vs.init(nn.Linear, 4, 4, plan=vs.Plan(mesh), seed=0)  # what is imported and allocated once
    # M_MMAP_THRESHOLD: glibc gives freed tensors back at once, so that what is resident is in use.
    ctypes.CDLL(None).mallopt(-3, ONE // 16)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    model = vs.init(make, plan=plan, seed=3)
    peak = resident("VmHWM") - before
    state = torch.get_rng_state()
    return peak, [p.locals[0][:2].clone() for p in model.parameters()], state


def test_memory_and_bits(pool):
    torch.manual_seed(3)
    plain = make()
    after = torch.get_rng_state()
    for rank, (peak, pieces, state) in enumerate(pool.run(build)):
        assert torch.equal(state, after)
        start = rank * WIDTH // 4
        for piece, p in zip(pieces, plain.parameters(), strict=True):
            assert torch.equal(piece, p[start : start + 2])
        # One whole parameter, and a margin for the allocator and the generator's states; the model is 20.
        assert peak < LAYERS * ONE / 4 + 3 * ONE, peak / ONE


def other_seeds():
    mesh = world_mesh((("dp", 4),))
    torch.manual_seed(torch.distributed.get_rank() // 3)
    try:
        vs.init(nn.Linear, 4, 4, plan=vs.Plan(mesh))
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_ranks_that_start_from_other_states_are_told(pool):
    for text in pool.run(other_seeds):
        assert "the default generator's state" in text


def trained(mesh):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    plan = vs.Plan(mesh, {"0.weight": P(dp=Shard(0))}, {"input": P(dp=Shard(0))})
    model = vs.parallelize(net, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 2, 64).view(8, 8).sin()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [t.full_tensor() for t in model.state_dict().values()]


def trained_here():
    return trained(world_mesh((("dp", 4),)))


def test_a_module_trains_to_the_bits_of_simulated_ranks(pool):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = trained(vs.make_mesh({"dp": 4}, backend="simulated"))
    torch.set_num_threads(threads)
    for found in pool.run(trained_here):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
