"""Recorded runs: equal ones have no difference, and a planted one is found where it was planted."""

import json

import pytest
import torch

import vescale as vs
from tests.toy import WRAP, loss_fn, make_batch, make_params, train_step
from vescale import _tree
from vescale._errors import ArgumentError
from vescale.debug.fingerprint import fingerprint
from vescale.spmd.layout import Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard
from vescale.spmd.program import stepwise

LAYOUTS = [
    P(),
    P(dp=Shard(0)),
    P(tp=Shard(1), dp=Shard(0)),
    P(dp=RaggedShard((0, 1), (3, 1))),
    P(tp=InterleavedShard(1, 2)),
    P(tp=Shard(1), dp=RaggedShard((0,), (0, 1))),
]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_is_the_sum_over_the_first_holders(spec, dtype):
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(
        4, 8, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator
    )
    x = (x > 0) if dtype == torch.bool else x.to(dtype)
    layout = Layout(mesh.abstract, spec, (4, 8))
    split = dict(spec.items())
    owners = [
        rank
        for rank in range(4)
        if all(axis in split or not at for axis, at in mesh.abstract.coordinate(rank).items())
    ]
    parts = [fingerprint(local_slice(x, layout, rank), layout, rank) for rank in owners]
    assert torch.stack(parts).sum() == fingerprint(x)
    assert fingerprint(x.flip(0)) != fingerprint(x)
    y = x.clone()
    for place in ((3, 5), (0, 1)):  # one sign, and two, in which all 63 bits below are the same
        y[place] = ~y[place] if dtype in (torch.bool, torch.int64) else -y[place]
        assert fingerprint(y) != fingerprint(x)


def test_bits_count_not_values():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert fingerprint(zero) != fingerprint(-zero)
    assert fingerprint(nan) == fingerprint(nan.clone())


# Whole train steps.

COLUMNS = {r".*\.w": P(tp=Shard(1)), r".*\.b": P(tp=Shard(0))}
PLANS = {
    "dp": ({"dp": 2},),
    "tp": ({"dp": 2, "tp": 2}, COLUMNS),
    "fsdp": ({"dp": 2}, {}, vs.FSDP("dp", WRAP)),
}


def recorded(name, directory, calls=2, plant=None, **options):
    """Some calls of a recorded train step; `plant(a weight)` before the last."""
    step, (params, state, rows) = train_step(*PLANS[name])
    step = vs.debug.record(step, directory, **options)
    for call in range(calls):
        if plant is not None and call == calls - 1:
            block = params["blocks"]["1"]
            params["blocks"]["1"] = block | {"w": plant(block["w"])}
        params, state, loss = step(params, state, rows)
    return params, loss


