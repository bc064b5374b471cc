"""8-bit AdamW on real ranks: the codes, scales and parameters of simulated ones, of each rank."""

import pytest
import torch

import vescale as vs
from tests import adamw_8bit_cases as cases
from tests.processes.test_world import world_mesh
from vescale import _tree

pytestmark = pytest.mark.processes


def pieces(mesh, case):
    """What each rank here holds after some steps, with rounding at random of what is cut over two axes."""
    key = vs.rng.key(5) if len(mesh.shape) > 1 else None
    params, state, _, _ = cases.run(mesh, case, key=key, names=("mat", "tall" if key is None else "small"))
    return [[leaf.to_local(rank) for leaf in _tree.leaves((params, state))] for rank in mesh.local_ranks]


def run_here(case):
    mesh = world_mesh(tuple(cases.CASES[case][0].items()))
    return pieces(mesh, case)[0] if mesh.local_ranks else None


@pytest.mark.parametrize("case", ["elements of a ragged cut", "fsdp and tp"])
def test_the_bits_are_those_of_simulated_ranks(pool, case):
    mesh = vs.make_mesh(cases.CASES[case][0], backend="simulated")
    expected = pieces(mesh, case)
    answers = pool.run(run_here, case)
    for rank in mesh.local_ranks:
        assert all(torch.equal(a, b) for a, b in zip(answers[rank], expected[rank], strict=True))
