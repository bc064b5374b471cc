"""Real ranks over gloo: the same bits as simulated ones, and errors instead of hangs."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist

from vescale._errors import ArgumentError, ConsistencyError, LayoutError
from vescale.spmd.dtensor import distribute_tensor, from_local, from_torch
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.mesh import Mesh, make_mesh
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard
from vescale.spmd.redistribute import redistribute
from vescale.testing.pool import RankError, RankPool

pytestmark = pytest.mark.processes

MESHES = ({"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 2})


@cache
def world_mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """One mesh a shape and process: groups are made once."""
    return make_mesh(dict(axes))


def pieces(layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Local tensors of all ranks, with contributions that don't add up exactly."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(layout.shape, generator=generator) * 100).to(dtype)
    found = []
    for rank in range(layout.mesh.size):
        piece = local_slice(value, layout, rank).clone()
        if layout.partials:
            noise = torch.Generator().manual_seed(rank)
            piece = (torch.randn(piece.shape, generator=noise) * 100).to(dtype)
        found.append(piece)
    return found


# (before, after, shape): both sides of the sizes at which the way of exchanging changes.
CASES = [
    (P(dp=Shard(0)), P(), (12, 5)),
    (P(dp=Shard(1)), P(), (5, 12)),
    (P(dp=Shard(0)), P(), (7, 3)),
    (P(dp=Shard(0)), P(dp=Shard(1)), (7, 5)),
    (P(dp=RaggedShard.on_rank(1, 2)), P(), (6, 4)),
    (P(dp=RaggedShard((0, 1), (5, 0, 1, 6))), P(), (12, 4)),
    (P(dp=RaggedShard((0,), (5, 0, 1, 6))), P(dp=RaggedShard((0,), (1, 9, 2, 0))), (12, 4)),
    (P(dp=Partial()), P(), (12, 5)),
    (P(dp=Partial()), P(), ()),
    (P(dp=Partial()), P(), (401, 101)),
    (P(dp=Partial("max")), P(dp=Shard(0)), (12, 5)),
    (P(dp=Partial()), P(dp=Shard(0)), (12, 5)),
    (P(dp=Partial()), P(dp=Shard(1)), (5, 7)),
    (P(dp=Partial()), P(dp=InterleavedShard(0, 3)), (12, 5)),
    (P(dp=Partial()), P(dp=RaggedShard((0,), (5, 0, 1, 6))), (12, 4)),
    (P(dp=Partial()), P(dp=Shard(0)), (2, 3)),
    (P(dp=Shard(0)), P(), (0, 3)),
    (P(dp=Partial(), tp=Partial()), P(), (13, 5)),
    (P(dp=Partial(), tp=Partial()), P(tp=Shard(0)), (12, 5)),
    (P(tp=Shard(1), dp=RaggedShard((0,), (5, 7))), P(tp=Shard(1)), (12, 6)),
    (P(tp=Shard(0), dp=Partial()), P(tp=Shard(0), dp=RaggedShard((0,), (1, 2))), (12, 6)),
    (P(tp=Shard(0)), P(dp=Shard(0)), (12, 6)),
    (P(dp=Shard(0), tp=Shard(0)), P(tp=Shard(0), dp=Shard(0)), (7, 6)),
]


def move(axes: dict[str, int], dtype: torch.dtype) -> list[tuple[int, torch.Tensor]]:
    """This rank's results of all cases that fit the mesh."""
    mesh = world_mesh(tuple(axes.items()))
    results = []
    for number, (src, dst) in legal(mesh.abstract):
        if mesh.local_ranks:
            before = pieces(src, dtype)[mesh.rank]
            results.append((number, redistribute([before], src, dst, mesh)[0]))
    return results


