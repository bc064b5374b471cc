"""What a node may do over an axis, what that asks of its operands, and what moving them is charged."""

from dataclasses import replace

import pytest

from vescale.spmd.layout import AbstractMesh, Digit, Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard
from vescale.spmd.program.candidates import (
    ANY,
    REFUSED,
    SMALL,
    Cut,
    Factor,
    Impossible,
    Pass,
    Whole,
    candidates,
    carry,
    charge,
    refine,
    state_of,
)
from vescale.spmd.rules.notation import Pattern, bind
from vescale.spmd.rules.views import regroup

MESH = AbstractMesh(("dp", "tp"), (2, 4))
MM = bind("i k, k j -> i j", [(8, 12), (12, 6)], [(8, 6)], sum=["k"], whole=[], linear=(frozenset((0,)),))
ROW = Digit(0)
SUM = Partial()
RAGGED = RaggedShard((0,), (3, 1))


def view(source, target):
    operand, result, sizes, whole = regroup(source, target)
    return Pattern((operand,), (result,), sizes, whole=frozenset(whole), linear=(frozenset((0,)),), view=True)


def elementwise(*operands):
    return Pattern(operands, ((("a",), ("b",)),), {"a": 8, "b": 4}, ragged=2, pointwise=True)


def offered(pattern, size, *states, taken=()):
    return list(candidates(pattern, size, [[state] for state in states], frozenset(taken)))


def test_every_factor_that_an_axis_divides():
    assert offered(MM, 2, None, None) == [Whole(), Factor("i"), Factor("k"), Factor("j")]


def test_a_factor_of_its_own_may_be_uneven_and_a_part_of_a_dim_may_not():
    assert Factor("j") in offered(MM, 4, None, None)
    flat = view((2, 3, 4), (6, 4))
    assert len(offered(flat, 2, None)) == 3  # the 2, the 4, and whole; 3 is no multiple of 2
    assert Factor("f1") not in offered(flat, 2, None)


def test_no_factor_that_is_taken_whole_or_in_no_operand():
    assert offered(MM, 2, None, None, taken=("i", "k")) == [Whole(), Factor("j")]
    whole = bind("i k -> i k", [(8, 12)], [(8, 12)], sum=[], whole=["k"])
    assert offered(whole, 2, None) == [Whole(), Factor("i")]
    made = Pattern(((("a",),),), ((("a",), ("new",)),), {"a": 4, "new": 2})
    assert offered(made, 2, None) == [Whole(), Factor("a")]


def test_what_is_not_made_yet_proposes_nothing():
    assert offered(MM, 2, None, ANY) == [Whole(), Factor("i"), Factor("k")]


def test_sums_pass_where_the_op_is_linear_and_maxima_never():
    assert Pass(SUM, frozenset((0,))) in offered(MM, 2, SUM, None)
    assert Pass(Partial("max"), frozenset((0,))) not in offered(MM, 2, Partial("max"), None)
    assert Pass(SUM, frozenset((0,))).operand(MM, 1) is None  # the other operand is a whole value


def test_ragged_cuts_pass_ops_that_allow_them_only():
    dims = (("a",), ("b",))
    assert Cut(RAGGED, ("a",)) in offered(elementwise(dims, dims), 2, RAGGED, None)
    assert not [found for found in offered(MM, 2, RAGGED, None) if isinstance(found, Cut)]


def test_a_cut_asks_of_operands_the_same_rows_or_nothing():
    pattern = elementwise((("a",), ("b",)), (), (("b",),), (("a",), ()), ((), ("b",)))
    rows = Cut(RAGGED, ("a",))
    assert [rows.operand(pattern, index) for index in range(5)] == [RAGGED, None, None, RAGGED, None]
    elements = RaggedShard((0, 1), (3, 5))
    cut = Cut(elements, ("a", "b"))
    assert [cut.operand(pattern, index) for index in (0, 1)] == [elements, None]
    for index in (2, 3, 4):
        with pytest.raises(Impossible):
            cut.operand(pattern, index)


def test_a_cut_follows_the_rows_through_other_dims_and_into_a_sum():
    flat = RaggedShard((0,), (3, 5))
    pattern = Pattern(
        ((("a",), ("b",), ("c",)),),
        ((("a", "b"), ("c",)), (("c",),), ((), ("a",), ("b", "c"))),
        {"a": 4, "b": 2, "c": 3},
        sum=frozenset("ab"),
        ragged=2,
    )
    cut = Cut(RaggedShard((0, 1), (3, 5)), ("a", "b"))
    assert [cut.result(pattern, 0), cut.result(pattern, 1)] == [flat, Partial("sum")]
    with pytest.raises(Impossible):
        cut.result(pattern, 2)
    assert cut not in offered(pattern, 2, cut.ragged)
    assert cut in offered(replace(pattern, results=pattern.results[:2]), 2, cut.ragged)


def test_a_factor_that_a_result_lacks_leaves_it_partial():
    assert [Factor("k").operand(MM, index) for index in (0, 1)] == [Digit(1), Digit(0)]
    assert Factor("k").result(MM, 0) == Partial("sum")
    assert Factor("i").result(MM, 0) == Digit(0)
    assert Factor("i").operand(MM, 1) is None


