"""Buffers of FSDP: what lies where, that nothing is copied on the way, and groups of tensors."""

import gc
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import vescale as vs
from tests import gpt
from tests.toy import WRAP, loss_fn, make_batch, make_params
from vescale import _tree
from vescale._errors import ArgumentError
from vescale.fsdp import DBuffer, gathers, reductions
from vescale.fsdp.into_buffer import DIRECT, WriteResult
from vescale.fsdp.memory import Write, packed
from vescale.spmd.program import binding, program as programs
from vescale.spmd.program.emit import Call
from vescale.spmd.redistribute_plan import plan as redistribution

AXES = {
    "dp": ({"dp": 4}, "dp", {}),
    "hsdp": ({"r": 2, "dp": 2}, ("r", "dp"), {}),
    "tp": ({"dp": 2, "tp": 2}, "dp", {r"blocks\.\d+\.w": vs.P(tp=vs.Shard(1))}),
}


def plan_on(case, **config):
    axes, axis, rules = AXES[case]
    rows = vs.P(**{name: vs.Shard(0) for name in axes if name != "tp"})
    return vs.Plan(vs.make_mesh(axes), rules, {"batch": rows}, fsdp=vs.FSDP(axis, WRAP, **config))


def buffers_of(params, plan):
    placed = vs.distribute(params, plan)
    flat = dict(zip(_tree.paths(placed), _tree.leaves(placed), strict=True))
    return [DBuffer.of(bucket, flat) for bucket in plan.resolve(params).buckets], flat


def inside(piece, whole):
    start = whole.data_ptr()
    return start <= piece.data_ptr() and piece.data_ptr() + piece.nbytes <= start + whole.nbytes


def in_buffers(params, plan):
    """Whether the parameters of each bucket lie in one storage at the planned places."""
    for bucket in plan.resolve(params).buckets:
        for rank in range(plan.mesh.size):
            pieces = [params[name].locals[rank] for name in bucket.names]
            assert len({piece.untyped_storage().data_ptr() for piece in pieces if piece.numel()}) == 1
            size = bucket.plan.shard_size * bucket.dtype.itemsize
            assert pieces[0].untyped_storage().nbytes() == size


# Zero copy.


def test_parameters_lie_in_the_gathered_buffer_and_gradients_are_sent_from_theirs(monkeypatch):
    model = gpt.make_model()
    plan = vs.Plan(
        vs.make_mesh({"dp": 2}), inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=vs.FSDP("dp", r"blocks\.\d+")
    )
    gathered, made, sent = [], [], []

    def views(places, real=gathers.views):
        take = real(places)

        def spied(flat):
            pieces = take(flat)
            gathered.append(all(inside(piece, flat) for piece in pieces))
            return pieces

        return spied

    def empty(*args, real=reductions.empty_gradients):
        make = real(*args)

        def spied(like):
            made.append(make(like))
            return made[-1]

        return spied

    def bind(step, mesh, real=binding.bind, **given):
        run = real(step, mesh, **given)

        def spied(values):
            if step.kind == "reduce_scatter":
                sent.extend(value.data_ptr() for value in values)
            return run(values)

        return spied

    monkeypatch.setattr(gathers, "views", views)
    monkeypatch.setattr(reductions, "empty_gradients", empty)
    monkeypatch.setattr(binding, "bind", bind)
    step = vs.parallelize(gpt.train_step(model, vs.optim.adamw(1e-3)), plan)
    params = vs.distribute(gpt.parameters(model), plan)
    step(params, vs.optim.adamw(1e-3).init(params), gpt.batch())
    assert len(gathered) == 2 * 5
    assert all(gathered)
    assert len(sent) == 2 * 3
    assert sorted(sent) == sorted(buffer.data_ptr() for buffer in made)


def step_listing(monkeypatch, model, plan):
    """The instructions of rank 0 for a train step, as they are run, and the looks of their values."""
    kept = []

    def generate(instructions, inputs, outputs, looks, real=programs.generate):
        kept.append((instructions, looks))
        return real(instructions, inputs, outputs, looks)

    monkeypatch.setattr(programs, "generate", generate)
    opt = vs.optim.adamw(1e-3)
    step = vs.parallelize(gpt.train_step(model, opt), plan, donate=("params", "opt_state"))
    params = vs.distribute(gpt.parameters(model), plan)
    step.lower(params, opt.init(params), gpt.batch()).source()
    return kept[0]


