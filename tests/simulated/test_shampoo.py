"""Shampoo against a plain dense one, on shards of every kind against one device; and what it communicates."""

import importlib
import re

import pytest
import torch

import vescale as vs
from tests import gpt, toy
from tests.muon_cases import draw, equal, named, step_of
from tests.shampoo_cases import CUTS, LR, SHAPES, densely
from vescale import _tree
from vescale.spmd.matrices import Matrices

P, S, R = vs.P, vs.Shard, vs.RaggedShard
STEPS = 3


def run(axes, specs, params, gradients, opt, donate=()):
    """Parameters and state after the steps, whole; and the program, which is one. Layouts stay."""
    mesh = vs.make_mesh(axes, backend="simulated")
    plan = vs.Plan(mesh, specs, {f"grads.{name}": spec for name, spec in specs.items()})
    step = vs.parallelize(step_of(opt), plan, donate=donate)
    placed = vs.distribute(params, plan)
    state = opt.init(placed)
    before = [leaf.layout for leaf in _tree.leaves((placed, state))]
    for grads in gradients:
        placed, state = step(placed, state, grads)
        assert [leaf.layout for leaf in _tree.leaves((placed, state))] == before
    assert step.cache_info().misses == 1
    return whole(placed), state, step.lower(placed, state, gradients[0])


def plainly(params, gradients, opt):
    params, state = dict(params), opt.init(params)
    for grads in gradients:
        params, state = step_of(opt)(params, state, grads)
    return params, state


def whole(tree):
    return _tree.tree_map(lambda x: x.full_tensor() if isinstance(x, vs.DTensor) else x, tree)


def same(ours, theirs):
    assert _tree.paths(ours) == _tree.paths(theirs)
    equal(dict(enumerate(_tree.leaves(whole(ours)))), dict(enumerate(_tree.leaves(theirs))))


def some(*shapes, steps=STEPS, dtype=torch.float32):
    return draw(*shapes, dtype=dtype), [draw(*shapes, seed=seed, dtype=dtype) for seed in range(1, steps + 1)]


def started(lowered):
    """The collectives in order: (to or from owners, kind and axes, how many values)."""
    found = []
    for line in lowered.as_text().splitlines():
        if match := re.match(r"t\d+ = start (\w+ over \S+) \((.*?)\)  # \S+ (to|from) ", line):
            found.append((match[3], match[1], match[2].count(",") + 1))
    return found


# In plain torch.


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"update_interval": 1, "grafting": "sgd", "weight_decay": 0.1},
        {"update_interval": 2, "grafting": "rmsprop", "betas": (0.0, 0.9)},
        {"update_interval": 3, "grafting": None, "eps": 1e-4, "root": 2},
        {"betas": (0.5, 1.0), "update_interval": 2},
        {"betas": (0.5, 1.0), "update_interval": 2, "grafting": None},
        {"max_dim": 7, "update_interval": 2},
        {"max_dim": 6, "grafting": "rmsprop", "update_interval": 2},
        {"max_dim": 0},
        {"max_dim": 0, "grafting": None},
    ],
    ids=str,
)
def test_the_formulas(hyper):
    """Against loops with singular values for roots, in float64. Roots of nothing are large: 1e-9."""
    params, gradients = some(*SHAPES, (1, 5), (5, 1), steps=5, dtype=torch.float64)
    found, _ = plainly(params, gradients, vs.optim.shampoo(LR, **hyper))
    expected = densely(params, gradients, **hyper)
    for name in params:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)
        assert (found[name] - params[name]).abs().max() > 1e-3


def test_float32_and_bfloat16_are_near():
    """Roots in float64 of float32 statistics; `eps` well above what rounds. bfloat16 has 8 bits."""
    params, gradients = some(*SHAPES, steps=5)
    expected = densely(params, gradients, eps=1e-2, update_interval=2)
    for roots, dtype, bound in (
        (torch.float64, torch.float32, 1e-5),
        (torch.float32, torch.float32, 1e-4),
        (torch.float64, torch.bfloat16, 0.1),
    ):
        opt = vs.optim.shampoo(LR, eps=1e-2, update_interval=2, root_dtype=roots)
        cast = lambda tree, dtype=dtype: _tree.tree_map(lambda x: x.to(dtype), tree)  # noqa: E731
        found, state = plainly(cast(params), list(map(cast, gradients)), opt)
        assert state["owned"]["w0"]["left"].dtype is torch.float32
        for name, value in found.items():
            torch.testing.assert_close(value.float(), expected[name], rtol=0, atol=bound)
            assert value.dtype is dtype


