"""Checkpoints on simulated ranks: every leaf and layout, other meshes, damage, steps and what is kept."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st

import vescale as vs
from tests import gpt, toy
from tests.checkpoint_cases import (
    OPTIMIZER,
    abstract_tree,
    cases,
    make_plan,
    make_step,
    make_tree,
    odd_tensors,
    same,
    size_of,
    values,
)
from tests.layouts import layouts, meshes, shapes
from vescale import _tree
from vescale._errors import ArgumentError, CheckpointError
from vescale.checkpoint import directories
from vescale.fsdp.memory import packed

CASES = cases()


def setup(case):
    axes, rules, fsdp = CASES[case]
    mesh = vs.make_mesh(axes, backend="simulated")
    return mesh, make_plan(mesh, rules, fsdp)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint from dp=4, ragged; what was saved; and what the next step makes of it."""
    path = tmp_path_factory.mktemp("saved") / "first"
    mesh, plan = setup("4 ragged")
    tree, step = make_tree(mesh, plan)
    assert vs.checkpoint.save(tree, path) == path
    expected = values(tree)
    following = step(tree["params"], tree["state"], toy.make_batch(torch.float32, 9))
    return path, expected, values(following)


@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_is_loaded_on_any_mesh(saved, case):
    path, expected, _ = saved
    mesh, plan = setup(case)
    target = abstract_tree(mesh, plan)
    loaded = vs.checkpoint.load(target, path)
    assert same(expected, values(loaded))
    for given_leaf, leaf in zip(_tree.leaves(target), _tree.leaves(loaded), strict=True):
        if isinstance(given_leaf, vs.DTensor):
            assert leaf.layout is given_leaf.layout
            replicas = [vs.distribute_tensor(leaf.full_tensor(), mesh, leaf.layout.spec).locals]
            assert all(torch.equal(a, b) for a, b in zip(leaf.locals, *replicas, strict=True))
    assert target["step"] == 0  # as it was
    assert target["params"]["head"]["w"].locals[0].is_meta
    assert not torch.equal(target["generator"].get_state(), loaded["generator"].get_state())


def next_step(loaded, plan):
    torch.set_rng_state(loaded["rng"]["torch"])
    batch = toy.make_batch(torch.float32, 9)
    return values(make_step(plan)(loaded["params"], loaded["state"], batch))


@pytest.mark.parametrize("case", ["4 ragged", "4, fsdp"])
def test_the_next_step_is_that_of_not_having_stopped(saved, tmp_path, case):
    """With dropout, whose numbers are torch's: its generator is in the checkpoint."""
    mesh, plan = setup(case)
    tree, step = make_tree(mesh, plan)
    path = vs.checkpoint.save(tree, tmp_path / "here")
    expected = values(step(tree["params"], tree["state"], toy.make_batch(torch.float32, 9)))
    torch.rand(5)  # the generator goes elsewhere
    assert same(expected, next_step(vs.checkpoint.load(abstract_tree(mesh, plan), path), plan))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_layout_to_any_other(tmp_path, data):
    shape = data.draw(shapes())
    (before, after) = (data.draw(layouts(data.draw(meshes()), shape, partial=False)) for _ in range(2))
    kind = data.draw(
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
    )
    value = torch.arange(torch.Size(shape).numel()).view(shape).to(kind)
    on = lambda layout, x: vs.distribute_tensor(  # noqa: E731
        x,
        vs.make_mesh(dict(zip(layout.mesh.axis_names, layout.mesh.shape)), backend="simulated"),
        layout.spec,
    )
    path = vs.checkpoint.save({"x": on(before, value)}, tmp_path / "any")
    target = on(after, torch.zeros(shape, dtype=kind))
    loaded = vs.checkpoint.load({"x": target}, path)["x"]
    expected = on(after, value).locals
    assert all(torch.equal(a, b) for a, b in zip(loaded.locals, expected, strict=True))
    vs.checkpoint.load({"x": target}, path, in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(target.locals, expected, strict=True))


def test_in_place_fills_the_buffers_of_fsdp(saved):
    path, expected, _ = saved
    _, plan = setup("4, fsdp")
    params = vs.distribute(toy.make_params(torch.float32), plan)
    before = [piece.data_ptr() for leaf in _tree.leaves(params) for piece in leaf.locals]
    tree = {"params": params, "state": OPTIMIZER.init(params), "step": 0, "generator": torch.Generator()}
    loaded = vs.checkpoint.load(tree, path, in_place=True)
    assert loaded["params"]["head"]["w"] is params["head"]["w"]
    assert loaded["generator"] is tree["generator"]
    assert [piece.data_ptr() for leaf in _tree.leaves(params) for piece in leaf.locals] == before
    found = values(loaded)
    assert all(torch.equal(found[p], expected[p]) for p in found if p != "step")
    copies = packed.count
    make_step(plan)(loaded["params"], loaded["state"], toy.make_batch(torch.float32, 9))
    assert packed.count == copies


