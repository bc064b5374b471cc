"""Heartbeats in a store of this process: what is heard of whom; forks and exits are left alone."""

import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from vescale._errors import ArgumentError, PeerError
from vescale.spmd import heartbeat, world
from vescale.spmd.heartbeat import Heartbeat
from vescale.spmd.watch import Here

PERIOD = 0.02


@pytest.fixture
def store(tmp_path):
    return dist.FileStore(str(tmp_path / "store"), -1)


def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(PERIOD / 2)


def test_ranks_hear_each_other_and_who_leaves(store):
    places = ["in call 1 of f", "in call 2 of g"]
    one, other = (Heartbeat(store, rank, (0, 1), lambda rank=rank: places[rank], PERIOD) for rank in (0, 1))
    one.listen("test", [1])
    soon(one.heard)
    (heard,) = one.heard()
    assert (heard.rank, heard.state, heard.at) == (1, "alive", "in call 2 of g")
    places[1] = "after call 2 of g"
    soon(lambda: one.heard()[0].at == "after call 2 of g")
    assert not one.gone()
    other.end("it closed its mesh")
    soon(one.gone)
    assert (one.heard()[0].state, one.heard()[0].why) == ("left", "it closed its mesh")
    one.listen("test", [])
    one.wait_for_others(True)
    again = Heartbeat(store, 1, (0, 1), str, PERIOD)  # a new mesh in the same world
    soon(lambda: not one.gone())
    for heart in (one, again):
        heart.end("the test is over")


def test_a_heart_that_stops_is_quiet(store):
    one, other = (Heartbeat(store, rank, (0, 1), str, PERIOD) for rank in (0, 1))
    one.listen("test", [1])
    soon(one.heard)
    other._ended.set()  # as if it had been killed: it beats once more, and doesn't say that it leaves
    other._thread.join()
    soon(lambda: one.heard()[0].quiet > 10 * PERIOD)
    assert one.heard()[0].state == "alive"
    one.end("the test is over")


def test_who_waits_hears_of_alarms_only(store):
    one, other = (Heartbeat(store, rank, (0, 1), lambda: "in call 3 of f", PERIOD) for rank in (0, 1))
    one.wait_for_others(True)
    time.sleep(5 * PERIOD)
    assert one.heard() == []
    other.fail("Connection closed by peer")
    soon(one.gone)
    assert (one.heard()[0].state, one.heard()[0].why) == ("failed", "Connection closed by peer")
    other.end("it closed its mesh")  # that it failed says more
    assert one.heard()[0].state == "failed"
    one.end("the test is over")


class Broken:
    """A store whose host is gone."""

    def clone(self) -> "Broken":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    asked = 0
    fault = "Connection reset by peer"

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        raise dist.DistNetworkError(self.fault)


def test_a_store_that_is_gone():
    """A lost connection does not come back, and torch warns at every try: there is one."""
    heart = Heartbeat(store := Broken(), 0, (0, 1), str, PERIOD)
    soon(lambda: not heart._thread.is_alive())
    assert heart.store_fault == "Connection reset by peer"
    assert store.asked == 1
    heart.end("the test is over")


def test_a_store_that_is_late_is_asked_again():
    store = Broken()
    store.fault = "wait timeout after 10000ms"
    heart = Heartbeat(store, 0, (0, 1), str, PERIOD)
    soon(lambda: store.asked > 3)
    assert heart.store_fault == store.fault
    heart.end("the test is over")


def test_a_place_is_worded():
    here = Here()
    assert str(here) == "before its first collective"
    outside = here.enter("train_step", 3)
    here.collective = (["all_reduce over dp", "all_gather over tp"], 1)
    assert str(here) == "in call 3 of train_step, at collective 1: all_gather over tp"
    here.leave(outside)
    assert str(here) == "after call 3 of train_step"
    here.collective = lambda: "all_gather over tp from P(tp=Shard(0)) to P()"
    assert str(here) == "after call 3 of train_step, at all_gather over tp from P(tp=Shard(0)) to P()"


SCRIPT = """
    import os, sys, time
    import torch.distributed as dist
    from vescale.spmd import heartbeat, mesh  # which ends at exit what was started

    store = dist.FileStore(sys.argv[1], -1)
    os.environ["VESCALE_HEARTBEAT"] = "0.01"
    heartbeat.start(store, "the world", 0, (0,), lambda: "here")
    while not store.check(["vescale/heart/0"]):
        time.sleep(0.01)
    if (child := os.fork()) == 0:
        assert heartbeat.current() is None
        heartbeat.end()  # nothing of its own, and not the parent's
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert b'"alive"' in store.get("vescale/heart/0")
    raise ValueError("on purpose")
"""


def test_forks_and_exits(tmp_path):
    """A child has no heart; a process that fails says so with its last beat, and ends at once."""
    path = str(tmp_path / "store")
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(SCRIPT),
            path,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=60,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    assert "on purpose" in found.stderr
    said = dist.FileStore(path, -1).get("vescale/heart/0").decode()
    assert '"left"' in said
    assert "its process ended with ValueError: on purpose" in said


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_times_that_are_none(store, text, monkeypatch):
    monkeypatch.setenv("VESCALE_TIMEOUT", text)
    with pytest.raises(ArgumentError, match="positive number of seconds"):
        world.timeout()
    monkeypatch.setenv("VESCALE_HEARTBEAT", text)
    with pytest.raises(ArgumentError, match="positive number of seconds"):
        heartbeat.start(store, "the world", 0, (0, 1), str)
    assert heartbeat.current() is None


def test_an_error_keeps_its_ranks_in_a_pickle():
    error = PeerError("found: rank 2 left")
    error.ranks = (2,)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks) == (str(error), (2,))