def test_a_learning_rate_that_is_a_tensor_or_a_schedule():
    params, gradients = some(*SHAPES)
    rates = (torch.tensor(LR, dtype=torch.float64), lambda step: LR + 0 * step)
    expected, _ = plainly(params, gradients, vs.optim.shampoo(LR))
    for lr in rates:
        equal(plainly(params, gradients, vs.optim.shampoo(lr))[0], expected)


def test_a_stack_is_its_matrices():
    params, gradients = some((4, 5, 6))
    apart = lambda tree: dict(enumerate(tree["w0"].clone()))  # noqa: E731
    opt = vs.optim.shampoo(LR)
    found, _ = plainly(params, gradients, opt)
    equal(apart(found), plainly(apart(params), list(map(apart, gradients)), opt)[0])


def test_nothing_to_precondition():
    """A gradient of zeros moves nothing, and leaves roots that are finite."""
    params = draw(*SHAPES)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    for grafting in (None, "sgd", "adam"):
        opt = vs.optim.shampoo(LR, grafting=grafting)
        found, state = plainly(params, [zeros, zeros], opt)
        equal(found, params)
        assert all(leaf.isfinite().all() for leaf in _tree.leaves(state))


# On shards.


@pytest.mark.parametrize("case", CUTS)
def test_every_sharding_has_the_bits_of_one_device(case):
    axes, specs = CUTS[case][0], named(CUTS[case][1])
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, update_interval=2, weight_decay=0.1)
    found, state, _ = run(axes, specs, params, gradients, opt)
    same((found, state), plainly(params, gradients, opt))


@pytest.mark.parametrize("case", ["ragged elements", "stack over tp"])
@pytest.mark.parametrize(
    "hyper",
    [{"grafting": "sgd"}, {"grafting": None, "betas": (0.0, 1.0)}, {"max_dim": 6}, {"max_dim": 0}],
    ids=str,
)
def test_every_kind_has_the_bits_of_one_device(case, hyper):
    axes, specs = CUTS[case][0], named(CUTS[case][1])
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, **{"update_interval": 2, **hyper})
    found, state, _ = run(axes, specs, params, gradients, opt)
    same((found, state), plainly(params, gradients, opt))


def test_parameters_of_16_bits():
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    params, gradients = some(*SHAPES, dtype=torch.bfloat16)
    opt = vs.optim.shampoo(LR)
    found, state, lowered = run(axes, specs, params, gradients, opt)
    same((found, state), plainly(params, gradients, opt))
    assert {c.value.partition("[")[0] for c in lowered.collectives()} == {"bfloat16"}


def test_donated():
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, update_interval=2)
    found, state, _ = run(axes, specs, params, gradients, opt, donate=("params", "opt_state"))
    same((found, state), plainly(params, gradients, opt))


@pytest.mark.parametrize("case", ["ragged elements", "tp and ragged dp", "stack over tp"])
def test_op_by_op_and_outside_programs(case):
    axes, specs = CUTS[case][0], named(CUTS[case][1])
    params, gradients = some(*SHAPES, steps=2)
    opt = vs.optim.shampoo(LR, update_interval=2)
    expected = plainly(params, gradients, opt)
    mesh = vs.make_mesh(axes, backend="simulated")
    place = lambda tree: {n: vs.distribute_tensor(v, mesh, specs[n]) for n, v in tree.items()}  # noqa: E731
    for step in (step_of(opt), vs.parallelize(step_of(opt), vs.Plan(mesh, specs), static=False)):
        placed = place(params)
        state = opt.init(placed)
        before = [leaf.layout for leaf in _tree.leaves((placed, state))]
        for grads in gradients:
            placed, state = step(placed, state, place(grads))
        assert [leaf.layout for leaf in _tree.leaves((placed, state))] == before
        same((placed, state), expected)


