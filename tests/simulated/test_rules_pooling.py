"""Pooling: every placement has the values of plain torch, and batch and channels are silent."""

import torch

from tests.rule_cases import Case, family, whole

aten = torch.ops.aten

IMAGE, VOLUME = whole(5, 4, 6, 8), whole(2, 5, 4, 4, 6)
SMALL, SMALL_VOLUME = whole(5, 4, 3, 4, seed=1), whole(2, 5, 2, 2, 3, seed=1)
WINDOW, CUBE = [2, 2], [2, 2, 2]
PLACES, PLACES_3D = (
    aten.max_pool2d_with_indices(IMAGE, WINDOW)[1],
    aten.max_pool3d_with_indices(VOLUME, CUBE)[1],
)
PAD_2D = (WINDOW, WINDOW, [0, 0], False, True, None)
PAD_3D = (CUBE, CUBE, [0, 0, 0], False, True, None)

CASES = [
    Case(aten.max_pool2d_with_indices, (IMAGE, [3, 3], [1, 2], [1, 1]), "0 1"),
    Case(aten.max_pool2d_with_indices, (IMAGE[0], WINDOW), "0"),
    Case(aten.max_pool3d_with_indices, (VOLUME, CUBE), "0 1"),
    Case(
        aten.max_pool2d_with_indices_backward,
        (SMALL, IMAGE, WINDOW, WINDOW, [0, 0], [1, 1], False, PLACES),
        "000 111 P..",
    ),
    Case(
        aten.max_pool3d_with_indices_backward,
        (SMALL_VOLUME, VOLUME, CUBE, CUBE, [0] * 3, [1] * 3, False, PLACES_3D),
        "000 111 P..",
    ),
    # Sums that are divided after they are made, or before.
    Case(aten.avg_pool2d, (IMAGE, [3, 3], [1, 1], [1, 1], False, False), "0 1 P", ulps=4),
    Case(aten.avg_pool2d, (IMAGE[0], WINDOW), "0 P"),
    Case(aten.avg_pool3d, (VOLUME, CUBE), "0 1 P"),
    Case(aten.avg_pool2d_backward, (SMALL, IMAGE, *PAD_2D), "00 11 P."),
    Case(aten.avg_pool3d_backward, (SMALL_VOLUME, VOLUME, *PAD_3D), "00 11 P."),
    Case(aten._adaptive_avg_pool2d, (IMAGE, [3, 5]), "0 1 P", ulps=4),
    Case(aten._adaptive_avg_pool3d, (VOLUME, [2, 2, 5]), "0 1 P", ulps=4),
    Case(aten._adaptive_avg_pool2d_backward, (SMALL, IMAGE), "00 11 P."),
    Case(aten._adaptive_avg_pool3d_backward, (SMALL_VOLUME, VOLUME), "00 11 P."),
    Case(aten.adaptive_max_pool2d, (IMAGE, [3, 5]), "0 1"),
    Case(aten.adaptive_max_pool3d, (VOLUME, [2, 2, 5]), "0 1"),
    Case(aten.adaptive_max_pool2d_backward, (SMALL, IMAGE, PLACES), "000 111 P.."),
    Case(aten.adaptive_max_pool3d_backward, (SMALL_VOLUME, VOLUME, PLACES_3D), "000 111 P.."),
    Case(aten.max_unpool2d, (SMALL, PLACES, [6, 8]), "00 11 P."),
    Case(aten.max_unpool3d, (SMALL_VOLUME, PLACES_3D, [4, 4, 6], CUBE, [0, 0, 0]), "00 11 P."),
]


test_values, test_promises, test_two_axes = family(CASES, free=(2, 4))
