"""Layouts: regions tile the tensor, two spellings of one layout are one object, errors say why."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.layouts import layouts, meshes, shapes
from vescale._errors import LayoutError
from vescale.spmd.layout import AbstractMesh, Digit, Layout
from vescale.spmd.locals import flat_indices
from vescale.spmd.mesh import group_ranks
from vescale.spmd.mesh_order import as_spec, from_mesh_order
from vescale.spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)
from vescale.spmd.redistribute_plan import base
from vescale.spmd.regions import common_size, flat_boxes, overlap, region

MESH = AbstractMesh(("dp", "tp"), (2, 3))


@st.composite
def any_layout(draw, partial=True):
    return draw(layouts(draw(meshes((1, 3))), draw(shapes()), partial))


def elements(layout, rank):
    return [index for start, stop in layout.regions(rank) for index in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(any_layout())
def test_regions_tile_the_tensor_once(layout):
    """Over the axes that split it, each element has exactly one owner; over the others all have it."""
    numel = math.prod(layout.shape)
    split = {a for a, p in layout.spec.items() if not isinstance(p, Partial | Replicate)}
    copies = math.prod(n for a, n in zip(layout.mesh.axis_names, layout.mesh.shape) if a not in split)
    held = sorted(i for rank in range(layout.mesh.size) for i in elements(layout, rank))
    assert held == sorted(list(range(numel)) * copies)


@settings(max_examples=200, deadline=None)
@given(any_layout())
def test_one_meaning_in_every_form(layout):
    """regions, local_shape, flat_indices and the closed form agree, and local order is global order."""
    for rank in range(layout.mesh.size):
        held = elements(layout, rank)
        assert held == sorted(held)
        index = flat_indices(layout, rank)
        assert tuple(index.shape) == layout.local_shape(rank)
        assert index.flatten().tolist() == held
        assert common_size(region(layout, rank), region(layout, rank)) == len(held)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlaps_are_the_common_elements(data):
    """Blocks of two ranks' local memory name the same elements on both sides, each once."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    src, dst = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    for sender in range(mesh.size):
        mine = flat_indices(src, sender)
        for receiver in range(mesh.size):
            theirs = flat_indices(dst, receiver)
            pair = region(src, sender), region(dst, receiver)
            seen = []
            for b in overlap(*pair):
                here = mine.as_strided(b.sizes, b.src_strides, b.src_offset)
                assert here.equal(theirs.as_strided(b.sizes, b.dst_strides, b.dst_offset))
                seen += here.flatten().tolist()
            assert sorted(seen) == sorted(set(mine.flatten().tolist()) & set(theirs.flatten().tolist()))
            assert common_size(*pair) == len(seen)


@settings(max_examples=200, deadline=None)
@given(any_layout(), st.data())
def test_base_is_what_the_group_holds(layout, data):
    axes = tuple(a for a in layout.mesh.axis_names if data.draw(st.booleans()))
    below = base(layout, axes)
    if below is None:
        return
    for rank in range(layout.mesh.size):
        group = group_ranks(layout.mesh, axes, rank)
        assert sorted({i for r in group for i in elements(layout, r)}) == elements(below, rank)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2), (2, 1, 3, 2)])
def test_flat_interval_is_the_fewest_boxes(shape):
    """Against brute force: the fewest boxes, in order, that cover the interval exactly."""
    numel = math.prod(shape)
    whole = {}  # elements of each box -> the box
    for low in range(numel + 1):
        for high in range(low, numel + 1):
            boxes = list(flat_boxes(shape, low, high))
            assert [i for box in boxes for i in _cells(shape, box)] == list(range(low, high))
            fewest = whole.setdefault((low, high), _fewest(shape, low, high))
            assert len(boxes) == fewest, (low, high, boxes)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_boxes_are_the_fewest(data):
    """Of any layout: each element in one box, in as few as an exhaustive search finds."""
    mesh = data.draw(meshes((1, 2)))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(data.draw(st.integers(1, 3))))
    layout = data.draw(layouts(mesh, shape, partial=False))
    rank = data.draw(st.integers(0, mesh.size - 1))
    boxes = layout.boxes(rank)
    held = elements(layout, rank)
    assert sorted(i for box in boxes for i in _cells(shape, box)) == held
    assert len(boxes) == _fewest_of(shape, frozenset(held), len(boxes))


