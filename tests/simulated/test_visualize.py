"""`vs.visualize`: the text a terminal shows, and pictures."""

import builtins
import re

import pytest
import torch

import vescale as vs
from vescale import P, Partial, RaggedShard, Shard
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.visualize import slices, text

MESH = AbstractMesh(("dp", "tp"), (2, 2))


def test_a_grid_of_ranks(capsys):
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    vs.visualize(vs.distribute_tensor(torch.zeros(5, 8), mesh, P(dp=Shard(0), tp=Shard(1))))
    assert capsys.readouterr().out == (
        "P(dp=Shard(0), tp=Shard(1)) on dp=2xtp=2, shape (5, 8)\n"
        "      0:4   4:8\n"
        "    +-----+-----+\n"
        "0:3 |  0  |  1  |\n"
        "    +-----+-----+\n"
        "3:5 |  2  |  3  |\n"
        "    +-----+-----+\n"
    )


def test_replicas_and_contributors_share_a_cell():
    assert "|  0,1  |  2,3  |" in re.sub(" +", "  ", text(Layout(MESH, P(dp=Shard(0)), (4,))))
    assert "| 0-3 |" in text(Layout(MESH, P(dp=Partial()), (4,)))


def test_a_ragged_tensor_lists_flat_intervals():
    lines = text(Layout(MESH, P(tp=Shard(0), dp=RaggedShard((0, 1), (5, 7))), (4, 6))).splitlines()
    assert lines[-4:] == ["rank 0  0:5", "rank 1  12:17", "rank 2  5:12", "rank 3  17:24"]
    nothing = text(Layout(MESH, P(dp=RaggedShard.on_rank(1, 2)), (4, 6)))
    assert "rank 0  nothing" in nothing


def test_more_dims_are_sliced():
    shown = text(Layout(MESH, P(tp=Shard(2), dp=RaggedShard((0,), (1, 2))), (3, 2, 4)))
    assert shown.count(", :, :]") == 2
    assert "[0:1, :, :]" in shown
    assert "[1:3, :, :]" in shown


@pytest.mark.parametrize(("shape", "says"), [((), "| 0-3 |"), ((0, 4), "no elements")])
def test_tensors_with_little_to_show(shape, says):
    assert says in text(Layout(MESH, P(), shape))


def test_large_meshes_are_cut_short():
    layout = Layout(AbstractMesh(("dp",), (128,)), P(dp=Shard(0)), (256, 4))
    assert "96 more rows" in text(layout)
    assert len(text(layout).splitlines()) < 80


@pytest.mark.parametrize(
    "spec", [P(dp=Shard(0), tp=Shard(1)), P(tp=Shard(0), dp=RaggedShard((0, 1), (5, 7)))]
)
def test_each_cell_is_held_by_its_ranks(spec):
    layout = Layout(MESH, spec, (4, 6))
    (part,), _ = slices(layout)
    for (top, bottom), line in zip(part.rows, part.ranks):
        for (left, right), ranks in zip(part.columns, line):
            for row in range(top, bottom):
                assert {layout.owner((row, column)) for column in range(left, right)} == {ranks}


@pytest.mark.parametrize("name", ["layout.png", "layout.svg"])
def test_pictures(tmp_path, name, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    vs.visualize(Layout(MESH, P(tp=Shard(2), dp=RaggedShard((0, 1, 2), (5, 7))), (2, 3, 4)), path)
    start = path.read_bytes()[:300]
    assert start.startswith(b"\x89PNG") or b"<svg" in start or b"<?xml" in start
    assert not capsys.readouterr().out


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(vs.VescaleError, match=r"vescale\[demo\]"):
        vs.visualize(Layout(MESH, P(), (4,)), tmp_path / "a.png")
