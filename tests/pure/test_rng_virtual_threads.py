"""Torch's cuda stream on integers: published numbers, the definition in a loop, and the traps."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from vescale._errors import ArgumentError
from vescale.rng import virtual_threads as vt
from vescale.rng.philox import philox4x32_ints
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import flat_indices
from vescale.spmd.placements import P, RaggedShard, Shard

# Printed by torch.rand(.., device="cuda") after torch.manual_seed(0), in the tests of NVIDIA's TensorRT-LLM
# (ReDrafter) and of OpenMMLab's mmdetection3d (PartA2 head): the first call, and the second.
FIRST = """
    0.3990 0.5167 0.0249 0.9401 0.9459 0.7967 0.4150 0.8203 0.2290 0.9096 0.1183 0.0752
    0.4092 0.9601 0.2093 0.1940 0.8909 0.4387 0.3570 0.5454 0.8299 0.2099 0.7684 0.4290
    0.2117 0.6606 0.1654 0.4250 0.9927 0.6964 0.2472 0.7028 0.7494 0.9303 0.0494
"""
SECOND = "0.9722 0.7910 0.4690 0.3300 0.3345 0.3783 0.7640 0.6405 0.1103 0.3594"
# torch.randn(.., 8, device="cuda") after torch.manual_seed(0), printed in a public notebook on fused LoRA
# kernels in Triton (input of its mul-add-relu).
NORMALS = """
    -0.9247 -0.4253 -2.6438  0.1452 -0.1209 -0.5797 -0.6229 -0.3284
    -1.0745 -0.3631 -1.6711  2.2655  0.3117 -0.1842  1.2866  1.1820
    -0.1271  1.2169  1.4353  1.0605 -0.4941 -1.4244 -0.7244 -1.2973
     0.0697 -0.0074  1.8969  0.6878 -0.0779 -0.8373  1.3506 -0.2879
    -0.5965 -0.3283 -0.9086 -0.8059 -0.7407 -0.0504  0.5435  1.5150
     0.0141  0.4532  1.6349  0.7124 -0.1806  1.0252 -1.4622 -0.7554
    -0.1836  0.3824  0.3918 -0.0830  0.8971 -1.1123  0.1116  0.4863
"""
SMALL = vt.Processor(multiprocessors=2, threads=512)  # at most 4 blocks, 1024 threads
SIZES = [1, 255, 256, 257, 1023, 1024, 1025, 4096, 4097, 5000]


def printed(text):
    return torch.tensor([float(word) for word in text.split()])


def test_published_uniform_numbers():
    first, second = printed(FIRST), printed(SECOND)
    numbers, offset = vt.rand(0, 0, len(first))
    assert ((numbers - first).abs() <= 0.5001e-4).all()
    assert offset == 4
    again, _ = vt.rand(0, offset, len(second))
    assert ((again - second).abs() <= 0.5001e-4).all()


def test_published_normal_numbers():
    want = printed(NORMALS)
    found, _ = vt.randn(0, 0, len(want))
    assert ((found - want).abs() <= 0.51e-4).all()


# The definition: each thread a generator of its own, each kernel a loop.


class Generator:
    """What cuRAND's state does, a call at a time."""

    def __init__(self, seed, thread, offset):
        self.key, self.thread, self.call = (seed % 2**32, seed >> 32), thread, offset // 4
        assert offset % 4 == 0

    def __call__(self):
        counter = (self.call % 2**32, self.call >> 32, self.thread % 2**32, self.thread >> 32)
        self.call += 1
        return philox4x32_ints(counter, self.key)