def test_a_recorded_step_is_the_step(tmp_path):
    step, (params, state, rows) = train_step(*PLANS["fsdp"])
    expected, _, loss = step(params, state, rows)
    found, recorded_loss = recorded("fsdp", tmp_path, calls=1)
    assert torch.equal(recorded_loss.full_tensor(), loss.full_tensor())
    for ours, theirs in zip(_tree.leaves(found), _tree.leaves(expected), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


@pytest.mark.parametrize("name", ["tp", "fsdp"])
def test_equal_runs(tmp_path, name):
    for run in ("a", "b"):
        recorded(name, tmp_path / run)
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    assert not found
    assert found.matched == "instruction"
    assert found.calls == 2
    assert found.compared > 200
    assert not vs.debug.diff(tmp_path / "a")
    assert "no difference in" in str(found)


def test_one_element_of_one_weight(tmp_path):
    def plant(weight):
        pieces = [weight.to_local(rank).clone() for rank in (0, 1)]
        for piece in pieces:
            piece[3, 2] = torch.nextafter(piece[3, 2], torch.tensor(torch.inf, dtype=piece.dtype))
        return vs.from_local(pieces, weight.mesh, P())

    recorded("dp", tmp_path / "a")
    recorded("fsdp", tmp_path / "c")
    recorded("dp", tmp_path / "b", plant=plant)
    for other in ("a", "c"):  # of the same program, and of another one
        found = vs.debug.diff(tmp_path / other, tmp_path / "b").divergence
        assert found.call == 1
        assert found.op == "the caller"
        assert found.value == "params.blocks.1.w"
        assert "all that call 0 made was equal" in found.reason


def test_a_replica_on_one_rank(tmp_path):
    def plant(weight):
        pieces = [weight.to_local(rank).clone() for rank in (0, 1)]
        pieces[1][5] += 1e-3
        return vs.from_local(pieces, weight.mesh, P())

    recorded("dp", tmp_path / "a", plant=plant)
    found = vs.debug.diff(tmp_path / "a").divergence
    assert (found.call, found.value, found.ranks) == (1, "params.blocks.1.w", (1,))


def test_a_replica_on_one_rank_against_another_plan(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    params = make_params()
    for run, rows in (("a", P()), ("b", P(dp=Shard(0)))):
        pieces = [params["blocks"]["1"]["w"].clone() for _ in range(2)]
        pieces[1][2, 3] += 1e-3 * (run == "b")
        block = params["blocks"]["1"] | {"w": vs.from_local(pieces, mesh, P())}
        own = params | {"blocks": params["blocks"] | {"1": block}}
        step = vs.parallelize(loss_fn, vs.Plan(mesh, inputs={"batch": rows}))
        vs.debug.record(step, tmp_path / run)(own, make_batch())
    report = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    assert report.matched == "node of the graph"
    assert (report.divergence.value, report.divergence.ranks) == ("params.blocks.1.w", (1,))
    assert "in b replicas differ" in report.divergence.reason


# Small programs.


def product_step(mesh, scale=2.0):
    def fn(x, w):
        y = torch.tanh(x @ w)
        y = y * scale
        return (y + x).sum()

    return vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}))


def test_an_instruction_of_one_rank(tmp_path, monkeypatch):
    """Bits that one rank gets wrong in one instruction."""
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    x, w = torch.randn(8, 4), torch.randn(4, 4)
    vs.debug.record(product_step(mesh), tmp_path / "a")(x, w)
    seen = []

    def faulty(instruction, values):
        call(instruction, values)
        if str(instruction.fn) == "aten.tanh.default":
            seen.append(instruction)
            if len(seen) == 3:  # ranks run in order
                values[instruction.outs[0]][1, 2] += 1e-3

    call = stepwise.call
    monkeypatch.setattr(stepwise, "call", faulty)
    vs.debug.record(product_step(mesh), tmp_path / "b")(x, w)
    report = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    found = report.divergence
    assert (found.op, found.ranks) == ("aten.tanh.default", (2,))
    assert [operand.state for operand in found.operands] == ["equal"]
    assert "it begins here" in found.reason
    assert "test_debug_record.py" in found.line
    assert found.line.endswith("in fn")
    for text in ("aten.tanh.default", found.line, "on rank 2", found.a, found.b):
        assert text in str(report)


def test_another_seed(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    def fn(x):
        y = 2 * x
        return torch.nn.functional.dropout(y, 0.5).sum()

    step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}))
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(seed)
        vs.debug.record(step, tmp_path / run)(torch.ones(64))
    assert not vs.debug.diff(tmp_path / "a", tmp_path / "b")
    found = vs.debug.diff(tmp_path / "a", tmp_path / "c").divergence
    assert found.op.startswith("draw bernoulli_")
    assert "the default generator starts the call in another state" in found.reason


