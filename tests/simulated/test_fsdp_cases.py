"""FSDP of parameters that are out of the ordinary, and of accumulated gradients, against plain torch.

The toy is two blocks and a head; losses are means over rows, in float64.
"""

import pytest
import torch

import vescale as vs
from tests.toy import ROWS, WRAP, close, loss_fn, make_batch, make_params
from vescale import _tree


def plan_on(axes, axis="dp", rules=None, inputs=("batch",), **config):
    mesh = vs.make_mesh(axes)
    rows = vs.P(**{name: vs.Shard(0) for name in axes if name != "tp"})
    config = {"wrap": WRAP, **config}
    return vs.Plan(mesh, rules, dict.fromkeys(inputs, rows), fsdp=vs.FSDP(axis, **config))


def kinds(lowered):
    """The collectives that move values of two elements or more: a loss is one."""
    return [(c.kind, c.axis) for c in lowered.collectives() if not c.value.endswith("[]")]


def check(loss_fn, params, plan, *args, bound=1e-10):
    """Value and gradients under the plan are plain torch's; what the program communicates."""
    expected = vs.value_and_grad(loss_fn)(params, *args)
    fn = lambda params, batch: vs.value_and_grad(loss_fn)(params, batch)  # noqa: E731
    run, placed = vs.parallelize(fn, plan), vs.distribute(params, plan)
    found = run(placed, *args)
    close(found, expected, bound)
    rest = {entry.path: entry.rest for entry in plan.resolve(params)}
    for path, gradient in zip(_tree.paths(params), _tree.leaves(found[1]), strict=True):
        assert gradient.layout is rest[path]
    return run.lower(placed, *args)


def test_an_axis_of_one_rank_communicates_nothing():
    params, batch = make_params(), make_batch()
    plan = plan_on({"dp": 1})
    assert not plan.resolve(params).buckets
    assert not check(loss_fn, params, plan, batch).collectives()
    found = check(loss_fn, params, plan_on({"r": 2, "dp": 1}, ("r", "dp")), batch).collectives()
    assert {c.axis for c in found} == {"r"}


# Which parameters are used.


def test_a_parameter_that_nobody_uses_gets_zeros():
    params = {**make_params(), "unused": torch.ones(7, 3, dtype=torch.float64)}
    lowered = check(loss_fn, params, plan_on({"dp": 4}), make_batch())
    assert kinds(lowered).count(("reduce_scatter", "dp")) == 3


def test_a_whole_block_that_nobody_uses_is_neither_gathered_nor_reduced():
    params = make_params(blocks=3)
    lowered = check(lambda params, batch: loss_fn(params, batch, 2), params, plan_on({"dp": 2}), make_batch())
    assert not [c for c in lowered.collectives() if "blocks.2" in c.cause]


def test_a_parameter_that_is_used_twice_is_reduced_once():
    params = make_params()

    def tied(params, batch):
        again = {**params["blocks"], "1": params["blocks"]["0"]}
        return loss_fn({**params, "blocks": again}, batch)

    lowered = check(tied, params, plan_on({"dp": 4}), make_batch())
    assert kinds(lowered).count(("reduce_scatter", "dp")) == 2  # the second block isn't used


def test_parameters_that_only_some_rows_use():
    """What some ranks' rows never touch has zeros there: contributions of others are not mixed in."""
    params = {**make_params(), "table": torch.randn(5, 3, dtype=torch.float64)}

    def lookup(params, batch):
        rows = torch.arange(ROWS, device=batch.device) // 2 % 5
        return loss_fn(params, batch) + (params["table"][rows] * batch[:, :3]).sum()

    check(lookup, params, plan_on({"dp": 4}), make_batch())


def test_ranks_that_use_different_parameters():
    """Inside shard_map each rank may choose a parameter: to those of others it contributes zeros."""
    params = make_params()
    plan = plan_on({"dp": 2})

    def per_rank(params, batch):
        first = vs.axis_index("dp") == 0
        used = torch.where(first, params["blocks"]["0"]["w"], params["blocks"]["1"]["w"])
        return vs.psum((batch @ used).square().sum(), "dp")

    def mapped(params, batch):
        spec = _tree.tree_map(lambda leaf: vs.P(), params)
        return vs.shard_map(
            per_rank, mesh=plan.mesh, in_specs=(spec, vs.P(dp=vs.Shard(0))), out_specs=vs.P()
        )(params, batch)

    def oracle(params, batch):
        halves = batch.chunk(2)
        return sum((half @ params["blocks"][str(r)]["w"]).square().sum() for r, half in enumerate(halves))

    batch = make_batch()
    expected = vs.value_and_grad(oracle)(params, batch)
    run = vs.parallelize(lambda params, batch: vs.value_and_grad(mapped)(params, batch), plan)
    close(run(vs.distribute(params, plan), batch), expected)


