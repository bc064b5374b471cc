"""Plans as plans: which steps, over which axes, and how many bytes, without a single tensor."""

import math

import pytest
from hypothesis import given, settings, strategies as st

from tests.layouts import layouts, meshes, shapes
from vescale._errors import LayoutError
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard
from vescale.spmd.redistribute_plan import COLLECTIVES, LOCAL, base, plan

MESH = AbstractMesh(("dp", "tp"), (2, 4))
RAGGED_A, RAGGED_B = RaggedShard((0,), (3, 5)), RaggedShard((0,), (1, 3))
RAGGED_C = RaggedShard((0,), (1, 1))

# Bytes an element, for all-reduces that are no gathers of a few numbers.
LARGE = 1 << 20


def steps(src, dst, shape=(8, 16), mesh=MESH):
    return plan(Layout(mesh, src, shape), Layout(mesh, dst, shape))


@pytest.mark.parametrize(
    ("src", "dst", "kind", "axes", "elements"),
    [
        # One gather, whatever the pieces: rank 0 receives what it lacks.
        (P(dp=Shard(0)), P(), "all_gather", ("dp",), 64),
        (P(tp=Shard(1)), P(), "all_gather", ("tp",), 96),
        (P(tp=InterleavedShard(1, 2)), P(), "all_gather", ("tp",), 96),
        (P(dp=RAGGED_A), P(), "all_gather", ("dp",), 80),
        (P(dp=RaggedShard.on_rank(0, 2)), P(), "all_gather", ("dp",), 0),
        (P(dp=Shard(0), tp=Shard(0)), P(), "all_gather", ("dp", "tp"), 112),
        (P(dp=Shard(0), tp=Shard(1)), P(dp=Shard(0)), "all_gather", ("tp",), 48),
        (P(tp=Shard(0), dp=RAGGED_B), P(tp=Shard(0)), "all_gather", ("dp",), None),
        # One reduction over the flattened group.
        # A small all-reduce is a gather of all contributions.
        (P(dp=Partial()), P(), "all_reduce", ("dp",), 128),
        (P(dp=Partial(), tp=Partial()), P(), "all_reduce", ("dp", "tp"), 7 * 128),
        (P(dp=Partial("max"), tp=Partial("max")), P(), "all_reduce", ("dp", "tp"), 7 * 128),
        (P(dp=Partial()), P(dp=Shard(0)), "reduce_scatter", ("dp",), 64),
        (P(dp=Partial()), P(dp=Shard(1)), "reduce_scatter", ("dp",), 64),
        (P(dp=Partial()), P(dp=RAGGED_A), "reduce_scatter", ("dp",), 48),
        # Rank 0 alone would rather have an all-reduce, of 128 elements a rank.
        (P(tp=Partial()), P(tp=RaggedShard((0,), (5, 1, 1, 1))), "reduce_scatter", ("tp",), 240),
        (P(tp=Partial()), P(tp=RaggedShard.on_rank(0, 4)), "reduce_scatter", ("tp",), 384),
        (P(tp=Partial()), P(tp=InterleavedShard(0, 2)), "reduce_scatter", ("tp",), 96),
        (P(tp=Shard(0), dp=Partial()), P(tp=Shard(0), dp=RAGGED_C), "reduce_scatter", ("dp",), 16),
        # Nothing leaves the rank.
        (P(), P(dp=Shard(0)), "slice", (), 0),
        (P(), P(tp=Shard(0), dp=Shard(1)), "slice", (), 0),
        (P(), P(dp=RAGGED_A), "slice", (), 0),
        (P(tp=Shard(1)), P(tp=Shard(1), dp=RAGGED_A), "slice", (), 0),
        (P(), P(dp=Partial()), "to_partial", ("dp",), 0),
        (P(dp=Shard(0)), P(dp=Partial()), "to_partial", ("dp",), 0),
        (P(dp=Shard(0)), P(dp=RaggedShard.even(2)), "view", (), 0),
        # Only what changes owner.
        (P(dp=Shard(0)), P(dp=Shard(1)), "all_to_all", ("dp",), 32),
        (P(dp=RAGGED_A), P(dp=RAGGED_B), "all_to_all", ("dp",), 0),
        (P(dp=RAGGED_B), P(dp=RAGGED_A), "all_to_all", ("dp",), 16),
        (P(dp=RAGGED_A), P(dp=Shard(0)), "all_to_all", ("dp",), 16),
        (P(dp=Shard(0), tp=Shard(1)), P(dp=Shard(0), tp=Shard(0)), "all_to_all", ("tp",), 12),
        (P(dp=Shard(0), tp=Shard(0)), P(tp=Shard(0), dp=Shard(0)), "all_to_all", ("dp", "tp"), 0),
        # From one axis to another: only ranks along the axis that was split have anything to give.
        (P(dp=Shard(0)), P(tp=Shard(0)), "all_to_all", ("dp",), 0),
        (P(dp=RAGGED_A), P(tp=Shard(0)), "all_to_all", ("dp",), 0),
    ],
)  # fmt: skip
def test_one_step(src, dst, kind, axes, elements):
    if elements is None:
        with pytest.raises(LayoutError, match="prefix rows"):
            steps(src, dst)
        return
    (step,) = steps(src, dst)
    assert (step.kind, step.axes) == (kind, axes)
    assert step.bytes_moved(0, itemsize=4) == 4 * elements
    assert step.is_collective == (kind in COLLECTIVES)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        # A slice first makes the reduction smaller; a gather waits until after it.
        (P(dp=Partial()), P(tp=Shard(0)), ["slice", "all_reduce"]),
        (P(dp=Partial()), P(dp=Shard(0), tp=Shard(1)), ["slice", "reduce_scatter"]),
        (P(dp=Partial(), tp=Shard(1)), P(dp=Shard(0)), ["reduce_scatter", "all_gather"]),
        (P(dp=Partial(), tp=Shard(1)), P(), ["all_reduce", "all_gather"]),
        (P(dp=Partial(), tp=Partial()), P(dp=Shard(0)), ["reduce_scatter", "all_reduce"]),
        (P(dp=Partial()), P(dp=Partial("max")), ["all_reduce", "to_partial"]),
        (P(dp=Partial()), P(dp=Partial()), []),
        (P(dp=Partial(), tp=Shard(0)), P(dp=Partial(), tp=Shard(1)), ["all_to_all"]),
        (P(dp=Shard(0)), P(dp=Partial("max")), ["all_gather", "to_partial"]),
    ],
)
def test_several_steps(src, dst, kinds):
    assert [step.kind for step in steps(src, dst)] == kinds


