"""Mapped functions on real ranks: the bits of simulated ones, values and gradients."""

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from tests.processes.test_programs import told
from tests.processes.test_world import world_mesh
from vescale.spmd.placements import P, RaggedShard, Shard

pytestmark = pytest.mark.processes

RAGGED = P(dp=RaggedShard((0,), (3, 0, 4, 1)))
ROWS = P(dp=Shard(0))


def gathered(w, x):
    """A weight that is ragged at rest, and rows of a batch."""
    return vs.psum((x @ vs.all_gather(w, "dp")).tanh().square().sum(), "dp")


def exchanged(w, x):
    """Every other way to move things; each rank gets rows of several."""
    y = vs.all_to_all(w, "dp", 1, 0) + vs.pmean(x.sum(), "dp")
    part = vs.psum_scatter(y.sin(), "dp", sizes=[1, 0, 5, 2])
    moved = vs.ppermute(vs.all_gather(part, "dp"), "dp", [(0, 1), (1, 2), (2, 0)])
    root = vs.broadcast(x, "dp", root=2)
    return vs.psum((moved.cos().sum() * root).sum() * (vs.axis_index("dp") + 1), "dp")


def routed(w, x):
    """Rows that go where their values say."""
    owner = (x[:, 0].abs() * 10).to(torch.int64) % 4
    counts = torch.zeros(4, dtype=torch.int64).scatter_add(0, owner, torch.ones_like(owner))
    order = owner.argsort(stable=True)
    rows, received = vs.all_to_all_ragged(x[order], counts, "dp")
    return vs.psum((rows * (received.sum() + 1)).exp().sum(), "dp") + vs.psum(w.sum(), "dp")


def two_axes(w, x):
    """A tuple of axes, and one of them alone."""
    y = vs.all_gather(w, ("tp", "dp")) @ x
    return vs.psum(vs.all_to_all(y, ("dp", "tp"), 0, 1).square().sum() * vs.axis_index("tp"), ("dp", "tp"))


CASES = {
    "gathered": (gathered, (("dp", 4),), (RAGGED, ROWS), (8, 4), (8, 8)),
    "exchanged": (exchanged, (("dp", 4),), (RAGGED, ROWS), (8, 4), (8, 8)),
    "routed": (routed, (("dp", 4),), (RAGGED, ROWS), (8, 4), (12, 3)),
    "two axes": (
        two_axes, (("dp", 2), ("tp", 2)), (P(dp=Shard(0), tp=RaggedShard((0,), (3, 1))), P()),
        (8, 3), (3, 5)),
}  # fmt: skip


def run(name, mesh):
    """Value, then gradients from outside and from inside, as the ranks of this process hold them."""
    fn, _, specs, *shapes = CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    generator = torch.Generator().manual_seed(0)
    given = [
        vs.distribute_tensor(torch.randn(shape, generator=generator), mesh, spec).requires_grad_()
        for shape, spec in zip(shapes, specs)
    ]
    loss = vs.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P())(*given)
    loss.backward()
    inside = vs.shard_map(vs.grad(fn, argnums=(0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)
    with torch.no_grad():
        results = [loss, *(tensor.grad for tensor in given), *inside(*given)]
    torch.set_num_threads(threads)
    return [[result.detach().to_local(rank) for result in results] for rank in mesh.local_ranks]


def run_here(name):
    (found,) = run(name, world_mesh(CASES[name][1]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_real_ranks_have_the_bits_of_simulated_ones(pool, name):
    expected = run(name, vs.make_mesh(dict(CASES[name][1]), backend="simulated"))
    for there, here in zip(pool.run(run_here, name), expected, strict=True):
        assert len(there) == len(here) == 5
        assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def differing_plain():
    mapped = vs.shard_map(gathered, mesh=world_mesh((("dp", 4),)), in_specs=(RAGGED, ROWS), out_specs=P())
    return told(mapped, torch.ones(8, 2), torch.full((8, 8), float(dist.get_rank() == 3)))


def test_a_plain_tensor_that_differs(pool):
    for message in pool.run(differing_plain):
        assert "x on rank 3" in message
        assert "vs.from_local" in message


def differing_code():
    def fn(x):
        return vs.pmax(x, "dp") if dist.get_rank() == 1 else vs.psum(x, "dp")

    return told(
        vs.shard_map(fn, mesh=world_mesh((("dp", 4),)), in_specs=(ROWS,), out_specs=P()), torch.ones(4)
    )


def test_a_branch_on_the_rank(pool):
    for message in pool.run(differing_code):
        assert "collective 0 is psum over dp on rank 0 and pmax over dp on rank 1" in message


def gradient_of_plain_tensors():
    """torch.func's wrappers reach the check that ranks have the same plain values."""
    mesh = world_mesh((("dp", 4),))
    mapped = vs.shard_map(
        lambda w, x: vs.psum((x @ w).square().sum(), "dp"), mesh=mesh, in_specs=(P(), ROWS), out_specs=P()
    )
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (8, 3)))
    return vs.grad(mapped)(w, x), 2 * x.T @ (x @ w)


def test_a_gradient_of_plain_tensors(pool):
    for found, expected in pool.run(gradient_of_plain_tensors):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