def test_another_key(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    def fn(x, key):
        return vs.rng.dropout(key, x, 0.5).sum()

    step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": P(dp=Shard(0))}))
    for run, seed in (("a", 1), ("b", 2)):
        vs.debug.record(step, tmp_path / run)(torch.ones(64), vs.rng.key(seed))
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b").divergence
    assert found.value == "key.data"


def test_meshes_of_which_bits_are_promised(tmp_path):
    """Elementwise work and draws, on one, two and four ranks, and in a ragged layout."""

    def fn(x, y):
        keep = torch.rand(16, 6) < 0.5
        z = (x * y).exp() + x.sqrt()
        return torch.where(keep, z, 0.0).t(), vs.rng.normal(vs.rng.key(3), (16, 6)) + z

    ragged = P(dp=RaggedShard((0,), (3, 0, 4, 1)))
    for run, size, spec in (
        ("a", 1, P()),
        ("b", 2, P(dp=Shard(0))),
        ("c", 4, P(dp=Shard(1))),
        ("d", 4, ragged),
    ):
        mesh = vs.make_mesh({"dp": size}, backend="simulated")
        step = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": spec, "y": spec}))
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.rand(16, 6, generator=generator) for _ in range(2))
        torch.manual_seed(5)
        vs.debug.record(step, tmp_path / run)(x, y)
    for run in "bcd":
        found = vs.debug.diff(tmp_path / "a", tmp_path / run)
        assert not found, found
        assert found.compared >= 8
        assert found.matched == "node of the graph"


def test_meshes_that_sum_in_another_order(tmp_path):
    for run, size in (("a", 1), ("b", 4)):
        mesh = vs.make_mesh({"dp": size}, backend="simulated")
        step = vs.parallelize(vs.value_and_grad(loss_fn), vs.Plan(mesh, inputs={"batch": P(dp=Shard(0))}))
        record = vs.debug.record(step, tmp_path / run, statistics=True)
        record(make_params(), make_batch())
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b").divergence
    assert found.op.startswith("aten.")
    assert "another order" in found.reason
    close = vs.debug.diff(tmp_path / "a", tmp_path / "b", tolerance=1e-12, absolute=1e-14)
    assert not close, close
    assert close.compared > 30


def test_a_tolerance_finds_what_is_no_rounding(tmp_path):
    for run, size in (("a", 1), ("b", 4)):
        mesh = vs.make_mesh({"dp": size}, backend="simulated")
        step = vs.parallelize(vs.value_and_grad(loss_fn), vs.Plan(mesh, inputs={"batch": P(dp=Shard(0))}))
        params = make_params()
        params["blocks"]["1"]["b"][2] += 1e-6 * (run == "b")
        vs.debug.record(step, tmp_path / run, statistics=True)(params, make_batch())
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b", tolerance=1e-9, absolute=1e-12).divergence
    assert found.value == "params.blocks.1.b"
    assert "norm" in found.a