def test_nothing_asks_ten_thousand_ranks(monkeypatch):
    """The same cost on any number of ranks: a plan looks at a few of them."""
    asked = set()
    seen = AbstractMesh.coordinate
    monkeypatch.setattr(AbstractMesh, "coordinate", lambda self, rank: asked.add(rank) or seen(self, rank))
    mesh, size = AbstractMesh(("dp",), (10_240,)), 10_240
    planned = RaggedShard.from_runs((0,), [(0, 5000), (3, 1), (8, 200), (5, 1), (0, 5038)])
    other = RaggedShard.from_runs((0,), [(0, 5002), (8, 201), (0, 5037)])
    for p, q, rows in [
        (RaggedShard.even(size), Shard(0), size * 2),
        (planned, other, 8 * 201),
        (planned, Shard(0), 8 * 201),
        (Shard(0), Shard(1), size * 2 - 5),
        (Partial(), planned, 8 * 201),
    ]:
        steps(P(dp=p), P(dp=q), (rows, 3), mesh)
        assert len(asked) < 200
        asked.clear()


def test_axes_of_one_rank_need_no_collective():
    mesh = AbstractMesh(("dp", "one"), (2, 1))
    for src in (P(one=Shard(0)), P(one=Partial()), P(one=RaggedShard((0, 1), (1,)))):
        (step,) = steps(src, P(), mesh=mesh)
        assert step.kind == "view"
    (step,) = steps(P(dp=Partial(), one=Partial()), P(), mesh=mesh)
    assert (step.kind, step.axes) == ("all_reduce", ("dp",))


def test_bytes_of_an_uneven_all_reduce():
    (step,) = steps(P(tp=Partial()), P(), shape=(5,))
    # Chunks of 2, 2, 1, 0 elements: three times the own chunk, then the rest of the sum.
    elements = [6 + 3, 6 + 3, 3 + 4, 0 + 5]
    assert [step.bytes_moved(rank, LARGE) for rank in range(4)] == [LARGE * n for n in elements]


def test_layouts_of_other_tensors_are_refused():
    with pytest.raises(LayoutError, match="keeps the mesh and the global shape"):
        plan(Layout(MESH, P(), (4,)), Layout(MESH, P(), (5,)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_splits_change_in_one_step_with_the_fewest_bytes(data):
    """Each rank receives the elements that it lacks, once: the least that any exchange can do."""
    mesh, shape = data.draw(meshes((1, 3))), data.draw(shapes())
    src, dst = (data.draw(layouts(mesh, shape, partial=False)) for _ in range(2))
    found = plan(src, dst)
    assert len(found) == (src is not dst)
    for rank in range(mesh.size):
        held, wanted = ({i for a, b in layout.regions(rank) for i in range(a, b)} for layout in (src, dst))
        assert sum(step.bytes_moved(rank, 2) for step in found) == 2 * len(wanted - held)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_plan_moves_more_than_a_direct_exchange(data):
    """All ranks together, pending sums too: each needs every contribution to its elements but its own."""
    mesh, shape = data.draw(meshes((1, 3))), data.draw(shapes())
    src, dst = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape, partial=False))
    least = 0
    for rank in range(mesh.size):
        held, wanted = ({i for a, b in layout.regions(rank) for i in range(a, b)} for layout in (src, dst))
        contributions = math.prod(mesh.axis_size(axis) for axis in src.partials)
        least += contributions * len(wanted) - len(wanted & held)
    assert sum(plan(src, dst).bytes_moved(rank) for rank in range(mesh.size)) <= least


