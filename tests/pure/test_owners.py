"""Owners of matrices: loads in balance, near what is possible; few elements moved; and how texts are read."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from vescale._errors import ArgumentError
from vescale.optim.at_owners import decide, ownerships
from vescale.optim.orthogonalize import flops
from vescale.optim.owners import Work, assign
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.matrices import Matrices
from vescale.spmd.placements import P, RaggedShard, Shard

MATRIX, STACK = Matrices.of("r c -> r c"), Matrices.of("b r c -> b r c")
area = lambda rows, columns: rows * columns  # noqa: E731


@st.composite
def works(draw):
    ranks = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        size, count = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        cuts = sorted(draw(st.lists(st.integers(0, size * count), min_size=ranks - 1, max_size=ranks - 1)))
        ends = [0, *cuts, size * count]
        held = tuple((r, a, b) for r, (a, b) in enumerate(itertools.pairwise(ends)) if a < b)
        found.append(Work(draw(st.integers(1, 9)), size, count, held if draw(st.booleans()) else ()))
    return found, ranks, [draw(st.integers(0, 5)) for _ in range(ranks)]


@given(works())
@settings(deadline=None, max_examples=200)
def test_every_matrix_has_an_owner_and_loads_are_near_the_bound(case):
    found, ranks, fixed = case
    ownership = assign(found, ranks, fixed)
    loads = list(fixed)
    for work, runs in zip(found, ownership.owners, strict=True):
        assert sum(count for _, count in runs) == work.count
        assert [rank for rank, _ in runs] == sorted({rank for rank, _ in runs})
        assert all(c > 0 for _, c in runs)
        for rank, count in runs:
            loads[rank] += work.cost * count
    assert tuple(loads) == ownership.loads
    assert ownership.bound * (1 + 1e-12) >= 1
    assert ownership.bound <= ownership.imbalance * (1 + 1e-12)
    # Graham: what is placed last was placed where least was to do.
    largest = max((work.cost for work in found), default=0)
    assert max(loads) <= max(sum(loads) / ranks + largest, max(fixed))
    assert 0 <= ownership.least_moved <= ownership.moved <= sum(work.size * work.count for work in found)
    assert assign(found, ranks, fixed) == ownership


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_no_assignment_is_below_the_bound(costs, ranks):
    ownership = assign([Work(cost, 1) for cost in costs], ranks)
    best = min(
        max(sum(cost for cost, at in zip(costs, places) if at == rank) for rank in range(ranks))
        for places in itertools.product(range(ranks), repeat=len(costs))
    )
    assert ownership.bound * ownership.mean <= best * (1 + 1e-12)
    assert max(ownership.loads) <= best * 4 / 3  # Graham's bound of the rule


def test_large_and_small_matrices_do_not_share_where_nothing_else_fits():
    """Fifteen of 8 and ten of 3 on sixteen ranks: one rank can't have all those of 3, so an 8 gets one."""
    ownership = assign([Work(8, 1)] * 15 + [Work(3, 1)] * 10, 16)
    assert ownership.bound == ownership.imbalance == 11 / (150 / 16)


def test_matrices_stay_where_they_are_when_that_is_balanced():
    held = [((rank, 0, 7), ((rank + 1) % 4, 7, 12)) for rank in (2, 0, 3, 1)]
    ownership = assign([Work(5, 12, 1, parts) for parts in held], 4)
    assert ownership.owners == (((2, 1),), ((0, 1),), ((3, 1),), ((1, 1),))
    assert ownership.moved == ownership.least_moved == 20


def test_many_matrices_on_many_ranks_take_little_time_and_are_balanced():
    """As many as DeepSeek-V3 has. The time is read off the work done: a pass over matrices and a heap."""
    works = [Work(flops(2048, 7168, 5), 2048 * 7168, 256)] * 174
    works += [Work(flops(512 * n, 7168, 5), 512 * n * 7168) for n in range(1, 12)] * 20
    ownership = assign(works, 256)
    assert sum(w.count for w in works) > 44_000
    assert ownership.imbalance < 1.05


# What layouts make of it.


def test_stacks_are_cut_between_matrices_and_matrices_go_to_one_rank():
    mesh = AbstractMesh(("dp",), (4,))
    layouts = [
        Layout(mesh, P(dp=RaggedShard((0, 1), (7, 2, 0, 9))), (6, 3, 5)),
        Layout(mesh, P(dp=Shard(1)), (8, 4)),
        Layout(mesh, P(dp=Shard(0)), (8, 3, 5)),
        Layout(mesh, P(), (8, 4)),
        None,
    ]
    how = [STACK, MATRIX, STACK, MATRIX, MATRIX]
    stack, matrix, *others = decide(layouts, how, area)
    assert stack is not None and stack.ragged is not None  # noqa: PT018
    assert matrix is not None and matrix.ragged is not None  # noqa: PT018
    assert others == [None] * 3  # whole already, or not known
    assert stack.ragged[1].dims == (0,)
    assert sum(stack.ragged[1].local_units) in (6, 3, 2, 1)
    assert matrix.ragged[1].dims == ()
    assert matrix.ragged[1].total == 1
    loads = Counter({rank: stack.local_shape(rank)[0] * 15 for rank in range(4)})
    loads.update({rank: math.prod(matrix.local_shape(rank)) for rank in range(4)})
    assert max(loads.values()) == 32  # of 32 and 6 times 15


