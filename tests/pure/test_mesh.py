"""Meshes without processes: shapes, ranks, and what is refused."""

import pytest

from vescale._errors import ArgumentError, LayoutError
from vescale.spmd.layout import AbstractMesh
from vescale.spmd.mesh import group_ranks, make_mesh

MESH = AbstractMesh(("dp", "tp", "pp"), (2, 3, 2))


@pytest.mark.parametrize(
    ("axes", "rank", "ranks"),
    [
        (("dp",), 5, (5, 11)),
        (("pp",), 5, (4, 5)),
        (("dp", "pp"), 3, (2, 3, 8, 9)),
        (("pp", "dp"), 3, (2, 3, 8, 9)),  # always in the order of the mesh
        ((), 7, (7,)),
        (("dp", "tp", "pp"), 7, tuple(range(12))),
    ],
)
def test_ranks_of_a_group(axes, rank, ranks):
    assert group_ranks(MESH, axes, rank) == ranks


def test_a_simulated_mesh():
    mesh = make_mesh({"dp": 2, "tp": 4})
    assert (mesh.backend, mesh.axis_names, mesh.shape, mesh.size) == (
        "simulated",
        ("dp", "tp"),
        (2, 4),
        8,
    )
    assert mesh.local_ranks == tuple(range(8))
    assert mesh.store is None
    assert mesh.reduction == "ordered"
    assert mesh["tp"].shape == (4,)
    assert mesh["tp", "dp"].axis_names == ("dp", "tp")
    mesh.close()


@pytest.mark.parametrize(
    "shape", [{}, {"dp": 0}, {"dp": -1}, {"dp": 2.0}, {"dp": True}, {"d p": 2}, {1: 2}, (2, 2)]
)
def test_shapes_that_are_none(shape):
    with pytest.raises(ArgumentError, match="make_mesh"):
        make_mesh(shape)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda mesh: mesh.rank, "local_ranks"),
        (lambda mesh: mesh.coordinate("dp"), "local_ranks"),
        (lambda mesh: mesh.device_mesh, "torchrun"),
    ],
)
def test_a_simulated_mesh_has_no_rank_of_its_own(ask, says):
    with pytest.raises(ArgumentError, match=says):
        ask(make_mesh({"dp": 2}, backend="simulated"))


def test_axes_that_are_not_there():
    mesh = make_mesh({"dp": 2}, backend="simulated")
    with pytest.raises(LayoutError, match="'tp'"):
        mesh["tp"]
    with pytest.raises(LayoutError, match="'tp'"):
        mesh.coordinate("tp")


def test_backends():
    with pytest.raises(ArgumentError, match="torchrun"):
        make_mesh({"dp": 2}, backend="processes")
    with pytest.raises(ArgumentError, match="backend"):
        make_mesh({"dp": 2}, backend="mpi")
    with pytest.raises(ArgumentError, match="backend"):
        make_mesh({"dp": 2}, backend="gloo")


def test_a_mesh_larger_than_torchruns_world(monkeypatch):
    """Refused before any process is waited for."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="world of 4"):
        make_mesh({"dp": 8})
