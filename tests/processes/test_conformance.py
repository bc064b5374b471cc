"""The same over gloo: each rank ends with the bits that its simulated counterpart has."""

import pytest

from tests.conformance import SHAPES, digest, every_pair, move, move_here

pytestmark = pytest.mark.processes


def compare(pool, cases, batch=500):
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        answers = pool.run(move_here, part)
        for number, case in enumerate(part):
            expected = [digest(tensor) for tensor in move(case)]
            assert [answers[rank][number] for rank in range(len(expected))] == expected, case


@pytest.mark.parametrize("size", SHAPES)
def test_all_pairs_on_one_axis(pool, size):
    compare(pool, list(every_pair(1, size)))
