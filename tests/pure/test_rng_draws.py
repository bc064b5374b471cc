"""Draws: their definitions to the bit, slices, statistics, tracing, errors."""

import doctest
import importlib
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import vescale.rng.numbers as numbers
from vescale._errors import ArgumentError
from vescale.rng import Key, bits, key, normal, uniform
from vescale.rng.draws import _last_below
from vescale.rng.inversion import invert
from vescale.rng.numbers import draw
from vescale.rng.philox import random_bits_at

MILLION = 1_000_000
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", ["", ".keys", ".draws", ".philox", ".inversion", ".numbers", ".ranges"])
def test_docstring_examples_run(name):
    module = importlib.import_module(f"vescale.rng{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or not name


# Definitions


def test_uniform_to_the_bit():
    one = key(11)
    words = draw(one.data, [1000], "bits32")
    assert uniform(one, (1000,)).tolist() == [(w >> 8) / 2**24 for w in words.tolist()]
    words = draw(one.data, [1000], "bits64")
    want = [(w % 2**64 >> 11) / 2**53 for w in words.tolist()]
    assert uniform(one, 1000, torch.float64).tolist() == want


def test_bits_to_the_bit():
    one = key(12)
    words = draw(one.data, [100], "bits32").tolist()
    for dtype, size in ((torch.uint32, 32), (torch.uint16, 16), (torch.uint8, 8)):
        assert bits(one, 100, dtype).dtype == dtype
        assert bits(one, 100, dtype).tolist() == [w % 2**size for w in words]
    for dtype in (torch.int32, torch.int16, torch.int8):
        size = torch.iinfo(dtype).bits
        assert [w % 2**size for w in bits(one, 100, dtype).tolist()] == [w % 2**size for w in words]
    assert torch.equal(bits(one, 100), draw(one.data, [100], "bits64"))
    assert [w % 2**64 for w in bits(one, 100).tolist()] == bits(one, 100, torch.uint64).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_the_float32_draw(dtype):
    one = key(13)
    assert torch.equal(normal(one, (3, 50), dtype), normal(one, (3, 50)).to(dtype))
    short = uniform(one, (100_000,), dtype)
    below_one = 1 - torch.finfo(dtype).eps / 2
    assert torch.equal(short, uniform(one, (100_000,)).to(dtype).clamp(max=below_one))
    assert short.max() == below_one


def test_default_shape_and_scalars():
    assert normal(key(1)).shape == uniform(key(1)).shape == bits(key(1)).shape == ()
    assert normal(key(1), 0).shape == (0,)
    assert uniform(key(1), torch.Size([2, 0, 3])).shape == (2, 0, 3)
    assert torch.equal(normal(key(1), [2, 3]), normal(key(1), (2, 3)))


# Slices


@given(st.integers(0, 2**63), st.sampled_from([torch.float32, torch.float64]), st.data())
@settings(max_examples=40, deadline=None)
def test_a_slice_is_the_draw_at_its_index(seed, dtype, data):
    one, width = key(seed), 64 if dtype == torch.float64 else 32
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    index = torch.arange(rows * columns).view(rows, columns)
    r, c = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    part = random_bits_at(one.data, index[r:, c:], width)
    assert torch.equal(normal(one, (rows, columns), dtype)[r:, c:], invert(part, dtype))
    whole = uniform(one, (rows, columns), dtype)[r:, c:]
    if width == 32:
        assert torch.equal(whole, (part >> 8).to(dtype) * 2.0**-24)
    else:
        assert torch.equal(whole, (part >> 11 & 2**53 - 1).to(dtype) * 2.0**-53)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_has_no_bits_from_vector_tails_or_chunks(dtype, monkeypatch):
    drawn = draw(key(3).data, [1003], "bits64" if dtype == torch.float64 else "bits32")
    whole = invert(drawn, dtype)
    singles = torch.stack([invert(one, dtype) for one in drawn[-60:]])
    assert torch.equal(whole[-60:], singles)
    monkeypatch.setattr(numbers, "_CHUNK", 7)
    monkeypatch.setattr(numbers, "kernel", lambda numel: None)
    assert torch.equal(normal(key(3), (1003,), dtype), whole)
    assert torch.equal(invert(drawn.view(17, 59).T, dtype), whole.view(17, 59).T)


def test_a_shorter_draw_begins_a_longer_one():
    for function in (normal, uniform, bits):
        assert torch.equal(function(key(8), (1000,))[:77], function(key(8), (77,)))


# Accuracy and statistics


def exact_normal(v, size):
    """float64 reference from signed integers: ndtri in the tails, the series at the centre."""
    x = (v.double() + 0.5) * 2.0 ** (1 - size)
    from_end = torch.where(v < 0, ~v, v) ^ (2 ** (size - 1) - 1)
    q = (from_end.double() + 0.5) * 2.0 ** (1 - size)
    tail = -torch.special.ndtri(q / 2) * x.sign()
    # sqrt(2) erfinv(x) = sqrt(pi/2) (x + pi x^3/12 + 7 pi^2 x^5/480 + ...): ndtri cancels there.
    s = math.pi * x * x
    series = x * math.sqrt(math.pi / 2) * (1 + s / 12 + 7 * s**2 / 480 + 127 * s**3 / 40320)
    return torch.where(x.abs() < 5e-3, series, tail)


@pytest.mark.parametrize(
    ("dtype", "size", "body", "tail"),
    [(torch.float32, 32, 4e-7, 4e-7), (torch.float64, 64, 3e-14, 2e-15)],
)
def test_normal_is_accurate_in_body_and_tails(dtype, size, body, tail):
    top = 2 ** (size - 1) - 1
    near = (2.0 ** torch.arange(0, size - 1.01, 0.004, dtype=torch.float64)).long()
    spread = torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:-1].mul(top).long()
    for v, bound in ((near, body), (spread, body), (top - near, tail)):
        for signed in (v, ~v):
            drawn = signed if size == 64 else signed % 2**32
            want = exact_normal(signed, size)
            got = invert(drawn, dtype).double()
            assert ((got - want).abs() / want.abs()).max() < bound


