"""Cost and memory of lowered programs: against what torch counts and allocates when the program runs."""

import builtins
import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vescale as vs
from tests.gpt import BLOCKS, CONTEXT, ROWS, TP, WIDTH, batch, make_model, parameters, ragged, train_step
from tests.memory import measured_peak
from vescale._errors import ArgumentError
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.program.cost import Rates
from vescale.spmd.program.memory import KINDS

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
ONE = vs.make_mesh({"dp": 1}, backend="simulated")
X = torch.ones(8, 4)


def gpt(mesh, rules, **options):
    model, opt = make_model(), vs.optim.adamw(1e-3)
    plan = vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))})
    params = vs.distribute(parameters(model), plan)
    return vs.parallelize(train_step(model, opt), plan, **options), params, opt.init(params)


def lower(fn, *args, mesh=MESH, **options):
    return vs.parallelize(fn, vs.Plan(mesh, **options)).lower(*args)


# Memory.


@pytest.mark.parametrize("donate", [(), ("params", "opt_state")], ids=["kept", "donated"])
def test_the_peak_is_what_is_allocated(donate):
    step, params, state = gpt(ONE, {}, donate=donate)
    found = step.lower(params, state, batch()).memory_analysis()
    real = measured_peak(step, params, state, batch())
    assert abs(found.peak / real - 1) < 0.01


def test_donation_lowers_the_peak():
    kept, given = (gpt(ONE, {}, donate=names) for names in ((), ("params", "opt_state")))
    peaks = [step.lower(*rest, batch()).memory_analysis().peak for step, *rest in (kept, given)]
    assert peaks[1] < peaks[0]


def test_values_go_after_their_last_use():
    found = lower(lambda x: x.cumsum(0).cumsum(0).cumsum(0), X, mesh=ONE).memory_analysis()
    assert found.timeline == (2 * X.nbytes,) * 3
    assert found.peaks == (2 * X.nbytes, 3 * X.nbytes, 3 * X.nbytes)
    assert found.peak_by_kind["arguments"] == X.nbytes


def test_a_view_costs_nothing_and_keeps_its_base():
    found = lower(lambda x: (x * 2).t()[:1], X, mesh=ONE).memory_analysis()
    assert set(found.timeline) == {2 * X.nbytes}
    cut = lower(lambda x: (x * 2)[:1] + 0, X, mesh=ONE).memory_analysis()
    assert cut.timeline[-1] == X.nbytes + X.nbytes // 8


def test_kinds_are_told_apart():
    step, params, state = gpt(MESH, ragged(TP, RaggedShard((0,), (5, 3))))
    found = step.lower(params, state, batch()).memory_analysis()
    assert tuple(found.kinds) == KINDS
    assert all(any(found.kinds[kind]) for kind in KINDS)
    assert tuple(map(sum, zip(*found.kinds.values()))) == found.peaks
    resting = sum(tensor.locals[0].nbytes for tensor in params.values())
    assert set(found.kinds["parameters"]) == {resting}
    # In use they are whole over dp, and split over tp where the plan splits them.
    split = sum(p.nbytes for name, p in parameters(make_model()).items() if "qkv" in name or "fc1" in name)
    split += sum(p.nbytes for name, p in parameters(make_model()).items() if name.endswith("fc2.weight"))
    split += sum(p.nbytes for name, p in parameters(make_model()).items() if name.endswith("proj.weight"))
    whole = sum(p.nbytes for p in parameters(make_model()).values())
    assert max(found.kinds["gathered parameters"]) == whole - split // 2


def test_it_says_where_the_peak_is():
    def fn(x):
        small = x.sum(0)
        return (x.repeat(64, 1) @ x.t()).sum() + small.sum()  # here

    line = fn.__code__.co_firstlineno + 2
    found = lower(fn, X, mesh=ONE).memory_analysis()
    assert f"test_analysis.py:{line}" in str(found.peak_origin)
    assert f"at instruction {found.at} of" in str(found)
    assert found.largest[0].nbytes == max(held.nbytes for held in found.largest)