def test_functions_that_differ(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    x, w = torch.randn(8, 4), torch.randn(4, 4)
    vs.debug.record(product_step(mesh), tmp_path / "a")(x, w)
    vs.debug.record(product_step(mesh, 3.0), tmp_path / "b")(x, w)
    found = vs.debug.diff(tmp_path / "a", tmp_path / "b")
    assert found.divergence.value == "node 2 of the graph"
    assert found.divergence.op == "aten.mul.Tensor"
    assert "2.0" in found.divergence.a
    assert "3.0" in found.divergence.b
    assert "functions differ here" in str(found)


def test_partial_values_are_compared_on_the_same_mesh_only(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    step = vs.parallelize(lambda x: x + x, vs.Plan(mesh))
    for run, pieces in (("a", (1.0, 2.0)), ("b", (2.0, 1.0))):
        x = vs.from_local([torch.full((2,), piece) for piece in pieces], mesh, P(dp=Partial()))
        vs.debug.record(step, tmp_path / run)(x)
    assert vs.debug.diff(tmp_path / "a", tmp_path / "b").divergence.ranks == (0, 1)


def test_inside_a_mapped_function(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    @vs.shard_map(mesh=mesh, in_specs=(P(dp=Shard(0)), P()), out_specs=P())
    def total(x, noise):
        y = x * 3
        y = y + noise * vs.axis_index("dp")
        return vs.psum(y.sum(), "dp")

    step = vs.parallelize(total, vs.Plan(mesh))
    for run, noise in (("a", 0.0), ("b", 0.25)):
        vs.debug.record(step, tmp_path / run)(torch.ones(4), torch.tensor(noise))
    lines = (tmp_path / "a" / "rank-0.index.jsonl").read_text().splitlines()
    inner = [line for line in map(json.loads, lines) if line.get("inner") is not None]
    assert "psum over dp" in {line["op"] for line in inner}
    assert all("test_debug_record.py" in line["line"] for line in inner if line["op"].startswith("aten.mul"))
    assert vs.debug.diff(tmp_path / "a", tmp_path / "b").divergence.value == "noise"


def test_mistakes(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    step = vs.parallelize(lambda x: x + 1, vs.Plan(mesh))
    vs.debug.record(step, tmp_path / "a")(torch.ones(2))
    with pytest.raises(ArgumentError, match="a directory holds one run"):
        vs.debug.record(step, tmp_path / "a")(torch.ones(2))
    consuming = vs.parallelize(lambda x: x + 1, vs.Plan(mesh), donate=["x"])
    x = vs.distribute_tensor(torch.ones(2), mesh, P())
    with pytest.raises(ArgumentError, match="a directory holds one run"):
        vs.debug.record(consuming, tmp_path / "a")(x)
    assert torch.equal(x.full_tensor(), torch.ones(2))  # nothing ran
    with pytest.raises(ArgumentError, match="no recording in"):
        vs.debug.diff(tmp_path / "a", tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="statistics=True"):
        vs.debug.diff(tmp_path / "a", tmp_path / "a", tolerance=1e-6)
    with pytest.raises(ArgumentError, match="static=True"):
        vs.debug.record(lambda x: x, tmp_path / "b")(torch.ones(2))


# Lanes.


def recorded_in_lanes(ranks, directory, plant=0.0):
    plan = vs.Plan(
        vs.make_mesh({"dp": ranks}, backend="simulated"),
        inputs={"batch": P(dp=Shard(0))},
        fsdp=vs.FSDP("dp", WRAP),
    )
    step = vs.parallelize(vs.value_and_grad(loss_fn), plan, lanes={"dp": 4})
    params = vs.distribute(make_params(torch.float32), step.plan)
    rows = make_batch(torch.float32)
    rows[5, 0] += plant
    result = vs.debug.record(step, directory)(params, rows)
    for ours, theirs in zip(_tree.leaves(result), _tree.leaves(step(params, rows)), strict=True):
        assert ours.layout is theirs.layout
        assert all(map(torch.equal, ours.locals, theirs.locals))
    return step, params, rows


def test_runs_with_lanes_are_equal_on_any_number_of_ranks(tmp_path):
    for ranks in (1, 2, 4):
        recorded_in_lanes(ranks, tmp_path / str(ranks))
    for ranks in (1, 2):
        found = vs.debug.diff(tmp_path / str(ranks), tmp_path / "4")
        assert not found, found
        assert found.matched == "instruction"
        assert found.compared > 60
        assert not vs.debug.diff(tmp_path / str(ranks))
    recorded_in_lanes(2, tmp_path / "planted", plant=1e-3)
    found = vs.debug.diff(tmp_path / "1", tmp_path / "planted").divergence
    assert (found.value, found.ranks) == ("batch", (1,))  # the lane that has row 5


def test_an_origin_and_no_timeline_of_lanes(tmp_path):
    step, params, rows = recorded_in_lanes(2, tmp_path / "a")
    rows[9, 3] = torch.nan
    assert vs.debug.find_nonfinite(step, params, rows).first.counts == {2: 1}
    with pytest.raises(ArgumentError, match="several lanes"):
        vs.debug.timeline(step, params, rows)
