"""Gradients of linear collectives are their adjoints: <A* g, dx> = <g, A dx>, exactly, in whole numbers.

An invariant value counts once in an inner product, a varying one once a rank; so does a global tensor.
"""

from itertools import chain, combinations, product

import pytest
import torch

import vescale as vs
from vescale.spmd.placements import P, RaggedShard, Shard

SIZES = {"dp": 2, "tp": 2}
SPLIT = {"dp": Shard(0), "tp": Shard(1)}
SUBSETS = [*chain.from_iterable(combinations(SIZES, count) for count in range(3))]
KEEPS, ADDS, REMOVES = "keeps", "adds", "removes"


def count(axis):
    return torch.Size([SIZES[a] for a in ([axis] if isinstance(axis, str) else axis)]).numel()


# name: (the collective of a local (8, 8) tensor, what it does to the axes over which its operand varies)
LINEAR = {
    "psum": (vs.psum, REMOVES),
    "pmean": (vs.pmean, REMOVES),
    "pvary": (vs.pvary, ADDS),
    "all_gather": (lambda x, axis: vs.all_gather(x, axis, dim=1), ADDS),
    "all_gather stacked": (lambda x, axis: vs.all_gather(x, axis, dim=2, tiled=False).flatten(1), ADDS),
    "all_gather invariant": (lambda x, axis: vs.all_gather(x, axis, to="invariant"), REMOVES),
    "psum_scatter": (lambda x, axis: vs.psum_scatter(x, axis, dim=1), ADDS),
    "psum_scatter untiled": (
        lambda x, axis: vs.psum_scatter(x.reshape(count(axis), -1, 8), axis, tiled=False),
        ADDS,
    ),
    "all_to_all": (lambda x, axis: vs.all_to_all(x, axis, 0, 1), ADDS),
    "all_to_all of one dim": (lambda x, axis: vs.all_to_all(x, axis, 1, 1), ADDS),
    "ppermute": (lambda x, axis: vs.ppermute(x, axis, [(0, 1)]), ADDS),
    "pshuffle": (lambda x, axis: vs.pshuffle(x, axis, [1, 0, *range(2, count(axis))]), ADDS),
    "broadcast": (lambda x, axis: vs.broadcast(x, axis, root=1), REMOVES),
}
OVER = ("dp", "tp", ("dp", "tp"), ("tp", "dp"))


@pytest.fixture(scope="module")
def mesh():
    return vs.make_mesh(SIZES, backend="simulated")


@pytest.fixture(scope="module")
def row():
    return vs.make_mesh({"tp": 4}, backend="simulated")


def whole(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).double()


def check_adjoint(outside, inside, x):
    """`outside`: the mapped collective; `inside`: (x, g) -> its vector-Jacobian product, mapped."""
    dx = whole(x.shape, 1)
    image = outside(dx).full_tensor()
    g = whole(image.shape, 2)
    x = x.clone().requires_grad_()
    (adjoint,) = torch.autograd.grad(outside(x).full_tensor(), x, g)
    assert (adjoint * dx).sum() == (g * image).sum()
    assert torch.equal(inside(x.detach(), g).full_tensor(), adjoint)
    assert image.any()


@pytest.mark.parametrize("vmapped", [False, True], ids=["", "vmapped"])
@pytest.mark.parametrize("varies", SUBSETS, ids=str)
@pytest.mark.parametrize(("name", "axis"), [*product(LINEAR, OVER)], ids=str)
def test_every_type_of_operand(mesh, name, axis, varies, vmapped):
    collective, effect = LINEAR[name]
    axes = {axis} if isinstance(axis, str) else set(axis)
    after = set(varies) - axes if effect is REMOVES else set(varies) | axes
    first = int(vmapped)

    def spec(varying):
        return P.of((a, Shard(SPLIT[a].dim + first)) for a in SIZES if a in varying)

    def call(x):
        return vs.vmap(lambda one: collective(one, axis))(x) if vmapped else collective(x, axis)

    def product_inside(x, g):
        return torch.func.vjp(call, x)[1](g)[0]

    shape = [3] * first + [8 * SIZES[a] ** (a in varies) for a in SIZES]
    outside = vs.shard_map(call, mesh=mesh, in_specs=(spec(varies),), out_specs=spec(after))
    inside = vs.shard_map(
        product_inside, mesh=mesh, in_specs=(spec(varies), spec(after)), out_specs=spec(varies)
    )
    check_adjoint(outside, inside, whole(shape, 0))


# Sizes that the specs fix, uneven; an empty member too.

ROWS = RaggedShard((0,), (3, 0, 4, 1))
UNEVEN = {
    "all_gather": (lambda x: vs.all_gather(x, "tp"), P(tp=Shard(0))),
    "all_gather invariant": (lambda x: vs.all_gather(x, "tp", to="invariant"), P()),
    "all_to_all": (lambda x: vs.all_to_all(x, "tp", 1, 0), P(tp=Shard(1))),
    "all_to_all the other way": (
        lambda x: vs.all_to_all(x.transpose(0, 1), "tp", 0, 1).transpose(0, 1), P(tp=Shard(1))),
    "psum_scatter": (
        lambda x: vs.psum_scatter(vs.all_gather(x, "tp"), "tp", sizes=[1, 0, 5, 2]),
        P(tp=RaggedShard((0,), (1, 0, 5, 2))),
    ),
    "ppermute": (
        lambda x: vs.ppermute(x, "tp", [(0, 1), (2, 3)]), P(tp=RaggedShard((0,), (3, 3, 4, 4)))),
    "pshuffle": (
        lambda x: vs.pshuffle(x, "tp", [2, 3, 1, 0]), P(tp=RaggedShard((0,), (4, 1, 0, 3)))),
}  # fmt: skip


