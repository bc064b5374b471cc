"""Maps, codes and scales of block-wise quantization against loops over blocks; bounds; layouts of scales."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests import quantize_reference as reference
from vescale._errors import ShardingError
from vescale.optim.quantize import as_ints, dequantize, quantize, quantized_zeros
from vescale.optim.quantize_layout import grid, grid_shape, local_tiling, scales_layout
from vescale.optim.quantize_map import dynamic_map, encode
from vescale.spmd.layout import AbstractMesh, Layout

KINDS = ["signed", "unsigned"]

shapes = st.one_of(
    st.tuples(st.integers(1, 70)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
)
blocks = st.one_of(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 40))


def values(shape, seed, spread=4.0):
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp(spread * torch.randn(shape, generator=generator))


def assert_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_is_that_of_its_bits(kind):
    numbers = dynamic_map(kind)
    assert_bits(numbers, reference.dynamic_map(kind == "signed"))
    assert numbers.shape == (256,)
    assert bool((numbers.diff() > 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_of_the_nearest_number(kind):
    """Also at each middle, at the floats next to it, and at the map's numbers."""
    numbers = dynamic_map(kind)
    middles = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    v = torch.cat(
        [numbers, middles, torch.tensor([-1.0, -0.0, 1e-45, -1e-45]), values((500,), 0).clamp(-1, 1)]
    )
    v = torch.cat([v, *(v.nextafter(torch.tensor(to)) for to in (-2.0, 2.0))]).clamp(-1, 1)
    nearest = (v.double().unsqueeze(1) - numbers.double()).abs().min(1).indices
    assert_bits(encode(v, kind).long(), nearest)


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, block=blocks, seed=st.integers(0, 99), rounded=st.booleans())
@settings(deadline=None, max_examples=40)
def test_bits_of_a_loop_over_blocks(kind, shape, block, seed, rounded):
    x = values(shape, seed)
    x = x if kind == "signed" else x.square()
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) if rounded else None
    codes, scales = quantize(x, kind, block, noise)
    expected, their_scales = reference.quantize(x, kind == "signed", block, noise)
    assert_bits(scales.reshape(-1), their_scales)
    assert_bits(codes, expected)
    assert_bits(
        dequantize(codes, scales, kind, block),
        reference.dequantize(codes, their_scales, kind == "signed", block),
    )
    again, scales = quantize(torch.zeros(shape), kind, block)
    zeros, no_scales = quantized_zeros(x, kind, block)
    assert_bits(zeros, again)
    assert_bits(no_scales, scales)


