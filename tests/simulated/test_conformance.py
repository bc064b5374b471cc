"""Every pair of placements on one to three axes: a sample; `make conformance` does them all."""

import pytest

from tests.conformance import MESHES, SHAPES, check, every_pair, move, sampled


def sweep(cases):
    count = 0
    for case in cases:
        check(case, move(case))
        count += 1
    return count


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("axes", MESHES)
def test_a_sample_of_all_pairs(axes, size):
    assert sweep(every_pair(axes, size) if axes == 1 else sampled(axes, size, 1)) >= 25
