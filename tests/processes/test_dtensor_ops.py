"""DTensors outside programs on real ranks: the values of plain torch, and the bits of simulated ranks."""

import pytest
import torch

import vescale as vs
from tests.dtensor_cases import CASES, MESH_AXES, run_case
from tests.processes.test_world import world_mesh

pytestmark = pytest.mark.processes


def run_here(name):
    return run_case(name, world_mesh(MESH_AXES))


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_bits_of_simulated_ranks(pool, name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    simulated = run_case(name, vs.make_mesh(dict(MESH_AXES), backend="simulated"))
    torch.set_num_threads(threads)
    for rank, pieces in enumerate(pool.run(run_here, name)):
        expected = [piece for at, piece in simulated if at == rank]
        assert len(pieces) == len(expected)
        for (_, ours), theirs in zip(pieces, expected, strict=True):
            assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))


def saved_and_loaded(folder):
    mesh = world_mesh(MESH_AXES)
    x = vs.distribute_tensor(torch.arange(48.0).view(8, 6), mesh, vs.P(tp=vs.Shard(1)))
    path = f"{folder}/{mesh.rank}.pt"
    torch.save(x, path)
    loaded = torch.load(path)
    return loaded.mesh is mesh, loaded.layout is x.layout, (loaded - x).abs().sum().item()


def test_pickling(pool, tmp_path):
    assert pool.run(saved_and_loaded, str(tmp_path)) == [(True, True, 0.0)] * 4