def test_ranks_hold_what_they_hold():
    plan = {"inputs": {"x": P(dp=RaggedShard((0,), (3, 1)))}}
    lowered = lower(lambda x: x * 2, X, **plan)
    assert [lowered.memory_analysis(rank).peak for rank in range(4)] == [192, 192, 64, 64]


def test_an_empty_program():
    found = lower(lambda x: 3, X, mesh=ONE)
    assert found.memory_analysis().peak == 0
    assert found.cost_analysis().flops == 0
    str(found.memory_analysis()), str(found.cost_analysis())


# Cost.


def test_flops_are_those_of_torchs_counter():
    def fn(w, x):
        return vs.value_and_grad(lambda w: (torch.tanh(x @ w[0]) + x @ w[1]).square().sum())(w)

    w = (torch.ones(4, 16), torch.ones(4, 16))
    with FlopCounterMode(display=False) as counter:
        fn(w, X)
    assert lower(fn, w, X, mesh=ONE).cost_analysis().flops == counter.get_total_flops() > 0


def test_flops_of_a_whole_step():
    """By hand: a weight is multiplied once forward and twice backward; attention's kernel computes again."""
    step, params, state = gpt(ONE, {})
    found = step.lower(params, state, batch()).cost_analysis()
    tokens, head = ROWS * CONTEXT, 256
    matmuls = 2 * tokens * WIDTH * (BLOCKS * 12 * WIDTH + head)
    attention = BLOCKS * 2 * 2 * ROWS * CONTEXT * CONTEXT * WIDTH
    assert found.regions["forward"].flops == matmuls + attention
    assert found.regions["backward"].flops == 2 * matmuls + attention * 5 // 2
    assert found.regions["update"].flops == 0


def test_flops_are_the_ranks_own():
    fn = lambda w, x: torch.relu(x @ w[0]) @ w[1]  # noqa: E731
    w = (torch.ones(4, 16), torch.ones(16, 4))
    whole = lower(fn, w, X, mesh=ONE).cost_analysis()
    plan = {"inputs": {"w.0": P(tp=Shard(1)), "w.1": P(tp=Shard(0)), "x": P(dp=Shard(0))}}
    lowered = lower(fn, w, X, **plan)
    assert [lowered.cost_analysis(rank).flops * 4 for rank in range(4)] == [whole.flops] * 4


def test_elementwise_ops_go_by_their_bytes():
    found = lower(lambda x, y: (x + y).t(), X, X, mesh=ONE).cost_analysis()
    assert (found.flops, found.bytes_accessed) == (0, 3 * X.nbytes)
    table = torch.ones(1000, 4)
    found = lower(lambda table, i: table[i], table, torch.tensor([1, 2]), mesh=ONE).cost_analysis()
    assert found.bytes_accessed < 200  # of the rows that are looked up


def test_traffic_by_kind_and_axis():
    step, params, state = gpt(MESH, ragged(TP, RaggedShard((0,), (5, 3))))
    lowered = step.lower(params, state, batch())
    found = {(entry.kind, entry.axis): entry for entry in lowered.cost_analysis().traffic}
    listed = lowered.collectives()
    assert {key: entry.count for key, entry in found.items()} == {
        ("all_gather", "dp"): 29,
        ("reduce_scatter", "dp"): 29,
        ("all_reduce", "tp"): 8,
        ("all_reduce", "dp"): 2,
    }
    for key, entry in found.items():
        assert entry.received == sum(c.bytes for c in listed if (c.kind, c.axis) == key)
    ranks = [lowered.cost_analysis(rank).total for rank in range(4)]
    assert sum(cost.sent for cost in ranks) == sum(cost.received for cost in ranks)
    gathers = [lowered.cost_analysis(rank).traffic[0] for rank in (0, 3)]
    assert gathers[0].sent == gathers[1].received > gathers[1].sent == gathers[0].received