def test_an_interleaved_piece_under_a_ragged_cut_in_the_fewest_boxes():
    """What lies behind the cut in its row keeps its whole height: three boxes, where rows give four."""
    mesh = AbstractMesh(("dp", "tp"), (2, 2))
    spec = P(tp=InterleavedShard(1, 2), dp=RaggedShard((0, 1), (1, 11)))
    layout = Layout(mesh, spec, (3, 8))
    assert layout.boxes(2) == (
        ((0, 1), (1, 2)),
        ((0, 3), (4, 6)),
        ((1, 3), (0, 2)),
    )


def _fewest_of(shape, held, limit):
    """The fewest disjoint boxes that make up a set: the first element left is the corner of one of them."""
    if not held:
        return 0
    if limit == 0:
        return math.inf
    first = []
    at = min(held)
    for size in reversed(shape):
        at, i = divmod(at, size)
        first.append(i)
    first.reverse()
    best = math.inf
    ends = [range(i + 1, size + 1) for i, size in zip(first, shape)]
    for stops in itertools.product(*ends):
        cells = frozenset(_cells(shape, tuple(zip(first, stops))))
        if cells <= held:
            best = min(best, 1 + _fewest_of(shape, held - cells, min(limit, best) - 1))
    return best


@settings(max_examples=100, deadline=None)
@given(any_layout())
def test_owners_are_those_who_hold_it(layout):
    numel = math.prod(layout.shape)
    held = [set(elements(layout, rank)) for rank in range(layout.mesh.size)]
    for flat in range(0, numel, max(numel // 16, 1)):
        index = tuple(_unravel(layout.shape, flat))
        assert layout.owner(index) == tuple(rank for rank, mine in enumerate(held) if flat in mine)


def _unravel(shape, flat):
    for n in range(len(shape)):
        inner = math.prod(shape[n + 1 :])
        yield flat // inner
        flat %= inner


def test_an_index_outside_has_no_owner():
    layout = Layout(MESH, P(dp=Shard(0)), (4,))
    for index in ((4,), (-1,), (0, 0)):
        with pytest.raises(LayoutError, match="counts from 0"):
            layout.owner(index)


def _cells(shape, box):
    cells = [0]
    for size, (start, stop) in zip(shape, box):
        cells = [cell * size + i for cell in cells for i in range(start, stop)]
    return cells


def _fewest(shape, low, high):
    """Runs that are boxes, chained: an interval's boxes can be taken to be intervals themselves."""
    best = {low: 0}
    for at in range(low, high):
        for end in range(at + 1, high + 1):
            if _is_box(shape, at, end):
                best[end] = min(best.get(end, math.inf), best[at] + 1)
    return best[high]


def _is_box(shape, low, high):
    points = []
    for flat in range(low, high):
        point = []
        for size in reversed(shape):
            flat, i = divmod(flat, size)
            point.append(i)
        points.append(tuple(point))
    box = [(min(c), max(c) + 1) for c in zip(*points)]
    return math.prod(b - a for a, b in box) == high - low


def test_equal_layouts_are_one_object():
    def same(a, b, shape=(12, 12), mesh=MESH):
        return Layout(mesh, a, shape) is Layout(mesh, b, shape)

    assert same(P(dp=Shard(0)), P(dp=Shard(0), tp=Replicate()))
    assert same(P(dp=Shard(0), tp=Shard(1)), P(tp=Shard(1), dp=Shard(0)))
    assert same(P(dp=Shard(0), tp=Shard(0)), P(tp=InterleavedShard(0, 2), dp=Shard(0)))
    assert not same(P(dp=Shard(0), tp=Shard(0)), P(tp=Shard(0), dp=Shard(0)))
    assert same(P(dp=RaggedShard((0,), (2, 4))), P(dp=RaggedShard((0,), (1, 2))))
    assert not same(P(dp=Shard(0)), P(dp=RaggedShard.even(2)))
    assert same(P(dp=RaggedShard.even(2), tp=Shard(1)), P(tp=Shard(1), dp=RaggedShard.even(2)))
    assert same(P("dp", None), P(dp=Shard(0)))
    assert same(P(("dp", "tp")), P(dp=Shard(0), tp=Shard(0)))
    assert same(
        P(dp=StridedRaggedShard((0,), (2, 4), split_factor=3), tp=Shard(0)),
        P(tp=Shard(0), dp=RaggedShard((0,), (1, 2))),
        (9, 4),
    )
    assert same(P(dp=StridedRaggedShard((0,), (1, 2), 1)), P(dp=RaggedShard((0,), (1, 2))))
    # An axis of one rank cuts nothing, and so commutes with uneven splits too.
    one = AbstractMesh(("dp", "one"), (2, 1))
    assert same(P(one=Shard(0), dp=Shard(0)), P(dp=Shard(0), one=Shard(0)), (7,), one)
    # Uneven splits of one dim keep their order; of two dims they commute.
    assert not same(P(dp=Shard(0), tp=Shard(0)), P(tp=Shard(0), dp=Shard(0)), (7,))
    assert same(P(dp=Shard(0), tp=Shard(1)), P(tp=Shard(1), dp=Shard(0)), (7, 7))


@settings(max_examples=100, deadline=None)
@given(any_layout())
def test_canonical_form_is_stable(layout):
    assert Layout(layout.mesh, layout.spec, layout.shape) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_uneven_and_empty_shards_follow_torch_chunk():
    mesh = AbstractMesh(("dp",), (4,))
    layout = Layout(mesh, P(dp=Shard(0)), (5,))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]


def test_grouped_query_sections():
    layout = Layout(AbstractMesh(("tp",), (2,)), P(tp=InterleavedShard(0, (8, 2, 2))), (12, 3))
    assert layout.local_shape(1) == (6, 3)
    assert layout.index_sets(1)[0] == ((4, 8), (9, 10), (11, 12))


def test_ragged_on_one_rank():
    layout = Layout(MESH, P(tp=RaggedShard.on_rank(1, 3)), (4, 5))
    assert [layout.local_shape(rank) for rank in range(3)] == [(0, 5), (4, 5), (0, 5)]


def test_a_placement_is_as_small_on_many_ranks():
    many = RaggedShard((0,), [3] * 10_240)
    assert many == RaggedShard.even(10_240)
    layout = Layout(AbstractMesh(("dp",), (10_240,)), P(dp=many), (20_480, 7))
    assert layout.local_shape(10_239) == (2, 7)
    assert list(layout.regions(10_239)) == [(20_478 * 7, 20_480 * 7)]


@pytest.mark.parametrize(
    ("spec", "shape", "says"),
    [
        (P(xp=Shard(0)), (4,), "the mesh has the axes dp, tp"),
        (P(dp=Shard(1)), (4,), "dim"),
        (P(dp=Shard(0)), (), "dim"),
        (P(dp=RaggedShard((0,), (1, 2, 1))), (4,), "axis 'dp' has 2"),
        (P(dp=RaggedShard((0,), (1, 2))), (4,), "4 prefix rows for 3 units"),
        (P(dp=RaggedShard((0, 1), (1, 1))), (4,), "ragged dims"),
        (P(dp=RaggedShard((), (1, 0))), (), "0-d"),
        (P(dp=RaggedShard.even(2), tp=RaggedShard.even(3)), (6,), "at most one"),
        (P(dp=RaggedShard.even(2), tp=Shard(0)), (12,), "comes last"),
        (P(dp=RaggedShard((0, 1), (1, 3)), tp=Shard(1)), (2, 6), "comes last"),
        (P(tp=Shard(0), dp=RaggedShard.even(2)), (8,), "uneven split of dim 0"),
        (P(dp=InterleavedShard(0, 3)), (8,), "equal sections"),
        (P(dp=InterleavedShard(0, (3, 4))), (8,), "section sizes"),
        (P(tp=Shard(0), dp=InterleavedShard(0, 2)), (8,), "of a dim of 3"),
        (P(dp=Partial("sum"), tp=Partial("max")), (8,), "commute"),
    ],
)
def test_illegal_layouts(spec, shape, says):
    with pytest.raises(LayoutError, match=says):
        Layout(MESH, spec, shape)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RaggedShard((1,), (1, 1)), "prefix"),
        (lambda: RaggedShard((0,), (1, -1)), "not negative"),
        (lambda: RaggedShard((0,), (0, 0)), "sum is positive"),
        (lambda: RaggedShard.on_rank(2, 2), "lies on the axis"),
        (lambda: RaggedShard((0, 0), (1, 1)), "prefix"),
        (lambda: RaggedShard(0, (1, 1)), "dims is a tuple"),
        (lambda: RaggedShard((0,), (1.5, 1)), "whole numbers"),
        (lambda: StridedRaggedShard((0,), (1, 1), 0), "split factor"),
        (lambda: StridedRaggedShard((0,), (1, -1), 2), "not negative"),
        (lambda: Partial("prod"), "one of"),
        (lambda: Shard(-1), "counts from the front"),
        (lambda: P("dp", dp=Shard(0)), "not both"),
        (lambda: P("dp", "dp"), "twice"),
        (lambda: P(dp=0), "a placement is"),
    ],
)
def test_illegal_placements(make, says):
    with pytest.raises(LayoutError, match=says):
        make()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (P(dp=StridedRaggedShard((0,), (1, 1), 2), tp=Shard(0)), r"\(tp=3\): 3"),
        (P(dp=StridedRaggedShard((0,), (1, 1), 3)), "product of the sizes of the sharded axes .*: 1"),
        (P(dp=StridedRaggedShard((0,), (1, 1), 3), tp=RaggedShard((0,), (1, 1, 1))), "split_factor"),
        (P(dp=StridedRaggedShard((0,), (1, 1), 1), tp=RaggedShard((0,), (1, 1, 1))), "at most one"),
        (P(xp=StridedRaggedShard((0,), (1, 1), 1)), "the mesh has the axes"),
    ],
)
def test_illegal_strided_ragged_layouts(spec, says):
    with pytest.raises(LayoutError, match=says):
        Layout(MESH, spec, (12, 4))


