"""The draws that are made of others: their definitions, edges, gradients and errors."""

import itertools
import math

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from vescale._errors import ArgumentError
from vescale.rng import (
    bernoulli,
    bits,
    categorical,
    choice,
    dropout,
    exponential,
    gumbel,
    key,
    normal,
    permutation,
    randint,
    truncated_normal,
    uniform,
)
from vescale.rng.draws import _between
from vescale.rng.inversion import invert, invert_int
from vescale.rng.numbers import draw
from vescale.rng.philox import MORE, derive_keys

MANY = 100_000


# Integers


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**64), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_randint_to_the_bit(seed, low, span, count):
    high = min(low + span, 2**63)
    one = key(seed)
    words = [word % 2**64 for word in bits(one, count).tolist()]
    more = [0] * count
    if high - low > 2**32:
        child = derive_keys(one.data, torch.tensor(0), MORE)
        more = [word % 2**64 for word in draw(child, [count], "bits64").tolist()]
    want = [low + ((a << 64 | b) * (high - low) >> 128) for a, b in zip(words, more)]
    assert randint(one, count, low, high).tolist() == want


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32, torch.uint64]
)
def test_randint_of_every_dtype(dtype):
    info = torch.iinfo(dtype)
    for low, high in ((info.min, info.max + 1), (info.max - 3, info.max + 1), (max(info.min, -3), 4)):
        found = randint(key(1), (500,), low, high, dtype)
        assert found.dtype == dtype
        values = [int(v) for v in found.tolist()]
        assert low <= min(values) <= max(values) < high
        if high - low < 10:
            assert set(values) == set(range(low, high))


def test_one_value_and_all_values():
    assert randint(key(1), (9,), 5, 6).tolist() == [5] * 9
    whole = randint(key(2), (9,), -(2**63), 2**63)
    assert torch.equal(whole, bits(key(2), (9,)) + -(2**63))


# Continuous numbers


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 32), (torch.float64, 64)])
def test_exponential_and_gumbel_are_accurate(dtype, size):
    """Against numpy in extended precision, also close to 0, where 1 - u counts."""
    top = 2**size - 1
    values = sorted({v & top for p in range(size) for v in (1 << p, ~(1 << p), (3 << p) - 1, -(5 << p))})
    values += [int(top * x) for x in numpy.linspace(0.001, 0.999, 500)]
    drawn = torch.tensor([v - 2**64 if v >= 2**63 else v for v in values])
    if numpy.finfo(numpy.longdouble).nmant < 60:
        pytest.skip("no extended precision here")
    from vescale.rng.logarithm import exponential_from_bits, gumbel_from_bits

    half, whole = numpy.longdouble(0.5), numpy.longdouble(2) ** size
    unit = numpy.array([numpy.longdouble(v) + half for v in values]) / whole
    rest = numpy.array([numpy.longdouble(top - v) + half for v in values]) / whole
    want = numpy.where(unit < 0.5, -numpy.log(unit), -numpy.log1p(-rest))
    found = exponential_from_bits(drawn, dtype)
    assert (found > 0).all()
    eps = torch.finfo(dtype).eps
    assert (numpy.abs(found.numpy() - want) / want).max() < 4 * eps
    deep = gumbel_from_bits(drawn, dtype).numpy()
    assert (numpy.abs(deep + numpy.log(want)) / numpy.maximum(1, numpy.abs(numpy.log(want)))).max() < 6 * eps


@given(st.floats(-9, 9), st.floats(0, 3), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_truncated_normal_keeps_its_bounds(lower, width, dtype):
    upper = lower + width
    try:
        drawn = truncated_normal(key(3), lower, upper, (200,), dtype)
    except ArgumentError:
        assert width < 0.3  # it holds no number of the dtype
        return
    assert drawn.dtype == dtype
    assert lower <= drawn.double().min()
    assert drawn.double().max() <= upper


def test_truncated_normal_is_the_normal_under_a_condition():
    one = key(4)
    assert torch.equal(
        truncated_normal(one, -math.inf, math.inf, (1000,), torch.float64),
        invert(bits(one, (1000,)) + -(2**63), torch.float64),
    )
    for lower, upper in ((-1, 1), (0.5, 0.75), (-math.inf, -2), (4, 5), (-9, -8.5)):
        low, high = _between(lower, upper)
        assert invert_int(low) >= lower
        assert invert_int(high) <= upper
        assert low == -(2**63) or invert_int(low - 1) < lower
        assert high == 2**63 - 1 or invert_int(high + 1) > upper
        middle = invert_int(low + (high - low) // 2)
        median = truncated_normal(one, lower, upper, (20_001,), torch.float64).median()
        tail = [truncated_normal(one, lower, upper, (20_001,), torch.float64) < middle]
        assert abs(tail[0].double().mean() - 0.5) < 4 * 0.5 / 20_001**0.5, (lower, upper, median)


def test_python_and_tensors_invert_alike():
    some = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), *bits(key(1), 200).tolist()]
    assert [invert_int(v) for v in some] == invert(torch.tensor(some), torch.float64).tolist()