def legal(mesh: AbstractMesh) -> list[tuple[int, tuple[Layout, Layout]]]:
    found = []
    for number, (src, dst, shape) in enumerate(CASES):
        try:
            found.append((number, (Layout(mesh, src, shape), Layout(mesh, dst, shape))))
        except LayoutError:
            continue
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_same_bits_as_simulated(pool, axes, dtype):
    mesh = make_mesh(axes, backend="simulated")
    expected = {
        number: redistribute(pieces(src, dtype), src, dst, mesh)
        for number, (src, dst) in legal(mesh.abstract)
    }
    assert len(expected) > 5
    answers = pool.run(move, axes, dtype)
    for rank in mesh.local_ranks:
        assert [number for number, _ in answers[rank]] == list(expected)
        for number, result in answers[rank]:
            there = expected[number][rank]
            assert result.shape == there.shape, CASES[number]
            assert torch.equal(bits(result), bits(there)), CASES[number]
    assert all(answer == [] for answer in answers[mesh.size :])  # they had no rank


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def native() -> bool:
    mesh = world_mesh((("dp", 4),))
    for src, dst in [(P(dp=Partial()), P()), (P(dp=Partial("avg")), P(dp=Shard(0)))]:
        for shape in [(8, 3), (5, 3)]:
            before, after = (Layout(mesh.abstract, spec, shape) for spec in (src, dst))
            value = torch.full(shape, float(mesh.rank))
            (result,) = redistribute([value], before, after, mesh, reduction="native")
            total = 6.0 if "sum" in before.partials.values() else 1.5
            assert torch.equal(result, torch.full(after.local_shape(mesh.rank), total))
    return True


def test_the_backends_own_order(pool):
    assert all(pool.run(native))


def moves_odd_types() -> bool:
    mesh = world_mesh((("dp", 4),))
    for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64):
        rows, columns = (Layout(mesh.abstract, P(dp=Shard(dim)), (6, 5)) for dim in (0, 1))
        value = (torch.arange(30).view(6, 5) % 2).to(dtype)
        (result,) = redistribute([local_slice(value, rows, mesh.rank)], rows, columns, mesh)
        assert torch.equal(bits(result), bits(local_slice(value, columns, mesh.rank)))
    return True


def test_types_that_gloo_does_not_know(pool):
    assert all(pool.run(moves_odd_types))


def differing_values() -> str:
    mesh = world_mesh((("dp", 4),))
    value = torch.ones(4)
    value[0] += mesh.rank == 2
    try:
        distribute_tensor(value, mesh, P(dp=Shard(0)))
    except ConsistencyError as error:
        return str(error)
    return "no error"


def test_a_plain_tensor_that_differs_between_ranks(pool):
    for message in pool.run(differing_values):
        assert "rank 2 differs" in message
        assert "vs.from_local" in message


def local_rows(rows: int, odd: int) -> tuple[str, torch.Size | None]:
    mesh = world_mesh((("dp", 4),))
    piece = torch.zeros(rows + odd * (mesh.rank == 1), 2)
    try:
        return "", from_local(piece, mesh, P(dp=Shard(0))).shape
    except ArgumentError as error:
        return str(error), None


def test_from_local_adds_up_the_rows(pool):
    assert pool.run(local_rows, 3, 0) == [("", torch.Size((12, 2)))] * 4


def test_from_local_names_the_rank_whose_piece_does_not_fit(pool):
    messages = pool.run(local_rows, 3, 2)
    assert len(set(messages)) == 1  # the same on all ranks
    assert "rank 1 has (5, 2)" in messages[0][0]


def different_calls() -> str:
    mesh = world_mesh((("dp", 4),))
    try:
        if mesh.rank == 3:
            distribute_tensor(torch.zeros(4), mesh, P())
        else:
            from_local(torch.zeros(4), mesh, P())
    except ConsistencyError as error:
        return str(error)
    return "no error"


def test_ranks_that_call_different_functions(pool):
    for rank, message in enumerate(pool.run(different_calls)):
        assert ("rank 3 called distribute_tensor" if rank != 3 else "rank 0 called") in message


def too_large() -> str:
    try:
        make_mesh({"dp": 4, "tp": 2})
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_a_mesh_larger_than_the_world(pool):
    assert all("8 ranks" in message and "world of 4" in message for message in pool.run(too_large))


def describe() -> dict[str, object]:
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, P(dp=Shard(0), tp=Shard(1)))
    theirs = x.to_torch()
    assert torch.equal(theirs.full_tensor(), x.full_tensor())
    back = from_torch(theirs)
    assert back.layout is x.layout
    assert torch.equal(back.to_local(), x.to_local())
    assert theirs.device_mesh is mesh.device_mesh
    assert Mesh.from_device_mesh(mesh.device_mesh).abstract == mesh.abstract
    return {
        "rank": mesh.rank,
        "dp": mesh.coordinate("dp"),
        "tp": mesh["tp"].world_ranks,
        "store": mesh.store is not None,
        "shape": tuple(x.to_local().shape),
        "group": dist.get_process_group_ranks(mesh.group(("dp",))),
        "whole": mesh.group(("dp", "tp")) is dist.group.WORLD,
        "repr": repr(mesh),
    }


