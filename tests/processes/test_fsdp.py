"""FSDP on real ranks: the bits of simulated ones at any schedule, and at two ranks those of torch's FSDP2."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vescale as vs
from tests import models, toy
from tests.gpt import TP, batch, make_model, parameters, train_step
from tests.processes.test_world import world_mesh
from vescale import _tree
from vescale.testing.pool import RankPool

pytestmark = pytest.mark.processes

STEPS = 3
# Of GPT one schedule, of the toy model, which is quick to compile, all of them.
CASES = {
    "2 ranks": ((("dp", 2),), "dp", {}),
    "4 ranks": ((("dp", 4),), "dp", {}),
    "hsdp": ((("replica", 2), ("dp", 2)), ("replica", "dp"), {}),
    "with tp": ((("dp", 2), ("tp", 2)), "dp", TP),
}
SCHEDULES = [(0, True), (1, True), (2, True), (1, False)]


def toy_step(opt):
    def step(params, opt_state, batch):
        loss, grads = vs.value_and_grad(toy.loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, loss

    return step


def train(mesh, case, schedule=None):
    """Every output of some steps, as the ranks here hold them: of GPT, or of the toy at a schedule."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matmul depend on it
    _, axis, rules = CASES[case]
    rows = vs.P(**{name: vs.Shard(0) for name in mesh.axis_names if name != "tp"})
    opt = vs.optim.adamw(1e-3)
    if schedule is None:
        model, fsdp = make_model(), vs.FSDP(axis, r"blocks\.\d+")
        values, fn, batches = parameters(model), train_step(model, opt), map(batch, range(STEPS))
    else:
        prefetch, reshard = schedule
        fsdp = vs.FSDP(axis, toy.WRAP, prefetch=prefetch, reshard_after_forward=reshard)
        rules = {r"blocks\.\d+\.w": vs.P(tp=vs.Shard(1))} if rules else {}
        values, fn = toy.make_params(torch.float32), toy_step(opt)
        batches = (toy.make_batch(torch.float32, seed) for seed in range(STEPS))
    plan = vs.Plan(mesh, rules, {"batch": rows}, fsdp=fsdp)
    step, params = vs.parallelize(fn, plan, donate=("params", "opt_state")), vs.distribute(values, plan)
    state, losses = opt.init(params), []
    for given in batches:
        params, state, loss = step(params, state, given)
        losses.append(loss)
    torch.set_num_threads(threads)
    leaves = _tree.leaves((params, state, losses))
    return [[leaf.to_local(rank) for leaf in leaves] for rank in mesh.local_ranks]


def train_here(case, schedules=(None,)):
    mesh = world_mesh(CASES[case][0])
    return [train(mesh, case, schedule)[0] for schedule in schedules] if mesh.local_ranks else None


@pytest.mark.parametrize("schedules", [[None], SCHEDULES], ids=["gpt", "toy"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_simulated_ranks_at_every_schedule(pool, case, schedules):
    mesh = vs.make_mesh(dict(CASES[case][0]), backend="simulated")
    expected = train(mesh, case, schedules[0])
    answers = pool.run(train_here, case, schedules)
    for rank in mesh.local_ranks:
        for there in answers[rank]:
            assert all(torch.equal(a, b) for a, b in zip(there, expected[rank], strict=True))


# Against torch's FSDP2.


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as ranks:
        yield ranks


def gpt_case():
    batches = [batch(seed) for seed in range(STEPS)]
    return make_model(), r"blocks\.\d+", lambda model: list(model.blocks), batches


def mixtral_case():
    # With gelu: under torch.func silu's gradient is torch's formula for higher derivatives, in other ops.
    model = models.mixtral("batched_mm", "eager", torch.float32, hidden_act="gelu")
    tokens = [models.tokens().roll(seed, 1) for seed in range(STEPS)]
    return model, r"model\.layers\.\d+", lambda model: list(model.model.layers), tokens


MODELS = {"gpt": gpt_case, "mixtral": mixtral_case}


def loss_of(model, batch, params=None):
    """A mean over a power of two of tokens, none ignored."""
    run = model if params is None else lambda *args: torch.func.functional_call(model, params, args)
    out = run(batch)
    if isinstance(out, torch.Tensor):
        return out
    targets = batch.roll(-1, 1)
    return torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())


def ours_and_theirs(name):
    """After some steps: [(our loss, theirs)], and of each parameter whether it has the bits of FSDP2's."""
    torch.set_num_threads(1)
    model, wrap, blocks, batches = MODELS[name]()
    mesh = vs.make_mesh({"dp": 2})
    plan = vs.Plan(mesh, inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=vs.FSDP("dp", wrap))
    opt = vs.optim.adamw(1e-3)

    def step(params, state, batch):
        loss, grads = vs.value_and_grad(lambda params, batch: loss_of(model, batch, params))(params, batch)
        updates, state = opt.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    run, params = (
        vs.parallelize(step, plan, donate=("params", "state")),
        vs.distribute(parameters(model), plan),
    )
    state = opt.init(params)

    theirs, *_ = MODELS[name]()
    sharded = init_device_mesh("cpu", (2,))
    for block in blocks(theirs):
        fully_shard(block, mesh=sharded)
    fully_shard(theirs, mesh=sharded)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=1e-2, foreach=True)
    losses = []
    for rows in batches:
        params, state, loss = run(params, state, rows)
        optimizer.zero_grad()
        local = loss_of(theirs, rows.chunk(2)[mesh.rank])
        local.backward()
        optimizer.step()
        mean = local.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append((loss.full_tensor().item(), (mean / 2).item()))
    equal = {
        name: torch.equal(params[name].full_tensor(), p.full_tensor())
        for name, p in theirs.named_parameters()
    }
    return losses, equal


@pytest.mark.parametrize("name", MODELS)
def test_at_two_ranks_the_bits_are_those_of_fsdp2(two, name):
    for losses, equal in two.run(ours_and_theirs, name):
        assert all(ours == theirs for ours, theirs in losses), losses
        assert all(equal.values()), [name for name, same in equal.items() if not same]
