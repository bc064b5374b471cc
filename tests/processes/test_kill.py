"""A rank is killed, stopped or leaves in the middle of training: all others say which, in time.

Each case has processes of its own: they are of no use afterwards. What a survivor returns is compared
with the same training on simulated ranks: its last whole step has those bits, what went into the step
that failed is as it was, and so is the last checkpoint of a training that saves.
"""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale as vs
from vescale._errors import ConsistencyError, PeerError
from vescale.spmd import watch
from vescale.testing.pool import RankError, RankPool

pytestmark = pytest.mark.processes

AXES = {4: {"dp": 2, "tp": 2}, 2: {"dp": 1, "tp": 2}}  # by the number of processes
TIMEOUT = 3.0  # of a collective, once all ranks have made their first steps; seconds
HEARTBEAT = "0.5"  # twice as often as by default: errors are worded in half the time


def plan_on(mesh):
    return vs.Plan(
        mesh,
        params={"up": vs.P(tp=vs.Shard(1)), "down": vs.P(tp=vs.Shard(0))},
        inputs={"x": vs.P(dp=vs.Shard(0))},
    )


def train_step(params, x):
    def loss(params):
        return (torch.relu(x @ params["up"]) @ params["down"] - x).square().mean()

    value, gradients = vs.value_and_grad(loss)(params)
    return {name: params[name] - 0.05 * gradients[name] for name in params}, value


def mapped_step(mesh):
    """The same by hand: every rank has its part of the matrices, and says what it sums."""

    def gradients(params, x):
        def loss(params):
            y = vs.psum(torch.relu(x @ params["up"]) @ params["down"], "tp")
            return vs.pmean((y - x).square().mean(), "dp")

        return vs.grad(loss)(params)

    specs = {"up": vs.P(tp=vs.Shard(1)), "down": vs.P(tp=vs.Shard(0))}
    run = vs.shard_map(gradients, mesh=mesh, in_specs=(specs, vs.P(dp=vs.Shard(0))), out_specs=specs)

    def step(params, x):
        found = run(params, x)
        return {name: params[name] - 0.05 * found[name] for name in params}, None

    return step


def moving_step(mesh):
    """No program: redistributions alone, there and back."""

    def step(params, x):
        moved = {name: p.redistribute(vs.P(dp=vs.Shard(0))) for name, p in params.items()}
        return {name: p.redistribute(params[name].layout.spec) * 0.5 for name, p in moved.items()}, None

    return step


def step_of(kind, mesh):
    if kind in ("static", "dynamic", "saves"):
        return vs.parallelize(train_step, plan_on(mesh), static=kind != "dynamic")
    return (mapped_step if kind == "shard_map" else moving_step)(mesh)


def start(mesh):
    torch.manual_seed(0)
    params = {"up": torch.randn(16, 32), "down": torch.randn(32, 16)}
    x = vs.distribute_tensor(torch.randn(8, 16), mesh, vs.P(dp=vs.Shard(0)))
    return vs.distribute(params, plan_on(mesh)), x


def bits(params, place=0):
    data = b"".join(params[name].locals[place].contiguous().numpy().tobytes() for name in sorted(params))
    return hashlib.sha256(data).hexdigest()


def trains(kind, ready, leaves=-1, timeout=TIMEOUT):
    """Steps until one fails: what the error says, when, and what was there before and after."""
    os.environ["VESCALE_TIMEOUT"] = "50"  # on a busy machine one rank may be late with its first program
    os.environ["VESCALE_HEARTBEAT"] = HEARTBEAT
    watch.GRACE = 1.0
    mesh = vs.make_mesh(AXES[dist.get_world_size()])
    step = step_of(kind, mesh)
    params, x = start(mesh)
    began, count = time.monotonic(), 0
    while time.monotonic() < began + 60:
        before, since = bits(params), time.monotonic()
        try:
            if kind == "saves":
                vs.checkpoint.save(params, Path(ready, "steps"), step=count, keep=2)
            after, _ = step(params, x)
        except (PeerError, ConsistencyError) as error:
            took = time.monotonic() - since
            if isinstance(error, PeerError):
                with pytest.raises(PeerError) as again:  # nothing more goes on a failed mesh
                    step(params, x)
                assert "a collective after one that failed" in str(again.value)
            assert bits(params) == before
            mesh.close()
            Path(ready, f"{dist.get_rank()} is done").touch()
            found = {"text": str(error), "ranks": getattr(error, "ranks", None), "steps": count}
            return {**found, "bits": before, "ended": since + took, "took": took}
        params, count = after, count + 1
        if count == 3:
            os.environ["VESCALE_TIMEOUT"] = str(timeout)
            Path(ready, str(dist.get_rank())).touch()
            if dist.get_rank() == leaves:
                mesh.close()
                return None
        time.sleep(0.002)  # so that the machine keeps up with what the clock says
    return "nobody failed"


