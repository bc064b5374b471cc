"""Resampling: values of plain torch; batch and channels, and the places of a sampler, are silent."""

import torch

from tests.rule_cases import Case, family, whole

aten = torch.ops.aten

SOURCES = {1: whole(4, 6, 4), 2: whole(4, 6, 4, 3), 3: whole(4, 6, 2, 3, 2)}
TARGETS = {dims: [2 * size for size in source.shape[2:]] for dims, source in SOURCES.items()}
GRID, GRID_3D = whole(4, 5, 2, 2) / 4, whole(4, 5, 2, 3, 3) / 4
IMAGE, VOLUME = SOURCES[2], SOURCES[3]
SAMPLED, SAMPLED_3D = whole(4, 6, 5, 2), whole(4, 6, 5, 2, 3)

# op, number of dims, arguments after the sizes
KINDS = [
    *((f"upsample_nearest{dims}d", dims, ()) for dims in (1, 2, 3)),
    *((f"_upsample_nearest_exact{dims}d", dims, ()) for dims in (1, 2, 3)),
    ("upsample_linear1d", 1, (False,)),
    ("upsample_bilinear2d", 2, (True,)),
    ("upsample_trilinear3d", 3, (False,)),
    ("upsample_bicubic2d", 2, (False,)),
    ("_upsample_bilinear2d_aa", 2, (False,)),
    ("_upsample_bicubic2d_aa", 2, (False,)),
]

CASES = [
    *(
        Case(getattr(aten, name), (SOURCES[dims], TARGETS[dims], *rest), "0 1 P", ulps=4)
        for name, dims, rest in KINDS
    ),
    *(
        Case(
            getattr(aten, f"{name}_backward"),
            (whole(4, 6, *TARGETS[dims]), TARGETS[dims], list(SOURCES[dims].shape), *rest),
            "0 1 P",
            ulps=4,
        )
        for name, dims, rest in KINDS
    ),
    Case(aten.grid_sampler_2d, (IMAGE, GRID, 0, 0, False), "00 1. .1 .2 P.", ulps=4),
    Case(aten.grid_sampler_3d, (VOLUME, GRID_3D, 0, 1, True), "00 1. .3 P.", ulps=4),
    *(
        Case(aten.grid_sampler_2d_backward, (SAMPLED, IMAGE, GRID, 0, 0, False, mask), "000 11. 2.1", ulps=4)
        for mask in ([True, True], [False, True])
    ),
    Case(
        aten.grid_sampler_3d_backward,
        (SAMPLED_3D, VOLUME, GRID_3D, 0, 0, False, [True, True]),
        "000 11.",
        ulps=4,
    ),
    Case(aten.affine_grid_generator, (whole(4, 2, 3), [4, 6, 5, 7], False), "0 P", ulps=4),
    Case(aten.affine_grid_generator, (whole(4, 3, 4), [4, 6, 2, 3, 4], True), "0 P", ulps=4),
]


test_values, test_promises, test_two_axes = family(CASES)
