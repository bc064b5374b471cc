"""Debugging on real ranks: each writes its own files, all get the same reports, and nobody waits in vain."""

import io
import itertools
import json
import sys
import time

import pytest
import torch

import vescale as vs
from tests.processes.test_world import world_mesh
from tests.toy import loss_fn, make_batch, make_params
from vescale.spmd.placements import P, Shard
from vescale.testing.pool import RankError

pytestmark = pytest.mark.processes


def gradients(mesh, directory, fault=False):
    """Two recorded calls; with `fault` the second rank of dp has another bias before the last."""
    plan = vs.Plan(mesh, {"blocks.*w": P(tp=Shard(1))}, {"batch": P(dp=Shard(0))})
    step = vs.debug.record(vs.parallelize(vs.value_and_grad(loss_fn), plan), directory)
    params = vs.distribute(make_params(), plan)
    step(params, make_batch())
    if fault:
        bias, place = params["head"]["b"], mesh.abstract.coordinate
        pieces = [bias.to_local(rank) + 1e-3 * place(rank)["dp"] for rank in mesh.local_ranks]
        params["head"]["b"] = vs.from_local(pieces if mesh.is_simulated else pieces[0], mesh, P())
    step(params, make_batch())


def gradients_there(directory, fault):
    gradients(world_mesh((("dp", 2), ("tp", 2))), directory, fault)


def test_a_recorded_run_is_that_of_simulated_ranks(pool, tmp_path):
    pool.run(gradients_there, str(tmp_path / "a"), False)
    gradients(vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated"), tmp_path / "b")
    assert len(list((tmp_path / "a").iterdir())) == 8
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    assert not found, found
    assert (found.matched, found.calls) == ("instruction", 2)
    assert found.compared > 60
    assert not vs.debug.diff(tmp_path / "a")


def test_a_rank_that_strays(pool, tmp_path):
    pool.run(gradients_there, str(tmp_path / "a"), True)
    found = vs.debug.diff(tmp_path / "a").divergence
    assert (found.call, found.value, found.ranks) == (1, "params.head.b", (2, 3))


def search():
    mesh = world_mesh((("dp", 4),))
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0))})
    x = torch.ones(8, 2)
    x[5] = -1.0
    report = vs.debug.find_nonfinite(vs.parallelize(lambda x: x.sqrt().sum() * 2, plan), x)
    return str(report), len(report.origins)


def test_a_nan_of_one_rank(pool):
    """Every rank gets the same report, of the rank whose part it was."""
    reports = pool.run(search)
    assert len(set(reports)) == 1
    text, count = reports[0]
    assert count == 1
    assert "nan in v1, made by aten.sqrt.default" in text
    assert "2 on rank 2; the first at [5, 0] on rank 2" in text


def measure():
    mesh = world_mesh((("dp", 4),))
    plan = vs.Plan(mesh, inputs={"batch": P(dp=Shard(0))})
    step = vs.parallelize(vs.value_and_grad(loss_fn), plan)
    timeline = vs.debug.timeline(step, make_params(), make_batch())
    return (
        timeline.ranks,
        [(s.rank, s.lane, s.start, s.end) for s in timeline.spans],
        json.dumps(timeline.as_chrome_trace()),
    )


def test_a_timeline_of_all_ranks(pool):
    reports = pool.run(measure)
    assert len({ranks for ranks, _, _ in reports}) == 1
    (ranks, spans, trace), *others = reports
    assert ranks == (0, 1, 2, 3)
    assert all(other[1] == spans for other in others)
    for rank in ranks:
        own = [span[2:] for span in spans if span[0] == rank]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    counts = [sum(1 for span in spans if span[:2] == (rank, "dp")) for rank in ranks]
    assert counts[0] > 0
    assert len(set(counts)) == 1
    assert {event["pid"] for event in json.loads(trace)["traceEvents"]} >= {0, 1, 2, 3}


def stop(command, seconds):
    """What one rank sees at a breakpoint, and how long each was there."""
    mesh = world_mesh((("dp", 4),))

    def fn(x):
        y = x * 2
        vs.debug.breakpoint(rank=1)
        return y.sum()

    step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}), static=False)
    typed, shown = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = (
        io.StringIO(f"!import time; time.sleep({seconds})\nranks y\n{command}\n"),
        io.StringIO(),
    )
    begin = time.monotonic()
    try:
        total = step(torch.arange(4.0)).full_tensor().item()
        return total, sys.stdout.getvalue(), time.monotonic() - begin
    finally:
        sys.stdin, sys.stdout = typed, shown


def test_one_rank_stops_and_the_others_wait(pool):
    found = pool.run(stop, "c", 1.0)
    assert [total for total, _, _ in found] == [12.0] * 4
    assert [bool(text) for _, text, _ in found] == [False, True, False, False]
    assert "rank 1 [1]: [2.0]" in found[1][1]
    assert all(seconds >= 1.0 for _, _, seconds in found)


def test_leaving_with_q_is_an_error_everywhere(pool):
    with pytest.raises(RankError) as caught:
        pool.run(stop, "q", 0.0)
    text = str(caught.value)
    assert text.count("rank 1 left the debugger with q") == 3
    assert "BdbQuit" in text


def lanes(mesh, directory):
    plan = vs.Plan(mesh, inputs={"batch": P(dp=Shard(0))}, fsdp=vs.FSDP("dp", r"blocks\.\d+"))
    step = vs.parallelize(vs.value_and_grad(loss_fn), plan, lanes={"dp": 4})
    params = vs.distribute(make_params(torch.float32), step.plan)
    vs.debug.record(step, directory)(params, make_batch(torch.float32))


def lanes_there(directory):
    mesh = world_mesh((("dp", 2),))
    if mesh.local_ranks:
        lanes(mesh, directory)


def test_lanes_on_two_processes_are_those_on_one(pool, tmp_path):
    pool.run(lanes_there, str(tmp_path / "a"))
    assert sorted(path.name for path in (tmp_path / "a").glob("*.calls.*")) == [
        "rank-0.calls.jsonl",
        "rank-2.calls.jsonl",
    ]
    lanes(vs.make_mesh({"dp": 1}, backend="simulated"), tmp_path / "b")
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    assert not found, found
    assert found.matched == "instruction"
    assert found.compared > 60
