"""Draws have their distributions: Kolmogorov-Smirnov and chi-square, with numpy alone.

The sample is 2e5 numbers in the default suite and 1e7 in the slow one. Keys are fixed, so a test passes or
fails for good; its bound is the 0.001 quantile.
"""

import math

import numpy
import pytest
import torch

from vescale.rng import (
    bernoulli,
    bits,
    exponential,
    fold_in,
    gumbel,
    key,
    normal,
    randint,
    split,
    truncated_normal,
    uniform,
)

SAMPLES = [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)]


def kolmogorov_smirnov(sample, cdf):
    """sqrt(n) times the largest distance of the empirical distribution; 1.95 has p = 0.001."""
    at = cdf(sample.double().sort().values).numpy()
    n = len(at)
    above = (numpy.arange(1, n + 1) / n - at).max()
    below = (at - numpy.arange(n) / n).max()
    return max(above, below) * math.sqrt(n)


def chi_square(counts, expected):
    """The statistic less its mean, in standard deviations; 3.3 has p = 0.001 or so, with 100 cells."""
    counts = numpy.asarray(counts, dtype=float)
    expected = numpy.broadcast_to(numpy.asarray(expected, dtype=float), counts.shape)
    assert abs(counts.sum() - expected.sum()) < 1e-6 * counts.sum()
    assert expected.min() > 20
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def phi(x):
    return torch.special.ndtr(x)


def truncated_phi(x):
    low, high = phi(torch.tensor([-0.5, 2.0], dtype=torch.float64))
    return (phi(x) - low) / (high - low)


CONTINUOUS = {
    "uniform": (uniform, lambda x: x),
    "uniform of float64": (lambda k, n: uniform(k, n, torch.float64, -1, 3), lambda x: (x + 1) / 4),
    "normal": (normal, phi),
    "normal of float64": (lambda k, n: normal(k, n, torch.float64), phi),
    "truncated normal": (lambda k, n: truncated_normal(k, -0.5, 2, n), truncated_phi),
    "exponential": (exponential, lambda x: -torch.expm1(-x)),
    "exponential of float64": (lambda k, n: exponential(k, n, torch.float64), lambda x: -torch.expm1(-x)),
    "gumbel": (gumbel, lambda x: (-(-x).exp()).exp()),
}


@pytest.mark.parametrize("n", SAMPLES)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name, n):
    function, cdf = CONTINUOUS[name]
    sample = function(key(2024), n)
    assert kolmogorov_smirnov(sample, cdf) < 1.95
    cells = (cdf(sample.double()) * 1000).long().clamp(0, 999)
    assert chi_square(torch.bincount(cells, minlength=1000), n / 1000) < 3.3


@pytest.mark.parametrize("n", SAMPLES)
@pytest.mark.parametrize("span", [2, 10, 1000, 6007])
def test_randint(n, span):
    found = randint(key(7), n, -3, span - 3) + 3
    assert chi_square(torch.bincount(found, minlength=span), n / span) < 3.3


@pytest.mark.parametrize("n", SAMPLES)
def test_randint_of_a_range_that_a_remainder_would_not_fill(n):
    """3 2^62 values: 64 bits modulo it would give the first third twice as often."""
    span = 3 * 2**62
    found = randint(key(8), n, -(2**63), -(2**63) + span)
    third = ((found >> 32) + 2**31) // 2**30  # in units of 2^62
    assert chi_square(torch.bincount(third, minlength=3), n / 3) < 3.3 * 2
    low = (found & 1023).numpy()
    assert chi_square(numpy.bincount(low, minlength=1024), n / 1024) < 3.3


@pytest.mark.parametrize("n", SAMPLES)
@pytest.mark.parametrize("p", [0.001, 0.3, 0.5, 0.99])
def test_bernoulli(n, p):
    assert abs(float(bernoulli(key(9), p, n).double().mean()) - p) < 3.3 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("n", SAMPLES)
def test_neighbours_are_independent(n):
    """Pairs and triples of neighbours, which share an engine call, fill their squares and cubes evenly."""
    u = uniform(key(10), n)
    for size, cells in ((2, 32), (3, 8), (4, 5)):
        groups = (u[: n // size * size].view(-1, size) * cells).long()
        places = groups @ torch.tensor([cells**power for power in range(size)])
        found = torch.bincount(places, minlength=cells**size)
        assert chi_square(found, len(places) / cells**size) < 3.3


@pytest.mark.parametrize("n", SAMPLES)
def test_streams_of_derived_keys_are_uncorrelated(n):
    root = key(11)
    family = [
        root,
        key(12),
        *split(root, 3),
        *(fold_in(root, i) for i in range(3)),
        *split(split(root)[0])[1:],
    ]
    draws = torch.stack([normal(one, n // 10) for one in family]).double()
    correlation = torch.corrcoef(draws).fill_diagonal_(0).abs().max()
    assert correlation < 4.5 / math.sqrt(n // 10)
    # Bit by bit: streams agree in half of them.
    words = torch.stack([bits(one, n // 100) for one in family])
    for other in words[1:]:
        same = ~(words[0] ^ other)
        ones = torch.stack([(same >> bit & 1).double().mean() for bit in range(64)])
        assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(n // 100)


def test_first_numbers_of_many_keys():
    """The other direction: number 0 of 20,000 keys that are folded, and that are split, from one."""
    root, n = key(13), 20_000
    children = split(root, n)
    for family in (children, [fold_in(root, i) for i in range(0, n, 4)]):
        sample = torch.stack([uniform(one) for one in family])
        assert kolmogorov_smirnov(sample, lambda x: x) < 1.95


def test_the_tests_see_what_they_must():
    """A remainder's bias, a correlation, and a wrong scale are found in the small sample already."""
    n = 200_000
    words = bits(key(1), n, torch.int32).long() % 2**16 % 50_000
    assert chi_square(torch.bincount(words // 500, minlength=100), n / 100) > 100
    assert kolmogorov_smirnov(normal(key(1), n) * 1.01, phi) > 1.95
    u = uniform(key(1), n)
    pairs = (torch.stack([u, (u + u.roll(1) * 0.2).frac()], 1) * 8).long() @ torch.tensor([8, 1])
    assert chi_square(torch.bincount(pairs, minlength=64), n / 64) > 100