def ks_distance(sample, cdf):
    sample = sample.double().sort().values
    n = sample.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    at = cdf(sample)
    return max((at - steps[:-1]).max(), (steps[1:] - at).max()) * n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_statistics(dtype):
    z = normal(key(2024), (MILLION,), dtype).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(z.pow(power).mean() - moment) < 4 * (variance / MILLION) ** 0.5
    assert ks_distance(z, torch.special.ndtr) < 1.95  # p = 0.001
    pair = torch.corrcoef(torch.stack([z[:-1], z[1:]]))[0, 1]
    assert abs(pair) < 4 / MILLION**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_statistics(dtype):
    u = uniform(key(2025), (MILLION,), dtype).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / MILLION) ** 0.5
    assert ks_distance(u, lambda x: x) < 1.95
    cells = torch.bincount((u * 1000).long(), minlength=1000).double()
    chi = ((cells - 1000) ** 2 / 1000).sum()
    assert abs(chi - 999) < 4 * (2 * 999) ** 0.5
    pairs = (u.view(-1, 2) * 32).long() @ torch.tensor([32, 1])
    expected = MILLION / 2 / 1024
    chi = ((torch.bincount(pairs, minlength=1024) - expected) ** 2 / expected).sum()
    assert abs(chi - 1023) < 4 * (2 * 1023) ** 0.5


def test_every_bit_is_fair():
    words = draw(key(77).data, [20_000], "bits64")
    for bit in range(64):
        assert abs((words >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / 20_000**0.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(-1, 1), (2.5, 2.625), (-8, -7.5), (0, 0.1), (-3.0, 0)])
def test_uniform_keeps_its_bounds(dtype, low, high):
    drawn = uniform(key(6), (20_000,), dtype, low, high)
    assert drawn.dtype == dtype
    assert drawn.min() >= torch.tensor(low, dtype=dtype)
    assert drawn.max() < torch.tensor(high, dtype=torch.float64)
    error = drawn.double().mean() - (low + high) / 2
    assert abs(error) < (high - low) * 0.01 + torch.finfo(dtype).eps * max(abs(low), abs(high))


