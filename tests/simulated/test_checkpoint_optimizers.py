"""States of optimizers, 8-bit ones too, go on from a checkpoint on other meshes, in other layouts and blocks.

Gradients are given, so steps are those of plain torch on one device, which did not stop: to the bit.
"""

import pytest
import torch

import vescale as vs
from tests.checkpoint_cases import odd_tensors, same, size_of, values
from tests.optimizers import OPTIMIZERS, plan_on
from vescale import _tree, optim
from vescale._errors import CheckpointError
from vescale.spmd import redistribute
from vescale.spmd.program import binding

P, S, R = vs.P, vs.Shard, vs.RaggedShard
SHAPES = {"frozen": (6,), "mat": (24, 12), "more": (7, 6), "vec": (6,), "none": (0, 3), "scalar": ()}


def make(seed):
    draw = lambda number, shape: torch.randn(  # noqa: E731
        shape, generator=torch.Generator().manual_seed(seed + number)
    )
    return {name: draw(number, shape) for number, (name, shape) in enumerate(SHAPES.items())}


def step_of(opt):
    def step(params, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    return step


def plainly(opt, steps):
    """Parameters and state of one device after so many steps."""
    params = make(0)
    state = opt.init(params)
    for number in range(1, steps + 1):
        params, state = step_of(opt)(params, state, make(100 * number))
    return {"params": params, "state": state}


def saved_after_two_steps(opt, plan, path):
    step, params = vs.parallelize(step_of(opt), plan), vs.distribute(make(0), plan)
    state = opt.init(params)
    for number in (1, 2):
        params, state = step(params, state, vs.distribute(make(100 * number), plan))
    return vs.checkpoint.save({"params": params, "state": state}, path)


def loaded_on(opt, plan, path):
    params = vs.checkpoint.abstract(_tree.tree_map(lambda p: p.to("meta"), make(0)), plan)
    return vs.checkpoint.load({"params": params, "state": opt.init(params)}, path)


def next_step(opt, plan, tree):
    grads = vs.distribute(make(300), plan)
    params, state = vs.parallelize(step_of(opt), plan)(tree["params"], tree["state"], grads)
    return {"params": params, "state": state}


# Codes of tiles of 2 x 3 that no layout cuts, rounded at random; one parameter frozen, others float32.


def eight_bit(*frozen):
    def label(path, p):
        return "frozen" if path in ("frozen", *frozen) else "8 bit" if p.dim() > 1 else "rest"

    codes = optim.adamw_8bit(0.1, block=(2, 3), min_elements=1, stochastic_rounding=vs.rng.key(4))
    return optim.partition(label, {"frozen": None, "8 bit": codes, "rest": optim.adamw(0.1)})


def tiles(axes, rows, columns, rules=None):
    blocks = {"mat|more": vs.Tile(rows, columns)}
    return lambda: vs.Plan(vs.make_mesh(axes), rules, fsdp=vs.FSDP("dp", block=blocks, max_padding=9))


def ragged(axes, mat, more, vec):
    rules = {"mat": P(dp=R((0,), mat)), "more": P(dp=R((0,), more)), "frozen|vec": P(dp=R((0,), vec))}
    return lambda: vs.Plan(vs.make_mesh(axes), rules)


PLANS = {
    "4": tiles({"dp": 4}, 2, 3),
    "4, other blocks": tiles({"dp": 4}, 12, 3),
    "1": tiles({"dp": 1}, 2, 3),
    "2, other blocks": tiles({"dp": 2}, 8, 3),
    "3, ragged": ragged({"dp": 3}, (1, 0, 2), (0, 1, 0), (4, 0, 2)),
    "2x2": tiles({"dp": 2, "tp": 2}, 2, 3, {"mat": P(tp=S(1))}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved_after_two_steps(eight_bit(), PLANS["4"](), tmp_path_factory.mktemp("8 bit") / "saved")


@pytest.mark.parametrize("case", PLANS)
def test_8_bit_state_goes_on_anywhere(path, case):
    opt, plan = eight_bit(), PLANS[case]()
    loaded = loaded_on(opt, plan, path)
    codes, before = loaded["state"]["8 bit"]["exp_avg"]["mat"], vs.distribute(make(0), PLANS["4"]())["mat"]
    assert codes.dtype is torch.uint8
    assert (codes.layout is before.layout) == (case == "4")
    assert same(loaded, plainly(opt, 2))
    following = next_step(opt, plan, loaded)
    assert same(following, plainly(opt, 3))
    assert torch.equal(following["params"]["frozen"].full_tensor(), make(0)["frozen"])
    assert not torch.equal(following["params"]["mat"].full_tensor(), make(0)["mat"])


def test_a_parameter_is_frozen_or_thawed_between_runs(path):
    """Frozen, it stays and its state is not loaded; thawed, it is said that it has none."""
    plan, opt = PLANS["2, other blocks"](), eight_bit("vec", "more")
    before, expected = plainly(eight_bit(), 2)["params"], plainly(eight_bit(), 3)["params"]
    found = values(next_step(opt, plan, loaded_on(opt, plan, path))["params"])
    for name in SHAPES:
        assert torch.equal(found[name], (before if name in ("vec", "more") else expected)[name])
    thawed = optim.partition(lambda path, p: "rest", {"rest": optim.adamw(0.1)})
    with pytest.raises(CheckpointError, match=r"no 'state\.rest\.exp_avg\.frozen'"):
        loaded_on(thawed, plan, path)


@pytest.mark.parametrize("name", ["adam", "muon", "shampoo"])
def test_every_state_goes_on_on_another_mesh(name, tmp_path):
    opt = OPTIMIZERS[name].make(0.1)
    path = saved_after_two_steps(opt, plan_on({"dp": 4}), tmp_path / "saved")
    plan = plan_on({"dp": 2, "tp": 2}, {"mat": P(tp=S(1))})
    loaded = loaded_on(opt, plan, path)
    assert same(loaded, plainly(opt, 2))
    assert same(next_step(opt, plan, loaded), plainly(opt, 3))


def test_a_file_of_8_bit_state_is_hardly_larger_than_it(tmp_path):
    plan = vs.Plan(vs.make_mesh({"dp": 4}), fsdp=vs.FSDP("dp", block={".*": vs.Tile(32, 32)}, max_padding=9))
    params = vs.distribute({f"w{number}": torch.randn(256, 512) for number in range(6)}, plan)
    tree = {"params": params, "state": optim.adamw_8bit(0.1).init(params)}
    payload = sum(leaf.nbytes for leaf in _tree.leaves(tree))
    assert payload <= size_of(vs.checkpoint.save(tree, tmp_path / "saved")) <= 1.02 * payload


def test_no_element_is_sent_to_save(tmp_path, monkeypatch):
    """Ragged pieces, columns and replicas are written by who has them: by us, and by torch."""
    tensors = odd_tensors(vs.make_mesh({"dp": 4}))

    def sends(*_, **__):
        raise AssertionError("a collective in a save")

    for module, name in ((binding, "bind"), (redistribute, "bind"), (redistribute, "bind_many")):
        monkeypatch.setattr(module, name, sends)
    with pytest.raises(AssertionError, match="a collective"):  # it would be seen
        tensors["six"].full_tensor()
    path = vs.checkpoint.save(tensors, tmp_path / "ours")
    for name, tensor in tensors.items():
        items = tensor.__create_write_items__(name, tensor)
        assert all(tensor.__get_tensor_shard__(item.index) is not None for item in items)
    monkeypatch.undo()
    assert same(tensors, vs.checkpoint.load(odd_tensors(vs.make_mesh({"dp": 4}), fill=-1), path))
