"""One pool of real ranks for all tests here: starting it takes longer than all of them."""

from collections.abc import Iterator

import pytest

from vescale.testing.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks
