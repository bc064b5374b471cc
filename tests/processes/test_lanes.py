"""Lanes in processes: the bits of simulated ranks, and no more on the wire than without lanes."""

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from tests.lane_cases import LANES, contributions, equal, gpt, mesh_of, small, start, train
from tests.processes.test_world import CASES as MOVES, world_mesh
from tests.simulated.test_lanes import mapped
from vescale import _tree
from vescale._errors import LayoutError
from vescale.spmd import transport
from vescale.spmd.lanes import LaneMesh
from vescale.spmd.layout import Layout
from vescale.spmd.redistribute import redistribute

pytestmark = pytest.mark.processes

MODELS = {"gpt": gpt, "small": small}
RUNS = [
    ("small", "replicated", 4),
    ("small", "fsdp", 1),
    ("small", "fsdp", 2),
    ("small", "fsdp", 4),
    ("small", "fsdp, tp inside", 2),
    ("small", "tp outside", 2),
    pytest.param("gpt", "fsdp", 2, marks=pytest.mark.slow),
    pytest.param("gpt", "fsdp, tp inside", 2, marks=pytest.mark.slow),
]


def train_here(model, case, ranks):
    axes = mesh_of(case, ranks, "simulated")
    mesh = world_mesh(tuple(zip(axes.axis_names, axes.shape)))
    return train(mesh, case, MODELS[model]()) if mesh.local_ranks else None


@pytest.mark.parametrize(("model", "case", "ranks"), RUNS)
def test_the_bits_are_those_of_a_rank_a_lane(pool, model, case, ranks):
    expected = train(mesh_of(case, LANES, "simulated"), case, MODELS[model](), lanes=None)
    answers = [found for found in pool.run(train_here, model, case, ranks) if found is not None]
    assert len(answers) == ranks * (2 if "tp" in case else 1)
    assert all(equal(found, expected) for found in answers)


def mapped_here():
    return mapped(world_mesh((("dp", 4),)))


def test_a_mapped_function(pool):
    expected = mapped(vs.make_mesh({"dp": LANES}, backend="simulated"))
    assert all(equal(found, expected) for found in pool.run(mapped_here))


# Every kind of move.

HOSTS = [
    ((("dp", 2),), {"dp": 2}),
    ((("dp", 2),), {"dp": 4}),
    ((("dp", 2), ("tp", 2)), {"dp": 4}),
    ((("dp", 2), ("tp", 2)), {"tp": 4}),
    ((("dp", 4),), {"dp": 8}),
]


def moves(mesh):
    for number, (src, dst, shape) in enumerate(MOVES):
        try:
            yield number, Layout(mesh, src, shape), Layout(mesh, dst, shape)
        except LayoutError:
            continue


def move(axes, lanes):
    """This process's results of all moves that fit the mesh."""
    hosts = world_mesh(axes)
    if not hosts.local_ranks:
        return None
    mesh, results = LaneMesh(hosts, lanes), {}
    for number, src, dst in moves(mesh.abstract):
        given = contributions(src)
        found = redistribute([given[lane] for lane in mesh.local_ranks], src, dst, mesh)
        results[number] = dict(zip(mesh.local_ranks, found, strict=True))
    return results


@pytest.mark.parametrize(("axes", "lanes"), HOSTS, ids=str)
def test_any_move(pool, axes, lanes):
    mesh = vs.make_mesh({**dict(axes), **lanes}, backend="simulated")
    expected = {
        number: redistribute(contributions(src), src, dst, mesh) for number, src, dst in moves(mesh.abstract)
    }
    assert len(expected) > 8
    answers = [found for found in pool.run(move, axes, lanes) if found is not None]
    seen = 0
    for found in answers:
        assert list(found) == list(expected)
        for number, by_lane in found.items():
            assert all(torch.equal(piece, expected[number][lane]) for lane, piece in by_lane.items())
            seen += len(by_lane)
    assert seen == len(expected) * mesh.size


