"""Moves that code for ragged tensors is known to get wrong, and groups of tensors that move together."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests.layouts import layouts, meshes, shapes
from vescale import InterleavedShard, P, Partial, RaggedShard, Replicate, Shard, StridedRaggedShard
from vescale.spmd.locals import local_slice
from vescale.spmd.redistribute import plan, rounds

TWO = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ONE = vs.make_mesh({"dp": 4}, backend="simulated")
A, B = RaggedShard((0,), (3, 0, 4, 1)), RaggedShard((0, 1), (5, 11, 0, 16))
PAIR, OTHER = RaggedShard((0,), (3, 1)), RaggedShard((0,), (1, 1))


def value(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1


def holds(x, expected):
    """Whether each rank has its own elements of the value, and all together have it."""
    for rank in x.mesh.local_ranks:
        if not x.layout.partials:
            assert torch.equal(x.to_local(rank), local_slice(expected, x.layout, rank)), (x, rank)
    assert torch.equal(x.full_tensor(), expected)
    return True


@pytest.mark.parametrize(
    ("mesh", "src", "dst"),
    [
        (ONE, P(dp=A), P()),
        (ONE, P(dp=A), P(dp=Shard(0))),
        (ONE, P(dp=A), P(dp=Shard(1))),
        (ONE, P(dp=A), P(dp=B)),
        (ONE, P(dp=Shard(1)), P(dp=B)),
        (ONE, P(dp=RaggedShard.on_rank(2, 4)), P(dp=A)),
        # Two axes, ragged on the first: the splits of the other axis come before it.
        (TWO, [StridedRaggedShard((0,), (3, 1), 2), Shard(0)], P()),
        (TWO, [StridedRaggedShard((0,), (3, 1), 2), Shard(0)], P(tp=Shard(0))),
        (TWO, [StridedRaggedShard((0,), (3, 1), 2), Shard(0)], [PAIR, Shard(1)]),
        (TWO, [StridedRaggedShard((0,), (3, 1), 2), Shard(0)], [OTHER, Replicate()]),
        (TWO, [StridedRaggedShard((0, 1), (13, 3), 2), Shard(0)], [Shard(0), PAIR]),
        (TWO, [PAIR, Shard(1)], P()),
        (TWO, [PAIR, Shard(1)], [PAIR, Replicate()]),
        (TWO, [PAIR, Shard(1)], [Shard(1), OTHER]),
        (TWO, [PAIR, Replicate()], [Replicate(), PAIR]),  # from one axis to another
        (TWO, [PAIR, Replicate()], [Replicate(), RaggedShard.on_rank(0, 2)]),
        (TWO, P(tp=InterleavedShard(0, 2), dp=OTHER), [PAIR, Replicate()]),
    ],
    ids=str,
)
def test_moves_and_their_gradients(mesh, src, dst):
    x = value(8, 4)
    before = vs.distribute_tensor(x, mesh, src)
    assert holds(before, x)
    leaf = before.detach().requires_grad_()
    after = leaf.redistribute(dst)
    assert holds(after.detach(), x)
    (after * after).sum().backward()
    assert leaf.grad.layout is before.layout
    assert holds(leaf.grad, 2 * x)


@pytest.mark.parametrize("shape", [(8, 4), (8, 5), (12, 6), (4, 3, 2)])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_units_that_do_not_divide_are_refused_and_nothing_is_dropped(shape, factor):
    """Where sum(units) doesn't divide the rows there is no such layout; else every row has an owner."""
    units = RaggedShard((0,), (factor, 2, 1, 0))
    if shape[0] % (factor + 3):
        with pytest.raises(vs.VescaleError, match="the units divide"):
            vs.distribute_tensor(value(*shape), ONE, P(dp=units))
    else:
        assert holds(vs.distribute_tensor(value(*shape), ONE, P(dp=units)), value(*shape))


def test_a_ragged_split_before_a_shard_of_the_same_dim_is_refused():
    """Written in the order of the mesh it would cut dim 0 first; what is meant has a name."""
    with pytest.raises(vs.VescaleError, match="StridedRaggedShard"):
        vs.distribute_tensor(value(8, 4), TWO, [PAIR, Shard(0)])


def test_pending_sums_beside_a_ragged_split():
    """(Ragged, Partial) to (Ragged, Replicate): reduced over one axis, still ragged over the other."""
    pieces = [value(8, 4)[:6], 10 * value(8, 4)[:6], value(8, 4)[6:], 10 * value(8, 4)[6:]]
    x = vs.from_local(pieces, TWO, P(dp=PAIR, tp=Partial()))
    assert holds(x.redistribute(P(dp=PAIR)), 11 * value(8, 4))
    assert holds(x.redistribute([OTHER, Shard(1)]), 11 * value(8, 4))


@pytest.mark.parametrize("columns", [(2, 3, 4, 5), (5, 4, 3, 2), (0, 7, 0, 1)])
def test_columns_of_any_width_are_assembled_exactly(columns):
    """Rank r has columns[r] columns: a ragged split of the transposed tensor, and not a Shard(1)."""
    total = sum(columns)
    x = value(3, total)
    pieces = list(x.split(list(columns), 1))
    rows = [piece.t().contiguous() for piece in pieces]
    held = vs.from_local(rows, ONE, P(dp=RaggedShard.from_sizes((0,), columns)))
    assert torch.equal(held.full_tensor().t(), x)
    with pytest.raises(vs.VescaleError, match=r"rank (0|1) has"):
        vs.from_local(pieces, ONE, P(dp=Shard(1)))
    with pytest.raises(vs.VescaleError, match=r"rank 0 has \(\d, 3\)"):
        vs.from_local(rows, ONE, P(dp=RaggedShard((0,), (1, 1, 1, 1))), shape=(total + -total % 4, 3))


