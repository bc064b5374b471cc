"""Torch's stream on cpu in parts: the numbers and the generator of the one large draw, bit for bit."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.rng import torch_stream
from vescale.rng.numbers import compressed
from vescale.rng.torch_stream import BLOCK, CHUNK, Stream, draw, whole

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
EVERYWHERE = [
    ("bernoulli_", (0.3,)),
    ("geometric_", (0.3,)),
    ("random_", ()),
    ("random_", (5,)),
    ("random_", (3, 100)),
]
REAL = [
    ("uniform_", (0.0, 1.0)),
    ("uniform_", (-2.0, 3.0)),
    ("normal_", (0.0, 1.0)),
    ("normal_", (3.0, 0.02)),
    ("exponential_", (2.0,)),
    ("log_normal_", (0.0, 1.0)),
    ("cauchy_", (0.0, 1.0)),
]
KINDS = [
    *((*made, dtype) for made in EVERYWHERE + REAL for dtype in FLOATS),
    *((*made, dtype) for made in EVERYWHERE for dtype in INTEGERS),
    ("random_", (-(2**40), 2**40), torch.int64),
    ("bernoulli_", (0.3,), torch.bool),
]
SHAPES = [
    ((5, 7), (7, 1)),  # less than a block and a half
    ((3, 5), (5, 1)),  # one short of a block
    ((16,), (1,)),
    ((0, 3), (3, 1)),
    ((9, 40), (1, 9)),  # transposed
    ((4, 5, 6), (6, 24, 1)),
    ((6, 1, 8), (16, 3, 2)),  # of every second element
    ((3, CHUNK // 2 + 5), (CHUNK // 2 + 5, 1)),  # two chunks
]


def following():
    """What the generator does next, its second normal number too."""
    return torch.randn(3), torch.rand(3)


def one_device(stream, seed):
    """The numbers in the order of the stream, and what is drawn after."""
    torch.manual_seed(seed)
    made = torch.empty_strided(stream.shape, stream.stride, dtype=stream.dtype)
    getattr(made, stream.kind)(*stream.numbers)
    return made.permute(stream.order).reshape(-1), following()


def check(stream, intervals, seed=3):
    """`intervals`: lists of intervals of indices, drawn for together."""
    expected, after = one_device(stream, seed)
    parts = [
        (torch.empty(sum(b - a for a, b in cut), dtype=stream.dtype), compressed(cut)) for cut in intervals
    ]
    torch.manual_seed(seed)
    draw(stream, parts)
    for (found, _), cut in zip(parts, intervals, strict=True):
        right = torch.cat([expected[a:b] for a, b in cut] or [expected[:0]])
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8)), stream  # NaNs too
    assert all(map(torch.equal, following(), after))


def cuts(numel):
    """Everything, nothing, two halves, and every third to fifth of 7 (columns)."""
    middle = numel // 3
    rows = [(i + 2, min(i + 5, numel)) for i in range(0, numel, 7) if i + 2 < numel]
    everything, halves = [(0, numel)], [[(0, middle)], [(middle, numel)]]
    return [
        [interval for interval in cut if interval[0] < interval[1]] for cut in [everything, [], *halves, rows]
    ]


@pytest.mark.parametrize(("kind", "numbers", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("shape", "stride"), SHAPES, ids=str)
def test_parts_have_the_bits_of_the_whole(kind, numbers, dtype, shape, stride):
    stream = Stream(kind, numbers, shape, stride, dtype)
    check(stream, cuts(stream.numel))
    for cut in cuts(stream.numel)[1:]:
        check(stream, [cut])  # alone: what others would have is skipped


SIZES = [*range(12, 20), *range(44, 52), CHUNK - 1, CHUNK + 1, CHUNK + 15, 2 * CHUNK]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_last_block_of_normal_numbers(dtype, size):
    stream = Stream("normal_", (0.0, 1.0), (size,), (1,), dtype)
    check(stream, [[(size - 1, size)], [(0, 1)]])
    check(stream, [[(0, 1)]])
    check(stream, [[(max(size - BLOCK - 2, 0), size - 1)]])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_of_any_chunk(data):
    size = data.draw(st.integers(1, 400))
    rows, start, at = [], 0, 0
    while True:
        start = at + data.draw(st.integers(0, 40))
        at = start + data.draw(st.integers(1, 60))
        if at > size:
            break
        rows.append((start, at))
    kind = data.draw(st.sampled_from(["normal_", "uniform_"]))
    stream = Stream(kind, (0.0, 1.0), (size,), (data.draw(st.sampled_from([1, 3])),), torch.float32)
    expected, after = one_device(stream, 5)
    found = torch.empty(sum(b - a for a, b in rows))
    torch.manual_seed(5)
    draw(stream, [(found, compressed(rows))], chunk=data.draw(st.sampled_from([16, 32, 48, 160])))
    assert torch.equal(found, torch.cat([expected[a:b] for a, b in rows] or [expected[:0]]))
    assert all(map(torch.equal, following(), after))


def test_a_pair_of_normal_numbers_goes_on_in_the_next_draw():
    odd = Stream("normal_", (0.0, 1.0), (5,), (1,), torch.float32)  # 5 of 3 pairs
    torch.manual_seed(0)
    expected = torch.randn(5), torch.randn(5)
    torch.manual_seed(0)
    found = torch.empty(5), torch.empty(5)
    for out in found:
        draw(odd, [(out, torch.tensor([[0, 5, 0, 1]]))])
    assert all(map(torch.equal, found, expected))


def test_a_generator_of_ones_own():
    mine, other = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    stream, out, before = (
        Stream("uniform_", (0.0, 1.0), (9,), (1,), torch.float32),
        torch.empty(3),
        torch.get_rng_state(),
    )
    draw(stream, [(out, torch.tensor([[6, 3, 0, 1]]))], mine)
    assert torch.equal(out, torch.rand(9, generator=other)[6:])
    assert torch.equal(mine.get_state(), other.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_change_nothing():
    threads = torch.get_num_threads()
    stream = Stream("bernoulli_", (0.3,), (3 * CHUNK,), (1,), torch.float32)
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(2)
            found.append(whole(stream))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


class Other(Stream):
    """A kernel that makes the numbers of a tensor from one word of the generator, as MKL's do."""

    def fill(self, out, generator):
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
        inner = torch.Generator().manual_seed(int(seed))
        return out.uniform_(generator=inner)