@pytest.mark.parametrize(
    ("spec", "shape", "state"),
    [
        (P(), (8,), None),
        (P(tp=Shard(1)), (8, 8), Digit(1)),
        (P(tp=InterleavedShard(0, 3)), (24,), Digit(0, 3)),
        (P(dp=Shard(0), tp=Shard(0)), (8,), Digit(0, 2)),
        (P(tp=Shard(0)), (7,), Digit(0)),  # uneven, but the only split of the dim
        (P(dp=Shard(0), tp=Shard(0)), (7,), Shard(0)),
        (P(tp=Partial()), (8,), SUM),
        (P(tp=RaggedShard.even(4)), (8,), RaggedShard.even(4)),
    ],
)
def test_the_state_that_an_axis_leaves(spec, shape, state):
    assert state_of(Layout(MESH, spec, shape), "tp") == state


def test_refine_cuts_a_factor_where_a_digit_starts():
    # Rows (b t) with t over tp: the digit has the b values outside it.
    pattern = refine(MM, 0, Layout(MESH, P(tp=InterleavedShard(0, 2)), (8, 12)))
    assert pattern.operands[0][0] == pattern.results[0][0] == ("i<", "i>")
    assert (pattern.sizes["i<"], pattern.sizes["i>"]) == (2, 4)
    assert refine(MM, 0, Layout(MESH, P(tp=Shard(0)), (8, 12))) is MM


def test_refine_cuts_the_factor_of_two_axes_in_two():
    pattern = refine(MM, 1, Layout(MESH, P(dp=Shard(0), tp=Shard(0)), (12, 6)))
    assert pattern is MM  # 12 is not 2 x 4 x something: an uneven pair of splits has no digits
    even = bind("k -> k", [(16,)], [(16,)], sum=[], whole=[])
    assert refine(even, 0, Layout(MESH, P(dp=Shard(0), tp=Shard(0)), (16,))).sizes == {"k<": 2, "k>": 8}


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ((8, 6), (48,), P(tp=Shard(0)), P(tp=Shard(0))),
        ((3, 8), (24,), P(tp=Shard(1)), P(tp=InterleavedShard(0, 3))),
        ((24,), (3, 8), P(tp=InterleavedShard(0, 3)), P(tp=Shard(1))),
        ((8, 4), (4, 2, 4), P(dp=Shard(1), tp=Shard(0)), P(dp=Shard(2), tp=Shard(0))),
        ((8, 4), (32,), P(dp=Shard(0), tp=Shard(1)), P(dp=Shard(0), tp=InterleavedShard(0, 4))),
        ((8, 6), (48,), P(tp=Partial()), P(tp=Partial())),
        ((8, 6), (48,), P(), P()),
        ((6, 4), (24,), P(tp=Shard(0)), None),  # 6 over 4 ranks: uneven splits don't survive a flattening
        ((6, 4), (3, 8), P(dp=Shard(0)), None),  # the 2 is not outermost in the 6's common factors
        ((8, 6), (48,), P(dp=RaggedShard((0,), (3, 5))), None),
    ],
)
def test_carry_through_a_reshape(source, target, before, after):
    found = carry(view(source, target), MESH, Layout(MESH, before, source), 0, target)
    assert found is (None if after is None else Layout(MESH, after, target))


BYTES = 1 << 20


@pytest.mark.parametrize(
    ("state", "need", "bytes_moved"),
    [
        (ROW, ROW, 0),
        (None, None, 0),
        (ANY, ROW, 0),
        (ROW, None, BYTES * 3 / 4),  # a gather
        (ROW, Digit(1), BYTES * 3 / 16),  # an exchange: a quarter of a gather among four
        (SUM, None, BYTES * 3 / 2),  # an all-reduce: scatter and gather
        (SUM, ROW, BYTES * 3 / 2),  # a scatter, charged as if gathered back
        (None, ROW, BYTES * 3 / 4),  # a slice, charged as if gathered back
        (None, RAGGED, 0),
        (SUM, RAGGED, BYTES * 3 / 4),
    ],
)
def test_what_a_move_is_charged(state, need, bytes_moved):
    assert charge(state, need, BYTES, 4, pinned=False)[0] == bytes_moved


@pytest.mark.parametrize("state", [None, ROW, ANY])
def test_large_values_do_not_become_partial(state):
    assert charge(state, SUM, SMALL + 1, 4, pinned=False)[0] >= REFUSED


def test_small_whole_values_may_become_partial():
    assert charge(None, SUM, SMALL, 4, pinned=False) == (0.0, 1)


def test_parameters_stay():
    assert charge(ROW, None, BYTES, 4, pinned=True)[0] >= REFUSED
    assert charge(ROW, ROW, BYTES, 4, pinned=True)[0] == 0


def test_ties_go_to_fewer_moves():
    assert charge(SUM, None, BYTES, 4, pinned=False)[1] < charge(SUM, ROW, BYTES, 4, pinned=False)[1]


def test_results_that_don_t_depend_on_a_factor_are_alike_on_every_rank():
    """Whole, not pending, also when another axis splits the factor further; and then not unevenly."""
    operands, results = ((("n",), ("i",)),), ((("n",), ("i",)), (("n",),))
    pattern = Pattern(operands, results, {"n": 4, "i": 6}, alike={"i": frozenset((1,))})
    assert Factor("i").result(pattern, 1) is None
    assert Factor("n").result(pattern, 1) == Digit(0)
    split = pattern.split("i", 2)
    assert Factor("i<").result(split, 1) is Factor("i>").result(split, 1) is None
    offered = [set(candidates(pattern, size, [[None]], frozenset())) for size in (3, 4)]
    assert [Factor("i") in found for found in offered] == [True, False]