def test_contributions_in_parts_are_exchanged_and_summed_at_once():
    (step,) = steps(P(dp=Partial(), tp=Shard(0)), P(dp=Shard(1), tp=Shard(1)))
    assert (step.kind, step.axes) == ("reduce_scatter", ("dp", "tp"))
    assert (step.reductions, step.contributions) == ((("dp", "sum"),), 2)
    # Two contributions to 8 x 2 elements, of which rank 0 has two rows of one.
    assert step.bytes_moved(0, 1) == 2 * 16 - 4


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_steps_form_a_chain(data):
    mesh, shape = data.draw(meshes((1, 3))), data.draw(shapes())
    src, dst = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    at = src
    for step in plan(src, dst):
        assert step.src is at
        assert LARGE * step.traffic == sum(step.bytes_moved(rank, LARGE) for rank in range(mesh.size))
        assert step.kind in COLLECTIVES + LOCAL
        assert not step.is_collective or step.group_size > 1
        at = step.dst
    assert at is dst


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        (P(dp=RAGGED_C), P(dp=Shard(0)), (8, 4)),
        (P(dp=Shard(0)), P(dp=RaggedShard((0, 1), (1, 1))), (8, 4)),
        (P(dp=Shard(0)), P(dp=RaggedShard((0,), (4, 3))), (7, 4)),  # torch's uneven chunks
        (P(dp=RAGGED_B), P(dp=RaggedShard((0, 1), (1, 3))), (8, 4)),
        (P(tp=Shard(1), dp=RAGGED_B), P(tp=Shard(1), dp=RaggedShard((0, 1), (1, 3))), (8, 4)),
        (P(tp=RaggedShard.on_rank(2, 4)), P(tp=RaggedShard((0,), (0, 0, 1, 0))), (8, 4)),
    ],
)
def test_the_same_data_by_another_name_stays_where_it_is(src, dst, shape):
    for a, b in ((src, dst), (dst, src)):
        route = steps(a, b, shape)
        assert [step.kind for step in route] == ["view"]
        assert [route.bytes_moved(rank) for rank in range(MESH.size)] == [0] * MESH.size


def test_a_ragged_split_that_moves_to_another_axis():
    """dp's two parts become tp's four: one exchange, of what each rank lacks."""
    route = steps(P(dp=RAGGED_A), P(tp=RaggedShard((0,), (1, 0, 5, 2))))
    assert [(step.kind, step.axes) for step in route] == [("all_to_all", ("dp",))]
    # Rows 0-2 on dp 0, 3-7 on dp 1; tp wants row 0, none, rows 1-5, rows 6-7.
    assert [route.bytes_moved(rank) // 16 for rank in range(8)] == [0, 0, 3, 2, 1, 0, 2, 0]


def test_a_plan_adds_up_its_steps():
    route = steps(P(dp=Partial(), tp=Shard(1)), P(dp=Shard(0)))
    assert [step.kind for step in route.collectives] == ["reduce_scatter", "all_gather"]
    # 4 x 4 elements of the sum, then the 4 x 12 of the other columns.
    assert route.bytes_moved(0, itemsize=4) == 4 * (16 + 48)
    assert steps(P(), P()) == ()
    assert steps(P(), P()).bytes_moved(0) == 0


@pytest.mark.parametrize("dst", [P(), P(dp=RaggedShard((0,), [1, 3] * 5120))])
def test_a_plan_over_ten_thousand_ranks(dst):
    mesh = AbstractMesh(("dp",), (10_240,))
    src = P(dp=RaggedShard((0,), [3, 1] * 5120))
    (step,) = steps(src, dst, shape=(4 * 5120, 8), mesh=mesh)
    assert step.is_collective
    assert step.bytes_moved(1, 1) == 8 * (4 * 5120 - 1 if dst == P() else 2)
    assert math.prod(step.src.local_shape(0)) == 24


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_pending_sum_becomes_splits_by_one_reduce_scatter(data):
    mesh, shape = data.draw(meshes((1, 3))), data.draw(shapes())
    dst = data.draw(layouts(mesh, shape, partial=False))
    axes = tuple(a for a in mesh.axis_names if a in dst.spec and data.draw(st.booleans()))
    before = base(dst, axes)
    if before is None or not axes:
        return
    spec = P.of([*before.spec.items(), *((axis, Partial()) for axis in axes)])
    (step,) = plan(Layout(mesh, spec, shape), dst)
    wide = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    assert step.axes == wide
    assert step.kind == ("reduce_scatter" if wide else "view")
    for rank in range(mesh.size):
        others = math.prod(mesh.axis_size(axis) for axis in wide) - 1
        assert step.bytes_moved(rank, 1) == others * math.prod(dst.local_shape(rank)) * bool(wide)