def test_a_train_step_copies_what_is_counted_and_nothing_else(monkeypatch):
    """Copied are gradients of layer norms and embeddings, which `out=` would copy too."""
    model = gpt.make_model()
    plan = vs.Plan(
        vs.make_mesh({"dp": 2}), inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=vs.FSDP("dp", r"blocks\.\d+")
    )
    instructions, looks = step_listing(monkeypatch, model, plan)
    calls = [call for call in instructions if isinstance(call, Call)]
    direct = sum(isinstance(call.fn, WriteResult) for call in calls)
    copied = [call for call in calls if isinstance(call.fn, Write)]
    norms, embeddings = 2 * (2 * gpt.BLOCKS + 1), 2
    assert len(copied) == norms + embeddings
    assert direct == len(gpt.parameters(model)) - norms - embeddings
    # Activations are cloned and concatenated, in attention: smaller than a shard, as no bucket is.
    smallest = min(bucket.plan.shard_size for bucket in plan.resolve(gpt.parameters(model)).buckets)
    copying = ("copy_", "cat", "clone", "_to_copy", "contiguous")
    copies = [call for call in calls if str(call.fn).startswith(tuple(f"aten.{name}" for name in copying))]
    sizes = [
        torch.Size(looks(value)[0]).numel() for call in copies for value in (*call.reads(), *call.makes())
    ]
    assert max(sizes, default=0) < smallest


def out_cases():
    """(op's out overload, arguments, shapes of results): each is run with `out=` views of one buffer."""
    aten, x, w = torch.ops.aten, torch.randn(8, 16), torch.randn(16, 8)
    mean, rstd = torch.zeros(8, 1), torch.ones(8, 1)
    image, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    yield "mm", lambda out: aten.mm.out(x, w, out=out[0]), [(8, 8)]
    yield "bmm", lambda out: aten.bmm.out(x[None], w[None], out=out[0]), [(1, 8, 8)]
    yield "sum", lambda out: aten.sum.IntList_out(x, [0], out=out[0]), [(16,)]
    yield "add", lambda out: aten.add.out(x, x, out=out[0]), [(8, 16)]
    norm = aten.native_layer_norm_backward.out
    given = (x, x, [16], mean, rstd, torch.ones(16), torch.ones(16), [True] * 3)
    names = ("out0", "out1", "out2")
    yield "layer norm", lambda out: norm(*given, **dict(zip(names, out))), [(8, 16), (16,), (16,)]
    index = torch.arange(8)
    dense = aten.embedding_dense_backward.out
    yield "embedding", lambda out: dense(x, index, 10, -1, False, out=out[0]), [(10, 16)]
    back, sizes = aten.convolution_backward.out, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)
    yield (
        "convolution",
        lambda out: back(torch.randn(2, 4, 8, 8), image, kernel, [4], *sizes, **dict(zip(names, out))),
        [(2, 3, 8, 8), (4, 3, 3, 3), (4,)],
    )


OUT_CASES = {name: case for name, *case in out_cases()}


@pytest.mark.parametrize("name", OUT_CASES)
def test_which_out_overloads_write_directly(name):
    run, shapes = OUT_CASES[name]
    flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes))
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    out = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(out)
    copies = sum(event.name == "aten::copy_" for event in seen.events())
    assert flat.count_nonzero() > 0
    if name in ("mm", "bmm", "sum", "add"):
        assert copies == 0
    else:
        assert copies >= 1
    assert any(str(op).startswith(f"aten.{name}.") for op in DIRECT) == (copies == 0)


# Where parameters lie.


def test_modules_have_their_parameters_in_buffers_from_the_start():
    plan = vs.Plan(
        vs.make_mesh({"dp": 2}), inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=vs.FSDP("dp", r"blocks\.\d+")
    )
    model = gpt.make_model()
    with torch.random.fork_rng():
        made = vs.init(lambda: gpt.GPT(gpt.BLOCKS, gpt.WIDTH, gpt.CONTEXT), plan=plan, seed=0)
    taken = vs.parallelize(model, plan)
    for ours in (made, taken):
        in_buffers(ours.params, plan)
        assert all(torch.equal(ours.params[n].full_tensor(), p) for n, p in gpt.parameters(model).items())
    loss = made(gpt.batch())
    loss.backward()
    expected = model(gpt.batch())
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(made.params[name].grad.full_tensor(), p.grad)
    torch.optim.AdamW(made.parameters(), lr=1e-3).step()
    in_buffers(made.params, plan)
    found = made.lower(gpt.batch()).collectives()
    assert [c.kind for c in found if c.value.startswith("float32[") and c.value[8] != "]"].count(
        "reduce_scatter"
    ) == 3