def test_the_last_number_below():
    for dtype in FLOATS:
        info = torch.finfo(dtype)
        for stop in (1.0, 1.5, 2.0, -1.0, -1.5, 0.0, 0.1, info.smallest_normal, info.max, -3e-5):
            below = torch.tensor(_last_below(stop, dtype), dtype=dtype)
            assert below.double() == _last_below(stop, dtype)
            assert below.double() < stop
            if dtype != torch.float64 and dtype != torch.float32:
                continue
            exact = torch.tensor(stop, dtype=dtype)
            if exact.double() == stop:
                assert below == torch.nextafter(exact, torch.tensor(-math.inf, dtype=dtype))


# Tracing and transforms


def test_a_traced_draw_is_one_node():
    def program(data):
        one = Key(data)
        return normal(one, (4, 8)), uniform(one, (3,), minval=-1, maxval=1), bits(one, 5, torch.uint32)

    graph = make_fx(program, tracing_mode="fake")(key(1).data)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [
        "vescale.draw.default",
        "vescale.draw.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.clamp.default",
        "vescale.draw.default",
        "aten._to_copy.default",
    ]
    for got, want in zip(graph(key(99).data), program(key(99).data)):
        assert torch.equal(got, want)


def test_draws_inside_grad_and_vmap():
    noise = normal(key(4), (3,))
    gradient = torch.func.grad(lambda x: (x * normal(key(4), (3,)) + uniform(key(5), (3,))).sum())
    assert torch.equal(gradient(torch.ones(3)), noise)
    traced = make_fx(gradient, tracing_mode="fake")(torch.ones(3))
    assert torch.equal(traced(torch.ones(3)), noise)
    keys = torch.stack([key(i).data for i in range(3)])
    batch = torch.func.vmap(lambda data: normal(Key(data), (5,)))(keys)
    assert torch.equal(batch, torch.stack([normal(key(i), (5,)) for i in range(3)]))
    x = torch.ones(3, requires_grad=True)
    (x * normal(key(4), (3,))).sum().backward()
    assert torch.equal(x.grad, noise)


def test_torch_generators_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = normal(key(4), (300,))
    torch.manual_seed(1)
    assert torch.equal(normal(key(4), (300,)), first)
    torch.set_rng_state(before)


# Errors


def test_a_traced_bound_is_refused_not_read():
    def program(high):
        return uniform(key(1), 3, maxval=high)

    with pytest.raises(ArgumentError, match="not tensors"):
        make_fx(program, tracing_mode="fake")(torch.tensor(2.0))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: normal(7, (3,)), "int 7"),
        (lambda: normal(key(1), (3, -1)), "(3, -1)"),
        (lambda: normal(key(1), (2.5,)), "(2.5,)"),
        (lambda: uniform(key(1), "ab"), "'ab'"),
        (lambda: bits(key(1), None), "None"),
        (lambda: normal(key(1), 3, torch.int32), "torch.int32"),
        (lambda: normal(key(1), 3, torch.complex64), "torch.complex64"),
        (lambda: uniform(key(1), 3, torch.int64), "torch.int64"),
        (lambda: bits(key(1), 3, torch.float32), "torch.float32"),
        (lambda: bits(key(1), 3, torch.bool), "torch.bool"),
        (lambda: uniform(key(1), 3, minval=1), "minval=1, maxval=1.0"),
        (lambda: uniform(key(1), 3, minval=2, maxval=1), "minval=2, maxval=1"),
        (lambda: uniform(key(1), 3, maxval=math.inf), "maxval=inf"),
        (lambda: uniform(key(1), 3, minval=math.nan), "minval=nan"),
        (lambda: uniform(key(1), 3, torch.float16, maxval=1e6), "maxval=1000000.0"),
        (lambda: uniform(key(1), 3, torch.float32, -3e38, 3e38), "minval=-3e+38"),
        (lambda: uniform(key(1), 3, torch.bfloat16, 256.1, 256.5), "minval=256.1, maxval=256.5"),
        (lambda: uniform(key(1), 3, maxval=torch.tensor(2.0)), "maxval=tensor(2.)"),
    ],
)
def test_mistakes_are_explained(call, found):
    with pytest.raises(ArgumentError) as error:
        call()
    lines = dict(line.split(": ", 1) for line in str(error.value).splitlines())
    assert found in lines["found"]
    assert lines["where"].startswith("vs.rng.")
    assert lines["rule"]
    assert lines["remedy"]
