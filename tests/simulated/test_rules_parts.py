"""Parts put back, diagonals, windows: values of plain torch; a part of a sharded dim is written in place."""

import torch

import vescale as vs
from tests.rule_cases import Case, family, mesh_of, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

X, CUBE = whole(8, 6), whole(4, 8, 6)

CASES = [
    Case(aten.select_backward, (whole(4, 6), [4, 8, 6], 1, 3), "0 1 P"),
    Case(aten.select_backward, (whole(6), [8, 6], 0, -1), "0 P"),
    Case(aten.slice_backward, (whole(4, 3, 6), [4, 8, 6], 1, 2, 8, 2), "0 2 P"),
    Case(aten.slice_backward, (CUBE, [4, 8, 6], 1, 0, 8, 1), "0 1 2 P"),
    Case(aten.select_scatter, (CUBE, whole(4, 6), 1, 5), "00 21 1. PP"),
    Case(aten.select_scatter, (X, whole(6), 0, -1), "10 0. PP"),
    Case(aten.slice_scatter, (CUBE, whole(4, 3, 6), 1, 1, 7, 2), "00 22 1. PP"),
    Case(aten.slice_scatter, (X, whole(5, 6), 0, -6, -1), "11 0. PP"),
    Case(aten.slice_scatter, (X, whole(8, 6, seed=1)), "11 0. PP"),
    Case(aten.diagonal, (CUBE, 1, 1, 2), "0 P"),
    Case(aten.diagonal, (whole(4, 6, 5, 3), -1, -1, 0), "1 2 P"),
    Case(aten.diagonal_backward, (whole(4, 5), [4, 8, 6], 1, 1, 2), "0 P"),
    Case(aten.diagonal_scatter, (CUBE, whole(4, 5), 1, 1, 2), "00 PP"),
    Case(aten.diag_embed, (CUBE,), "0 1 P"),
    Case(aten.diag_embed, (CUBE, -1, 0, 2), "0 1 P"),
    Case(aten.unfold, (CUBE, 1, 3, 2), "0 2 P"),
    Case(aten.unfold_backward, (whole(4, 3, 6, 3), [4, 8, 6], 1, 3, 2), "0 2 P"),
]


test_values, test_promises, test_two_axes = family(CASES, examples=60)


def test_an_update_of_a_sharded_sequence_stays_in_place():
    """What a key-value cache does at each token: nothing of the cache travels."""
    mesh = mesh_of(4)

    def update(cache, new):
        cache = cache.clone()
        cache[:, 5:7] = new
        return cache

    cache, new = whole(2, 12, 3), whole(2, 2, 3)
    placed = vs.distribute_tensor(cache, mesh, P(dp=Shard(1)))
    run = vs.parallelize(update, vs.Plan(mesh))
    assert torch.equal(run(placed, new).full_tensor(), update(cache, new))
    assert not [move for move in run.lower(placed, new).collectives() if "[2,12,3]" in move.value]