def test_a_part_of_what_was_saved(saved):
    path, expected, _ = saved
    mesh, _ = setup("3 ragged")
    head = {"params": {"head": {"w": vs.distribute_tensor(torch.zeros(6, 3), mesh, vs.P(dp=vs.Shard(0)))}}}
    loaded = vs.checkpoint.load(head, path)
    assert torch.equal(values(loaded)["params.head.w"], expected["params.head.w"])


def test_a_parameter_stays_one(tmp_path):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    weight = torch.nn.Parameter(vs.distribute_tensor(torch.ones(4), mesh, vs.P(dp=vs.Shard(0))))
    path = vs.checkpoint.save({"w": weight, "v": torch.ones(2, requires_grad=True)}, tmp_path / "p")
    loaded = vs.checkpoint.load({"w": weight, "v": torch.zeros(2, requires_grad=True)}, path)
    assert isinstance(loaded["w"], torch.nn.Parameter)
    assert loaded["w"].requires_grad
    assert loaded["v"].requires_grad
    assert loaded["v"].is_leaf


# On disk.


@pytest.mark.parametrize("fsdp", [None, vs.FSDP("dp", r"blocks\.\d+")], ids=["ragged", "fsdp"])
def test_files_are_hardly_larger_than_what_is_in_them(tmp_path, fsdp):
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    values = gpt.parameters(gpt.GPT(2, 128, 64))
    rules = {} if fsdp else gpt.ragged({}, vs.RaggedShard((0,), (2, 1, 0, 1)))
    params = vs.distribute(values, vs.Plan(mesh, rules, fsdp=fsdp))
    state = OPTIMIZER.init(params)
    path = vs.checkpoint.save({"params": params, "state": state}, tmp_path / "gpt")
    payload = sum(leaf.nbytes for leaf in _tree.leaves((params, state)))
    assert payload > 3 << 20
    assert payload <= size_of(path) <= 1.02 * payload


def test_replicas_are_written_once(tmp_path):
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    x = torch.randn(256, 256)
    tree = {
        "all": vs.distribute_tensor(x, mesh, vs.P()),
        "two": vs.distribute_tensor(x, mesh, vs.P(tp=vs.Shard(1))),
    }
    path = vs.checkpoint.save(tree, tmp_path / "replicas")
    assert size_of(path) < 2 * x.nbytes * 1.01


def targets(path):
    return sorted(file for file in path.iterdir())


@pytest.mark.parametrize("in_place", [False, True])
def test_damage_is_an_error_that_names_the_file(saved, tmp_path, in_place):
    """A byte flipped, bytes missing or too many, a file gone: in every file, at random places."""
    path, _, _ = saved
    mesh, plan = setup("2 ragged")
    tree = abstract_tree(mesh, plan)
    if in_place:
        params = vs.distribute(toy.make_params(torch.float32), plan)
        tree |= {"params": params, "state": OPTIMIZER.init(params), "scalar": torch.tensor(0.0).double()}
    before = values({"params": tree["params"]}) if in_place else {}
    generator = torch.Generator().manual_seed(0)
    for file in targets(path):
        data = file.read_bytes()
        places = torch.randint(len(data), (12,), generator=generator).tolist()
        flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
        for bad in [*flipped, data[: len(data) // 2], data[:-1], b"", data + b"\0", data[::-1], None]:
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            (copy / file.name).unlink() if bad is None else (copy / file.name).write_bytes(bad)
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                vs.checkpoint.load(tree, copy, in_place=in_place)
    assert same(before, values({"params": tree["params"]}) if in_place else {})


def test_a_damaged_piece_names_its_tensor(tmp_path):
    path = vs.checkpoint.save({"a": torch.zeros(1 << 17), "b": torch.zeros(1 << 17)}, tmp_path / "ab")
    data = bytearray((path / "00000.bin").read_bytes())
    data[-1] ^= 1
    (path / "00000.bin").write_bytes(data)
    assert vs.checkpoint.load({"a": torch.ones(1 << 17)}, path)["a"].sum() == 0  # nobody read b
    with pytest.raises(CheckpointError, match=r"(?s)tensor 'b'.*00000\.bin has other bytes"):
        vs.checkpoint.load({"a": torch.ones(1 << 17), "b": torch.ones(1 << 17)}, path)


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    first, second = (vs.checkpoint.save({name: torch.zeros(4)}, tmp_path / name) for name in "xy")
    shutil.copy(second / "00000.jsonl", first / "00000.jsonl")
    with pytest.raises(CheckpointError, match=r"00000\.jsonl.*another checkpoint"):
        vs.checkpoint.load({"x": torch.zeros(4)}, first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(4, 3)}, r"'x' is float32 of shape \(3, 4\), not float32 of shape \(4, 3\)"),
        ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "not float64"),
        ({"n": 1.0}, "'n' is int, not float"),
        ({"n": torch.zeros(())}, "'n' is int, not float32"),
        ({"g": torch.get_rng_state()}, "'g' is the state of a generator"),
        ({"weight": torch.zeros(3)}, r"no 'weight' \(near: weights\)"),
        ({"x": torch.zeros(1), "n": ""}, "(?s)'n' is .*; 'x' is "),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_loaded(tmp_path, change, says):
    tree = {"x": torch.ones(3, 4), "n": 3, "g": torch.Generator(), "weights": torch.ones(3)}
    path = vs.checkpoint.save(tree, tmp_path / "misfit")
    target = {"weights": torch.zeros(3), **change}
    with pytest.raises(CheckpointError, match=says):
        vs.checkpoint.load(target, path, in_place=True)
    assert not target["weights"].any()


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (lambda mesh: vs.distribute_tensor(torch.ones(2), mesh, vs.P(dp=vs.Partial())), "pending reductions"),
        (lambda mesh: object(), "object"),
        (lambda mesh: 1j, "complex 1j"),
        (lambda mesh: torch.eye(3).to_sparse(), "sparse"),
        (lambda mesh: torch.empty(3, device="meta"), "without values"),
    ],
)
def test_leaves_that_cannot_be_saved(tmp_path, leaf, says):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    with pytest.raises(ArgumentError, match=rf"(?s){says}.*where: tree\.leaf"):
        vs.checkpoint.save({"tree": {"leaf": leaf(mesh)}}, tmp_path / "no")
    assert not list(tmp_path.iterdir())


