"""The training example on simulated meshes, and its own promises about its size."""

import inspect
import runpy
from pathlib import Path

import gpt
import pytest
import train_gpt

import vescale as vs

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERED = sorted(path.stem for path in EXAMPLES.glob("[0-9]*.py"))


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
def test_follows_plain_torch(axes, tmp_path):
    seen = train_gpt.train(vs.make_mesh(axes), steps=3, batch=4)
    assert seen.gap <= 1e-5
    assert seen.step.cache_info().misses == 1
    train_gpt.report(seen, str(axes), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize("name", NUMBERED)
def test_asserts_its_own_claim(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw_8bit", "shampoo"))]
)
def test_stops_and_goes_on_elsewhere(optimizer, tmp_path):
    """Whatever the optimizer: a run that goes on on another mesh follows the one that did not stop."""
    options = {"batch": 4, "optimizer": optimizer, "blocks": 1, "compare": False, "folder": tmp_path}
    whole = train_gpt.train(vs.make_mesh({"dp": 2}), steps=3, save_every=2, **options)
    rest = train_gpt.train(vs.make_mesh({"dp": 2, "tp": 2}), steps=3, resume=True, **options)
    (step, loss), *others = rest.curves["vescale"].items()
    assert (step, others) == (2, [])
    assert abs(loss - whole.curves["vescale"][2]) < 1e-4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_hash_on_any_mesh(optimizer):
    options = {
        "steps": 2,
        "batch": 8,
        "lanes": 4,
        "hash": True,
        "blocks": 1,
        "compare": False,
        "dropout": 0.1,
        "optimizer": optimizer,
    }
    one, four = (train_gpt.train(vs.make_mesh({"dp": ranks}), **options).hash for ranks in (1, 4))
    assert one == four