def test_distributing_dtensors_moves_them_into_buffers():
    params, plan = make_params(), plan_on("dp")
    placed = vs.distribute(params, vs.Plan(plan.mesh))
    again = vs.distribute(placed, plan)
    flat = dict(zip(_tree.paths(again), _tree.leaves(again), strict=True))
    in_buffers(flat, plan)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(_tree.leaves(again), _tree.leaves(params)))


@pytest.mark.parametrize("case", AXES)
def test_a_buffer_gathers_reduces_and_releases(case):
    params = make_params()
    expected = dict(zip(_tree.paths(params), _tree.leaves(params), strict=True))
    buffers, _ = buffers_of(params, plan_on(case))
    for buffer in buffers:
        gathered = buffer.all_gather()
        assert buffer.wholes is not None
        for name, value in gathered.items():
            assert torch.equal(value.full_tensor(), expected[name])
            assert all(inside(p, whole) for p, whole in zip(value.locals, buffer.wholes, strict=True))
        alive = weakref.ref(buffer.wholes[0])
        del gathered, value
        buffer.release()
        assert alive() is None  # at once, without a collector

        wholes = buffer.contributions()
        places = buffer.places(wholes)
        for rank, piece in ((r, p) for x in places.values() for r, p in enumerate(x.locals)):
            piece.fill_(rank + 1)
        reduced = buffer.reduce_scatter(wholes)
        for name, value in places.items():
            assert torch.equal(reduced[name].full_tensor(), value.full_tensor())
            assert reduced[name].layout is buffer[name].layout


def test_over_replicas_the_smaller_piece_is_reduced_last():
    buffers, _ = buffers_of(make_params(), plan_on("hsdp"))
    bucket = buffers[0].bucket

    mesh = bucket.rest[0].mesh
    steps = redistribution(bucket.flat(mesh, "partial"), bucket.flat(mesh, "shard"))
    assert [(step.kind, step.axes) for step in steps] == [("reduce_scatter", ("dp",)), ("all_reduce", ("r",))]


def test_a_buffer_in_low_precision():
    params = make_params(torch.float32)
    buffers, _ = buffers_of(params, plan_on("dp", param_dtype=torch.bfloat16))
    for buffer in buffers:
        low = buffer.cast(torch.bfloat16)
        for name, value in buffer.all_gather().items():
            assert value.dtype == torch.bfloat16
            assert buffer[name].dtype == torch.float32
            assert torch.equal(value.full_tensor(), low[name].full_tensor())
            assert torch.equal(value.full_tensor(), buffer[name].full_tensor().bfloat16())


def test_wholes_of_another_size_are_refused():
    (buffer, *_), _ = buffers_of(make_params(), plan_on("dp"))
    with pytest.raises(ArgumentError, match="flat"):
        buffer.reduce_scatter([torch.zeros(3)] * 4)
    with pytest.raises(ArgumentError, match="no tensor"):
        DBuffer.of(buffer.bucket, {})


# Groups.


@pytest.mark.parametrize("case", AXES)
def test_group_operations_and_the_norm(case):
    """What several ranks hold counts once, padding doesn't count, and few calls do it all."""
    params, plan = make_params(), plan_on(case)
    buffers, flat = buffers_of(params, plan)
    wanted = torch.stack([p.norm() for p in _tree.leaves(params)]).norm()
    torch.testing.assert_close(vs.TensorGroup(flat).norm(), wanted, rtol=1e-12, atol=0)
    for buffer in buffers:
        for shard in buffer.shards:  # what no parameter fills
            assert shard.numel() >= sum(p.locals[0].numel() for p in buffer.values())
        before = {name: x.full_tensor() for name, x in buffer.items()}
        mine = torch.stack([x.norm() for x in before.values()]).norm()
        torch.testing.assert_close(buffer.norm(), mine, rtol=1e-12, atol=0)
        _mark_padding(buffer)
        torch.testing.assert_close(buffer.norm(), mine, rtol=1e-12, atol=0)
        more = vs.TensorGroup({name: x * 2 for name, x in buffer.items()})
        buffer.scale_(3.0).add_(more, alpha=0.5)
        assert all(torch.equal(buffer[name].full_tensor(), x * 3 + x) for name, x in before.items())
        assert buffer.zero_().norm() == 0
        assert all(not x.full_tensor().any() for x in buffer.values())


