"""Ranks that wait for each other at the store, before collectives: the dead are named, the slow are not."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from tests.processes.test_world import world_mesh
from vescale._errors import PeerError
from vescale.spmd import records
from vescale.testing.pool import RankError, RankPool

pytestmark = pytest.mark.processes

SILENCE = 1.5  # seconds that are a death, here
TIMEOUT = "60"  # of the waits that a death ends


def rows_plan():
    return vs.Plan(world_mesh((("dp", 2),)), inputs={"x": vs.P(dp=vs.Shard(0))})


def error_of(call):
    began = time.monotonic()
    with pytest.raises(PeerError) as found:
        call()
    return {"text": str(found.value), "ranks": found.value.ranks, "took": time.monotonic() - began}


def slow_then_dead_while_it_traces():
    """Rank 1 traces for longer than a death takes to be seen, then another program, in which it dies."""
    os.environ["VESCALE_TIMEOUT"], records.DEAD = TIMEOUT, SILENCE

    def slow(x):
        if dist.get_rank() == 1:
            time.sleep(2 * SILENCE)
        return x.sum()

    def dies(x):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum()

    total = vs.parallelize(slow, rows_plan())(torch.ones(4)).item()
    step = vs.parallelize(dies, rows_plan())
    found = error_of(lambda: step(torch.ones(4)))
    with pytest.raises(PeerError, match="a collective after one that failed"):
        step(torch.ones(4))
    return total, found


def test_a_rank_that_dies_while_it_traces():
    with RankPool(2, timeout=100) as ranks, pytest.raises(RankError) as error:
        ranks.run(slow_then_dead_while_it_traces)
    assert error.value.died == {1: -signal.SIGKILL}, error.value
    total, found = error.value.answers[0]
    assert total == 4
    assert found["ranks"] == (1,)
    assert "no word from rank 1\n  rank 1 died or stalled, last heard of at" in found["text"]
    assert "a new program of" in found["text"]
    assert found["took"] < 20  # the rest is for a busy machine


def saves(root, timeout, closes):
    """Rank 1 dies, or closes its mesh, where rank 0 waits for what it has written, on a thread."""
    mesh = world_mesh((("dp", 2),))
    os.environ["VESCALE_TIMEOUT"], records.DEAD = timeout, SILENCE
    x = vs.distribute_tensor(torch.ones(4), mesh, vs.P(dp=vs.Shard(0)))
    if dist.get_rank() == 1:
        vs.checkpoint.saving.write_pieces = lambda *_: time.sleep(3600) if closes else os._exit(7)
    future = vs.checkpoint.async_save({"x": x}, root)
    if dist.get_rank() == 1:
        if closes:
            mesh.close()
            time.sleep(4 * SILENCE)
            os._exit(7)
        time.sleep(3600)
    return error_of(future.result)


@pytest.mark.parametrize("closes", [False, True], ids=["dies", "closes its mesh"])
def test_a_save_with_a_rank_that_is_gone(tmp_path, closes):
    """Who has closed its mesh may still be writing: only the timeout is for it."""
    with RankPool(2, timeout=100) as ranks, pytest.raises(RankError) as error:
        ranks.run(saves, tmp_path / "saved", "4" if closes else TIMEOUT, closes)
    found = error.value.answers[0]
    assert found["ranks"] == (1,)
    assert ("rank 1 left: it closed its mesh" if closes else "rank 1 died or stalled") in found["text"]
    assert found["took"] >= (4 if closes else SILENCE)
    assert found["took"] < 20
    assert list(tmp_path.iterdir()) == []
