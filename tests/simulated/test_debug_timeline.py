"""Timelines: spans in order, lanes, and files that other programs read."""

import itertools
import json

import pytest
import torch

import vescale as vs
from tests.toy import WRAP, train_step
from vescale import _tree
from vescale._errors import ArgumentError
from vescale.spmd.placements import P, Shard


@pytest.fixture(scope="module")
def found():
    """The timeline of a train step with donated state, FSDP, on two ranks."""
    step, (params, state, batch) = train_step({"dp": 2}, {}, vs.FSDP("dp", WRAP))
    before = [leaf.full_tensor().clone() for leaf in _tree.leaves(params)]
    timeline = vs.debug.timeline(step, params, state, batch)
    after = [leaf.full_tensor() for leaf in _tree.leaves(params)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return timeline, step.lower(params, state, batch)


def test_each_rank_does_one_thing_after_the_other(found):
    timeline, lowered = found
    assert timeline.ranks == (0, 1)
    for rank in timeline.ranks:
        own = [span for span in timeline.spans if span.rank == rank]
        assert len(own) == len(lowered.cost_analysis(rank).events)
        assert [span.name for span in own] == [event.name for event in lowered.cost_analysis(rank).events]
        assert all(span.seconds > 0 for span in own)
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))
    assert timeline.seconds == max(span.end for span in timeline.spans)


def test_collectives_begin_together(found):
    timeline, lowered = found
    exchanged = [[s for s in timeline.spans if s.rank == rank and s.lane == "dp"] for rank in (0, 1)]
    starts = [[span.start for span in own] for own in exchanged]
    assert starts[0] == starts[1]
    kinds = {collective.kind for collective in lowered.collectives()}
    assert {span.kind for span in exchanged[0]} == kinds
    wire = lowered.cost_analysis(0).total
    assert sum(span.received for span in exchanged[0]) == wire.received


def test_the_model_has_the_seconds_of_the_cost_analysis(found):
    timeline, lowered = found
    for rank in (0, 1):
        own = [span for span in timeline.modelled if span.rank == rank]
        assert own[-1].end == pytest.approx(lowered.cost_analysis(rank).seconds(timeline.rates))


def test_a_chrome_trace(found, tmp_path):
    """What the format asks for: complete events with numbers for process and thread, and names for these."""
    timeline, _ = found
    timeline.save(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(complete) + len(named) == len(trace["traceEvents"])
    assert len(complete) == len(timeline.spans) + len(timeline.modelled)
    threads = {(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "rank 0, modelled", 3: "rank 1, modelled"}
    for event in complete:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in threads
    assert any("toy.py" in event["args"]["where"] for event in complete)


def test_a_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    timeline, _ = found
    for name in ("run.png", "run.svg"):
        timeline.save(tmp_path / name)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "run.svg").read_text()
    assert text.count("<path") > 100
    with pytest.raises(ArgumentError, match=r"\.json"):
        timeline.save(tmp_path / "run.gif")


def test_a_table(found):
    timeline, _ = found
    lines = str(timeline).splitlines()
    assert lines[1].split() == ["compute", "dp", "end"] or "wait" in lines[1]
    assert len(lines) == 4


def test_draws_move_generators_as_one_call_does():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    step = vs.parallelize(lambda x: torch.dropout(x, 0.5, True), vs.Plan(mesh))
    x = torch.ones(16)
    torch.manual_seed(1)
    step(x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    timeline = vs.debug.timeline(step, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert any("bernoulli_" in span.name for span in timeline.spans)


def test_a_program_that_communicates_in_two_halves():
    """A start and a wait: both are spans."""
    from vescale.spmd.program import passes
    from vescale.spmd.program.passes import Pass, registry

    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    plan = vs.Plan(mesh, inputs={"x": P(dp=Shard(0))})
    passes.register(Pass("early", passes.DECISIONS, lambda data: passes.start_early(data, ("all_reduce",))))
    try:
        timeline = vs.debug.timeline(vs.parallelize(lambda x: (x.sum(), (x * x).exp()), plan), torch.ones(4))
    finally:
        registry.unregister("early")
    lanes = [span.lane for span in timeline.spans if span.rank == 0]
    assert lanes.count("dp") == lanes.count("wait") == 1
