"""Factor notation: texts bound to shapes, factors split, and arguments found."""

import math

import pytest
import torch

from tests.graphs import traced
from vescale.spmd.rules.notation import Pattern, argument, bind, find_rule, parse, rule, tensor_position

aten = torch.ops.aten
NOTHING = {"sum": (), "whole": ()}


def test_parse():
    assert parse("i k, (k g) 1 -> ... i") == ([[["i"], ["k"]], [["k", "g"], []]], [["...", ["i"]]])


def test_a_scalar_is_a_list_of_no_dims():
    assert parse(", n c ->") == ([[], [["n"], ["c"]]], [[]])
    assert bind(", n ->", [(), (3,)], [()], sum=["n"], whole=[]).operands == ((), (("n",),))


def test_factors_get_their_sizes():
    pattern = bind("i k, k j -> i j", [(2, 3), (3, 5)], [(2, 5)], sum=["k"], whole=[])
    assert pattern.sizes == {"i": 2, "k": 3, "j": 5}
    assert (pattern.sum, pattern.whole) == ({"k"}, set())


def test_sizes_that_differ_are_noticed():
    with pytest.raises(AssertionError):
        bind("i k, k j -> i j", [(2, 3), (4, 5)], [(2, 5)], **NOTHING)


def test_dots_stand_for_the_same_dims_everywhere():
    pattern = bind("v d, ... -> ... d", [(10, 4), (2, 3)], [(2, 3, 4)], sum=["v"], whole=[])
    assert pattern.operands[1] == pattern.results[0][:2] == ((".0",), (".1",))
    assert bind("... d -> ... d", [(2, 3, 4)], [(2, 3, 4)], sum=[], whole=["..."]).whole == {".0", ".1"}


def test_a_factor_that_a_result_lacks_is_whole_unless_it_is_summed():
    """Forgetting to say what happens to it must not give a wrong value."""
    assert bind("i k -> i", [(2, 3)], [(2,)], **NOTHING).whole == {"k"}
    assert bind("i k -> i", [(2, 3)], [(2,)], sum=["k"], whole=[]).whole == set()
    two = bind("i k -> i k, i", [(2, 3)], [(2, 3), (2,)], **NOTHING)
    assert two.whole == {"k"}


def replacement(x):
    return x


def test_split_writes_a_factor_as_two():
    pattern = Pattern(
        ((("a", "k"),),),
        ((("k",),),),
        {"a": 2, "k": 12},
        sum=frozenset("k"),
        whole=frozenset("a"),
        expand={"k": replacement},
    )
    split = pattern.split("k", 3)
    assert split.operands == ((("a", "k<", "k>"),),)
    assert split.results == ((("k<", "k>"),),)
    assert split.sizes == {"a": 2, "k<": 3, "k>": 4}
    assert split.sum == {"k<", "k>"}
    assert split.whole == {"a"}
    assert split.expand == {"k<": replacement, "k>": replacement}


def test_the_inner_part_of_a_contiguous_factor_is_whole():
    pattern = bind("n c -> n", [(2, 12)], [(2,)], sum=["c"], whole=[], contiguous=frozenset("c"))
    split = pattern.split("c", 3)
    assert split.whole == {"c>"}
    assert split.contiguous == {"c<", "c>"}


def test_arguments_by_position_and_by_name():
    graph = traced(lambda x: torch.sum(x, 1, keepdim=True), torch.ones(2, 3))
    (node,) = graph.nodes
    assert argument(node, 1, "dim") == (1,) or argument(node, 1, "dim") == [1]
    assert argument(node, 2, "keepdim", False) is True
    assert argument(node, 9, "dtype", "none") == "none"


def test_tensors_are_numbered_in_the_order_of_the_arguments():
    graph = traced(
        lambda a, b, c: torch.where(a, torch.cat([b, c]), 1.0), torch.ones(4) > 0, *[torch.ones(2)] * 2
    )
    cat, *_, where = graph.nodes
    assert list(cat.refs()) == [1, 2]
    assert tensor_position(where, 1) == 1
    assert tensor_position(cat, 1) is None


def test_an_op_has_one_rule():
    with pytest.raises(AssertionError):
        rule(aten.mm.default, "i k, k j -> i j")
    assert find_rule(aten.mm.default) is not None
    assert find_rule(aten.block_diag.default) is None


@pytest.mark.parametrize("op", [aten.mm, aten.bmm, aten.mv, aten.dot], ids=str)
def test_the_factors_of_every_tensor_multiply_to_its_shape(op):
    shapes = {
        aten.mm: [(2, 3), (3, 5)],
        aten.bmm: [(7, 2, 3), (7, 3, 5)],
        aten.mv: [(2, 3), (3,)],
        aten.dot: [(3,), (3,)],
    }[op]
    graph = traced(op, *map(torch.ones, shapes))
    (node,) = graph.nodes
    found = find_rule(node.op)
    assert found is not None
    pattern = found(node, graph.metas)
    for value, dims in zip([*node.refs(), *node.outs], [*pattern.operands, *pattern.results]):
        assert graph.metas[value].shape == tuple(math.prod(pattern.sizes[f] for f in dim) for dim in dims)
    assert pattern.sum == {"k"}
