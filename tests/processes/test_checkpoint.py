"""Checkpoints of real ranks: other meshes, one error on all ranks, and processes that are killed."""

import os
import re
import shutil
import signal
import threading
import time
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import vescale as vs
from tests import checkpoint_cases, toy
from tests.checkpoint_cases import abstract_tree, make_plan, make_step, make_tree, odd_tensors, same, values
from tests.processes.test_world import world_mesh
from vescale._errors import VescaleError
from vescale.checkpoint import files, together
from vescale.testing.pool import RankError, RankPool

pytestmark = pytest.mark.processes

CASES = checkpoint_cases.cases()


def here(case):
    """This process's mesh of a case, and the plan; one thread, on which the bits of a matmul depend."""
    torch.set_num_threads(1)
    axes, rules, fsdp = CASES[case]
    mesh = world_mesh(tuple(axes.items()))
    return mesh, make_plan(mesh, rules, fsdp)


@cache
def step_here():
    """Traced once: tracing is what takes time."""
    return make_step(here("4 ragged")[1])


def train():
    return make_tree(*here("4 ragged"), step_here(), steps=1)[0]["step"]


def train_and_save(path, asynchronous):
    tree, step = make_tree(*here("4 ragged"), step_here())
    if asynchronous:
        future = vs.checkpoint.async_save(tree, path)
    else:
        vs.checkpoint.save(tree, path)
    # Programs with collectives run meanwhile, and overwrite what they are given.
    for seed in (9, 10, 11) if asynchronous else (9,):
        following = step(tree["params"], tree["state"], toy.make_batch(torch.float32, seed))
        tree["params"], tree["state"], _ = following
    if asynchronous:
        future.result()
    return values(following) if not asynchronous else None


def load_here(path, case):
    mesh, plan = here(case)
    return values(vs.checkpoint.load(abstract_tree(mesh, plan), path)) if mesh.local_ranks else None


def continue_here(path):
    mesh, plan = here("4 ragged")
    loaded = vs.checkpoint.load(abstract_tree(mesh, plan), path)
    torch.set_rng_state(loaded["rng"]["torch"])
    return values(step_here()(loaded["params"], loaded["state"], toy.make_batch(torch.float32, 9)))


FEW = ["3 ragged", "2x2", "4, fsdp in tiles"]  # simulated ranks load in all cases


@pytest.mark.parametrize(
    ("asynchronous", "cases"),
    [
        pytest.param(False, FEW, id="save"),
        pytest.param(True, ["3 ragged"], id="async_save"),
        pytest.param(False, list(CASES), id="all cases", marks=pytest.mark.slow),
    ],
)
def test_ranks_save_and_other_ranks_load(pool, tmp_path, monkeypatch, asynchronous, cases):
    """What simulated ranks train is what processes do; so the tree is known here."""
    path = tmp_path / "first"
    monkeypatch.setattr(pool, "timeout", 60)  # four traces at once, on a machine that may have other work
    pool.run(train)
    following = pool.run(train_and_save, path, asynchronous)
    axes, rules, fsdp = CASES["4 ragged"]
    mesh = vs.make_mesh(axes, backend="simulated")
    torch.set_num_threads(1)
    expected = values(make_tree(mesh, make_plan(mesh, rules, fsdp))[0])
    assert same(expected, values(vs.checkpoint.load(abstract_tree(mesh, make_plan(mesh, rules, fsdp)), path)))
    for case in cases:
        size = torch.Size(CASES[case][0].values()).numel()
        for rank, loaded in enumerate(pool.run(load_here, path, case)):
            assert loaded is None if rank >= size else same(expected, loaded)
    if not asynchronous:  # the next step, with dropout, is the one that the ranks made that did not stop
        for there, again in zip(following, pool.run(continue_here, path), strict=True):
            assert same(there, again)


def torch_saves(path, asynchronous):
    mesh = world_mesh((("dp", 4),))
    tensors = odd_tensors(mesh)
    expected = values(tensors)
    if asynchronous:
        future = dcp.async_save(tensors, checkpoint_id=path / "torch")
        for tensor in tensors.values():
            tensor.to_local().zero_()
        future.result()
    else:
        dcp.save(tensors, checkpoint_id=path / "torch")
    loaded = odd_tensors(mesh, fill=-1)
    dcp.load(loaded, checkpoint_id=path / "torch")
    ours = odd_tensors(mesh, fill=-1)  # and what vs.checkpoint saves, with its reader
    dcp.load(ours, storage_reader=vs.checkpoint.Reader(vs.checkpoint.save(loaded, path / "ours")))
    return same(expected, values(loaded)) and same(expected, values(ours))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_torch_saves_and_loads_as_it_is(pool, tmp_path, asynchronous):
    assert all(pool.run(torch_saves, tmp_path, asynchronous))
    metadata = dcp.FileSystemReader(tmp_path / "torch").read_metadata().state_dict_metadata
    assert [len(metadata[name].chunks) for name in ("six", "none", "scalar", "whole")] == [3, 1, 1, 1]


