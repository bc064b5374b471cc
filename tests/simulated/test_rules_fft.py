"""Fourier transforms: values of plain torch; dims that aren't transformed are silent."""

import pytest
import torch
from hypothesis import given, settings

from tests.rule_cases import Case, check, check_all, check_free, mesh_of, names, on_two_axes, whole

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


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_values(case):
    check_all(case, mesh_of(3))


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_promises(case):
    check_free(case, 2)
    check_free(case, 3)


@settings(max_examples=30)
@given(on_two_axes(CASES))
def test_two_axes(drawn):
    check(*drawn, mesh_of(2, 2))