def _mark_padding(buffer):
    """Something other than zero where no parameter lies."""
    for rank, shard in enumerate(buffer.shards):
        kept = [x.locals[rank].clone() for x in buffer.values()]
        shard.fill_(7.0)
        for x, value in zip(buffer.values(), kept, strict=True):
            x.locals[rank].copy_(value)


def test_groups_of_several_dtypes_keep_each():
    mesh = vs.make_mesh({"dp": 2})
    values = {"a": torch.randn(4), "b": torch.randn(6).bfloat16(), "c": torch.randn(2).double()}
    group = vs.TensorGroup(
        {n: vs.distribute_tensor(v, mesh, vs.P(dp=vs.Shard(0))) for n, v in values.items()}
    )
    total = sum(v.double().square().sum() for v in values.values()).sqrt()
    torch.testing.assert_close(group.norm(), total, rtol=1e-12, atol=0)
    assert [x.dtype for x in group.scale_(2.0).values()] == [v.dtype for v in values.values()]
    assert {x.dtype for x in group.cast(torch.float16).values()} == {torch.float16}
    with pytest.raises(ArgumentError, match="same names"):
        group.add_(vs.TensorGroup({"a": group["a"]}))
    pending = vs.from_local([torch.ones(2)] * 2, mesh, vs.P(dp=vs.Partial()))
    with pytest.raises(ArgumentError, match="pending"):
        vs.TensorGroup({"a": pending}).norm()


def test_nothing_is_left_of_a_step_but_its_results():
    """Whole buffers and gradient buffers are gone when a call returns."""
    params, batch, plan = make_params(), make_batch(), plan_on("dp")
    run = vs.parallelize(lambda params, batch: vs.value_and_grad(loss_fn)(params, batch), plan)
    placed = vs.distribute(params, plan)
    sizes = {bucket.shape for bucket in plan.resolve(params).buckets}

    def held():
        gc.collect()
        return [x for x in gc.get_objects() if type(x) is torch.Tensor and tuple(x.shape) in sizes]

    before = held()  # other tests may have tensors of these shapes; held, so that no address is used again
    run(placed, batch)
    known = set(map(id, before))
    assert not [x for x in held() if id(x) not in known]


def test_buckets_are_printed_and_drawn(tmp_path):
    params, batch, plan = make_params(), make_batch(), plan_on("hsdp")
    run = vs.parallelize(lambda params, batch: vs.value_and_grad(loss_fn)(params, batch), plan)
    lowered = run.lower(vs.distribute(params, plan), batch)
    text, table = lowered.as_text(), str(plan.resolve(params))
    for bucket in lowered.buckets:
        assert str(bucket) in text
        assert str(bucket) in table
    assert "bucket blocks.0: 2 parameters over dp, replicas over r" in text
    assert "start all_gather over dp" in text
    assert "= parameters of blocks.0 (" in text
    assert "= write the gradient of blocks.0.w (" in text
    lowered.visualize(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_donated_parameters_stay_in_their_buffers():
    """Updated in place they do. New ones are made elsewhere, and are packed: with the same bits."""
    params, batch, plan = make_params(), make_batch(), plan_on("dp")
    opt = vs.optim.adamw(1e-3)

    def step(params, state, batch):
        _, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state

    reached, counts = [], []
    for donate in (("params", "state"), ()):
        run, placed = vs.parallelize(step, plan, donate=donate), vs.distribute(params, plan)
        state = opt.init(placed)
        packed.counts.clear()
        for _ in range(3):
            placed, state = run(placed, state, batch)
        reached.append(dict(zip(_tree.paths(placed), _tree.leaves(placed), strict=True)))
        counts.append(sum(packed.counts.values()))
    in_buffers(reached[0], plan)
    assert counts[0] == 0
    assert counts[1] > 0
    assert all(torch.equal(x.full_tensor(), reached[1][name].full_tensor()) for name, x in reached[0].items())