def test_a_mesh_knows_its_place(pool):
    assert pool.run(describe)[2] == {
        "rank": 2,
        "dp": 1,
        "tp": (2, 3),
        "store": True,
        "shape": (2, 2),
        "group": [0, 2],
        "whole": True,
        "repr": "Mesh(dp=2 x tp=2, processes on cpu)",
    }


def outside() -> str:
    mesh = world_mesh((("dp", 3),))
    if mesh.local_ranks:
        return "inside"
    with pytest.raises(ArgumentError, match="has no rank"):
        _ = mesh.rank
    return "outside"


def test_ranks_outside_a_mesh(pool):
    assert pool.run(outside) == ["inside"] * 3 + ["outside"]


def closes() -> bool:
    mesh = make_mesh({"dp": 2, "tp": 2})
    mesh.close()
    return dist.is_initialized()


def test_close_leaves_the_world_that_it_did_not_start(pool):
    assert all(pool.run(closes))


def checkpoint(directory: str) -> bool:
    import torch.distributed.checkpoint as dcp

    mesh = world_mesh((("dp", 2), ("tp", 2)))
    value = torch.arange(96.0).view(12, 8)
    specs = [
        P(dp=Shard(0)),
        P(tp=Shard(1), dp=RaggedShard((0,), (5, 7))),
        P(dp=RaggedShard((0, 1), (11, 37))),
        P(tp=InterleavedShard(1, 2)),
    ]
    saved = {str(i): distribute_tensor(value, mesh, spec) for i, spec in enumerate(specs)}
    dcp.save(saved, checkpoint_id=directory)
    loaded = {
        str(i): distribute_tensor(torch.zeros(12, 8), mesh, spec)
        for i, spec in enumerate(reversed(specs))  # other layouts: resharded on load
    }
    dcp.load(loaded, checkpoint_id=directory)
    return all(torch.equal(tensor.full_tensor(), value) for tensor in loaded.values())


def test_checkpoint(pool, tmp_path):
    assert all(pool.run(checkpoint, str(tmp_path)))


def fails_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    return dist.get_rank()


def sleeps_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_the_pool_names_ranks_that_fail(pool):
    with pytest.raises(RankError, match=r"(?s)fails_on.*rank 2: .*on purpose"):
        pool.run(fails_on, 2)
    assert pool.run(fails_on, -1) == [0, 1, 2, 3]  # and goes on


def test_the_pool_names_ranks_that_hang():
    with RankPool(2, timeout=1.5) as pair, pytest.raises(RankError, match="from rank 1"):
        pair.run(sleeps_on, 1)


SCRIPT = """
import torch, torch.distributed as dist
from vescale.spmd.layout import Layout
from vescale.spmd.mesh import make_mesh
from vescale.spmd.placements import P, Partial
from vescale.spmd.redistribute import bind, plan

mesh = make_mesh({"dp": 2})
assert mesh.backend == "processes" and dist.get_world_size() == 2, mesh
before, after = (Layout(mesh.abstract, spec, (3,)) for spec in (P(dp=Partial()), P()))
reduce = bind(plan(before, after)[0], mesh)  # still referenced when the interpreter ends
print("sum", reduce([torch.ones(3)])[0].sum().item(), flush=True)
"""
CLOSE = "mesh.close(); assert not dist.is_initialized()"


@pytest.mark.parametrize("end", [CLOSE, ""], ids=["close", "no close"])
def test_under_torchrun(tmp_path, end):
    """The world is initialised from torchrun's environment, and ended by close or else at exit."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT + end)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    found = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("6.0") == 2  # the processes write when they like


def arrives_late() -> str:
    mesh = world_mesh((("dp", 2), ("tp", 2)))
    mesh.store.set_timeout(timedelta(seconds=1))
    try:
        if mesh.rank != 1:
            from_local(torch.zeros(4), mesh, P())
    except ConsistencyError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named():
    with RankPool(4) as ranks:
        answers = ranks.run(arrives_late)
    assert ["no word from rank 1\n" in answer for answer in answers] == [True, False, True, True]
    assert ["rank 1 is alive, before its first" in answer for answer in answers] == [True, False, True, True]