def test_what_can_not_be_followed_is_drawn_whole():
    stream = Other("uniform_", (), (CHUNK + 9,), (1,), torch.float32)
    assert not torch_stream.can_follow(torch_stream._probe_of(stream))
    torch.manual_seed(1)
    expected, after = stream.fill(torch.empty(CHUNK + 9), None), torch.rand(3)
    torch.manual_seed(1)
    found, first = torch.empty(11), torch.empty(2)
    draw(stream, [(found, torch.tensor([[CHUNK - 2, 11, 0, 1]])), (first, torch.tensor([[0, 2, 0, 1]]))])
    assert torch.equal(found, expected[CHUNK - 2 :])
    assert torch.equal(first, expected[:2])
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("kind", ["uniform_", "normal_", "bernoulli_", "random_"])
def test_ordinary_kinds_are_followed_here(kind):
    """On a build where one isn't, results are right and memory is not local: then this test says so."""
    numbers = {"bernoulli_": (0.5,), "random_": ()}.get(kind, (0.0, 1.0))
    stream = Stream(kind, numbers, (75,), (1,), torch.float32)
    one = whole(stream, torch.Generator().manual_seed(0))
    parts = [
        stream.fill(torch.empty(size), g) for g in [torch.Generator().manual_seed(0)] for size in (32, 43)
    ]
    assert torch_stream.can_follow(stream) == torch.equal(torch.cat(parts), one)


def test_the_probe_is_no_draw():
    torch_stream.can_follow.cache_clear()
    state = torch.get_rng_state()
    torch_stream.can_follow(Stream("normal_", (0.0, 1.0), (75,), (1,), torch.float32))
    assert torch.equal(torch.get_rng_state(), state)


class Largest(TorchDispatchMode):
    """The largest tensor that a call made or saw."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        seen = [value for value in (result, *args) if isinstance(value, torch.Tensor)]
        self.numel = max(self.numel, *(value.untyped_storage().nbytes() // value.itemsize for value in seen))
        return result


@pytest.mark.parametrize(
    ("kind", "stride"), [("normal_", 1), ("normal_", 2), ("uniform_", 1), ("bernoulli_", 1)]
)
def test_memory_is_that_of_a_chunk(kind, stride):
    numbers = (0.5,) if kind == "bernoulli_" else (0.0, 1.0)
    stream = Stream(kind, numbers, (20 * CHUNK + 3,), (stride,), torch.float32)
    torch_stream.can_follow(torch_stream._probe_of(stream))
    with Largest() as largest:
        draw(stream, [(torch.empty(100), torch.tensor([[7 * CHUNK, 5, CHUNK // 2, 20]]))])
    assert largest.numel <= 2 * CHUNK