def test_trees_that_cannot_be_saved(tmp_path):
    with pytest.raises(ArgumentError, match=r"two leaves called 'a\.b'"):
        vs.checkpoint.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "no")
    pair = [vs.make_mesh({"dp": size}, backend="simulated") for size in (2, 3)]
    with pytest.raises(ArgumentError, match="one mesh"):
        vs.checkpoint.save([vs.distribute_tensor(torch.ones(6), mesh, vs.P()) for mesh in pair], tmp_path)
    for keep, step in ((0, 1), (2, None)):
        with pytest.raises(ArgumentError, match="keep"):
            vs.checkpoint.save({}, tmp_path, step=step, keep=keep)
    with pytest.raises(ArgumentError, match="whole number"):
        vs.checkpoint.save({}, tmp_path, step=-1)
    with pytest.raises(ArgumentError, match="two leaves"):
        vs.checkpoint.load({"a.b": 1, "a": {"b": 2}}, tmp_path)
    with pytest.raises(ArgumentError, match="in_place"):
        vs.checkpoint.load(
            {"x": torch.zeros(1, device="meta")},
            vs.checkpoint.save({"x": torch.ones(1)}, tmp_path / "x"),
            in_place=True,
        )
    target = {"a": torch.zeros(1), "z": torch.zeros(1).expand(3)}
    path = vs.checkpoint.save({"a": torch.ones(1), "z": torch.ones(3)}, tmp_path / "z")
    with pytest.raises(ArgumentError, match="expanded"):
        vs.checkpoint.load(target, path, in_place=True)
    assert not target["a"].any()


def test_a_path_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="latest"):
        vs.checkpoint.load({}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="save"):
        vs.checkpoint.save({}, tmp_path / "file" / "below")
    for path in (None, 5, "", "/", b"x"):
        with pytest.raises(ArgumentError, match="path="):
            vs.checkpoint.save({}, path)
        with pytest.raises(ArgumentError, match="path="):
            vs.checkpoint.load({}, path)


def test_a_save_replaces_checkpoints_and_nothing_else(tmp_path):
    """Such as a directory of steps, when step= was left out."""
    (tmp_path / "file").write_text("of somebody")
    vs.checkpoint.save({"n": 1}, tmp_path / "steps", step=1)
    for name in ("file", "steps"):
        with pytest.raises(CheckpointError, match="nothing else"):
            vs.checkpoint.save({"n": 2}, tmp_path / name)
    assert (tmp_path / "file").read_text() == "of somebody"
    assert vs.checkpoint.load({"n": 0}, vs.checkpoint.latest(tmp_path / "steps")) == {"n": 1}
    (tmp_path / "empty").mkdir()
    vs.checkpoint.save({"n": 3}, tmp_path / "empty")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "steps", "empty"}


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for n in (1, 2):
        assert vs.checkpoint.save({"n": n}, tmp_path / "link") == tmp_path / "there"
        assert vs.checkpoint.load({"n": 0}, tmp_path / "link") == {"n": n}
    assert {path.name for path in tmp_path.iterdir()} == {"link", "there"}


# Steps.