def big(mesh, value=1.0):
    """A tensor of which each rank has blocks of the file to itself."""
    rows = torch.full((4 * files.BLOCK // 4, 4), value)
    return {"big": vs.distribute_tensor(rows, mesh, vs.P(dp=vs.Shard(0))), "step": 1}


def outcome(call):
    try:
        call()
    except VescaleError as error:
        return f"{type(error).__name__}: {error}"
    return None


def misuse(path, kind):
    """What each of 4 ranks gets when one of them differs, or can't."""
    mesh = world_mesh((("dp", 4),))
    rank = mesh.rank
    tree = big(mesh)
    if kind == "disk":
        write = files.DataWriter.write
        files.DataWriter.write = full if rank == 2 else write
        try:
            return outcome(lambda: vs.checkpoint.save(tree, path))
        finally:
            files.DataWriter.write = write
    if kind == "value":
        return outcome(lambda: vs.checkpoint.save({**tree, "step": rank // 3}, path))
    if kind == "leaf":
        return outcome(lambda: vs.checkpoint.save({**tree, "step": object() if rank == 1 else 1}, path))
    if kind == "call":
        return outcome(lambda: (vs.checkpoint.load if rank == 3 else vs.checkpoint.save)(tree, path))
    if kind == "path":
        return outcome(lambda: vs.checkpoint.save(tree, path / str(rank // 3)))
    if kind == "load":
        target = big(mesh, 0.0)
        found = outcome(lambda: vs.checkpoint.load(target, path, in_place=True))
        return found if not target["big"].to_local().any() else "half loaded"
    target = {**big(mesh, 0.0), **MISFITS[kind]}
    found = outcome(lambda: vs.checkpoint.load(target, path, in_place=True))
    return "half loaded" if "big" not in MISFITS[kind] and target["big"].to_local().any() else found


MISFITS = {
    "more": {"more": torch.zeros(2)},
    "shape": {"big": torch.zeros(5)},
    "dtype": {"big": torch.zeros(4 * files.BLOCK // 4, 4, dtype=torch.float64)},
    "kind": {"step": 1.0},
}


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("disk", "No space left on device.*on rank 2"),
        ("value", "ConsistencyError.*step on rank 3"),
        ("leaf", "ArgumentError.*object.*where: step"),
        ("path", "ConsistencyError.*rank 3"),
        ("call", r"ConsistencyError.*rank 0 called \S+save\(.*, rank 3 \S+load\("),
    ],
)
def test_what_fails_on_one_rank_is_one_error_on_all(pool, tmp_path, kind, says):
    answers = pool.run(misuse, tmp_path, kind)
    assert len(set(answers)) == 1
    assert re.search(f"(?s){says}", answers[0]), answers[0]
    assert kind == "path" or not list(tmp_path.iterdir())


def save_big(path):
    vs.checkpoint.save(big(world_mesh((("dp", 4),))), path)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "big"
    pool.run(save_big, path)
    return path


DAMAGE = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": None,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_error_on_all_ranks_and_nothing_is_loaded(pool, saved, tmp_path, how):
    path = shutil.copytree(saved, tmp_path / "big")
    file = path / "00002.bin"
    if (damage := DAMAGE[how]) is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    answers = pool.run(misuse, path, "load")
    assert len(set(answers)) == 1
    assert "CheckpointError: tensor 'big'" in answers[0]
    assert "00002.bin" in answers[0]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("more", "no 'more'"),
        ("shape", r"'big' is float32 of shape \(\d+, 4\), not float32 of shape \(5,\)"),
        ("dtype", "'big' is float32 of shape .*, not float64"),
        ("kind", "'step' is int, not float"),
    ],
)
def test_what_does_not_fit_is_one_error_on_all_ranks_and_nothing_is_loaded(pool, saved, kind, says):
    answers = pool.run(misuse, saved, kind)
    assert len(set(answers)) == 1
    assert re.search(f"CheckpointError: .*{says}", answers[0]), answers[0]


def comes_late(path):
    mesh = world_mesh((("dp", 2),))
    mesh.store.set_timeout(timedelta(seconds=1))
    return outcome(lambda: vs.checkpoint.save(big(mesh), path)) if mesh.rank != 1 else None


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with RankPool(2) as ranks:
        answers = ranks.run(comes_late, tmp_path / "late")
    assert ["no word from rank 1" in (answer or "") for answer in answers] == [True, False]


def store_goes(path):
    mesh = world_mesh((("dp", 4),))
    tree, check = big(mesh), type(mesh.store).check
    type(mesh.store).check = lambda *_: (_ for _ in ()).throw(dist.DistNetworkError("gone"))
    try:
        return outcome(lambda: vs.checkpoint.save(tree, path))
    finally:
        type(mesh.store).check = check


def test_a_store_that_goes_is_an_error_of_ours(pool, tmp_path):
    for answer in pool.run(store_goes, tmp_path / "x"):
        assert answer.startswith("PeerError: found: no answer from the process group's store: gone")


def no_tensors_of_ours(path):
    """A tree of plain leaves is saved by all processes, once."""
    vs.checkpoint.save({"x": torch.arange(4.0), "step": 2}, path)
    begun = dict(together._begun)
    return vs.checkpoint.load({"x": torch.zeros(4), "step": 0}, path)["x"].tolist(), len(begun) > 0


def test_a_tree_without_dtensors(pool, tmp_path):
    assert pool.run(no_tensors_of_ours, tmp_path / "plain") == [([0, 1, 2, 3], True)] * 4


def read_own_bytes(path):
    from vescale.checkpoint import safetensors_files

    mesh = world_mesh((("dp", 4),))
    tree = odd_tensors(mesh)
    vs.checkpoint.save_safetensors(tree, path, max_shard_bytes=200)
    counted, read = [], safetensors_files.read_into
    safetensors_files.read_into = lambda file, at, into: (counted.append(into.nbytes), read(file, at, into))
    try:
        specs = {name: tensor.layout.spec for name, tensor in tree.items()}
        loaded = vs.checkpoint.load_safetensors(path, vs.Plan(mesh, specs))
    finally:
        safetensors_files.read_into = read
    own = sum(tensor.to_local().nbytes for tensor in tree.values())
    return same(tree, loaded), sum(counted) == own


def test_safetensors_of_ranks(pool, tmp_path):
    import safetensors.torch

    assert pool.run(read_own_bytes, tmp_path) == [(True, True)] * 4
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    assert same(found, values(odd_tensors(mesh)))


# Killed.


def numbered(mesh, step):
    return {
        "x": vs.distribute_tensor(torch.full((1 << 16,), float(step)), mesh, vs.P(dp=vs.Shard(0))),
        "n": step,
    }


def save_for_ever(root, start):
    """Steps of a directory, and one path over and over; what is done is told in a file, by rank 0."""
    mesh = world_mesh((("dp", dist.get_world_size()),)) if dist.is_initialized() else vs.make_mesh({"dp": 2})
    for step in range(start, 1 << 30):
        vs.checkpoint.save(numbered(mesh, step), root / "steps", step=step, keep=2)
        vs.checkpoint.save(numbered(mesh, step), root / "same")
        if 0 in mesh.local_ranks:
            (root / "done.new").write_text(str(step))
            os.replace(root / "done.new", root / "done")


def done_in(root):
    """The last step of which both saves were said to be done, -1 for none."""
    return int((root / "done").read_text()) if (root / "done").exists() else -1


def wait_and_kill(root, start, generator, kill):
    """At a random time after a save of this life was done."""
    end = time.monotonic() + 60
    while done_in(root) < start and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(torch.rand((), generator=generator).item() * 0.2)
    kill()


def check_left(root):
    """The last checkpoints are whole, and no older than what was said to be done; the next step."""
    done = done_in(root)
    mesh = vs.make_mesh({"dp": 3}, backend="simulated")
    last = vs.checkpoint.latest(root / "steps")
    for path in (last, root / "same"):
        assert path is not None
        loaded = vs.checkpoint.load(numbered(mesh, -1), path)
        assert loaded["n"] in (done, done + 1)
        assert (loaded["x"].full_tensor() == loaded["n"]).all()
    return done + 1


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_process_never_loses_the_last_checkpoint(tmp_path, kills):
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "vescale"])
    start, generator = 0, torch.Generator().manual_seed(kills)
    for _ in range(kills):
        process = context.Process(target=save_for_ever, args=(tmp_path, start))
        process.start()
        wait_and_kill(tmp_path, start, generator, lambda: os.kill(process.pid, signal.SIGKILL))  # noqa: B023
        process.join()
        assert check_left(tmp_path) > start
        start = check_left(tmp_path)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_ranks_never_lose_the_last_checkpoint(tmp_path, kills):
    """All of them at once: rank 0, which renames, and one that writes."""
    start, generator = 0, torch.Generator().manual_seed(kills)
    for _ in range(kills):
        with RankPool(2, timeout=60) as ranks:
            ranks.run(os.getpid)  # they have started
            kill = lambda: [process.kill() for process, _ in ranks._ranks]  # noqa: E731
            thread = threading.Thread(target=wait_and_kill, args=(tmp_path, start, generator, kill))
            thread.start()
            with pytest.raises(RankError):
                ranks.run(save_for_ever, tmp_path, start)
            thread.join()
        assert check_left(tmp_path) > start
        start = check_left(tmp_path)


def save_until_told(root):
    """Rank 1 dies in the middle; rank 0 gets an error and not a checkpoint."""
    mesh = world_mesh((("dp", 2),))
    mesh.store.set_timeout(timedelta(seconds=1))
    vs.checkpoint.save(numbered(mesh, 0), Path(root), step=0)
    if mesh.rank == 1:
        files.DataWriter.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    found = outcome(lambda: vs.checkpoint.save(numbered(mesh, 1), Path(root), step=1))
    (Path(root) / "told").write_text(str(found))


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path):
    with RankPool(2) as ranks, pytest.raises(RankError, match="rank 1"):
        ranks.run(save_until_told, tmp_path)
    assert "no word from rank 1" in (tmp_path / "told").read_text()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000000", "told"]