@given(shape=shapes, block=blocks, seed=st.integers(0, 99), log_scale=st.integers(-30, 30))
@settings(deadline=None, max_examples=40)
def test_errors_are_bounded(shape, block, seed, log_scale):
    """By half the widest gap, 0.9 / 64 signed and 0.9 / 128 unsigned, in units of the block's maximum; by
    0.47 of a number above 1e-5 of that (1e-6 unsigned); and what is below half of the least code becomes
    0."""
    x = values(shape, seed) * 2.0**log_scale
    for kind, half, few in (("signed", 0.45 / 64, 1e-5), ("unsigned", 0.45 / 128, 1e-6)):
        y = x if kind == "signed" else x.abs()
        least = dynamic_map(kind).abs().sort().values[1]
        codes, scales = quantize(y, kind, block)
        found = dequantize(codes, scales, kind, block)
        for where, scale in zip(reference.blocks(shape, block), scales.reshape(-1), strict=True):
            here, error = y.reshape(-1)[where], (found.reshape(-1)[where] - y.reshape(-1)[where]).abs()
            assert bool((error <= scale * (half + 2e-7)).all())
            assert bool((found.reshape(-1)[where][here.abs() < 0.49 * least * scale] == 0).all())
            assert bool((error <= 0.47 * here.abs())[here.abs() >= few * scale].all())
            assert bool((found.reshape(-1)[where].abs() <= scale).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quantized_is_a_fixed_point(kind):
    x = values((64, 64), 3).abs()  # whose maximum, unlike a negative one, is a number of both maps
    codes, scales = quantize(x, kind, (32, 32))
    again, same = quantize(dequantize(codes, scales, kind, (32, 32)), kind, (32, 32))
    assert_bits(again, codes)
    assert_bits(same, scales)


def test_zero_blocks_and_numbers_that_are_not_finite():
    x = torch.ones(8, 8)
    x[:4, :4] = 0.0
    x[0, 4], x[4, 0] = torch.nan, -torch.inf
    codes, scales = quantize(x, "signed", (4, 4))
    assert_bits(scales, torch.tensor([[0.0, torch.nan], [torch.nan, 1.0]]))
    found = dequantize(codes, scales, "signed", (4, 4))
    assert bool((found[:4, :4] == 0).all())
    assert bool((found[4:, 4:] == 1).all())
    assert bool(found[:4, 4:].isnan().all())
    assert bool(found[4:, :4].isnan().all())
    assert bool((codes[:4] == encode(torch.zeros(()), "signed")).all())


def test_the_smallest_and_the_largest_numbers():
    """Subnormal and huge maxima don't overflow, nor become 0."""
    for size in (1e-45, 1e-40, 3e38):
        x = torch.tensor([[size, -size, size / 2, 0.0]])
        found = dequantize(*quantize(x, "signed", (1, 4)), "signed", (1, 4))
        assert bool(found.isfinite().all())
        assert found[0, 0] == x[0, 0]


def test_rounding_at_random_is_unbiased():
    """The mean of n draws is within 5 standard errors: gap * sqrt(p (1 - p) / n), at most half of the gap."""
    x, n = values((32, 32), 5, spread=1.0), 600
    x = x.sign() * x.abs().clamp(max=0.99)
    x[0, 0] = 1.0  # the scale
    found, key = torch.zeros(32, 32, dtype=torch.float64), vs.rng.key(3)
    for number in range(n):
        noise = vs.rng.uniform(vs.rng.fold_in(key, number), (32, 32))
        found += dequantize(*quantize(x, "signed", (32, 32), noise), "signed", (32, 32))
    numbers = dynamic_map("signed")
    lower = (x.unsqueeze(2) >= numbers).sum(2).sub(1).clamp(0, 254)
    gap = (numbers[lower + 1] - numbers[lower]).double()
    error = (found / n - x).abs()
    assert bool((error <= 5 * gap / 2 / math.sqrt(n) + 1e-9).all())
    to_nearest = dequantize(*quantize(x, "signed", (32, 32)), "signed", (32, 32)) - x
    assert float((found / n - x).mean().abs()) < float(to_nearest.abs().mean()) / 10


# Layouts.


def cuts(shape, sizes, count):
    """How many rows of `count` leading dims lie between neighbouring cuts that cut no block."""
    if len(sizes) < len(shape):
        return max(1, math.prod(sizes) // math.prod(shape[count:]))
    if count == len(shape):
        rows = sizes[-2] if len(sizes) > 1 else 1
        return rows * shape[-1] if rows > 1 else sizes[-1]
    return sizes[-2] if count == len(shape) - 1 else 1


def placements(shape, sizes, ranks):
    """Placements that cut no block, and some that do."""
    yield vs.P()
    yield vs.P(a=vs.RaggedShard.on_rank(1, ranks))
    for dim in range(len(shape)):
        yield vs.P(a=vs.Shard(dim))
        yield vs.P(a=vs.Shard(dim), b=vs.Shard(dim))
        yield vs.P(a=vs.InterleavedShard(dim, 2), b=vs.Shard((dim + 1) % len(shape)))
    for count in range(1, len(shape) + 1):
        rows, step = math.prod(shape[:count]), cuts(shape, sizes, count)
        for first in sorted({0, step, 2 * step, rows}):
            if first <= rows:
                ragged = vs.RaggedShard(range(count), (first, *[0] * (ranks - 2), rows - first))
                yield vs.P(a=ragged)
                yield vs.P(b=vs.Shard(len(shape) - 1), a=ragged)


def legal(mesh, shape, sizes):
    for spec in placements(shape, sizes, mesh.axis_size("a")):
        if set(spec) <= set(mesh.axis_names):
            try:
                yield Layout(mesh, spec, shape)
            except vs.VescaleError:
                continue


def elements(layout, rank):
    return torch.cat([torch.arange(*interval) for interval in layout.regions(rank)] or [torch.arange(0)])


def layout_of_scales(layout, sizes):
    """None when it is refused."""
    try:
        return scales_layout(layout, sizes, "w")
    except ShardingError:
        return None


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}, {"a": 3, "b": 2}], ids=str)
@pytest.mark.parametrize(
    "shape", [(24,), (13, 8), (16, 12), (8, 16), (2, 6, 8), (3, 5, 8), (2, 2, 4, 8)], ids=str
)
def test_scales_are_with_their_blocks(shape, axes):
    """On each rank: the codes and scales of its local tensor are the global ones, in the places that the
    layouts say, and it has no block in part. What is refused does cut a block; or its pieces, which are whole
    blocks, are no runs of rows of blocks (sections, and shards of a flattened tensor)."""
    mesh = AbstractMesh(tuple(axes), tuple(axes.values()))
    x = values(shape, 1)
    tried = refused = 0
    for block in ((4, 4), (1, 4), (3, 2), 4, 8, 6, 16):
        codes, scales = quantize(x, "signed", block)
        sizes = grid(shape, block)
        owner = torch.empty(math.prod(shape), dtype=torch.long)
        for number, where in enumerate(reference.blocks(shape, block)):
            owner[where] = number
        for layout in legal(mesh, shape, sizes):
            held = [elements(layout, rank) for rank in range(mesh.size)]
            cut = any(set(owner[mine].tolist()) & set(owner[others(mine, owner)].tolist()) for mine in held)
            of_scales = layout_of_scales(layout, sizes)
            tried += 1
            if of_scales is None:
                refused += 1
                interleaved = any(isinstance(p, vs.InterleavedShard) for _, p in layout.spec.items())
                assert cut or interleaved or len(sizes) < len(shape), (layout, block)
                continue
            assert not cut, (layout, block)
            assert of_scales.shape == grid_shape(shape, sizes)
            for rank, mine in enumerate(held):
                local = x.reshape(-1)[mine].view(layout.local_shape(rank))
                lies = as_ints(local_tiling(layout, sizes, rank))
                made = torch.ops.vescale.quantize_blocks.default(
                    local, None, "signed", sizes, lies, of_scales.local_shape(rank), "w"
                )
                assert_bits(made[0].reshape(-1), codes.reshape(-1)[mine])
                assert_bits(made[1].reshape(-1), scales.reshape(-1)[elements(of_scales, rank)])
    assert tried > 20
    assert 0 < refused < tried


def others(mine, owner):
    """The elements that are not `mine`."""
    mask = torch.ones(owner.shape, dtype=torch.bool)
    mask[mine] = False
    return mask


def test_runs_of_ranks_stay_runs():
    """A layout of 10,240 ranks is as small for the scales as for the codes."""
    mesh = AbstractMesh(("dp",), (10240,))
    layout = Layout(mesh, vs.P(dp=vs.RaggedShard.even(10240)), (10240 * 64, 128))
    ragged = scales_layout(layout, (32, 32), "w").spec["dp"]
    assert isinstance(ragged, vs.RaggedShard)
    assert ragged.runs == ((1, 10240),)