@pytest.mark.parametrize("low", [torch.float64, torch.float32])
def test_frozen_parameters_are_gathered_and_get_no_gradient(low):
    """In the dtype in use, as those are of which a gradient is taken."""
    params, batch = make_params(), make_batch().to(low)
    params = {"trained": {"head": params["head"]}, "frozen": {"blocks": params["blocks"]}}
    plan = plan_on({"dp": 2}, wrap=r"frozen\.blocks\.\d+|trained\.head", param_dtype=low)

    def step(params, batch):
        inner = lambda trained, frozen: loss_fn({**trained, **frozen}, batch)  # noqa: E731
        return vs.value_and_grad(inner)(params["trained"], params["frozen"])

    run, placed = vs.parallelize(step, plan), vs.distribute(params, plan)
    loss, gradients = run(placed, batch)
    expected = step(_tree.tree_map(lambda p: p.to(low), params), batch)
    assert loss.dtype == low
    assert {g.dtype for g in _tree.leaves(gradients)} == {torch.float64}
    close(
        (loss, _tree.tree_map(lambda g: g.to(low), gradients)),
        expected,
        1e-10 if low == torch.float64 else 1e-6,
    )
    lowered = run.lower(placed, batch)
    assert kinds(lowered) == [("all_gather", "dp")] * 3 + [("reduce_scatter", "dp")]
    name = str(low).removeprefix("torch.")
    assert all(c.value.startswith(name) for c in lowered.collectives() if c.kind == "all_gather")


