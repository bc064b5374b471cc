"""Fourier transforms: values of plain torch; dims that aren't transformed are silent."""

import torch

from tests.rule_cases import Case, family, whole

aten = torch.ops.aten

REAL = whole(4, 6, 5)
COMPLEX = torch.complex(REAL, whole(4, 6, 5, seed=1))

CASES = [
    Case(aten._fft_r2c, (REAL, [2], 0, True), "0 1 P", ulps=16),
    Case(aten._fft_r2c, (REAL, [0, 1], 1, False), "2 P", ulps=16),
    Case(aten._fft_c2c, (COMPLEX, [1], 0, True), "0 2", ulps=16),
    Case(aten._fft_c2c, (COMPLEX, [0, 2], 2, False), "1", ulps=16),
    Case(aten._fft_c2r, (COMPLEX, [2], 2, 8), "0 1", ulps=16),
    Case(aten._fft_c2r, (COMPLEX, [0, 1], 0, 10), "2", ulps=16),
]


test_values, test_promises, test_two_axes = family(CASES, examples=30)