@settings(max_examples=200, deadline=None)
@given(any_layout())
def test_placements_in_mesh_order_mean_the_layout(layout):
    """Wherever there are such placements; only uneven splits of one dim, out of order, have none."""
    try:
        placements = layout.placements
    except LayoutError:
        dims = [p.dim for p in dict(layout.spec.items()).values() if hasattr(p, "dim")]
        assert len(set(dims)) < len(dims)
        assert not all(axis in layout.digits for axis, p in layout.spec.items() if hasattr(p, "dim"))
        return
    assert Layout(layout.mesh, from_mesh_order(layout.mesh, placements), layout.shape) is layout
    assert Layout(layout.mesh, as_spec(layout.mesh, list(placements)), layout.shape) is layout


def test_a_ragged_split_on_an_earlier_axis_is_strided_only_where_it_must_be():
    units = RaggedShard((0,), (1, 3))
    mesh = AbstractMesh(("dp", "tp"), (2, 2))
    assert Layout(mesh, P(tp=Shard(0), dp=units), (8, 4)).placements == (
        StridedRaggedShard((0,), (1, 3), split_factor=2),
        Shard(0),
    )
    assert Layout(mesh, P(tp=Shard(1), dp=units), (8, 4)).placements == (units, Shard(1))
    assert Layout(mesh, P(dp=Shard(0), tp=units), (8, 4)).placements == (Shard(0), units)