@pytest.mark.parametrize("axes", [{"dp": 2}, {"r": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_the_gradient_of_each_row_stays_with_its_row(axes):
    """Under vmap a gradient is a slice, which rests nowhere; their mean is again a gradient."""
    rules = {r"blocks\.\d+\.w": vs.P(tp=vs.Shard(1))} if "tp" in axes else None
    plan = plan_on(axes, ("r", "dp") if "r" in axes else "dp", rules)

    def step(params, batch):
        each = vs.vmap(vs.grad(lambda params, row: loss_fn(params, row[None])), (None, 0))(params, batch)
        mean = _tree.tree_map(lambda g: g.mean(0), each)
        return _tree.tree_map(torch.sub, params, mean), each

    params, batch = make_params(), make_batch()
    run, placed = vs.parallelize(step, plan), vs.distribute(params, plan)
    found = run(placed, batch)
    close(found, step(params, batch))
    assert all(each.layout.spec["dp"] == vs.Shard(0) for each in _tree.leaves(found[1]))
    assert len(run.lower(placed, batch).as_text().splitlines()) < 200  # not a few lines a row
    again, _ = run(found[0], batch)
    assert all(a.layout is b.layout for a, b in zip(_tree.leaves(again), _tree.leaves(placed), strict=True))


# Which kinds of parameters there are.


def test_integers_scalars_empty_ones_and_few_elements():
    params = {
        **make_params(),
        "order": torch.tensor([2, 0, 1, 4, 3, 5]),
        "scale": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.ones(0, 4, dtype=torch.float64),
        "one": torch.full((1,), 0.5, dtype=torch.float64),
        "half": torch.ones(5, 2),
    }
    plan = plan_on({"dp": 4})
    resolved = plan.resolve(params)
    rest = {entry.path: entry.rest for entry in resolved}
    assert rest["scale"].spec == rest["empty"].spec == vs.P()
    assert sorted(rest["one"].local_shape(rank) for rank in range(4)) == [(0,)] * 3 + [(1,)]
    assert {bucket.dtype for bucket in resolved.buckets} == {torch.float64, torch.float32, torch.int64}

    def step(params, batch):
        def inner(trained, order):
            batch2 = batch[:, order] * trained["scale"] + trained["one"]
            return (
                loss_fn(trained, batch2)
                + (batch2[:, :5].float() @ trained["half"]).sum().double() / ROWS
                + trained["empty"].sum()
            )

        trained = {name: value for name, value in params.items() if name != "order"}
        return vs.value_and_grad(inner)(trained, params["order"])

    batch = make_batch()
    run, placed = vs.parallelize(step, plan), vs.distribute(params, plan)
    close(run(placed, batch), step(params, batch), bound=1e-6)  # a part of the loss is in float32
    lowered = run.lower(placed, batch)
    assert kinds(lowered).count(("reduce_scatter", "dp")) == 4  # float32 is a bucket of its own


@pytest.mark.parametrize(
    "block", [vs.Rows(1), vs.Rows(4), vs.Tile(2, 2), vs.Elements(3), vs.Whole()], ids=str
)
def test_blocks(block):
    params, batch = make_params(), make_batch()
    plan = plan_on({"dp": 4}, block={r"blocks\.\d+\.w": block, r".*\.b": vs.Whole()})
    check(loss_fn, params, plan, batch)
    for bucket in plan.resolve(params).buckets:
        for name, layout in zip(bucket.names, bucket.rest, strict=True):
            sizes = [torch.Size(layout.local_shape(rank)).numel() for rank in range(4)]
            if name.endswith(".b"):
                assert sorted(sizes)[:3] == [0, 0, 0]
            elif name.startswith("blocks"):
                unit = {vs.Rows(1): 6, vs.Rows(4): 24, vs.Tile(2, 2): 12, vs.Elements(3): 3}.get(block, 36)
                assert all(size % unit == 0 or size == 36 % unit for size in sizes), (name, sizes)


def test_with_tensor_parallel_rules_and_replicas():
    rules = {r"blocks\.\d+\.w": vs.P(tp=vs.Shard(1)), r"blocks\.\d+\.b": vs.P(tp=vs.Shard(0))}
    plan = plan_on({"r": 2, "dp": 2, "tp": 2}, ("r", "dp"), rules)
    found = kinds(check(loss_fn, make_params(), plan, make_batch()))
    assert found.count(("reduce_scatter", "dp")) == 3
    assert found.count(("all_reduce", "r")) == 3


# Precision.


def by_hand(params, batch, low, wide):
    """Each of two ranks computes its rows in `low`; gradients are summed in `wide`."""
    used = _tree.tree_map(lambda p: p.to(low), params)
    halves = [vs.value_and_grad(loss_fn)(used, half.to(low)) for half in batch.chunk(2)]
    # A mean over all rows is the mean of the ranks'; gradients of it are halves.
    return _tree.tree_map(lambda a, b: (a / 2).to(wide) + (b / 2).to(wide), halves[0][1], halves[1][1])


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_low_precision_has_the_bits_of_a_reference_by_hand(wide):
    params, batch = make_params(dtype=torch.float32), make_batch(torch.bfloat16)
    plan = plan_on({"dp": 2}, param_dtype=torch.bfloat16, reduce_dtype=wide)
    step = lambda params, batch: vs.value_and_grad(loss_fn)(params, batch)  # noqa: E731
    run, placed = vs.parallelize(step, plan), vs.distribute(params, plan)
    _, gradients = run(placed, batch)
    expected = by_hand(params, batch, torch.bfloat16, wide)
    for ours, theirs in zip(_tree.leaves(gradients), _tree.leaves(expected), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours.full_tensor(), theirs.float())
    found = run.lower(placed, batch).collectives()
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    assert all(c.value.startswith("bfloat16") for c in found if c.kind == "all_gather")
    assert all(c.value.startswith(names[wide]) for c in found if c.kind == "reduce_scatter")


# Accumulation.


def in_one_loss(params, batch):
    parts = [loss_fn(params, part) for part in batch.reshape(ROWS // 4, 4, -1).unbind(1)]
    return sum(parts) / 4


def in_a_loop(params, batch, scale_each=False):
    """Gradients of four parts, added up."""
    total, gradients = 0.0, None
    for part in batch.reshape(ROWS // 4, 4, -1).unbind(1):
        value, found = vs.value_and_grad(loss_fn)(params, part)
        if scale_each:
            found = _tree.tree_map(lambda g: g / 4, found)
        total = total + value / 4
        gradients = found if gradients is None else _tree.tree_map(torch.add, gradients, found)
    return total, gradients if scale_each else _tree.tree_map(lambda g: g / 4, gradients)


STEPS = {
    "one loss": lambda params, batch: vs.value_and_grad(in_one_loss)(params, batch),
    "a loop": in_a_loop,
    "a loop that scales each": lambda params, batch: in_a_loop(params, batch, True),
}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"r": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("how", STEPS)
def test_microbatches_equal_the_batch_and_are_reduced_once(how, axes):
    params, batch = make_params(), make_batch()
    plan = plan_on(axes, tuple(axes) if len(axes) == 2 else "dp")
    run, placed = vs.parallelize(STEPS[how], plan), vs.distribute(params, plan)
    close(run(placed, batch), vs.value_and_grad(loss_fn)(params, batch))
    found = kinds(run.lower(placed, batch))
    assert found.count(("reduce_scatter", "dp")) == 3
    assert found.count(("all_reduce", "r")) == (3 if "r" in axes else 0)


def test_microbatches_in_low_precision_gather_buckets_and_reduce_once():
    params, batch = make_params(dtype=torch.float32), make_batch(torch.bfloat16)
    plan = plan_on({"dp": 2}, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run, placed = vs.parallelize(in_a_loop, plan), vs.distribute(params, plan)
    _, gradients = run(placed, batch)
    close(gradients, in_a_loop(params, batch.float())[1], bound=0.05)
    found = kinds(run.lower(placed, batch))
    assert found.count(("reduce_scatter", "dp")) == 3
    # Two blocks and the rest, forward and backward; a bucket stays where nobody else is used in between.
    assert found.count(("all_gather", "dp")) <= 4 * 5


def test_op_by_op():
    params, batch, plan = make_params(), make_batch(), plan_on({"dp": 2})
    step = lambda params, batch: vs.value_and_grad(loss_fn)(params, batch)  # noqa: E731
    run = vs.parallelize(step, plan, static=False)
    close(run(vs.distribute(params, plan), batch), step(params, batch))
