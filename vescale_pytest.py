"""pytest plugin of vescale: tests over meshes, and real ranks that are started once.

    @pytest.mark.vescale(meshes=[{"dp": 2}, {"dp": 2, "tp": 2}])
    def test_my_step(mesh):                     # runs once on each, on simulated ranks
        ...

    def test_on_real_ranks(vs_ranks):
        answers = vs_ranks.pool(2).run(job)     # started once a session

pytest loads it by its entry point, in every project that has vescale installed. It lies outside the package
because `import vescale` imports torch, which takes seconds: here that happens when a test asks for a mesh or
a pool, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vescale import Mesh
    from vescale.testing import RankPool

MARKER = (
    "vescale(meshes=[{axis: size}, ...]): run the test on each mesh, which it takes as the argument `mesh`"
)


class Ranks:
    """Meshes of simulated ranks and pools of real ones, kept for the session."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """A mesh of simulated ranks; a new one, so that no test finds the programs of another."""
        import vescale as vs

        return vs.make_mesh(axes, backend="simulated")

    def pool(self, size: int, timeout: float = 60) -> RankPool:
        """The pool of `size` real ranks: gloo processes, started by the first job that one runs."""
        from vescale.testing import RankPool

        if size not in self._pools:
            self._pools[size] = RankPool(size, timeout)
        return self._pools[size]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("vescale")
    if marker is None:
        return
    where = metafunc.definition.nodeid
    meshes: Any = marker.kwargs.get("meshes") or ()
    if marker.args or set(marker.kwargs) != {"meshes"} or not meshes or not all(map(_is_mesh, meshes)):
        raise pytest.UsageError(f"{where}: @pytest.mark.{MARKER}; found {marker}")
    if "mesh" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{where}: marked for meshes, but it has no argument `mesh`")
    names = ["x".join(f"{axis}{size}" for axis, size in axes.items()) for axes in meshes]
    metafunc.parametrize("mesh", meshes, ids=names, indirect=True)


def _is_mesh(axes: Any) -> bool:
    return bool(axes) and isinstance(axes, Mapping) and all(type(size) is int for size in axes.values())


@pytest.fixture(scope="session")
def vs_ranks() -> Iterator[Ranks]:
    """`mesh(axes)`, a mesh of simulated ranks, and `pool(size)`, real ranks that are started once."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def mesh(request: pytest.FixtureRequest, vs_ranks: Ranks) -> Mesh:
    """A mesh of simulated ranks: one after another of those in `@pytest.mark.vescale(meshes=[...])`."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(f"{request.node.nodeid}: the fixture `mesh` needs @pytest.mark.{MARKER}")
    return vs_ranks.mesh(request.param)
