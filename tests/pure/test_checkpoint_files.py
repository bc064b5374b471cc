"""The files of a checkpoint, without ranks: every byte is checked, and each element written once."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.layouts import layouts, meshes, shapes
from vescale._errors import CheckpointError
from vescale.checkpoint import files
from vescale.checkpoint.contents import holds_chosen
from vescale.spmd.layout import AbstractMesh, replicated

BLOCK = 64
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128, torch.bool]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK", BLOCK)


def written(path, tensors):
    with open(path, "wb") as file:
        data = files.DataWriter(file)
        places = [data.write(tensor) for tensor in tensors]
        data.finish()
    return places, lambda: files.DataFile(path, data.bytes, BLOCK, data.checksums)


def read(file, at, like):
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    file.read(at, files.as_bytes(found))
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_written_is_read(tmp_path, data):
    tensors = []
    for _ in range(data.draw(st.integers(0, 5))):
        shape, dtype = data.draw(shapes()), data.draw(st.sampled_from(DTYPES))
        tensor = torch.randn(shape).mul(9).to(dtype)
        views = [tensor, tensor.conj(), tensor.movedim(0, -1) if shape else tensor]
        tensors.append(data.draw(st.sampled_from(views)))
    places, reopen = written(tmp_path / "data", tensors)
    file = reopen()
    assert file.size == (tmp_path / "data").stat().st_size
    order = data.draw(st.permutations(range(len(tensors))))
    for number in order:
        found = read(file, places[number], tensors[number])
        assert torch.equal(files.as_bytes(found), files.as_bytes(tensors[number]))


def test_every_byte_is_checked_and_no_block_is_read_twice(tmp_path, monkeypatch):
    path = tmp_path / "data"
    tensors = [torch.arange(n, dtype=torch.uint8) for n in (10, 3, 200, 0, 70, 5)]
    places, reopen = written(path, tensors)
    counted, read_into = [], files.read_into
    monkeypatch.setattr(files, "read_into", lambda f, at, into: (counted.append(at), read_into(f, at, into)))
    file = reopen()
    for place, tensor in zip(places, tensors):
        assert torch.equal(read(file, place, tensor), tensor)
    assert counted == list(range(0, file.size, BLOCK))
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        file, faults = reopen(), 0
        for place, tensor in zip(places, tensors):
            try:
                read(file, place, tensor)
            except CheckpointError as error:
                assert f"from byte {at // BLOCK * BLOCK}" in str(error)  # noqa: PT017
                faults += 1
        assert faults


def test_lines_are_those_that_were_written(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [{"a": [1, 2.5, "x\n"]}, [], "text", math.inf]
    checksum = files.write_lines(path, lines)
    assert files.read_lines(path) == files.read_lines(path, checksum) == lines
    good = path.read_bytes()
    for at in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with pytest.raises(CheckpointError, match=r"lines\.jsonl"):
                files.read_lines(path)
        path.write_bytes(good[:at])
        with pytest.raises(CheckpointError, match=r"lines\.jsonl"):
            files.read_lines(path)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_element_is_written_by_one_rank(data):
    mesh = data.draw(meshes(axes=(1, 3)))
    layout = data.draw(layouts(mesh, data.draw(shapes()), partial=False))
    seen, path = [0] * math.prod(layout.shape), data.draw(st.sampled_from(["w", "blocks.0.bias", ""]))
    for rank in range(mesh.size):
        if holds_chosen(path, layout, rank):
            for start, stop in layout.regions(rank):
                for flat in range(start, stop):
                    seen[flat] += 1
    assert set(seen) <= {1}


def test_replicas_are_spread_over_the_ranks():
    """By name: no rank writes all that is replicated."""
    layout = replicated(AbstractMesh(("dp", "tp"), (2, 4)), (8,))
    chosen = [
        [rank for rank in range(8) if holds_chosen(f"blocks.{n}.bias", layout, rank)] for n in range(400)
    ]
    counts = Counter(rank for ranks in chosen for rank in ranks)
    assert sum(counts.values()) == 400
    assert len(counts) == 8
    assert max(counts.values()) < 100
