"""Over gloo: how many collectives a move takes, scatters from one rank, sub-meshes, errors on all ranks."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from vescale import InterleavedShard, P, Partial, RaggedShard, Shard, StridedRaggedShard
from vescale.spmd.layout import Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.redistribute import plan, redistribute

pytestmark = pytest.mark.processes

UNITS = RaggedShard((0,), (3, 1))


@cache
def world_mesh(**axes):
    return vs.make_mesh(axes)


def value(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@contextmanager
def counted():
    """The names of the collectives that torch.distributed is asked for."""
    names = ("all_to_all_single", "all_reduce", "broadcast", "reduce_scatter", "send", "recv", "scatter")
    calls, real = [], {name: getattr(dist, name) for name in names}

    def count(name):
        def call(*args, **kwargs):
            calls.append(name)
            return real[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, count(name))
        yield calls
    finally:
        for name in names:
            setattr(dist, name, real[name])


def same(x, expected):
    return torch.equal(x.to_local(), local_slice(expected, x.layout, x.mesh.rank))


def right(x, expected):
    assert same(x, expected), x
    assert torch.equal(x.full_tensor(), expected), x
    return True


# Groups.


def together():
    mesh = world_mesh(dp=2, tp=2)
    moves = [
        *((P(dp=UNITS), P(), (8, n), torch.float32) for n in range(1, 9)),
        *((P(dp=UNITS), P(), (8, n), torch.bfloat16) for n in range(1, 4)),
        (P(dp=Shard(0)), P(), (3, 3), torch.float32),
        (P(dp=Shard(0)), P(), (4, 3), torch.float32),
        (P(tp=Shard(0), dp=UNITS), P(tp=Shard(0)), (8, 4), torch.float32),
        (P(dp=Shard(0)), P(dp=Shard(1)), (7, 5), torch.float32),
        (P(dp=Shard(1)), P(dp=UNITS), (8, 3), torch.float32),
        (P(dp=Partial()), P(dp=UNITS), (8, 3), torch.float32),
        (P(dp=Partial()), P(dp=Shard(1)), (5, 7), torch.float32),
        (P(dp=Partial()), P(), (5, 7), torch.float32),
        (P(dp=Partial()), P(), (), torch.float32),
        (P(dp=Partial(), tp=Shard(0)), P(), (4, 4), torch.float32),
    ]
    tensors = []
    for number, (src, _, shape, dtype) in enumerate(moves):
        layout = Layout(mesh.abstract, src, shape)
        noise = torch.Generator().manual_seed(10 * number + (mesh.rank if layout.partials else 0))
        whole = (torch.randn(shape, generator=noise) * 100).to(dtype)
        spec = P.of((a, p) for a, p in layout.spec.items() if not isinstance(p, Partial))
        piece = local_slice(whole, Layout(mesh.abstract, spec, shape), mesh.rank).clone()
        tensors.append(vs.DTensor([piece], mesh, layout))
    apart = [x.redistribute(dst) for x, (_, dst, _, _) in zip(tensors, moves)]
    kept = [x.to_local().clone() for x in tensors]
    with counted() as calls:
        found = vs.redistribute_many(tensors, [dst for _, dst, _, _ in moves])
    for a, b, x, before in zip(apart, found, tensors, kept):
        assert a.layout is b.layout
        assert torch.equal(a.to_local(), b.to_local()), a
        assert torch.equal(x.to_local(), before), "an input was modified"
    memory = [x.to_local().untyped_storage().data_ptr() for x in found if x.to_local().numel()]
    assert len(set(memory)) == len(memory)
    # float32: gathers over dp, exchanges, reduce-scatters, all-reduces (a small one is one exchange), the
    # gather over tp after a reduction; bfloat16: gathers.
    return calls


def test_a_group_moves_in_one_collective_a_kind(pool):
    assert pool.run(together) == [["all_to_all_single"] * 6] * 4


def native():
    mesh = world_mesh(dp=4)
    from vescale.spmd.redistribute import redistribute_all

    moves = [(P(dp=Partial()), P()), (P(dp=Partial()), P()), (P(dp=Partial()), P(dp=Shard(0)))] * 2
    layouts = [tuple(Layout(mesh.abstract, spec, (5, 3)) for spec in move) for move in moves]
    pieces = [[torch.full((5, 3), float(mesh.rank + number))] for number in range(len(moves))]
    with counted() as calls:
        found = redistribute_all(pieces, layouts, mesh, reduction="native")
    for number, ((tensor,), (_, dst)) in enumerate(zip(found, layouts)):
        total = torch.full((5, 3), 6.0 + 4 * number)
        assert torch.equal(tensor, local_slice(total, dst, mesh.rank))
    return calls


def test_groups_in_the_backends_own_order(pool):
    assert pool.run(native) == [["all_reduce", "reduce_scatter"]] * 4


# One rank's value.


def from_source(source, axes):
    mesh = world_mesh(**axes)
    if not mesh.local_ranks:
        return None
    x = value(8, 6) if mesh.rank == source else torch.full((8, 6), float("nan"))
    found = []
    specs = [
        P(),
        P(dp=Shard(0)),
        P(dp=RaggedShard((0, 1), [2] + [1] * (mesh.shape[0] - 1) + [])),
        P(dp=Partial()),
    ]
    for spec in specs:
        try:
            Layout(mesh.abstract, spec, (8, 6))
        except vs.VescaleError:
            continue
        with counted() as calls:
            y = vs.distribute_tensor(x, mesh, spec, src_rank=source)
        assert torch.equal(y.full_tensor(), value(8, 6)), (spec, source)
        found.append(tuple(calls))
    return found


@pytest.mark.parametrize(
    ("source", "axes"), [(0, {"dp": 4}), (2, {"dp": 4}), (3, {"dp": 2, "tp": 2}), (1, {"dp": 3})]
)
def test_a_value_from_one_rank_takes_one_collective(pool, source, axes):
    size = torch.Size(axes.values()).numel()
    for found in pool.run(from_source, source, axes)[:size]:
        assert found[0] == ("broadcast",)
        assert len(found) >= 3
        assert set(found[1:]) == {("all_to_all_single",)}


def source_shapes_differ():
    mesh = world_mesh(dp=4)
    try:
        vs.distribute_tensor(torch.zeros(4 + (mesh.rank == 2)), mesh, P(dp=Shard(0)), src_rank=0)
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_a_value_of_another_shape_is_named(pool):
    messages = pool.run(source_shapes_differ)
    assert all("rank 2 differs" in message for message in messages)


# Moves that need care on the wire.


def careful():
    mesh = world_mesh(dp=2, tp=2)
    moves = [
        # Pieces made of several runs in two dims: what is sent is not in the order of the memory.
        (P(dp=InterleavedShard(0, (2, 4)), tp=InterleavedShard(1, (4, 2))), P(), (6, 6)),
        # A rank sends the first part of what it has, and no more.
        (P(tp=Shard(0)), P(dp=RaggedShard.on_rank(0, 2)), (8, 4)),
        (P(dp=UNITS), P(tp=UNITS), (8, 4)),
        (P(dp=UNITS), P(tp=RaggedShard((0, 1), (1, 31))), (8, 4)),
        (P(tp=Shard(0), dp=UNITS), P(tp=Shard(1), dp=UNITS), (8, 4)),
    ]
    for src, dst, shape in moves:
        x = vs.distribute_tensor(value(*shape), mesh, src)
        assert right(x.redistribute(dst), value(*shape)), (src, dst)
        assert right(x, value(*shape))
    return True


def summed_in_parts():
    """Contributions over dp, each in two parts over tp, to columns: one exchange and a sum."""
    mesh = world_mesh(dp=2, tp=2)
    src, dst = P(dp=Partial(), tp=Shard(0)), P(dp=Shard(1), tp=Shard(1))
    whole = [value(7, 6) * (10**index) for index in range(2)]
    layout = Layout(mesh.abstract, P(tp=Shard(0)), (7, 6))
    piece = local_slice(whole[mesh.coordinate("dp")], layout, mesh.rank)
    x = vs.DTensor([piece], mesh, Layout(mesh.abstract, src, (7, 6)))
    for reduction in ("ordered", "native"):
        with counted() as calls:
            (found,) = redistribute(
                x.locals, x.layout, Layout(mesh.abstract, dst, (7, 6)), mesh, reduction=reduction
            )
        assert calls == ["all_to_all_single"]
        assert torch.equal(
            found, local_slice(11 * value(7, 6), Layout(mesh.abstract, dst, (7, 6)), mesh.rank)
        )
    many = [P(dp=Partial(), tp=Shard(0))] * 3
    tensors = [
        vs.DTensor([piece * n], mesh, Layout(mesh.abstract, spec, (7, 6))) for n, spec in enumerate(many)
    ]
    with counted() as calls:
        moved = vs.redistribute_many(tensors, dst)
    assert calls == ["all_to_all_single"]
    return all(right(y, 11 * n * value(7, 6)) for n, y in enumerate(moved))


def test_contributions_in_parts_take_one_exchange(pool):
    assert all(pool.run(summed_in_parts))


def test_what_is_sent_is_what_is_needed(pool):
    assert all(pool.run(careful))


def bytes_on_the_wire():
    mesh = world_mesh(dp=2, tp=2)
    strided = StridedRaggedShard((0,), (3, 1), split_factor=2)
    specs = [
        P(),
        P(dp=Shard(0)),
        P(tp=Shard(1)),
        P(dp=UNITS),
        P(tp=Shard(0), dp=UNITS),
        P(dp=strided, tp=Shard(1)),
    ]
    specs += [P(dp=Partial(), tp=Shard(0)), P(dp=Partial(), tp=Partial())]
    received, real = [], dist.all_to_all_single

    def count(recv, send, out_splits, in_splits, group, **options):
        here = dist.get_group_rank(group, dist.get_rank())
        received.append((sum(out_splits) - out_splits[here]) * recv.itemsize)
        return real(recv, send, out_splits, in_splits, group, **options)

    dist.all_to_all_single = count
    try:
        for src in specs:
            for dst in specs[:-2]:
                a, b = (Layout(mesh.abstract, spec, (8, 4)) for spec in (src, dst))
                received.clear()
                vs.DTensor([torch.zeros(a.local_shape(mesh.rank))], mesh, a).redistribute(dst)
                assert sum(received) == plan(a, b).bytes_moved(mesh.rank, 4), (src, dst)
    finally:
        dist.all_to_all_single = real
    return True


def test_plans_say_exactly_what_each_rank_receives(pool):
    assert all(pool.run(bytes_on_the_wire))


# Parts of the world.


def on_a_part():
    """Two halves of a mesh at different work: neither waits for the other."""
    mesh = world_mesh(dp=2, tp=2)
    part = mesh["tp"]
    assert part is mesh["tp"]
    done = []
    for number in range(3 if mesh.coordinate("dp") else 0):  # only the second half, ranks 2 and 3
        x = vs.distribute_tensor(value(5, 3) + number, part, P(tp=Shard(0)))
        assert right(x.redistribute(P(tp=RaggedShard((0, 1), (4, 11)))), value(5, 3) + number)
        total = vs.from_local(torch.full((2,), float(part.rank)), part, P(tp=Partial()))
        assert total.full_tensor().tolist() == [1.0, 1.0]
        done.append(part.world_ranks)
    # And together again, on all axes and on the other one.
    assert right(vs.distribute_tensor(value(8, 4), mesh, P(tp=Shard(0), dp=UNITS)), value(8, 4))
    assert right(vs.distribute_tensor(value(8, 4), mesh["dp"], P(dp=UNITS)), value(8, 4))
    return done


def test_parts_of_a_mesh_work_alone(pool):
    assert pool.run(on_a_part) == [[], [], [(2, 3)] * 3, [(2, 3)] * 3]


def on_a_subset():
    """A mesh of the first two ranks: the others hold nothing of it, say so at once, and go on."""
    mesh = world_mesh(dp=2)
    if not mesh.local_ranks:
        for make in (vs.distribute_tensor, vs.from_local):
            with pytest.raises(vs.VescaleError):
                make(value(4), mesh, P(dp=Shard(0)))
        return "outside"
    x = vs.distribute_tensor(value(5, 2), mesh, P(dp=Shard(0)))
    assert right(x.redistribute(P(dp=Shard(1))), value(5, 2))
    return "inside"


def test_ranks_outside_a_mesh_do_not_block(pool):
    assert pool.run(on_a_subset) == ["inside", "inside", "outside", "outside"]
    assert pool.run(on_a_part)[3] == [(2, 3)] * 3


# Mistakes: one error, on every rank, before anything is sent.


def mistake(name):
    mesh = world_mesh(dp=4)
    rank, plain = mesh.rank, torch.zeros(4, 4)
    calls = {
        "dtypes": lambda: vs.from_local(
            plain.to(torch.float64 if rank == 1 else torch.float32), mesh, P(dp=Shard(0))
        ),
        "shapes": lambda: vs.from_local(
            plain[: 4 + (rank == 0) - (rank == 2)], mesh, P(dp=Shard(0)), shape=(16, 4)
        ),
        "dims": lambda: vs.from_local(plain[None] if rank == 1 else plain, mesh, P(dp=Shard(0))),
        "ragged": lambda: vs.from_local(plain, mesh, P(dp=RaggedShard((0,), (1, 2, 3, 4)))),
        "two ragged": lambda: vs.distribute_tensor(
            plain, world_mesh(dp=2, tp=2), P(dp=RaggedShard.even(2), tp=RaggedShard.even(2))
        ),
        "units": lambda: vs.distribute_tensor(plain, mesh, P(dp=RaggedShard((0,), (1, 1, 1, 2)))),
        "avg": lambda: vs.from_local(plain.long(), mesh, P(dp=Partial("avg"))).full_tensor(),
    }
    with counted() as sent:
        try:
            calls[name]()
        except vs.VescaleError as error:
            return str(error), sent
    return "no error", sent


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dtypes", "float64 on rank 1, float32 on rank 0"),
        ("shapes", "rank 2 has (3, 4), not (4, 4)"),
        ("dims", "(4, 4), (1, 4, 4)"),
        ("ragged", "16 prefix rows for 10 units"),
        ("two ragged", "at most one RaggedShard"),
        ("units", "4 prefix rows for 5 units"),
        ("avg", "the average of torch.int64"),
    ],
)
def test_a_mistake_is_one_error_on_all_ranks(pool, name, says):
    answers = pool.run(mistake, name)
    assert len({message for message, _ in answers}) == 1
    assert says in answers[0][0]
    assert all(sent == [] for _, sent in answers)


def one_rank_fails():
    mesh = world_mesh(dp=4)
    piece = torch.zeros(2, requires_grad=mesh.rank == 3)
    try:
        vs.from_local(piece, mesh, P(dp=Shard(0)))
    except vs.VescaleError as error:
        return str(error)
    return "no error"


def test_the_others_hear_of_a_rank_that_fails_alone(pool):
    *others, own = pool.run(one_rank_fails)
    assert "requires grad" in own
    assert all("rank 3 failed" in message and "requires grad" in message for message in others)