def test_collectives_of_mapped_functions_count():
    mapped = vs.shard_map(
        lambda x: vs.psum(vs.all_gather(x, "tp"), "dp"),
        mesh=MESH,
        in_specs=P(dp=Shard(0), tp=Shard(1)),
        out_specs=P(),
        check=False,
    )
    lowered = lower(lambda x: mapped(x) * 2, X)
    found = {entry.kind: entry for entry in lowered.cost_analysis().traffic}
    assert found["all_gather"].received == found["all_gather"].sent == X.nbytes // 4
    assert found["psum"].received == found["psum"].sent
    assert [c.bytes for c in lowered.collectives()] == [w.wire.received for w in _exchanges(lowered)]


def _exchanges(lowered):
    return [event for event in lowered.cost_analysis().events if event.wire is not None]


def test_cost_prints_as_a_table_and_is_frozen():
    step, params, state = gpt(MESH, TP)
    found = step.lower(params, state, batch()).cost_analysis()
    head, *rows = str(found).splitlines()
    columns = "instructions flops bytes_accessed collectives received sent"
    assert head.split() == ["rank", "0", *columns.split()]
    assert [row.split()[0] for row in rows[:4]] == ["forward", "backward", "update", "all"]
    assert found.seconds() > found.seconds(Rates(flops=1e18, memory=1e18, wire=1e18, latency=0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 1


# Pictures.


def test_the_picture_of_a_program(tmp_path):
    pytest.importorskip("matplotlib")
    step, params, state = gpt(MESH, TP)
    lowered = step.lower(params, state, batch())
    lowered.visualize(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert text.count("<path") > 50
    lower(lambda x: 3, X).visualize(tmp_path / "nothing.png", rank=3)
    assert (tmp_path / "nothing.png").stat().st_size > 1000


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    lowered = lower(lambda x: x + 1, X)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ArgumentError, match=r"vescale\[demo\]"):
        lowered.visualize(tmp_path / "step.png")


# Arguments without values, meshes without ranks.


def test_lowering_needs_no_values():
    step, params, state = gpt(MESH, TP)
    model = make_model().to("meta")
    opt = vs.optim.adamw(1e-3)
    shapes = parameters(model)
    plan = vs.Plan(vs.AbstractMesh(("dp", "tp"), (2, 2)), TP, {"batch": P(dp=Shard(0))})
    abstract = vs.parallelize(train_step(model, opt), plan)
    found = abstract.lower(shapes, opt.init(shapes), torch.empty_like(batch(), device="meta"))
    real = step.lower(params, state, batch())
    assert found.as_text() == real.as_text()
    assert found.memory_analysis().peak == real.memory_analysis().peak
    assert found.cost_analysis().total == real.cost_analysis().total


def test_fake_tensors_will_do():
    from vescale._compat import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(8, 4)
    plan = {"inputs": {"x": P(dp=Shard(0))}}
    assert lower(lambda x: x.sum(), x, **plan).as_text() == lower(lambda x: x.sum(), X, **plan).as_text()


def test_closed_over_tensors_need_no_values():
    scale = torch.ones(4, device="meta")
    found = lower(lambda x: (x * scale).sum(), torch.empty(8, 4, device="meta"))
    assert "float32[4]" in found.as_text()


def test_a_call_needs_values():
    fn = vs.parallelize(lambda tree: tree["a"] + 1, vs.Plan(MESH))
    with pytest.raises(ArgumentError, match=r"'tree.a' without values(.|\n)*\.lower"):
        fn({"a": X.to("meta")})


def test_a_call_needs_values_of_what_it_closes_over():
    scale = torch.ones(4, device="meta")
    with pytest.raises(ArgumentError, match=r"'closed-over tensor 0' without values"):
        vs.parallelize(lambda x: x * scale, vs.Plan(MESH))(X)


def test_a_call_needs_ranks():
    plan = vs.Plan(vs.AbstractMesh(("dp",), (2,)), {"w": P(dp=Shard(0))})
    with pytest.raises(ArgumentError, match=r"abstract mesh dp=2(.|\n)*make_mesh"):
        vs.parallelize(lambda params: params["w"] + 1, plan)({"w": X})
    with pytest.raises(ArgumentError, match=r"vs\.distribute(.|\n)*make_mesh"):
        vs.distribute({"w": X}, plan)
    assert plan.resolve({"w": X})[0].local == "(4, 4) 64 B"
