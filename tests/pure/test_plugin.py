"""The pytest plugin, in a project of its own; and pytest starts without torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


def run(pytester, source, *options):
    """The tests of `source` with the plugin, in this process: torch, once imported, stays out of it."""
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess("-p", "vescale_pytest", "--strict-markers", *options)


def test_tests_run_on_meshes_and_share_real_ranks(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
        import pytest, torch, vescale as vs

        @pytest.mark.vescale(meshes=[{"dp": 2}, {"dp": 2, "tp": 2}])
        @pytest.mark.parametrize("factor", [2, 3])
        def test_scaled(mesh, factor):
            plan = vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))})
            vs.testing.assert_consistent(lambda x: x * factor, [torch.arange(4.0)], plan)
            assert mesh.is_simulated

        pools = set()

        def test_first(vs_ranks):
            pools.add(vs_ranks.pool(2))
            assert vs_ranks.mesh({"tp": 3}).size == 3

        def test_second(vs_ranks):
            assert vs_ranks.pool(2) in pools
            assert vs_ranks.pool(3).size == 3
        """
    )
    result = pytester.runpytest_subprocess("-p", "vescale_pytest", "--strict-markers", "-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_scaled*dp2xtp2*"])


def test_mistakes_are_told(pytester):
    result = run(
        pytester,
        """
        import pytest

        @pytest.mark.vescale(meshes=[{"dp": "two"}])
        def test_wrong(mesh):
            pass
        """,
    )
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*@pytest.mark.vescale(meshes=*"])


def test_a_mark_without_the_argument_is_told(pytester):
    result = run(
        pytester,
        """
        import pytest

        @pytest.mark.vescale(meshes=[{"dp": 2}])
        def test_wrong():
            pass
        """,
    )
    result.stdout.fnmatch_lines(["*no argument `mesh`*"])


def test_the_argument_without_a_mark_is_told(pytester):
    result = run(pytester, "def test_wrong(mesh): pass")
    result.stdout.fnmatch_lines(["*the fixture `mesh` needs @pytest.mark.vescale*"])


def test_pytest_starts_without_torch(pytester):
    pytester.makepyfile("import sys\n\ndef test_light():\n    assert 'torch' not in sys.modules")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vescale_pytest", "-p", "no:cacheprovider", "."]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": ""}
    done = subprocess.run(command, cwd=pytester.path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_finds_it_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"vescale_pytest": "vescale_pytest"}
    assert project["tool"]["setuptools"]["py-modules"] == ["vescale_pytest"]
