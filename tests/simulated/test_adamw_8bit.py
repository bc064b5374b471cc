"""8-bit AdamW on simulated ranks: the bits of one device, and no communication."""

import json
from pathlib import Path

import pytest
import torch

import vescale as vs
from examples.gpt import read_rows, read_text, row_starts
from tests import adamw_8bit_cases as cases, gpt
from tests.adamw_8bit_cases import CASES, LR, STEPS, check, expected, layouts, make_grads, make_params
from vescale import _tree
from vescale._errors import ArgumentError, ShardingError

KEY = vs.rng.key(11)


@pytest.mark.parametrize("case", [case for case in CASES if case != "fsdp 2"])
def test_bits_of_one_device_without_communication(case):
    axes, block, names, _ = CASES[case]
    params, state, lowered, seen = cases.run(vs.make_mesh(axes), case)
    check(params, state, expected(names, block=block))
    assert lowered is not None
    assert not lowered.collectives()
    for after in seen[1:]:  # the step is a plain tensor at first
        assert all(one in (None, other) for one, other in zip(seen[0], after, strict=True))


@pytest.mark.parametrize("case", ["ragged, uneven and empty", "fsdp 2", "tp"])
def test_op_by_op(case):
    axes, block, names, _ = CASES[case]
    params, state, _, seen = cases.run(vs.make_mesh(axes), case, static=False)
    check(params, state, expected(names, block=block))
    assert all(one in (None, other) for one, other in zip(seen[0], seen[-1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch(dtype):
    """Nothing given is written, and parameters keep their dtype."""
    opt, params = vs.optim.adamw_8bit(LR), make_params(dtype=dtype)
    state = opt.init(params)
    kept = _tree.tree_map(torch.clone, (params, state))
    for step in range(STEPS):
        before = params, state
        updates, state = opt.update(make_grads(step, dtype=dtype), state, params)
        params = vs.optim.apply_updates(params, updates)
        if step == 0:
            for leaf, copy in zip(_tree.leaves(before), _tree.leaves(kept), strict=True):
                torch.testing.assert_close(leaf, copy, rtol=0, atol=0)
    check(params, state, expected(dtype=dtype))
    assert all(p.dtype == dtype for p in params.values())


@pytest.mark.parametrize("case", ["fsdp and tp"])
def test_parameters_of_16_bits(case):
    axes, block, names, _ = CASES[case]
    params, state, lowered, _ = cases.run(vs.make_mesh(axes), case, dtype=torch.bfloat16)
    check(params, state, expected(names, torch.bfloat16, block=block))
    assert lowered is not None
    assert not lowered.collectives()


def test_what_stays_float32_is_updated_as_by_adamw():
    small = ("small", "one")
    params, found = make_params(small), []
    for opt in (vs.optim.adamw(LR), vs.optim.adamw_8bit(LR)):
        state, p = opt.init(params), params
        for step in range(STEPS):
            updates, state = opt.update(make_grads(step, small), state, p)
            p = vs.optim.apply_updates(p, updates)
        found.append(p)
    for name in small:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=0)


def test_4096_elements_are_quantized_and_4095_are_not_however_few_a_rank_has():
    mesh, opt = vs.make_mesh({"dp": 4}), vs.optim.adamw_8bit(LR)
    params = {"less": torch.ones(63, 65), "more": torch.ones(128, 32)}
    placed = vs.distribute(params, vs.Plan(mesh, {".*": vs.P(dp=vs.RaggedShard.on_rank(1, 4))}))
    rows = {"more": vs.distribute_tensor(params["more"], mesh, vs.P(dp=vs.Shard(0)))}  # 1,024 a rank
    for tree in (params, placed, {**placed, **rows}):
        state = opt.init(tree)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert [state[moment][name].dtype for name in params] == [torch.float32, torch.uint8]
            assert list(state[f"{moment}_scale"]) == ["more"]


def draws(t, number, shape, quantized=4):
    keys = vs.rng.split(vs.rng.fold_in(KEY, t), 2 * quantized)
    return vs.rng.uniform(keys[number], shape)


@pytest.mark.parametrize("case", ["replicate", "ragged, uneven and empty", "hsdp"])
def test_rounding_at_random_is_the_same_on_every_mesh(case):
    """And other rounding at each step: the reference draws anew."""
    axes, block, names, _ = CASES[case]
    params, state, lowered, _ = cases.run(vs.make_mesh(axes), case, key=KEY)
    check(params, state, expected(names, block=block, draws=draws))
    assert lowered is not None
    assert not lowered.collectives()


# Blocks that are cut.

CUT = {
    "ragged": (
        {"dp": 2},
        (32, 32),
        {"mat": vs.P(dp=vs.RaggedShard((0,), (40, 56)))},
        ["mat of shape (96, 64)", "cuts at row 40", "tile of 32 x 32", r"block={r'mat': vs.Tile(32, 32)}"],
    ),
    "shard": (
        {"tp": 2},
        (32, 32),
        {"mat": vs.P(tp=vs.Shard(0))},
        ["mat", "Shard(0) over 'tp' cuts dim 0 at 48", "tile of 32 x 32", "smaller block="],
    ),
    "run of elements": (
        {"dp": 2},
        512,
        {"tall": vs.P(dp=vs.RaggedShard((0,), (65, 65)))},
        ["tall", "cuts at element 2600", "run of 512 elements", r"block={r'tall': vs.Elements(512)}"],
    ),
    "vector": (
        {"dp": 2},
        (32, 32),
        {"vec": vs.P(dp=vs.Shard(0))},
        ["vec", "cuts dim 0 at 2500", r"block={r'vec': vs.Elements(1024)}"],
    ),
    "stack": (
        {"dp": 2},
        (32, 32),
        {"stack": vs.P(dp=vs.RaggedShard((0, 1), (64, 56)))},
        ["stack", "cuts at row 64", "vs.Tile(32, 32)"],
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_a_block_that_is_cut_is_an_error(case):
    """In init, and where update is traced: nothing has run by then."""
    axes, block, rules, words = CUT[case]
    plan = vs.Plan(vs.make_mesh(axes), rules)
    opt, (name,) = vs.optim.adamw_8bit(LR, block=block), rules
    params = vs.distribute(make_params((name,)), plan)
    step = vs.parallelize(cases.update_step(opt), plan)
    state = opt.init(make_params((name,)))
    calls = [lambda: opt.init(params), lambda: step(params, state, make_grads(0, (name,)))]
    for call in calls:
        with pytest.raises(ShardingError) as error:
            call()
        assert all(word in str(error.value) for word in words), str(error.value)


def test_fsdp_without_the_block_is_an_error_and_with_it_is_not():
    params = {f"w{number}": torch.ones(96, 64) for number in range(3)}
    mesh, opt = vs.make_mesh({"dp": 4}), vs.optim.adamw_8bit(LR)
    with pytest.raises(ShardingError, match=r"declare vs.FSDP\(..., block=\{r'w0': vs.Tile\(32, 32\)\}\)"):
        opt.init(vs.distribute(params, vs.Plan(mesh, fsdp=vs.FSDP("dp"))))
    tiles = vs.FSDP("dp", block={"w.*": vs.Tile(32, 32)}, max_padding=0.5)
    opt.init(vs.distribute(params, vs.Plan(mesh, fsdp=tiles)))


# The state.


def test_init_inside_a_program_and_on_shapes():
    axes, block, names, said = CASES["ragged, uneven and empty"]
    plan = vs.Plan(vs.make_mesh(axes), **said)
    opt, params = vs.optim.adamw_8bit(LR, block=block), vs.distribute(make_params(names), plan)
    made = vs.parallelize(opt.init, plan)
    assert not made.lower(params).collectives()
    one, other = made(params), opt.init(params)
    assert layouts(one)[:-1] == layouts(other)[:-1]  # "step" is last
    for a, b in zip(_tree.leaves(one), _tree.leaves(other), strict=True):
        torch.testing.assert_close(cases.whole(a), cases.whole(b), rtol=0, atol=0)
    shapes = opt.init(_tree.tree_map(lambda p: p.to("meta"), make_params(names)))
    for a, b in zip(_tree.leaves(shapes), _tree.leaves(other), strict=True):
        assert (a.device.type, a.shape, a.dtype) == ("meta", b.shape, b.dtype)


def test_init_and_an_update_in_one_program():
    axes, block, names, said = CASES["ragged, uneven and empty"]
    plan = vs.Plan(vs.make_mesh(axes), **said)
    opt = vs.optim.adamw_8bit(LR, block=block)

    def first_step(params, grads):
        return cases.update_step(opt)(params, opt.init(params), grads)

    run = vs.parallelize(first_step, plan)
    params, state = run(vs.distribute(make_params(names), plan), make_grads(0, names))
    check(params, state, expected(names, steps=1, block=block))
    assert not run.lower(vs.distribute(make_params(names), plan), make_grads(0, names)).collectives()


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b", "gpt-oss-120b(hf layout)"])
def test_bytes_of_the_state(model):
    """At most 0.27 of float32's; two codes and two scales of 1,024 elements are 0.251."""
    table = json.loads((Path(__file__).parents[1] / "data/param_shapes.json").read_text())[model]
    params = {
        f"{bucket['bucket']}.{name}": torch.empty(shape, device="meta")
        for bucket in table
        for name, shape, _ in bucket["params"]
    }
    state = vs.optim.adamw_8bit(LR).init(params)
    ours = sum(leaf.numel() * leaf.dtype.itemsize for leaf in _tree.leaves(state))
    assert 0.25 < ours / sum(2 * 4 * p.numel() for p in params.values()) < 0.2525


def test_a_state_of_another_optimizer_is_an_error():
    params, grads = make_params(("mat",)), make_grads(0, ("mat",))
    state = vs.optim.adamw_8bit(LR, min_elements=10**6).init(params)
    with pytest.raises(ArgumentError, match="no scales of mat"):
        vs.optim.adamw_8bit(LR).update(grads, state, params)


@pytest.mark.parametrize(
    "options",
    [
        {"block": (32,)},
        {"block": (0, 32)},
        {"block": 2.5},
        {"block": (32, True)},
        {"min_elements": -1},
        {"stochastic_rounding": 3},
        {"betas": (0.9, 1.0)},
    ],
    ids=str,
)
def test_options_that_can_not_be_meant(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        vs.optim.adamw_8bit(LR, **options)


def test_without_parameters():
    opt = vs.optim.adamw_8bit(LR)
    updates, state = opt.update({}, opt.init({}), {})
    assert (updates.delta, state["exp_avg_scale"]) == ({}, {})


def test_a_gradient_that_is_not_finite_stays_in_its_block():
    opt, params = vs.optim.adamw_8bit(LR), make_params(("mat",))
    grads = make_grads(0, ("mat",))
    grads["mat"][40, 3] = torch.inf
    _, state = opt.update(grads, opt.init(params), params)
    for step in (1, 2):
        updates, state = opt.update(make_grads(step, ("mat",)), state, params)
        bad = ~updates.delta["mat"].isfinite()
        assert bool(bad[32:64, :32].all())
        assert int(bad.sum()) == 32 * 32


# Training.


@pytest.mark.slow
def test_a_gpt_communicates_as_with_adamw():
    """The collectives of a whole step are those with float32 moments, and so the update has none."""
    mesh, model = vs.make_mesh({"dp": 2}), gpt.make_model()
    fsdp = vs.FSDP("dp", r"blocks\.\d+", block={".*": vs.Tile(32, 32)}, max_padding=1.0)
    plan = vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)
    found = []
    for opt in (vs.optim.adamw(LR), vs.optim.adamw_8bit(LR)):
        params = vs.distribute(gpt.parameters(model), plan)
        step = vs.parallelize(gpt.train_step(model, opt), plan, donate=("params", "opt_state"))
        state = opt.init(params)
        lowered = step.lower(params, state, gpt.batch())
        found.append([(c.kind, c.axis, c.bytes, c.value) for c in lowered.collectives()])
    assert found[0] == found[1]
    before = layouts(state)[:-1]
    params, state, loss = step(params, state, gpt.batch())
    assert layouts(state)[:-1] == before
    assert loss.item() < 10


def test_a_gpt_learns_as_with_adamw():
    """Mean losses of the last 20 of 60 steps are within 1%, where the first is above 1.3 times that."""
    text, _ = read_text()
    starts, means = row_starts(text, 60, gpt.ROWS, 0), []
    for opt in (vs.optim.adamw(3e-3), vs.optim.adamw_8bit(3e-3)):
        model = gpt.make_model()
        params, losses = gpt.parameters(model), []
        state, step = opt.init(params), gpt.train_step(model, opt)
        for rows in starts:
            params, state, loss = step(params, state, read_rows(text, rows)[:, : gpt.CONTEXT + 1])
            losses.append(loss.item())
        means.append(sum(losses[-20:]) / 20)
        assert losses[0] > 1.3 * means[-1]
    assert abs(means[1] / means[0] - 1) < 0.01