# Coins and categories


def test_bernoulli_to_the_bit():
    u = uniform(key(5), (1000,))
    assert torch.equal(bernoulli(key(5), 0.3, 1000), u < 0.3)
    p = torch.linspace(0, 1, 1000)
    assert torch.equal(bernoulli(key(5), p), u < p)
    assert torch.equal(bernoulli(key(5), p.double()), uniform(key(5), (1000,), torch.float64) < p.double())
    assert torch.equal(bernoulli(key(5), p.bfloat16()), u < p.bfloat16().float())
    assert torch.equal(bernoulli(key(5), p[:10], (100, 10)), u.view(100, 10) < p[:10])
    assert not bernoulli(key(5), 0.0, MANY).any()
    assert bernoulli(key(5), 1, MANY).all()
    assert bernoulli(key(5)).shape == ()


def test_categorical_to_the_bit():
    logits = normal(key(1), (3, 4, 5))
    for dim in (0, 1, 2, -1, -3):
        want = (logits + gumbel(key(6), (3, 4, 5))).argmax(dim)
        assert torch.equal(categorical(key(6), logits, dim), want)
    more = categorical(key(6), logits, 1, shape=(7, 3, 5))
    assert torch.equal(more, (logits + gumbel(key(6), (7, 3, 4, 5))).argmax(2))
    wide = categorical(key(6), logits.double())
    assert torch.equal(wide, (logits.double() + gumbel(key(6), (3, 4, 5), torch.float64)).argmax(-1))
    never = torch.tensor([0.0, -math.inf, 0.0])
    assert 1 not in categorical(key(7), never, shape=(1000,)).tolist()


def test_frequencies_of_categories_and_choices():
    p = torch.tensor([0.1, 0.0, 0.2, 0.7])
    for found in (
        categorical(key(8), p.log(), shape=(MANY,)),
        choice(key(8), 4, (MANY,), p=p * 3),
        choice(key(8), torch.arange(4), (MANY,), p=p),
    ):
        counts = torch.bincount(found, minlength=4).double() / MANY
        assert counts[1] == 0
        assert ((counts - p).abs() <= 4.5 * (p * (1 - p) / MANY).sqrt()).all()


# Orders and samples


def test_permutations():
    x = normal(key(1), (5, 6))
    order = permutation(key(9), 6)
    assert order.sort().values.tolist() == list(range(6))
    assert torch.equal(order, bits(key(9), 6).argsort(stable=True))
    assert torch.equal(permutation(key(9), x, 1), x[:, order])
    assert torch.equal(permutation(key(9), x, -1), x[:, order])
    assert torch.equal(permutation(key(9), x), x[permutation(key(9), 5)])
    assert permutation(key(9), 0).shape == (0,)


def test_every_order_is_as_likely():
    rows = torch.stack([permutation(one, 4) for one in map(key, range(4800))])
    numbers = {order: place for place, order in enumerate(itertools.permutations(range(4)))}
    counts = torch.bincount(torch.tensor([numbers[tuple(row)] for row in rows.tolist()]), minlength=24)
    assert ((counts - 200.0) ** 2 / 200).sum() < 23 + 4.5 * 46**0.5


def test_choices():
    assert torch.equal(choice(key(2), 10, (3, 4)), randint(key(2), (3, 4), 0, 10))
    x = normal(key(1), (5, 6, 7))
    index = choice(key(2), 6, (2, 3))
    assert torch.equal(choice(key(2), x, (2, 3), dim=1), x[:, index])
    assert choice(key(2), x, dim=1).shape == (5, 7)
    assert torch.equal(choice(key(2), 100, (7,), replace=False), permutation(key(2), 100)[:7])
    assert sorted(choice(key(2), 9, (3, 3), replace=False).view(-1).tolist()) == list(range(9))
    assert choice(key(2), 5, (0,)).shape == choice(key(2), 0, (0,)).shape == (0,)
    p = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])
    assert sorted(choice(key(2), 5, (3,), False, p).tolist()) == [1, 2, 4]