TEXTS = ["(h d=4) k -> h d k", "r (h d=5) -> h r d", "(g r=4) (h c=5) -> g h r c"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "spec", [P(dp=S(0)), P(dp=S(1)), P(dp=R((0,), (5, 2, 0, 1))), P(dp=R((0, 1), (70, 2, 8, 0)))], ids=str
)
def test_views_as_matrices_whatever_is_cut(text, spec):
    """Against the same matrices as parameters of their own."""
    params, gradients = some((8, 10), steps=2)
    how = Matrices.of(text)
    apart = lambda tree: dict(enumerate(how.split(tree["w0"]).clone()))  # noqa: E731
    expected, _ = plainly(apart(params), list(map(apart, gradients)), vs.optim.shampoo(LR))
    opt = vs.optim.shampoo(LR, matrix_dims={"w.": text})
    found, _, _ = run({"dp": 4}, {"w0": spec}, params, gradients, opt)
    equal(apart(found), expected)


# What is kept, and where.


def test_statistics_are_kept_by_owners_once():
    shapes = [(8, 6), (6, 8), (10, 4), (8, 3, 5)]
    specs = {"w0": P(dp=S(0)), "w1": P(dp=S(1)), "w2": P(dp=R((0, 1), (3, 0, 30, 7))), "w3": P(dp=S(1))}
    params, gradients = some(*shapes, steps=1)
    _, state, _ = run({"dp": 4}, specs, params, gradients, vs.optim.shampoo(LR))
    for name, kept in state["owned"].items():
        holders = set()
        for value in kept.values():
            counts = [local.numel() for local in value.locals]
            assert sum(counts) == value.numel()
            holders.add(tuple(rank for rank, count in enumerate(counts) if count))
        assert len(holders) == 1, "all of a matrix is with its owner"
        assert name == "w3" or len(holders.pop()) == 1
    owners = [tuple(local.numel() > 0 for local in kept["left"].locals) for kept in state["owned"].values()]
    assert len(set(owners)) == 4, "and owners are different ranks"


def test_init_inside_a_program_and_of_abstract_parameters():
    axes, specs = CUTS["stack over tp"][0], named(CUTS["stack over tp"][1])
    plan = vs.Plan(vs.make_mesh(axes, backend="simulated"), specs)
    opt, params = vs.optim.shampoo(LR), draw(*SHAPES)
    here = opt.init(vs.distribute(params, plan))
    inside = vs.parallelize(lambda params: opt.init(params), plan)(params)
    looks = lambda tree: [(x.shape, x.dtype, x.layout) for x in _tree.leaves(tree)]  # noqa: E731
    assert looks(inside) == looks(here)
    assert _tree.paths(inside) == _tree.paths(here)
    abstract = opt.init({name: p.to("meta") for name, p in params.items()})
    assert [x.shape for x in _tree.leaves(abstract)] == [x.shape for x in _tree.leaves(here)]
    assert all(x.is_meta for x in _tree.leaves(abstract))


@pytest.mark.parametrize("case", ["columns", "stack over tp"])
def test_saved_on_one_mesh_and_loaded_on_another(case, tmp_path):
    """Into parameters and state without values: others own matrices, and the next step has the bits."""
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, update_interval=2)
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    mesh = vs.make_mesh(axes, backend="simulated")
    step, placed = vs.parallelize(step_of(opt), plan := vs.Plan(mesh, specs)), vs.distribute(params, plan)
    placed, state = step(placed, opt.init(placed), gradients[0])
    path = vs.checkpoint.save({"params": placed, "state": state}, tmp_path / "saved")

    axes, specs = CUTS[case][0], named(CUTS[case][1])
    plan = vs.Plan(vs.make_mesh(axes, backend="simulated"), specs)
    target = vs.checkpoint.abstract({name: p.to("meta") for name, p in params.items()}, plan)
    target = {"params": target, "state": opt.init(target)}
    assert all(piece.is_meta for leaf in _tree.leaves(target["state"]["owned"]) for piece in leaf.locals)
    loaded = vs.checkpoint.load(target, path)
    step, found = vs.parallelize(step_of(opt), plan), (loaded["params"], loaded["state"])
    for grads in gradients[1:]:
        found = step(*found, grads)
    assert step.cache_info().misses == 1
    same(found, plainly(params, gradients, opt))


