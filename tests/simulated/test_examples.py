"""The training example on simulated meshes, and its own promises about its size."""

import inspect
import runpy
import sys
from pathlib import Path

import pytest

import vescale as vs
from examples import gpt

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERED = sorted(path.stem for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.fixture(scope="module")
def train_gpt():
    sys.path.insert(0, str(EXAMPLES))  # as when the script runs
    import train_gpt

    yield train_gpt
    sys.path.remove(str(EXAMPLES))


def test_is_short():
    assert len(inspect.getsource(gpt.make_plan).strip().splitlines()) <= 15
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) <= (200 if script.name == "demo.py" else 150), script


def test_text():
    text, held_out = gpt.read_text()
    assert len(text) >= 2 << 20
    assert len(held_out) >= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}], ids=str)
def test_follows_plain_torch(train_gpt, axes, tmp_path):
    seen = train_gpt.train(vs.make_mesh(axes), steps=3, batch=4)
    assert seen.gap <= 1e-5
    assert seen.step.cache_info().misses == 1
    train_gpt.report(seen, str(axes), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize("name", NUMBERED)
def test_asserts_its_own_claim(name, train_gpt, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out
