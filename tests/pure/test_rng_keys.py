"""Keys: what they are as values and as trees, and that derived streams are their own."""

import copy
import pickle

import numpy
import optree
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from vescale import _tree
from vescale._errors import ArgumentError
from vescale.rng import Key, fold_in, key, normal, split, uniform
from vescale.rng.philox import philox4x32_ints


def word(one):
    low, high = one.data.tolist()
    return high << 32 | low


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1, -1, -(2**63), 0x123456789ABCDEF0])
def test_a_key_is_its_seed(seed):
    assert word(key(seed)) == seed % 2**64
    if -(2**63) <= seed < 2**63:
        assert word(key(torch.tensor(seed))) == seed % 2**64
        assert word(fold_in(key(3), torch.tensor(seed))) == word(fold_in(key(3), seed))


def test_split_and_fold_in_to_the_bit():
    parent = key(0x0000000500000006)
    for i, child in enumerate(split(parent, 20)):
        assert child.data.tolist() == list(philox4x32_ints((i, 0, 0, 1), (6, 5))[:2])
    for datum in (0, 3, 2**40 + 1, -2):
        counter = (datum & 0xFFFFFFFF, datum >> 32 & 0xFFFFFFFF, 0, 2)
        assert fold_in(parent, datum).data.tolist() == list(philox4x32_ints(counter, (6, 5))[:2])
    assert [word(one) for one in split(parent, 3)] == [word(one) for one in split(parent, 30)[:3]]


def test_a_tree_of_one_leaf():
    tree = {"params": [key(1)], "dropout": key(2)}
    paths, leaves, spec = _tree.flatten_with_path(tree)
    assert paths == ["dropout.data", "params.0.data"]
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = _tree.unflatten(spec, leaves)
    assert isinstance(again["dropout"], Key)
    assert word(again["params"][0]) == 1
    accessor = optree.tree_accessors(key(1), namespace="vescale")[0]
    assert torch.equal(accessor(key(1)), key(1).data)


def test_values_print_pickle_copy_and_do_not_change():
    one = key(42)
    assert repr(one) == "Key(0x000000000000002a)"
    assert repr(Key(None)) == "Key(None)"
    assert word(pickle.loads(pickle.dumps(one))) == word(copy.deepcopy(one)) == 42
    with pytest.raises(AttributeError):
        one.data = torch.zeros(2)


def test_a_traced_key_prints():
    seen = []

    def program(data):
        seen.append(repr(Key(data)))
        return data + 1

    make_fx(program, tracing_mode="fake")(key(1).data)
    torch.func.vmap(program)(torch.zeros(3, 2, dtype=torch.int64))
    assert len(seen) == 2
    assert all(text.startswith("Key(") for text in seen)


def test_tracing_takes_few_nodes_and_no_constants():
    def program(data, step):
        first, second = split(fold_in(fold_in(Key(data), step), 3))
        return first.data + key(5).data, second.data, key(step).data

    args = key(9).data, torch.tensor(4)
    graph = make_fx(program, tracing_mode="fake")(*args)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("vescale.derive_keys.default") == 3
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    other = key(9).data, torch.tensor(77)
    for values in (args, other):
        for got, want in zip(graph(*values), program(*values)):
            assert torch.equal(got, want)


def test_derived_keys_are_distinct():
    root = key(0)
    family = [root, *split(root, 300), *(fold_in(root, i) for i in range(300))]
    family += [grandchild for child in split(root, 50) for grandchild in split(child, 4)]
    assert len({word(one) for one in family}) == len(family)


def test_derived_streams_are_not_correlated():
    root = key(123)
    near = [root, key(124), *split(root, 4), *(fold_in(root, i) for i in range(4))]
    near += split(split(root)[0])
    draws = torch.stack([normal(one, (20_000,), torch.float64) for one in near])
    correlation = torch.corrcoef(draws).fill_diagonal_(0).abs().max()
    assert correlation < 5 / 20_000**0.5
    # Nor is one a shifted copy of another.
    heads = torch.stack([uniform(one, (2_000,), torch.float64) for one in near])
    assert heads.unique().numel() == heads.numel()


def test_bits_of_derived_keys_are_fair():
    data = torch.stack([one.data for one in split(key(5), 4096)])
    ones = ((data.unsqueeze(-1) >> torch.arange(32)) & 1).double().mean(0)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 4096**0.5


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: key(1.5), "float 1.5"),
        (lambda: key("7"), "str '7'"),
        (lambda: key(True), "True"),
        (lambda: key(2**64), str(2**64)),
        (lambda: key(-(2**63) - 1), str(-(2**63) - 1)),
        (lambda: key(torch.tensor([1, 2])), "a tensor of torch.int64, shape (2,)"),
        (lambda: key(torch.tensor(1.0)), "a tensor of torch.float32, shape ()"),
        (lambda: split(key(1), 0), "0"),
        (lambda: split(key(1), 2.0), "2.0"),
        (lambda: split(key(1), True), "True"),
        (lambda: split(7), "int 7"),
        (lambda: fold_in(torch.zeros(2), 1), "Tensor tensor([0., 0.])"),
        (lambda: fold_in(key(1), 0.5), "float 0.5"),
        (lambda: fold_in(Key(torch.zeros(2)), 1), "a Key whose data is torch.float32 (2,)"),
        (lambda: fold_in(Key(None), 1), "a Key whose data is None"),
        (lambda: split(Key(torch.zeros(3, 2, dtype=torch.int64))), "torch.int64 (3, 2)"),
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


def test_numpy_integers_are_integers():
    assert word(key(numpy.int32(7))) == 7
    assert word(fold_in(key(1), numpy.uint8(3))) == word(fold_in(key(1), 3))