def test_state_of_plain_parameters_is_whole_and_right():
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, update_interval=2)
    plan = vs.Plan(vs.make_mesh(axes, backend="simulated"), specs)
    step, placed, state = vs.parallelize(step_of(opt), plan), params, opt.init(params)
    for grads in gradients:
        placed, state = step(placed, state, grads)
    same((placed, state), plainly(params, gradients, opt))


def test_roots_are_computed_where_the_step_says_and_by_owners_only(monkeypatch):
    """Five steps of one program, two of which take eigenvalues: of both sides of each matrix, once."""
    taken = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: taken.append(len(x)) or real(x))
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    params, gradients = some(*SHAPES, steps=5)
    found, state, _ = run(axes, specs, params, gradients, vs.optim.shampoo(LR, update_interval=3))
    assert sorted(taken) == sorted(2 * [8, 6, 10, 7, *4 * (5, 6)])
    same((found, state), plainly(params, gradients, vs.optim.shampoo(LR, update_interval=3)))


# Communication.


def test_one_collective_to_owners_and_one_back_and_none_for_norms():
    """Norms that are grafted are of whole matrices, at their owners: nothing is reduced."""
    shapes = [(8, 6), (6, 8), (10, 4), (4, 8)]
    specs = {"w0": P(dp=S(0)), "w1": P(dp=S(1)), "w2": P(dp=R((0,), (2, 3))), "w3": P(dp=S(0))}
    params, gradients = some(*shapes, steps=1)
    for grafting in (None, "sgd", "rmsprop", "adam"):
        _, _, lowered = run({"dp": 2}, specs, params, gradients, vs.optim.shampoo(LR, grafting=grafting))
        assert started(lowered) == [("to", "all_to_all over dp", 4), ("from", "all_to_all over dp", 4)]
        assert len(lowered.collectives()) == 8
        assert {(c.kind, c.reason) for c in lowered.collectives()} == {("all_to_all", "plan")}


