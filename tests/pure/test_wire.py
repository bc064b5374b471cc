"""What collectives put on the wire: every byte that is received was sent by somebody."""

import pytest
from hypothesis import given, strategies as st

from tests.layouts import layouts, meshes, shapes
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.placements import P, Partial, RaggedShard, Shard
from vescale.spmd.program.wire import wire
from vescale.spmd.redistribute_plan import GATHER_BYTES, plan

MESH = AbstractMesh(("dp", "tp"), (2, 4))


@given(st.data())
def test_what_is_received_was_sent(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    src, dst = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape, partial=False))
    for step in plan(src, dst).collectives:
        if step.kind == "all_reduce":
            continue  # an uneven one, in ceil-sized chunks, is checked below
        found = [wire(step, rank, 4) for rank in range(mesh.size)]
        assert sum(one.sent for one in found) == sum(one.received for one in found), step
        assert all(one.received == step.bytes_moved(rank, 4) for rank, one in enumerate(found))


def one(src, dst, shape, rank=0):
    (step,) = plan(Layout(MESH, src, shape), Layout(MESH, dst, shape))
    return wire(step, rank, 4)


@pytest.mark.parametrize("rows", [8, 1 << 14, 10_001])
def test_all_reduces(rows):
    """A small one is a gather of all contributions; a large one a reduce-scatter and a gather."""
    nbytes = rows * 4
    found = [one(P(tp=Partial()), P(), (rows,), rank) for rank in range(4)]
    if 4 * nbytes <= GATHER_BYTES:
        assert {(w.received, w.sent) for w in found} == {(3 * nbytes, 3 * nbytes)}
        assert found[0].buffers == (2 * 4 - 1) * nbytes  # the result is counted apart
    else:
        assert all(abs(w.received - 2 * nbytes * 3 / 4) < 64 for w in found)
    assert sum(w.sent for w in found) == sum(w.received for w in found)


def test_a_ragged_gather_is_sent_by_who_has_it():
    cut = P(tp=RaggedShard((0,), (5, 0, 2, 1)))
    found = [one(cut, P(), (8, 4), rank) for rank in range(4)]
    assert [w.sent for w in found] == [3 * 16 * units for units in (5, 0, 2, 1)]
    assert [w.received for w in found] == [16 * (8 - units) for units in (5, 0, 2, 1)]
    back = [one(P(tp=Partial()), cut, (8, 4), rank) for rank in range(4)]
    assert [w.received for w in back] == [3 * 16 * units for units in (5, 0, 2, 1)]
    assert [w.sent for w in back] == [16 * (8 - units) for units in (5, 0, 2, 1)]


def test_a_large_group_is_not_walked():
    mesh = AbstractMesh(("dp",), (4096,))
    (step,) = plan(Layout(mesh, P(dp=Shard(0)), (8192, 8192)), Layout(mesh, P(dp=Shard(1)), (8192, 8192)))
    found = wire(step, 0, 4)
    assert found.sent == found.received == (2 * 8192 - 4) * 4