def test_placements_say_what_they_are():
    assert repr(RaggedShard((0,), (3, 1))) == "RaggedShard((0,), (3, 1))"
    assert repr(RaggedShard.even(10_240)) == "RaggedShard.even(10240, dims=(0,))"
    assert repr(RaggedShard((0,), [0, 0, 5, 2, 2])) == "RaggedShard((0,), (0 x 2, 5, 2 x 2))"
    assert len(repr(RaggedShard((0,), range(10_240)))) < 100
    strided = StridedRaggedShard((0, 1), (2, 4), split_factor=2)
    assert repr(strided) == "StridedRaggedShard((0, 1), (1, 2), split_factor=2)"
    assert (strided.dims, strided.local_units) == ((0, 1), (1, 2))
    assert pickle.loads(pickle.dumps(strided)) == strided


def test_uneven_sections_are_each_cut_as_torch_chunks():
    layout = Layout(AbstractMesh(("tp",), (2,)), P(tp=InterleavedShard(0, (5, 2, 1))), (8, 3))
    assert [layout.index_sets(rank)[0] for rank in (0, 1)] == [((0, 3), (5, 6), (7, 8)), ((3, 5), (6, 7))]
    assert [layout.local_shape(rank) for rank in (0, 1)] == [(5, 3), (3, 3)]
    assert layout.num_bytes(0, torch.bfloat16) == 30


def test_a_ragged_split_commutes_with_later_ones_only_where_its_cuts_are_whole():
    """Whole in the piece that it cuts, which an earlier split has made smaller."""
    mesh = AbstractMesh(("dp", "tp", "pp"), (2, 2, 2))
    units = RaggedShard((0, 1), (1, 3))
    first = P(dp=units, pp=Shard(1))
    last = P(pp=Shard(1), dp=units)
    assert Layout(mesh, first, (4, 4)) is Layout(mesh, last, (4, 4))
    with pytest.raises(LayoutError, match="comes last"):
        Layout(mesh, P(tp=Shard(0), dp=units, pp=Shard(1)), (4, 4))


def test_digits_speak_of_layouts():
    layout = Layout.of(MESH, (12,), {"tp": Digit(0, 2), "dp": Digit(0, 1)})
    assert layout is Layout(MESH, P(dp=Shard(0), tp=Shard(0)), (12,))
    assert layout.digits == {"dp": Digit(0, 1), "tp": Digit(0, 2)}