@pytest.mark.parametrize("vmapped", [False, True], ids=["", "vmapped"])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_members(row, name, vmapped):
    collective, after = UNEVEN[name]

    def call(x):
        return vs.vmap(collective, in_dims=2, out_dims=2)(x) if vmapped else collective(x)

    def product_inside(x, g):
        return torch.func.vjp(call, x)[1](g)[0]

    before = P(tp=ROWS)
    if name == "ppermute":  # ranks without a source keep their own size, in zeros
        after = P(tp=RaggedShard((0,), (3, 3, 4, 4)))
    outside = vs.shard_map(call, mesh=row, in_specs=(before,), out_specs=after)
    inside = vs.shard_map(product_inside, mesh=row, in_specs=(before, after), out_specs=before)
    check_adjoint(outside, inside, whole((8, 6, 3) if vmapped else (8, 6), 0))


# Sizes known at run time: rows beyond the counts are zero, and get a zero gradient.

COUNTS = [2, 0, 3, 1]  # of 3 rows on each rank
SENDS = [[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0], [0, 1, 1, 1]]  # of 3 rows, to each rank
RUN_TIME = {
    "all_gather_ragged": (
        lambda x, c: vs.all_gather_ragged(x, c.reshape(()), "tp")[0], COUNTS, P(tp=Shard(0))),
    "all_gather_ragged of less": (
        lambda x, c: vs.all_gather_ragged(x, c.reshape(()), "tp", capacity=7)[0], COUNTS, P(tp=Shard(0))),
    "all_to_all_ragged": (
        lambda x, c: vs.all_to_all_ragged(x, c, "tp")[0], [*chain(*SENDS)], P(tp=Shard(0))),
    "all_to_all_ragged of less": (
        lambda x, c: vs.all_to_all_ragged(x, c, "tp", capacity=5, pair_capacity=3)[0],
        [*chain(*SENDS)], P(tp=Shard(0))),
    "psum_scatter_ragged": (
        lambda x, c: vs.psum_scatter_ragged(x, c, "tp"), [1, 0, 2, 0] * 4, P(tp=Shard(0))),
}  # fmt: skip


@pytest.mark.parametrize("vmapped", [False, True], ids=["", "vmapped"])
@pytest.mark.parametrize("name", RUN_TIME)
def test_run_time_sizes(row, name, vmapped):
    collective, counts, after = RUN_TIME[name]
    counts = torch.tensor(counts)

    def call(x, c):
        return (
            vs.vmap(lambda one: collective(one, c), in_dims=2, out_dims=2)(x) if vmapped else collective(x, c)
        )

    def product_inside(x, g, c):
        return torch.func.vjp(lambda x: call(x, c), x)[1](g)[0]

    rows, shape = P(tp=Shard(0)), (12, 2, 3) if vmapped else (12, 2)
    outside = vs.shard_map(call, mesh=row, in_specs=(rows, rows), out_specs=after)
    inside = vs.shard_map(product_inside, mesh=row, in_specs=(rows, after, rows), out_specs=rows)
    check_adjoint(lambda x: outside(x, counts), lambda x, g: inside(x, g, counts), whole(shape, 0))


def test_run_time_sizes_keep_the_rows_that_count(row):
    x, rows = whole((12, 2), 0), P(tp=Shard(0))
    each = x.split(3)
    gathered = vs.shard_map(
        lambda x, c: vs.all_gather_ragged(x, c.reshape(()), "tp", capacity=6)[0],
        mesh=row, in_specs=(rows, rows), out_specs=rows,
    )(x, torch.tensor(COUNTS))  # fmt: skip
    expected = torch.cat([piece[:n] for piece, n in zip(each, COUNTS)])
    assert all(torch.equal(gathered.to_local(rank), expected) for rank in range(4))
    arrived, received = vs.shard_map(
        lambda x, c: vs.all_to_all_ragged(x, c, "tp", capacity=4),
        mesh=row, in_specs=(rows, rows), out_specs=rows,
    )(x, torch.tensor([*chain(*SENDS)]))  # fmt: skip
    assert received.full_tensor().view(4, 4).tolist() == [list(column) for column in zip(*SENDS)]
    for rank in range(4):
        sent = torch.cat([piece.split([*SENDS[i], 3 - sum(SENDS[i])])[rank] for i, piece in enumerate(each)])
        assert torch.equal(arrived.to_local(rank), torch.cat([sent, torch.zeros(4 - len(sent), 2)]))


def test_what_overflows_its_capacity_is_nan(row):
    rows = P(tp=Shard(0))
    over = vs.shard_map(
        lambda x, c: vs.all_gather_ragged(x, c.reshape(()), "tp", capacity=5)[0],
        mesh=row, in_specs=(rows, rows), out_specs=rows,
    )(torch.ones(12), torch.tensor(COUNTS))  # fmt: skip
    assert over.full_tensor().isnan().all()
