"""safetensors files on simulated ranks, against the package of that name and the models of transformers."""

import json
import os

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import vescale as vs
from tests import gpt, models
from tests.layouts import layouts, meshes, shapes
from vescale._errors import ArgumentError, CheckpointError, PlanError
from vescale.checkpoint import safetensors_files, safetensors_load

DTYPES = [*safetensors_files.NAMES]


@pytest.fixture
def bytes_read(monkeypatch):
    """Counts the bytes of tensors that are read, by file."""
    counted = []
    read = safetensors_files.read_into

    def counting(file, start, into):
        counted.append(into.nbytes)
        return read(file, start, into)

    monkeypatch.setattr(safetensors_files, "read_into", counting)
    return counted


def simulated(mesh):
    return vs.make_mesh(dict(zip(mesh.axis_names, mesh.shape)), backend="simulated")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_rank_reads_its_own_bytes_and_no_others(tmp_path, bytes_read, data):
    shape, dtype = data.draw(shapes()), data.draw(st.sampled_from(DTYPES))
    layout = data.draw(layouts(data.draw(meshes()), shape, partial=False))
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize) % (2 if dtype == torch.bool else 251)
    value = raw.to(torch.uint8).view(dtype).view(shape)
    safetensors.torch.save_file({"before": torch.ones(3), "x": value}, tmp_path / "one.safetensors")
    plan = vs.Plan(simulated(layout.mesh), {"x": layout.spec})
    bytes_read.clear()
    keep = lambda name: name if name == "x" else None  # noqa: E731
    loaded = vs.checkpoint.load_safetensors(tmp_path / "one.safetensors", plan, rename=keep)
    assert sum(bytes_read) == sum(layout.num_bytes(rank, dtype) for rank in range(layout.mesh.size))
    assert list(loaded) == ["x"]
    assert loaded["x"].layout is layout
    for piece, expected in zip(
        loaded["x"].locals, vs.distribute_tensor(value, plan.mesh, layout.spec).locals
    ):
        assert torch.equal(as_bytes(piece), as_bytes(expected))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_written_is_what_the_package_reads(tmp_path, data):
    mesh = data.draw(meshes())
    tree = {}
    for number in range(data.draw(st.integers(1, 4))):
        shape, dtype = data.draw(shapes()), data.draw(st.sampled_from([torch.float32, torch.int8]))
        layout = data.draw(layouts(mesh, shape, partial=False))
        value = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        tree[f"x{number}"] = vs.distribute_tensor(value, simulated(mesh), layout.spec)
    limit = data.draw(st.sampled_from([1, 100, 10**6]))
    vs.checkpoint.save_safetensors(tree, tmp_path, max_shard_bytes=limit)
    found = {}
    for file in safetensors_files.find_files(tmp_path):
        found |= safetensors.torch.load_file(file)
    assert found.keys() == tree.keys()
    assert all(torch.equal(found[name], tensor.full_tensor()) for name, tensor in tree.items())


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["one file", "several"])
def test_a_model_of_transformers_there_and_back(tmp_path, limit, bytes_read):
    """Saved by transformers, loaded into FSDP buffers, saved by us, loaded by transformers: the same bits."""
    model = models.llama("eager", torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    assert (tmp_path / "theirs" / safetensors_files.INDEX).exists() == (limit < 10**6)
    mesh = vs.make_mesh({"dp": 4}, backend="simulated")
    plan = vs.Plan(mesh, fsdp=vs.FSDP("dp", r"model\.layers\.\d+"))
    params = vs.checkpoint.load_safetensors(tmp_path / "theirs", plan)
    expected = {name: p for name, p in model.state_dict().items() if name in params}
    assert all(torch.equal(params[name].full_tensor(), value) for name, value in expected.items())
    assert sum(bytes_read) == sum(piece.nbytes for p in params.values() for piece in p.locals)
    for bucket in plan.resolve(params).buckets:  # the pieces of a bucket lie in one buffer
        pieces = [params[name].locals[1] for name in bucket.names]
        assert len({piece.untyped_storage().data_ptr() for piece in pieces if piece.numel()}) == 1
    vs.checkpoint.save_safetensors(params, tmp_path / "ours", max_shard_bytes=limit)
    model.config.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_dtype_is_kept_unless_a_cast_is_asked_for(tmp_path):
    values = {"w": torch.randn(8, 4), "ids": torch.arange(8)}
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    plan = vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"), {"w": vs.P(dp=vs.Shard(1))})
    kept = vs.checkpoint.load_safetensors(tmp_path, plan)
    assert (kept["w"].dtype, kept["ids"].dtype) == (torch.float32, torch.int64)
    cast = vs.checkpoint.load_safetensors(tmp_path, plan, dtype=torch.bfloat16)
    assert cast["ids"].dtype is torch.int64
    assert torch.equal(cast["w"].full_tensor(), values["w"].bfloat16())
    with pytest.raises(ArgumentError, match="floating-point"):
        vs.checkpoint.load_safetensors(tmp_path, plan, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="floating-point"):
        vs.checkpoint.load_safetensors(tmp_path, plan, dtype="bfloat16")
    with pytest.raises(ArgumentError, match="paths=None"):
        vs.checkpoint.load_safetensors(None, plan)


def test_rename(tmp_path):
    values = gpt.parameters(gpt.make_model())
    rules = {r"blocks\.(.*)": r"layers.\1"}
    vs.checkpoint.save_safetensors(values, tmp_path, rename=rules)
    names = safetensors.safe_open(tmp_path / "model.safetensors", "pt").keys()
    assert len([name for name in names if name.startswith("layers.0.")]) > 4
    plan = vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"))
    back = {r"layers\.(.*)": r"blocks.\1"}
    loaded = vs.checkpoint.load_safetensors(tmp_path, plan, rename=back)
    assert loaded.keys() == values.keys()
    for rename, says in (
        ({r"layer\.(.*)": "x"}, r"match no name.*\n.*\n.*\n.*near: "),
        ({r"layers.*": "x"}, "both renamed to 'x'"),
        (lambda name: "x", "both renamed to 'x'"),
        (lambda name: 3, "renamed to 3"),
        ({r"layers.(.*)": r"\2"}, "invalid group"),
        ({r"layers.(": "x"}, "unterminated"),
        (["layers"], "list"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){says}"):
            vs.checkpoint.load_safetensors(tmp_path, plan, rename=rename)
    with pytest.raises(PlanError, match="match no parameter"):
        vs.checkpoint.load_safetensors(tmp_path, vs.Plan(plan.mesh, {"blocks.*": vs.P()}))


def test_files_that_are_none(tmp_path):
    plan = vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        vs.checkpoint.load_safetensors(tmp_path, plan)
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="no file"):
        vs.checkpoint.load_safetensors(file, plan)
    safetensors.torch.save_file({"a": torch.ones(4), "b": torch.ones(100)}, file)
    data = file.read_bytes()
    lies = data.replace(b'"shape":[4]', b'"shape":[5]')
    for bad, says in (
        (data[:-1], "'b' ends at byte"),
        (data[:40], "a header that is none"),
        (data[:5], "a header that is none"),
        (b"", "a header that is none"),
        (lies, "'a' of 16 bytes, not 20"),
        (data.replace(b"F32", b"F33"), "F33"),
        (data.replace(b'"shape":[4]', b'"shape":[-4]', 1), "a header that is none"),
        (data.replace(b'"data_offsets":[0,16]', b'"data_offsets":[-1,15]', 1), "a header that is none"),
    ):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{says}"):
            vs.checkpoint.load_safetensors(file, plan)
    file.write_bytes(data)
    os.link(file, tmp_path / "twice.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' in model\.safetensors and in twice\.safetensors"):
        vs.checkpoint.load_safetensors(tmp_path, plan)
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"no file.*gone"):
        vs.checkpoint.load_safetensors(tmp_path, plan)
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps({"weight_map": {"c": file.name}}))
    with pytest.raises(CheckpointError, match=r"no tensor 'c'"):
        vs.checkpoint.load_safetensors(tmp_path, plan)
    (tmp_path / safetensors_files.INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        vs.checkpoint.load_safetensors(tmp_path, plan)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"b": torch.ones(100)}, file)
    find = safetensors_load._entries
    monkeypatch.setattr(safetensors_load, "_entries", lambda *args: (find(*args), os.truncate(file, 200))[0])
    with pytest.raises(CheckpointError, match=r"(?s)tensor 'b'.*ends too early"):
        vs.checkpoint.load_safetensors(file, vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated")))


def test_leaves_that_a_file_cannot_hold(tmp_path):
    for leaf in (3, torch.Generator(), torch.ones(2, dtype=torch.complex128), torch.empty(2, device="meta")):
        with pytest.raises(ArgumentError, match="where: leaf"):
            vs.checkpoint.save_safetensors({"leaf": leaf}, tmp_path / "no")
    with pytest.raises(ArgumentError, match="__metadata__"):
        vs.checkpoint.save_safetensors({"__metadata__": torch.ones(2)}, tmp_path / "no")
    with pytest.raises(ArgumentError, match="path=None"):
        vs.checkpoint.save_safetensors({}, None)
    with pytest.raises(ArgumentError, match="max_shard_bytes"):
        vs.checkpoint.save_safetensors({}, tmp_path / "no", max_shard_bytes=0)
    assert not (tmp_path / "no").exists()
    (tmp_path / "file").write_text("of somebody")
    with pytest.raises(CheckpointError, match="file"):
        vs.checkpoint.save_safetensors({}, tmp_path / "file")