# The wire.


class Wire:
    """Counts the collectives of this process, and the bytes that it sends to others in them."""

    def __enter__(self):
        self.calls = self.sent = 0
        self.exchange, self.gather = dist.all_to_all_single, transport._gather_single
        dist.all_to_all_single, transport._gather_single = self.all_to_all, self.all_gather
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, transport._gather_single = self.exchange, self.gather

    def all_to_all(self, recv, send, out_splits, in_splits, group, **given):
        sizes = [n for rank, n in enumerate(in_splits) if rank != group.rank()]
        self.calls, self.sent = self.calls + 1, self.sent + sum(sizes) * send.itemsize
        return self.exchange(recv, send, out_splits, in_splits, group, **given)

    def all_gather(self, recv, send, group, **given):
        self.calls, self.sent = self.calls + 1, self.sent + send.nbytes * (group.size() - 1)
        return self.gather(recv, send, group, **given)


def sent(case, ranks, lanes):
    """(collectives, bytes sent, bytes of padding that a step may move) of the second step."""
    mesh = world_mesh((("dp", ranks),))
    if not mesh.local_ranks:
        return None
    torch.manual_seed(0)
    step, params, state, batches = start(mesh, case, small(), lanes=lanes)
    params, state, _ = step(params, state, batches[0])
    with Wire() as wire:
        params, state, _ = step(params, state, batches[1])
    padding = sum(bucket.padding_nbytes for bucket in step.lower(params, state, batches[1]).buckets)
    assert len(_tree.leaves(params)) == 6
    return wire.calls, wire.sent, padding


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["replicated", "fsdp"])
def test_no_more_on_the_wire_than_without_lanes(pool, case, ranks):
    plain = [found for found in pool.run(sent, case, ranks, None) if found is not None]
    lanes = [found for found in pool.run(sent, case, ranks, LANES) if found is not None]
    for (calls, count, _), (with_lanes, more, padding) in zip(plain, lanes, strict=True):
        assert with_lanes == calls > 0
        # A bucket is gathered twice and reduced once; what pads it is for 8 shards.
        assert more <= count + 3 * padding * LANES // ranks * (ranks - 1)
        assert case == "fsdp" or more == count


def sent_for_a_gradient(ranks):
    """Bytes that a rank sends for the gradient of one replicated matrix, and of one that FSDP splits.

    Small ones are gathered and summed by each rank, so this one isn't.
    """
    mesh = world_mesh((("dp", ranks),))
    if not mesh.local_ranks:
        return None
    w, counts = {"w": torch.ones(128, 256)}, []
    for fsdp in (None, vs.FSDP("dp")):
        plan = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)
        loss = lambda params, x: (x @ params["w"]).square().sum()  # noqa: E731
        step = vs.parallelize(vs.grad(loss), plan, lanes={"dp": LANES})
        params, x = vs.distribute(w, step.plan), torch.ones(8, 128)
        step(params, x)
        with Wire() as wire:
            step(params, x)
        counts.append(wire.sent)
    return counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_wire_has_what_a_reduce_scatter_and_an_all_gather_need(pool, ranks):
    """A rank sends each of the others its part of the sum, and then its own part: the least there is."""
    part = 128 * 256 * 4 // ranks
    for found in pool.run(sent_for_a_gradient, ranks):
        assert found in (None, [2 * (ranks - 1) * part] * 2)


def natively():
    mesh = world_mesh((("dp", 4),))
    placed = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))})
    x = torch.arange(64.0)
    return [
        vs.parallelize(lambda x: x.sum(), placed, reduction=order)(x).full_tensor()
        for order in ("native", "ordered")
    ]


def test_the_backend_may_reduce_in_its_own_order(pool):
    for found in pool.run(natively):
        assert equal(found, [torch.tensor(2016.0)] * 2)  # whole numbers: any order is exact