WHOLE = {
    "experts": ((8, 3, 5), P(dp=S(0)), {}),
    "experts, uneven": ((6, 3, 5), P(dp=S(0)), {}),
    "experts, ragged": ((8, 3, 5), P(dp=R((0,), (1, 4, 0, 3))), {}),
    "experts, rows": ((8, 3, 5), P(dp=R((0, 1), (3, 12, 0, 9))), {}),
    "experts, elements": ((4, 3, 5), P(dp=R((0, 1, 2), (30, 15, 0, 15))), {}),
    "experts of layers": ((2, 4, 3, 5), P(dp=S(1)), {"matrix_dims": {"w0": "l e r c -> l e r c"}}),
    "layers, ragged": (
        (4, 2, 3, 5),
        P(dp=R((0, 1), (1, 4, 0, 3))),
        {"matrix_dims": {"w0": "l e r c -> l e r c"}},
    ),
    "heads": ((24, 5), P(dp=R((0,), (8, 4, 0, 12))), {"matrix_dims": {"w0": "(h d=4) k -> h d k"}}),
    "heads of three": (
        (24, 5),
        P(dp=vs.InterleavedShard(0, 3)),
        {"matrix_dims": {"w0": "(g=3 h d=2) k -> g h d k"}},
    ),
    "heads of columns": ((5, 24), P(dp=S(1)), {"matrix_dims": {"w0": "r (h d=3) -> h r d"}}),
    "on one rank": ((8, 6), P(dp=R.on_rank(2, 4)), {}),
    "whole block": ((8, 6), P(dp=R((0,), (0, 1, 0, 0))), {}),
    "replicated": ((8, 6), P(), {}),
    "no statistics": ((8, 6), P(dp=R((0, 1), (5, 11, 0, 32))), {"max_dim": 5}),
    "no elements": ((0, 6), P(dp=S(0)), {}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_matrices_that_are_whole_on_a_rank_do_not_move(case):
    shape, spec, hyper = WHOLE[case]
    params, gradients = some(shape, steps=2)
    opt = vs.optim.shampoo(LR, update_interval=2, **hyper)
    found, state, lowered = run({"dp": 4}, {"w0": spec}, params, gradients, opt)
    assert not lowered.collectives()
    same((found, state), plainly(params, gradients, opt))


def test_waves_overlap_in_two_slots(monkeypatch):
    waves = importlib.import_module("vescale.spmd.program.passes.owner_waves")
    monkeypatch.setattr(waves, "WAVE_BYTES", 192)  # one matrix of 8 x 6 a rank
    shapes = [(8, 6)] * 6 + [(4, 3, 5)]
    specs = {f"w{i}": P(dp=S(0)) for i in range(7)}
    params, gradients = some(*shapes)
    opt = vs.optim.shampoo(LR, update_interval=2)
    found, state, lowered = run({"dp": 2}, specs, params, gradients, opt)
    over = "all_to_all over dp", 2
    assert started(lowered) == [(way, *over) for way in ("to", "to", "from", "to", "from", "from")]
    order = "".join(
        "s" if "= start" in line else "w" if "= wait" in line else "o"
        for line in lowered.as_text().splitlines()
        if "= start" in line or "= wait" in line or "precondition" in line
    )
    # The stack, which doesn't move, while wave 0 is on its way; then wave 1 is while wave 0 is computed, ..
    assert order == "soswoosswoowswoowsw"
    same((found, state), plainly(params, gradients, opt))


# In a train step.


def labelled(lr=0.02):
    first = vs.optim.shampoo(lr, eps=1e-2, update_interval=2)
    return vs.optim.partition(lambda path, p: p.dim() > 1, {True: first, False: vs.optim.adam(1e-3)})


@pytest.mark.parametrize(
    ("axes", "axis", "rules"),
    [
        ({"dp": 4}, "dp", None),
        ({"replica": 2, "dp": 2}, ("replica", "dp"), None),
        ({"dp": 2, "tp": 2}, "dp", {r"blocks\..*\.w": P(tp=S(0))}),
    ],
)
def test_training_under_fsdp(axes, axis, rules):
    """Gradients are summed in another order, and small eigenvalues enlarge what that rounds: 1e-4."""
    rows = {"batch": P(**{name: S(0) for name in axes if name != "tp"})}
    mesh = vs.make_mesh(axes, backend="simulated")
    plan = vs.Plan(mesh, rules, rows, fsdp=vs.FSDP(axis, toy.WRAP))
    opt, params = labelled(), toy.make_params(torch.float32)

    def train_step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(toy.loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, loss

    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"), strict=True)
    placed = vs.distribute(params, plan)
    state, plain, plain_state = opt.init(placed), params, opt.init(params)
    for number in range(3):
        batch = toy.make_batch(torch.float32, number)
        plain, plain_state, expected = train_step(plain, plain_state, batch)
        placed, state, loss = step(placed, state, batch)
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-4, atol=1e-4)
    toy.close(placed, plain, 1e-4)
    assert step.cache_info().misses == 1
    lowered = step.lower(placed, state, batch)
    ways = [way for way, *_ in started(lowered)]
    assert ways[0] == "to"
    assert ways.count("from") >= 1
    if "replica" in axes:  # each replica does the same, and tells no other
        assert {axis for _, axis, _ in started(lowered)} == {"all_to_all over dp"}


def test_lanes():
    """With state made over the same lanes: the bits of a mesh with as many ranks."""
    params, gradients = some(*SHAPES)
    opt = vs.optim.shampoo(LR, update_interval=2)
    for ranks in (1, 2, 4):
        plan = vs.Plan(vs.make_mesh({"dp": ranks}, backend="simulated"), fsdp=vs.FSDP("dp"))
        step = vs.parallelize(step_of(opt), plan, lanes={"dp": 4})
        init = vs.parallelize(lambda params: opt.init(params), plan, lanes={"dp": 4})
        placed = vs.distribute(params, step.plan)
        state = init(placed)
        for grads in gradients:
            placed, state = step(placed, state, grads)
        assert step.cache_info().misses == 1
        same((placed, state), plainly(params, gradients, opt))
    plan = vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"), fsdp=vs.FSDP("dp"))
    step = vs.parallelize(step_of(opt), plan, lanes={"dp": 4})
    placed = vs.distribute(params, step.plan)
    state = opt.init(placed)  # with owners among two ranks
    with pytest.raises(vs.VescaleError, match="lanes over 'dp'"):
        step(placed, state, gradients[0])


def test_fewer_steps_than_sgd_and_adam():
    """The GPT of the examples, small, on one batch: after 8 steps below the others at the best of rates."""

    def train(opt):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = gpt.GPT(1, 16, gpt.CONTEXT)
        params, step = gpt.parameters(model), gpt.train_step(model, opt)
        state = opt.init(params)
        for _ in range(8):
            params, state, loss = step(params, state, gpt.batch())
        return loss.item()

    sides = {True: vs.optim.shampoo(0.1, update_interval=2), False: vs.optim.adam(0.03)}
    found = train(vs.optim.partition(lambda path, p: p.dim() > 1, sides))
    assert found < 0.8 * min(train(vs.optim.sgd(lr, 0.9)) for lr in (0.1, 0.3, 1.0, 2.0))
    assert found < 0.8 * min(train(vs.optim.adam(lr)) for lr in (0.01, 0.03, 0.1, 0.3))


def test_a_step_that_is_not_taken():
    """An inf that one rank holds stops no rank, and leaves parameters and state bit-unchanged."""
    axes, specs = CUTS["ragged elements"][0], named(CUTS["ragged elements"][1])
    params, gradients = some(*SHAPES, steps=3)
    opt = vs.optim.skip_if_nonfinite(vs.optim.shampoo(LR, update_interval=1))
    bad = {**gradients[1], "w0": gradients[1]["w0"].clone().index_fill_(0, torch.tensor(7), torch.inf)}
    found, state, _ = run(axes, specs, params, [gradients[0], bad, gradients[2]], opt)
    same((found, state), plainly(params, [gradients[0], bad, gradients[2]], opt))
    equal(found, plainly(params, [gradients[0], gradients[2]], opt)[0])
    ours, state, _ = run(axes, specs, params, [bad], vs.optim.shampoo(LR))
    assert state["owned"]["w0"]["left_root"].full_tensor().isnan().all()
    assert ours["w1"].isfinite().all()


def test_operations_are_counted():
    """Of what is done in each step: statistics, and two products with roots."""
    params = draw((8, 6))
    _, _, lowered = run({"dp": 2}, {"w0": P(dp=R.on_rank(0, 2))}, params, [params], vs.optim.shampoo(LR))
    assert lowered.cost_analysis(rank=1).flops == 0
    assert lowered.cost_analysis(rank=0).flops == 4 * (8 * 8 * 6 + 8 * 6 * 6)


# What is refused.


@pytest.mark.parametrize(
    ("shape", "matrix_dims", "says"),
    [
        ((3,), None, r"w0 of shape \(3,\)(.|\n)*vs\.optim\.shampoo(.|\n)*vs\.optim\.partition"),
        ((4, 3, 2, 2), None, r"matrix_dims=\{'w0': 'o i y x -> o \(i y x\)'\}"),
        ((4, 3), {"w": "r c -> r c"}, "near: w0"),
    ],
)
def test_what_is_no_matrix_is_an_error_with_a_remedy(shape, matrix_dims, says):
    with pytest.raises(vs.VescaleError, match=says):
        vs.optim.shampoo(LR, matrix_dims=matrix_dims).init({"w0": torch.zeros(shape)})


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.1)},
        {"weight_decay": -0.1},
        {"eps": -1.0},
        {"update_interval": 0},
        {"grafting": "adagrad"},
        {"grafting_eps": -1.0},
        {"root": 0},
        {"root_dtype": torch.bfloat16},
        {"max_dim": 0.5},
    ],
    ids=str,
)
def test_hyperparameters_out_of_range(hyper):
    with pytest.raises(vs.VescaleError, match=next(iter(hyper))):
        vs.optim.shampoo(**{"lr": LR, **hyper})


@pytest.mark.parametrize("hyper", [{"max_dim": 5}, {"max_dim": 8}, {"max_dim": 7, "grafting": None}], ids=str)
def test_the_state_of_another_optimizer(hyper):
    params = draw((8, 6))
    state = vs.optim.shampoo(LR, max_dim=7).init(params)
    with pytest.raises(vs.VescaleError, match=r"w0 has \{'left': \(1, 0, 0\)(.|\n)*the same max_dim"):
        vs.optim.shampoo(LR, **hyper).update(params, state, params)


def test_no_parameters():
    opt = vs.optim.shampoo(LR)
    updates, _ = opt.update({}, opt.init({}), {})
    assert vs.optim.apply_updates({}, updates) == {}
