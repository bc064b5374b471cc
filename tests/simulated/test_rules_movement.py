"""Movement within dims, padding, copies, triangles: values of plain torch, and other dims are silent."""

import torch

import vescale as vs
from tests.rule_cases import Case, family, mesh_of, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

X, CUBE, IMAGE = whole(8, 6), whole(4, 8, 6), whole(4, 6, 5, 7)
LINE, VOLUME = whole(4, 6, 5), whole(2, 4, 3, 4, 5)
CHANNELS = whole(3, 24, 4, 2)
PAD_1D, PAD_2D, PAD_3D = [1, 2], [1, 2, 0, 1], [1, 0, 2, 1, 1, 1]
WINDOW = ([3, 2], [1, 1], [1, 0], [2, 1])


def padded(image, pad):
    return whole(*torch.constant_pad_nd(image, pad).shape, seed=1)


CASES = [
    Case(aten.flip, (CUBE, [1]), "0 2 P"),
    Case(aten.flip, (CUBE, [0, -1]), "1 P"),
    Case(aten.roll, (CUBE, [3], [1]), "0 2 P"),
    Case(aten.roll, (X, [3]), "P"),
    Case(aten.rot90, (CUBE, 1, [1, 2]), "0 P"),
    Case(aten.rot90, (CUBE, 2, [0, -1]), "1 P"),
    Case(aten.linalg_cross, (whole(4, 3, 6), whole(4, 3, 1)), "0. 2. 00", kwargs={"dim": 1}),
    Case(aten.linalg_cross, (whole(8, 3), whole(8, 3, seed=1)), "00 P. .P"),
    Case(aten.constant_pad_nd, (CUBE, [1, 2]), "0 1 P"),
    Case(aten.constant_pad_nd, (CUBE, [0, 0, -1, 2], 1.5), "0 2"),
    Case(aten.reflection_pad1d, (LINE, PAD_1D), "0 1 P"),
    Case(aten.reflection_pad1d, (LINE[0], PAD_1D), "0 P"),
    Case(aten.reflection_pad2d, (IMAGE, PAD_2D), "0 1 P"),
    Case(aten.reflection_pad3d, (VOLUME, PAD_3D), "0 1 P"),
    Case(aten.replication_pad1d, (LINE, PAD_1D), "0 1 P"),
    Case(aten.replication_pad2d, (IMAGE, PAD_2D), "0 1 P"),
    Case(aten.replication_pad3d, (VOLUME, PAD_3D), "0 1 P"),
    Case(aten.reflection_pad1d_backward, (padded(LINE, PAD_1D), LINE, PAD_1D), "00 11 P."),
    Case(aten.reflection_pad2d_backward, (padded(IMAGE, PAD_2D), IMAGE, PAD_2D), "00 11 P."),
    Case(aten.reflection_pad3d_backward, (padded(VOLUME, PAD_3D), VOLUME, PAD_3D), "00 11 P."),
    Case(aten.replication_pad1d_backward, (padded(LINE, PAD_1D), LINE, PAD_1D), "00 11 P."),
    Case(aten.replication_pad2d_backward, (padded(IMAGE, PAD_2D), IMAGE, PAD_2D), "00 11 P."),
    Case(aten.replication_pad3d_backward, (padded(VOLUME, PAD_3D), VOLUME, PAD_3D), "00 11 P."),
    # A repeated dim is interleaved, which an uneven one can't be.
    Case(aten.repeat, (X, [1, 3]), "0 P", even="1"),
    Case(aten.repeat, (X, [2, 1, 1]), "0 1 P"),
    Case(aten.repeat, (X, [2, 2, 2]), "P", even="0 1"),
    Case(aten.pixel_shuffle, (CHANNELS, 2), "0 P", even="1 2"),
    Case(aten.pixel_unshuffle, (whole(3, 4, 6, 4), 2), "0 P", even="1"),
    Case(aten.channel_shuffle, (CHANNELS, 3), "0 2 3 P"),
    Case(aten.im2col, (IMAGE, *WINDOW), "0 P", even="1"),
    Case(aten.im2col, (IMAGE[0], *WINDOW), "P", even="0"),
    Case(aten.col2im, (whole(4, 36, 18), [5, 7], *WINDOW), "0 P"),
    Case(aten.col2im, (whole(36, 18), [5, 7], *WINDOW), "P"),
    # The offset of a rank's rows and columns
    Case(aten.tril, (CUBE,), "0 1 2 P"),
    Case(aten.triu, (X, 1), "0 1 P"),
    Case(aten.tril, (X, -2), "0 1 P"),
    Case(aten.trace, (X,), "0 1 P"),
]


test_values, test_promises, test_two_axes = family(CASES, examples=60)


def test_a_block_of_a_matrix_has_its_own_diagonal():
    mesh = mesh_of(2, 3)
    placed = vs.distribute_tensor(X, mesh, P(dp=Shard(0), tp=Shard(1)))
    for op in (torch.tril, torch.triu):
        run = vs.parallelize(lambda x: op(x, 1), vs.Plan(mesh))  # noqa: B023
        assert torch.equal(run(placed).full_tensor(), op(X, 1))
        assert not run.lower(placed).collectives()