def strided(seed, offset, numel, processor, each):
    """A kernel that strides over the grid: `each` makes its 4 or 2 values of one call's words."""
    grid = min(processor.multiprocessors * (processor.threads // 256), -(-numel // 256))
    threads, out, calls = 256 * grid, [None] * numel, 0
    for thread in range(threads):
        generator = Generator(seed, thread, offset)
        at, calls = thread, 0
        while at < numel or calls == 0:
            values = each(generator())
            calls += 1
            for place, value in enumerate(values):
                if at + place * threads < numel:
                    out[at + place * threads] = value
            at += threads * len(values)
        if thread == 0:
            most = calls
    return out, offset + 4 * most


def as_float(word):
    return float(torch.tensor(word).to(torch.float32) * 2.0**-32 + 2.0**-33)


def as_double(low, high):
    return float(low ^ high << 21) * 2.0**-53 + 2.0**-54


@pytest.mark.parametrize("numel", SIZES)
def test_uniform_by_the_loop(numel):
    seed, offset = 0x123456789, 8
    want, after = strided(seed, offset, numel, SMALL, lambda w: [as_float(word) for word in w])
    found, end = vt.rand(seed, offset, numel, processor=SMALL)
    assert found.tolist() == [0.0 if value == 1 else value for value in want]
    assert end == after
    want, after = strided(seed, offset, numel, SMALL, lambda w: [as_double(*w[:2]), as_double(*w[2:])])
    found, end = vt.rand(seed, offset, numel, torch.float64, processor=SMALL)
    assert found.tolist() == [0.0 if value == 1 else value for value in want]
    assert end == after


def box_muller(x, y):
    length = math.sqrt(-2 * math.log(as_float(x)))
    angle = 2 * math.pi * as_float(y)
    return [length * math.sin(angle), length * math.cos(angle)]


@pytest.mark.parametrize("numel", SIZES)
def test_normal_by_the_loop(numel):
    want, after = strided(7, 4, numel, SMALL, lambda w: [*box_muller(*w[:2]), *box_muller(*w[2:])])
    found, end = vt.randn(7, 4, numel, processor=SMALL)
    assert torch.allclose(found.double(), torch.tensor(want, dtype=torch.float64), rtol=2e-6, atol=3e-6)
    assert end == after
    half, _ = vt.randn(7, 4, numel, torch.bfloat16, processor=SMALL)
    assert torch.equal(half, found.bfloat16())

    def double(w):
        length = math.sqrt(-2 * math.log(as_double(*w[:2])))
        angle = 2 * math.pi * as_double(*w[2:])
        return [length * math.sin(angle), length * math.cos(angle)]

    want, after = strided(7, 4, numel, SMALL, double)
    found, end = vt.randn(7, 4, numel, torch.float64, processor=SMALL)
    assert torch.allclose(found, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    assert end == after


@pytest.mark.parametrize("numel", SIZES)
def test_integers_and_coins_by_the_loop(numel):
    want, after = strided(3, 0, numel, SMALL, lambda w: [word % 1000 - 5 for word in w])
    found, end = vt.randint(3, 0, numel, -5, 995, processor=SMALL)
    assert (found.tolist(), end) == (want, after)
    span = 2**63 + 11
    want, after = strided(
        3, 0, numel, SMALL, lambda w: [(w[0] << 32 | w[1]) % span - 2**62, (w[2] << 32 | w[3]) % span - 2**62]
    )
    found, end = vt.randint(3, 0, numel, -(2**62), span - 2**62, processor=SMALL)
    assert (found.tolist(), end) == (want, after)
    p = torch.tensor(0.3).item()
    want, after = strided(3, 0, numel, SMALL, lambda w: [as_float(word) < p for word in w])
    found, end = vt.bernoulli(3, 0, numel, 0.3, processor=SMALL)
    assert (found.tolist(), end) == (want, after)


def test_bernoulli_of_a_tensor_has_threads_of_its_own():
    p = torch.linspace(0, 1, 4099)
    found, end = vt.bernoulli(5, 8, 4099, p, processor=SMALL)
    want = []
    for thread in range(-(-4099 // 4)):
        want += [as_float(word) for word in Generator(5, thread, 8)()]
    assert found.tolist() == [u <= q for u, q in zip(want, p.tolist())]
    assert end == 8 + 12


@pytest.mark.parametrize("numel", [8, 1024, 2048, 4096, 8192, 8200, 40_000])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_dropout_by_the_loop(numel, width):
    """The vectorised kernel: `width` neighbours a turn, for 2 two words of each call."""
    threads, out = SMALL.virtual_threads(numel), [0.0] * numel
    for thread in range(threads):
        generator = Generator(11, thread, 4)
        for at in range(thread * width, numel, threads * width):
            words = [word for _ in range(-(-width // 4)) for word in generator()]
            out[at : at + width] = [as_float(word) for word in words[:width]]
    keep = torch.tensor(1 - 0.3, dtype=torch.float32).item()
    found, end = vt.dropout(11, 4, numel, 0.3, processor=SMALL, width=width)
    assert found.tolist() == [u < keep for u in out]
    assert end == 4 + ((numel - 1) // (threads * 4) + 1) * 4


@pytest.mark.parametrize("numel", [7, 1025, 5001])
def test_dropout_of_odd_sizes_strides_over_the_grid(numel):
    keep = torch.tensor(0.5).item()
    want, after = strided(11, 4, numel, SMALL, lambda w: [as_float(word) < keep for word in w])
    found, end = vt.dropout(11, 4, numel, 0.5, processor=SMALL)
    assert (found.tolist(), end) == (want, after)


# The traps


def test_large_draws_depend_on_the_gpu_and_small_ones_do_not():
    few, many = vt.Processor(4, 1024), vt.Processor(5, 1024)
    assert torch.equal(vt.rand(1, 0, 4096, processor=few)[0], vt.rand(1, 0, 4096, processor=many)[0])
    assert not torch.equal(vt.rand(1, 0, 4097, processor=few)[0], vt.rand(1, 0, 4097, processor=many)[0])


def test_threads_that_are_no_multiple_of_a_block():
    assert vt.Processor(84, 1536).virtual_threads(10**9) == 84 * 6 * 256
    assert vt.Processor(84, 1700).virtual_threads(10**9) == 84 * 6 * 256


def test_more_than_two_gigabytes_are_drawn_in_halves():
    assert list(vt.launches(2**29, 4)) == [(0, 2**29)]
    numel = 2**29 + 4
    half = numel // 2
    index = torch.tensor([0, half - 1, half, numel - 1])
    found, end = vt.rand(3, 0, numel, index=index)
    skipped = vt.H100.advance(numel)
    first, middle = vt.rand(3, skipped, half, index=torch.tensor([0, half - 1]))
    second, last = vt.rand(3, middle, numel - half, index=torch.tensor([0, numel - half - 1]))
    assert torch.equal(found, torch.cat([first, second]))
    assert end == last
    starts = [start for start, _ in vt.launches(2**31 + 8, 4)]
    assert starts == sorted(starts)
    assert sum(size for _, size in vt.launches(2**31 + 8, 4)) == 2**31 + 8


def test_the_second_draw_begins_where_the_first_ended():
    numel = 5000
    _, offset = vt.rand(9, 0, numel, processor=SMALL)
    assert offset == SMALL.advance(numel) == 8
    assert vt.rand(9, offset, numel, torch.float64, processor=SMALL)[1] - offset == 12


def test_an_empty_draw_takes_nothing():
    numbers, offset = vt.rand(1, 4, 0)
    assert numbers.shape == (0,)
    assert offset == 4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40).map(lambda n: 4 * n), st.data())
@settings(max_examples=40, deadline=None)
def test_a_ranks_own_elements(seed, offset, data):
    """Of a layout, from its index ranges: what one device draws, at those places."""
    rows, columns = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 60))
    numel, mesh = rows * columns, AbstractMesh(("dp",), (3,))
    ragged = RaggedShard((0,), (0, rows - rows // 3, rows // 3))
    spec = data.draw(st.sampled_from([P(), P(dp=Shard(0)), P(dp=Shard(1)), P(dp=ragged)]))
    layout = Layout(mesh, spec, (rows, columns))
    for draw in (
        lambda index: vt.rand(seed, offset, numel, index=index, processor=SMALL),
        lambda index: vt.randn(seed, offset, numel, torch.float64, index=index, processor=SMALL),
        lambda index: vt.dropout(seed, offset, numel, 0.4, index=index, processor=SMALL),
        lambda index: vt.randint(seed, offset, numel, 0, 2**40, index=index, processor=SMALL),
    ):
        whole, after = draw(None)
        for rank in range(3):
            index = flat_indices(layout, rank).reshape(-1)
            own, end = draw(index)
            assert torch.equal(own, whole[index])
            assert end == after


def test_indices_are_checked():
    for index in (torch.tensor([10]), torch.tensor([-1]), torch.tensor([0.5])):
        with pytest.raises(ArgumentError, match="global"):
            vt.rand(0, 0, 10, index=index)


def test_triton_is_asked_for_on_cuda_only():
    from vescale.rng import triton_philox

    index = torch.arange(3)
    for function in (triton_philox.words, triton_philox.randn):
        with pytest.raises(ArgumentError, match="cuda"):
            function(index, index, 0)
