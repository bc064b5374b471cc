"""The engine: published vectors, the contract of its ops, and how they trace."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import vescale.rng.philox as philox
from vescale.rng.numbers import draw
from vescale.rng.philox import (
    FOLD_IN,
    MASK,
    derive_keys,
    philox4x32,
    philox4x32_ints,
    random_bits_at,
)

ONES = 0xFFFFFFFF
# Random123, kat_vectors: philox4x32, 10 rounds.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words = st.integers(0, ONES)
keys = st.tuples(words, words).map(lambda pair: torch.tensor(pair))
widths = st.sampled_from([32, 64])


def expected(key, index, width):
    """The definition, one element at a time on Python ints."""
    per = 128 // width
    number = index // per
    block = philox4x32_ints((number & MASK, number >> 32, 0, 0), tuple(key.tolist()))
    if width == 32:
        return block[index % 4]
    low, high = block[2 * (index % 2) : 2 * (index % 2) + 2]
    value = low | high << 32
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_published_vectors(counter, key, output):
    assert philox4x32_ints(counter, key) == output
    tensors = philox4x32(*torch.tensor(counter).view(4, 1).unbind(), torch.tensor(key))
    assert tuple(int(word) & MASK for word in tensors) == output


@given(st.lists(st.tuples(words, words, words, words), min_size=1, max_size=5), keys)
@settings(max_examples=25, deadline=None)
def test_tensors_compute_what_ints_do(counters, key):
    many = philox4x32(*torch.tensor(counters).unbind(1), key)
    got = (torch.stack(many, dim=1) & MASK).tolist()
    assert got == [list(philox4x32_ints(counter, tuple(key.tolist()))) for counter in counters]


@given(keys, st.lists(st.integers(0, 6), max_size=4), widths)
@settings(max_examples=60, deadline=None)
def test_the_draw_is_the_draw_at_every_index(key, shape, width):
    numel = math.prod(shape)
    whole = draw(key, shape, f"bits{width}")
    index = torch.arange(numel).view(shape)
    assert whole.shape == tuple(shape)
    assert torch.equal(whole, random_bits_at(key, index, width))
    assert whole.reshape(-1)[:9].tolist() == [expected(key, i, width) for i in range(min(numel, 9))]


@given(keys, widths, st.data())
@settings(max_examples=60, deadline=None)
def test_any_subset_in_any_order(key, width, data):
    whole = draw(key, [311], f"bits{width}")
    index = torch.tensor(data.draw(st.lists(st.integers(0, 310), max_size=60)), dtype=torch.int64)
    assert torch.equal(random_bits_at(key, index, width), whole[index])
    grid = index[: index.numel() // 2 * 2].view(2, -1).T  # not contiguous
    assert torch.equal(random_bits_at(key, grid, width), whole[grid])


@pytest.mark.parametrize("width", [32, 64])
def test_chunks_do_not_show(width, monkeypatch):
    key = torch.tensor([3, 4])
    whole = draw(key, [5000], f"bits{width}")
    index = torch.arange(4999, -1, -1)
    monkeypatch.setattr(philox, "_chunk", lambda device: 17)
    assert torch.equal(draw(key, [5000], f"bits{width}"), whole)
    assert torch.equal(random_bits_at(key, index, width), whole.flip(0))


@pytest.mark.parametrize("width", [32, 64])
def test_indices_beyond_32_bits(width):
    key = torch.tensor([0xDEADBEEF, 1])
    index = [2**32, 2**34 + 5, 2**35 + 1, 2**62 + 3]
    assert random_bits_at(key, torch.tensor(index), width).tolist() == [
        expected(key, i, width) for i in index
    ]
    many = torch.arange(2**34 - 50, 2**34 + 50)  # enough for the tensor path, across the carry
    assert random_bits_at(key, many, width).tolist() == [expected(key, int(i), width) for i in many]


@given(keys, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=17, max_size=20))
@settings(max_examples=20, deadline=None)
def test_few_keys_and_many_are_derived_alike(key, data):
    many = derive_keys(key, torch.tensor(data), FOLD_IN)
    few = torch.stack([derive_keys(key, torch.tensor(datum), FOLD_IN) for datum in data])
    assert torch.equal(many, few)
    assert many.min() >= 0
    assert many.max() <= MASK


def test_width_is_checked():
    with pytest.raises(ValueError, match="32 or 64"):
        random_bits_at(torch.tensor([0, 0]), torch.arange(3), 16)


def test_ops_satisfy_torch():
    key, index = torch.tensor([1, 2]), torch.arange(6).view(2, 3)
    for op, args in (
        (torch.ops.vescale.draw.default, (key, [2, 3], "bits32")),
        (torch.ops.vescale.draw_at.default, (key, torch.tensor([[3, 2, 0, 1]]), [2], "gumbel64")),
        (torch.ops.vescale.scale_bits.default, (index, index, 3, 7)),
        (torch.ops.vescale.random_bits_at.default, (key, index, 64)),
        (torch.ops.vescale.derive_keys.default, (key, index, FOLD_IN)),
        (torch.ops.vescale.normal_from_bits.default, (index,)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_fake_tensors_trace_to_one_node_with_the_right_shape():
    def both(key, index):
        return draw(key, [4, 5], "bits32"), random_bits_at(key, index, 64)

    args = torch.tensor([1, 2]), torch.arange(6).view(2, 3)
    graph = make_fx(both, tracing_mode="fake")(*args)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == [
        "vescale.draw.default",
        "vescale.random_bits_at.default",
    ]
    assert [tuple(node.meta["val"].shape) for node in calls] == [(4, 5), (2, 3)]
    for got, want in zip(graph(*args), both(*args)):
        assert torch.equal(got, want)


def test_vmap_over_keys_and_over_indices():
    many = torch.tensor([[1, 2], [3, 4], [5, 6]])
    index = torch.arange(6).view(2, 3)
    got = torch.func.vmap(lambda key: draw(key, [5], "bits32"))(many)
    assert torch.equal(got, torch.stack([draw(key, [5], "bits32") for key in many]))
    got = torch.func.vmap(lambda i: random_bits_at(many[0], i, 32), in_dims=1)(index)
    assert torch.equal(got, random_bits_at(many[0], index.T, 32))
    got = torch.func.vmap(lambda key, i: random_bits_at(key, i, 32))(many, index.T)
    want = [random_bits_at(key, i, 32) for key, i in zip(many, index.T)]
    assert torch.equal(got, torch.stack(want))


def test_blocks_do_not_repeat():
    drawn = draw(torch.tensor([9, 9]), [4096], "bits64")
    assert drawn.unique().numel() == 4096
    other = [draw(torch.tensor(key), [64], "bits64") for key in itertools.product((0, 1), (0, 1))]
    assert torch.cat(other).unique().numel() == 256