def test_steps_and_what_is_kept(tmp_path):
    assert vs.checkpoint.latest(tmp_path / "nothing") is None
    for step in (0, 5, 100, 20):
        vs.checkpoint.save({"step": step}, tmp_path, step=step)
    assert vs.checkpoint.latest(tmp_path) == tmp_path / "step_00000100"
    (tmp_path / ".step_00000200.partial").mkdir()  # as a killed save leaves it
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_00000300").mkdir()  # of somebody else
    assert vs.checkpoint.latest(tmp_path) == tmp_path / "step_00000100"
    vs.checkpoint.save({"step": 150}, tmp_path, step=150, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_00000100", "step_00000150", "notes", "step_00000300")
    }
    vs.checkpoint.save({"step": 120}, tmp_path, step=120, keep=1)  # of a run that went back
    assert vs.checkpoint.load({"step": 0}, tmp_path / "step_00000120") == {"step": 120}
    assert {path.name for path in directories.steps(tmp_path)} == {"step_00000120", "step_00000150"}


def test_a_path_that_exists_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "step_00000001"
    for n in (1, 2):
        vs.checkpoint.save({"n": n}, path)
    assert vs.checkpoint.load({"n": 0}, path) == {"n": 2}

    def killed(self, target):
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        vs.checkpoint.save({"n": 3}, path)
    monkeypatch.undo()
    assert not path.exists()
    assert vs.checkpoint.latest(tmp_path) == path
    assert vs.checkpoint.load({"n": 0}, path) == {"n": 2}
    vs.checkpoint.save({"n": 4}, path)
    assert vs.checkpoint.load({"n": 0}, path) == {"n": 4}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = vs.checkpoint.save({"x": torch.ones(3)}, tmp_path / "x")
    full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
    monkeypatch.setattr("vescale.checkpoint.files.DataWriter.write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        vs.checkpoint.save({"x": torch.zeros(3)}, path)
    assert vs.checkpoint.load({"x": torch.zeros(3)}, path)["x"].tolist() == [1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


# Async.


def test_an_async_save_has_the_values_of_the_call(tmp_path):
    mesh, plan = setup("4, fsdp")
    tree, step = make_tree(mesh, plan)
    expected = values(tree)
    first = vs.checkpoint.async_save(tree, tmp_path, step=2)
    step(tree["params"], tree["state"], toy.make_batch(torch.float32, 9))  # donated: overwritten in place
    tree["frozen"].locals[0].zero_()
    tree["generator"].manual_seed(0)
    second = vs.checkpoint.async_save({"n": 1}, tmp_path, step=3, keep=2)
    assert second.result().name == "step_00000003"
    assert first.done()
    loaded = vs.checkpoint.load(abstract_tree(mesh, plan), first.result())
    assert same(expected, values(loaded))


def test_errors_of_an_async_save(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="object"):
        vs.checkpoint.async_save({"x": object()}, tmp_path)
    full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
    monkeypatch.setattr("vescale.checkpoint.files.DataWriter.write", full)
    future = vs.checkpoint.async_save({"x": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="No space"):
        future.result()
    assert not list(tmp_path.iterdir())


# torch's own calls.


@pytest.mark.parametrize("asynchronous", [False, True])
def test_torch_saves_and_loads_as_it_is(tmp_path, asynchronous):
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    tensors = odd_tensors(mesh)
    expected = values(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        if asynchronous:
            future = dcp.async_save(tensors, checkpoint_id=tmp_path / "dcp")
            for tensor in tensors.values():
                for piece in tensor.locals:
                    piece.zero_()
            future.result()
        else:
            dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
        loaded = odd_tensors(mesh, fill=-1)
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert same(expected, values(loaded))
    assert all(piece.tolist() == 2.5 for piece in loaded["scalar"].locals)


def test_replicas_are_one_item_and_a_ragged_piece_its_boxes():
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    tensors = odd_tensors(mesh)
    count = lambda name: len(tensors[name].__create_write_items__(name, tensors[name]))  # noqa: E731
    assert [count(name) for name in ("six", "none", "scalar", "whole", "on one")] == [3, 1, 1, 1, 1]
    boxes = [box for rank in range(4) for box in tensors["ragged"].layout.boxes(rank)]
    assert count("ragged") == len(boxes)


def test_torch_reads_our_checkpoints_with_a_reader(tmp_path):
    """Into plain tensors, and numbers: a program that has torch's loader only."""
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    tensors = odd_tensors(mesh)
    path = vs.checkpoint.save({**tensors, "step": 4}, tmp_path / "ours")
    plain = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        state = {**plain, "step": 0}
        dcp.load(state, storage_reader=vs.checkpoint.Reader(path))
    assert state["step"] == 4
    assert all(torch.equal(plain[name], tensor.full_tensor()) for name, tensor in tensors.items())