def test_lists_and_p_are_two_spellings():
    for spec in (P(tp=Shard(0), dp=PAIR), P(dp=Shard(1)), P(dp=Partial(), tp=Shard(0))):
        x = vs.distribute_tensor(value(8, 4), TWO, spec)
        again = vs.distribute_tensor(value(8, 4), TWO, list(x.placements))
        assert again.layout is x.layout
        assert x.redistribute(list(x.placements)).layout is x.layout
        assert vs.from_local(x.locals, TWO, list(x.placements), shape=(8, 4)).layout is x.layout
    for bad in ([Shard(0)], "dp", 3):
        with pytest.raises(vs.VescaleError, match=r"one placement an axis|list of placements"):
            vs.distribute_tensor(value(8, 4), TWO, bad)


def test_a_source_rank():
    x = vs.distribute_tensor(value(5), ONE, P(dp=Shard(0)), src_rank=3)
    assert holds(x, value(5))
    for rank in (-1, 4):
        with pytest.raises(vs.VescaleError, match="one of the 4 ranks"):
            vs.distribute_tensor(value(5), ONE, P(), src_rank=rank)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.int64, "avg"), (torch.complex64, "max"), (torch.float8_e4m3fn, "sum")],
    ids=str,
)
def test_reductions_that_a_dtype_has_not_are_refused_before_anything_moves(dtype, op):
    pieces = [torch.zeros(4, dtype=dtype) for _ in range(4)]
    x = vs.from_local(pieces, ONE, P(dp=Partial(op)))
    with pytest.raises(vs.VescaleError, match=str(dtype)):
        x.redistribute(P())


# Groups.


@st.composite
def groups(draw):
    mesh = draw(meshes((1, 3)))
    moves = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(shapes())
        moves.append((draw(layouts(mesh, shape)), draw(layouts(mesh, shape))))
    return mesh, moves


@settings(max_examples=60, deadline=None)
@given(groups())
def test_together_as_one_by_one(group):
    abstract, moves = group
    mesh = vs.make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    tensors = []
    for number, (src, _) in enumerate(moves):
        noise = torch.Generator().manual_seed(number)
        pieces = [torch.randn(src.local_shape(rank), generator=noise) for rank in range(mesh.size)]
        tensors.append(vs.DTensor(pieces, mesh, src))
    together = vs.redistribute_many(tensors, [dst.spec for _, dst in moves])
    for x, y, (_, dst) in zip(tensors, together, moves):
        assert y.layout is dst
        for a, b in zip(x.redistribute(dst.spec).locals, y.locals):
            assert a.shape == b.shape
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def kinds_of(moves, dtypes=None):
    """(collectives in all plans, rounds of them together)."""
    plans = [plan(vs.Layout(TWO.abstract, a, s), vs.Layout(TWO.abstract, b, s)) for a, b, s in moves]
    at, found = [0] * len(plans), []
    for members in rounds(plans, dtypes or ["float32"] * len(plans)):
        steps = [plans[i][at[i]] for i in members]
        for i in members:
            at[i] += 1
        if steps[0].is_collective:
            found.append((steps[0].kind, members))
    assert at == [len(steps) for steps in plans]
    return sum(len(steps.collectives) for steps in plans), found


def test_one_collective_for_steps_of_one_kind():
    gathers = [(P(dp=PAIR), P(), (8, n)) for n in range(1, 6)] + [(P(dp=Shard(1)), P(), (3, 7))]
    assert kinds_of(gathers) == (6, [("all_gather", (0, 1, 2, 3, 4, 5))])
    over_tp = (P(tp=Shard(0)), P(), (4,))
    assert kinds_of([*gathers, over_tp])[1] == [("all_gather", (0, 1, 2, 3, 4, 5)), ("all_gather", (6,))]
    assert len(kinds_of(gathers, ["float32"] * 3 + ["bfloat16"] * 3)[1]) == 2
    # A gather waits for the one that comes after a reduction.
    late = [(P(dp=Partial(), tp=Shard(1)), P(dp=Shard(0)), (4, 4)), (P(tp=Shard(1)), P(), (4, 4))]
    assert kinds_of(late) == (3, [("reduce_scatter", (0,)), ("all_gather", (0, 1))])
    sums = [(P(dp=Partial()), P(), (4,)), (P(dp=Partial("max")), P(), (4,)), (P(dp=Partial()), P(), ())]
    assert kinds_of(sums)[1] == [("all_reduce", (0, 2)), ("all_reduce", (1,))]


def test_gradients_go_back_together():
    leaves = [vs.distribute_tensor(value(8, n), TWO, P(dp=PAIR)).requires_grad_() for n in (2, 3)]
    a, b = vs.redistribute_many(leaves, [P(), P(tp=Shard(0))])
    (a * a).sum().backward()  # b has no gradient
    assert torch.equal(leaves[0].grad.full_tensor(), 2 * value(8, 2))
    assert leaves[0].grad.layout is leaves[0].layout
    assert b.layout.spec == P(tp=Shard(0))


def test_groups_that_are_none():
    assert vs.redistribute_many([], P()) == []
    x = vs.distribute_tensor(value(8, 4), TWO, P())
    y = vs.distribute_tensor(value(8, 4), ONE, P())
    for tensors, placements, says in [
        ([x, torch.zeros(2)], P(), "Tensor at 1"),
        ([x, y], P(), "a call for each mesh"),
        ([x, x], [P()], "1 placements for 2"),
    ]:
        with pytest.raises(vs.VescaleError, match=says):
            vs.redistribute_many(tensors, placements)