def strike(pool, victim, how, ready, delay, struck):
    """Send the signal so long after all ranks have made their first steps; end what was stopped later."""
    pid, end = pool.pids[victim], time.monotonic() + 60
    while len(list(ready.glob("?"))) < pool.size and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(delay)
    struck.append(time.monotonic())
    os.kill(pid, how)
    if how == signal.SIGSTOP:
        while len(list(ready.glob("*done"))) < pool.size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


def survivors(how, kind, seed, ready):
    """Train, strike a random rank at a random moment, and return what the others say."""
    chance = random.Random(seed)
    victim, delay = chance.randrange(4), chance.random()
    struck = []
    with RankPool(4, timeout=60) as pool:
        pool.pids  # noqa: B018 - starts them
        hand = threading.Thread(target=strike, args=(pool, victim, how, ready, delay, struck))
        hand.start()
        with pytest.raises(RankError) as found:
            pool.run(trains, kind, str(ready))
        hand.join()
    error = found.value
    assert error.died == {victim: -signal.SIGKILL}, error
    assert sorted(error.answers) == [rank for rank in range(4) if rank != victim], error
    return victim, struck[0], error.answers


def check(how, kind, seed, ready):
    victim, struck, answers = survivors(how, kind, seed, ready)
    for rank, said in answers.items():
        in_a_save = kind == "saves" and said["ranks"] is None
        told = "no word from rank {}\n" if in_a_save else "rank {} died or stalled"
        assert told.format(victim) in said["text"], (rank, victim, said)
        assert in_a_save or said["ranks"] == (victim,), (rank, victim, said)
        assert said["ended"] - struck < 30
        assert said["took"] < 20
    assert max(said["steps"] for said in answers.values()) - min(s["steps"] for s in answers.values()) <= 1
    mesh = vs.make_mesh(AXES[4], backend="simulated")
    step, (params, x) = step_of(kind, mesh), start(mesh)
    done = {said["steps"]: [] for said in answers.values()}
    for rank, said in answers.items():
        done[said["steps"]].append(rank)
    last = vs.checkpoint.latest(ready / "steps") if kind == "saves" else None
    saved = -1 if last is None else int(last.name.removeprefix("step_"))
    assert kind != "saves" or saved in (min(done) - 1, *done)
    for count in range(max(done) + 1):
        for rank in done.get(count, ()):
            assert bits(params, rank) == answers[rank]["bits"], (rank, count)
        if count == saved:
            left = vs.checkpoint.load(params, last)
            assert all(torch.equal(left[name].full_tensor(), params[name].full_tensor()) for name in params)
        params, _ = step(params, x)


QUICK = [
    (signal.SIGKILL, "saves", 0),
    (signal.SIGSTOP, "dynamic", 3),
]


@pytest.mark.parametrize(("how", "kind", "seed"), QUICK, ids=str)
def test_a_rank_that_dies_or_stalls_is_named(how, kind, seed, tmp_path):
    check(how, kind, seed, tmp_path)


KINDS = ("static", "saves", "dynamic", "shard_map", "redistribute")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_at_random_points(how, seed, tmp_path):
    check(how, KINDS[seed % len(KINDS)], seed, tmp_path)


def test_a_rank_that_leaves_is_named(tmp_path):
    """It closed its mesh: nobody waits for it until the timeout."""
    with RankPool(2, timeout=60) as pool:
        said, nothing = pool.run(trains, "shard_map", str(tmp_path), 1, 50.0)
    assert nothing is None
    assert "rank 1 left: it closed its mesh" in said["text"]
    assert said["ranks"] == (1,)
    assert said["took"] < 20


def trains_in_a_store_of_rank_0(port, ready):
    """As under torchrun without an agent: the first rank keeps the keys of all."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        threading.Thread(target=dies_when_all_are_ready, args=(ready,), daemon=True).start()
    return trains("static", ready)


def dies_when_all_are_ready(ready):
    while len(list(Path(ready).glob("?"))) < 2:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_host_of_the_store_dies(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with RankPool(2, timeout=60) as pool, pytest.raises(RankError) as found:
        pool.run(trains_in_a_store_of_rank_0, port, str(tmp_path))
    assert found.value.died == {0: -signal.SIGKILL}
    said = found.value.answers[1]
    assert "the store does not answer" in said["text"]
    assert "its host, rank 0 or torchrun's agent, is gone" in said["text"]
    assert said["ranks"] == (0,)
    assert said["took"] < 20


STALLS = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import vescale as vs

dist.init_process_group("gloo", timeout=timedelta(seconds=300))
mesh = vs.make_mesh({"dp": 2})
step = vs.parallelize(lambda x: (x * x).sum(), vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}))
for call in range(10):
    if call == 3:
        os.environ["VESCALE_TIMEOUT"] = "2"
        print(time.time(), flush=True)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    step(torch.ones(6))
"""


@pytest.mark.slow
def test_a_script_ends_though_its_backend_would_wait_longer():
    """The world has a timeout of its own, of which gloo reminds whoever takes it down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "VESCALE_HEARTBEAT": "0.25",
    }
    shared |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STALLS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        out, error = ranks[0].communicate(timeout=170)
        ended = time.time()
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1, error
    assert "rank 1 died or stalled" in error
    assert ended - float(out) < 30