def test_choices_without_replacement_have_the_right_probabilities():
    """The first by p, the second by what is left: all ordered pairs of 3."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    n = 6000
    pairs = torch.stack([choice(one, 3, (2,), False, p) for one in map(key, range(n))])
    for a, b in itertools.permutations(range(3), 2):
        want = float(p[a] * p[b] / (1 - p[a]))
        got = ((pairs[:, 0] == a) & (pairs[:, 1] == b)).double().mean()
        assert abs(got - want) < 4 * (want * (1 - want) / n) ** 0.5


# Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_and_its_gradient(dtype):
    x = normal(key(1), (40, 50), dtype).requires_grad_()
    y = dropout(key(3), x, 0.3)
    keep = uniform(key(3), (40, 50)) >= 0.3
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(keep, x * (1 / 0.7), 0.0))
    g = normal(key(2), (40, 50), dtype)
    (gradient,) = torch.autograd.grad(y, x, g)
    assert torch.equal(gradient, torch.where(keep, g * (1 / 0.7), 0.0))
    functional = torch.func.grad(lambda x: (dropout(key(3), x, 0.3) * g).sum())(x.detach())
    assert torch.equal(functional, gradient)


def test_dropout_at_its_ends():
    x = torch.tensor([1.0, math.inf, math.nan, -2.0])
    assert torch.equal(dropout(key(1), x[[0, 3]], 0.0), x[[0, 3]])
    assert dropout(key(1), x, 1).tolist() == [0.0] * 4
    spoilt = torch.full((1000,), math.nan)
    kept = dropout(key(1), spoilt, 0.5)
    assert torch.equal(kept.isnan(), uniform(key(1), (1000,)) >= 0.5)


# Errors


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: randint(key(1), (3,), 5, 5), "minval=5, maxval=5"),
        (lambda: randint(key(1), (3,), 0, 257, torch.uint8), "maxval=257"),
        (lambda: randint(key(1), (3,), -1, 4, torch.uint64), "minval=-1"),
        (lambda: randint(key(1), (3,), 0.0, 4), "minval=0.0"),
        (lambda: randint(key(1), (3,), 0, torch.tensor(4)), "maxval=tensor(4)"),
        (lambda: randint(key(1), (3,), False, 4), "minval=False"),
        (lambda: randint(key(1), (3,), 0, 4, torch.float32), "torch.float32"),
        (lambda: truncated_normal(key(1), 2, 1, (3,)), "lower=2, upper=1"),
        (lambda: truncated_normal(key(1), 9.5, 10, (3,)), "lower=9.5, upper=10"),
        (lambda: truncated_normal(key(1), math.nan, 1, (3,)), "lower=nan"),
        (lambda: truncated_normal(key(1), torch.tensor(0.0), 1, (3,)), "lower=tensor(0.)"),
        (lambda: truncated_normal(key(1), 1.001, 1.002, (3,), torch.bfloat16), "lower=1.001"),
        (lambda: exponential(key(1), (3,), torch.int32), "torch.int32"),
        (lambda: gumbel(7, (3,)), "int 7"),
        (lambda: bernoulli(key(1), 1.5, (3,)), "1.5"),
        (lambda: bernoulli(key(1), math.nan, (3,)), "nan"),
        (lambda: bernoulli(key(1), True, (3,)), "True"),
        (lambda: bernoulli(key(1), torch.ones(4), (3,)), "shape (4,), for shape (3,)"),
        (lambda: bernoulli(key(1), torch.ones(4, dtype=torch.int64)), "torch.int64"),
        (lambda: categorical(key(1), torch.ones(3, dtype=torch.int64)), "torch.int64"),
        (lambda: categorical(key(1), torch.ones(3), 1), "dim=1"),
        (lambda: categorical(key(1), torch.ones(3, 0)), "(3, 0)"),
        (lambda: categorical(key(1), torch.ones(())), "()"),
        (lambda: categorical(key(1), torch.ones(2, 3), -1, (2, 5)), "shape (2, 5)"),
        (lambda: categorical(key(1), torch.ones(2, 3), -1, ()), "shape ()"),
        (lambda: permutation(key(1), -1), "-1"),
        (lambda: permutation(key(1), 3.0), "3.0"),
        (lambda: permutation(key(1), torch.ones(3), 1), "dim=1"),
        (lambda: permutation(key(1), torch.ones(())), "shape ()"),
        (lambda: choice(key(1), 3, (4,), replace=False), "4 of 3 things"),
        (lambda: choice(key(1), 0, (4,)), "4 of 0 things"),
        (lambda: choice(key(1), 3, (4,), p=[1, 2, 3]), "[1, 2, 3]"),
        (lambda: choice(key(1), 3, (4,), p=torch.ones(4)), "shape (4,)"),
        (lambda: dropout(key(1), torch.ones(3), 1.1), "1.1"),
        (lambda: dropout(key(1), torch.ones(3), -0.1), "-0.1"),
        (lambda: dropout(key(1), torch.arange(3)), "torch.int64"),
        (lambda: dropout(key(1), 3.0), "3.0"),
    ],
)
def test_mistakes_are_explained(call, found):
    with pytest.raises(ArgumentError) as error:
        call()
    lines = dict(line.split(": ", 1) for line in str(error.value).splitlines())
    assert found in lines["found"]
    assert lines["where"].startswith("vs.rng.")
    assert lines["rule"]