@pytest.mark.parametrize(
    ("text", "shape", "spec", "whole"),
    [
        ("(h d=4) k -> h d k", (24, 5), P(dp=RaggedShard((0,), (4, 20))), True),
        ("(h d=4) k -> h d k", (24, 5), P(dp=RaggedShard((0,), (6, 18))), False),
        ("(h d=4) k -> h d k", (24, 5), P(dp=RaggedShard((0, 1), (20, 100))), True),
        ("(h d=4) k -> h d k", (24, 5), P(tp=Shard(0), dp=RaggedShard((0,), (4, 8))), True),
        ("(h d=4) k -> h d k", (24, 5), P(tp=Shard(0), dp=RaggedShard((0,), (2, 10))), False),
        ("r (h d=4) -> h r d", (5, 24), P(dp=Shard(1)), True),
        ("r (h d=4) -> h r d", (5, 20), P(dp=Shard(1)), False),
        ("r (h d=4) -> h r d", (5, 24), P(dp=RaggedShard((), (0, 1))), True),
        ("r (h d=4) -> h r d", (5, 24), P(dp=RaggedShard((0,), (1, 4))), False),
        ("r c -> r c", (6, 4), P(dp=RaggedShard((0,), (0, 1))), True),
        ("b r c -> b r c", (8, 4, 2), P(dp=Shard(0), tp=Shard(0)), True),
        ("b r c -> b r c", (5, 4, 2), P(dp=Shard(0)), True),
    ],
)
def test_what_is_whole_on_a_rank_stays(text, shape, spec, whole):
    layout = Layout(AbstractMesh(("dp", "tp"), (2, 2)), spec, shape)
    (where,) = decide([layout], [Matrices.of(text)], area)
    assert (where is None) == whole


def test_ranks_that_have_whole_matrices_already_get_fewer():
    mesh = AbstractMesh(("dp",), (2,))
    there = Layout(mesh, P(dp=RaggedShard((0,), (1, 0))), (6, 4))
    cut = Layout(mesh, P(dp=Shard(0)), (6, 4))
    ownership = ownerships([there, cut], [MATRIX] * 2, area)["dp"].ownership
    assert ownership.owners == (((0, 1),), ((1, 1),))
    assert [layout and layout.spec for layout in decide([there, cut], [MATRIX] * 2, area)] == [
        None,
        P(dp=RaggedShard.on_rank(1, 2)),
    ]


def test_whole_matrices_move_only_where_others_do_and_their_rank_has_the_most_to_do():
    mesh = AbstractMesh(("dp",), (2,))
    there = Layout(mesh, P(dp=RaggedShard((0,), (1, 0))), (6, 4))
    small = Layout(mesh, P(dp=Shard(0)), (2, 1))
    assert decide([there] * 4, [MATRIX] * 4, area) == [None] * 4
    where = decide([there] * 4 + [small], [MATRIX] * 5, area)
    assert where.count(None) == 2
    assert {layout.spec for layout in where if layout} == {
        P(dp=RaggedShard.on_rank(rank, 2)) for rank in (0, 1)
    }


def test_a_tensor_parallel_matrix_is_brought_together_over_both_axes():
    mesh = AbstractMesh(("dp", "tp"), (2, 2))
    (where,) = decide([Layout(mesh, P(tp=Shard(0), dp=Shard(0)), (8, 6))], [MATRIX], area)
    assert where is not None
    assert where.spec == P(dp=RaggedShard.on_rank(0, 2))
    wide = AbstractMesh(("dp", "tp"), (2, 4))
    (where,) = decide([Layout(wide, P(tp=Shard(0), dp=RaggedShard((0,), (1, 1))), (8, 6))], [MATRIX], area)
    assert where is not None
    assert where.spec == P(tp=RaggedShard.on_rank(0, 4))  # two ranks do the same, not four
    (where,) = decide([Layout(mesh, P(tp=Shard(2), dp=RaggedShard((0,), (1, 3))), (8, 2, 6))], [STACK], area)
    assert where is not None
    assert where.spec == P(tp=Shard(0), dp=RaggedShard.even(2))  # each of the four has two of the eight
    (where,) = decide([Layout(mesh, P(tp=Shard(2), dp=RaggedShard((0,), (1, 2))), (3, 2, 6))], [STACK], area)
    assert where is not None
    assert where.spec == P(dp=RaggedShard((0,), (1, 2)))  # three don't divide; over dp nothing is cut


# Texts.


def test_a_split_tensor_joins_to_what_it_was():
    x = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    for text in (
        "a b c -> a b c",
        "(g r=2) b c -> g r (b c)",
        "a (h d=3) c -> h a (d c)",
        "a b c -> (a b) c",
    ):
        how = Matrices.of(text)
        matrices = how.split(x)
        assert matrices.shape == how.grid(x.shape)
        assert torch.equal(how.join(matrices, x.shape), x)
    assert torch.equal(Matrices.of("a (h d=3) c -> h a (d c)").split(x)[1], x[:, 3:].reshape(4, 15))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("r c", (2, 2)),
        ("r c -> r", (2, 2)),
        ("r c -> r r", (2, 2)),
        ("(r c -> r c", (2, 2)),
        ("r 4 -> r 4", (2, 4)),
        ("r c -> r c", (2, 2, 2)),
        ("(h d) c -> h d c", (4, 2)),
        ("(h d=3) c -> h d c", (4, 2)),
        ("r c=3 -> r c", (4, 2)),
    ],
)
def test_texts_that_say_nothing_are_errors(text, shape):
    with pytest.raises(ArgumentError, match=r"w\.b"):
        Matrices.of(text, "w.b").sizes(shape, "w.b")
