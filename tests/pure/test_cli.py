"""The command line: what it prints, what it returns, and what it says to a wrong use."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import vescale as vs
from vescale.cli import main, selftest, table

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(params=["rich", "plain"])
def shown(request, capsys, monkeypatch):
    """A function that runs a command: its exit status, and what it prints, with and without rich."""
    if request.param == "plain":
        monkeypatch.setattr(table, "find_spec", lambda name: None)

    def run(*arguments):
        status = main(arguments)
        said = capsys.readouterr()
        return status, re.sub(r"[ \u2500-\u257f]+", " ", said.out), said.err

    return run


def test_doctor_says_what_is_there(shown):
    status, out, _ = shown("doctor", "--no-self-test")
    assert status == 0
    for words in (
        f"torch {torch.__version__}",
        "gloo yes ok",
        "random numbers on cpu",
        "meshes are simulated",
    ):
        assert words in out
    assert "self-test" not in out


def test_doctor_fails_when_a_test_does(shown, monkeypatch):
    monkeypatch.setattr(selftest, "KNOWN", (((0, 0, 0, 0), (0, 0), (1, 2, 3, 4)),))
    monkeypatch.setattr(selftest, "train_step", lambda: "as it should")
    monkeypatch.setattr(selftest, "ring", lambda: "as it should")
    status, out, _ = shown("doctor")
    assert status == 1
    assert "AssertionError: Philox gives other words than published" in out
    assert out.count("FAILED") == 1


def test_the_self_test_of_a_step_sees_a_difference(monkeypatch):
    assert "bits of plain torch" in selftest.train_step()
    found = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: found(one, other + (other.ndim > 0)))
    with pytest.raises(AssertionError, match="up on 2 x 2 simulated ranks has other bits"):
        selftest.train_step()


def test_random_numbers():
    assert "published blocks" in selftest.random_numbers()


def write(path, content):
    path.write_text(json.dumps(content))
    return str(path)


def received(out, collective):
    """The bytes in the line of a collective."""
    (found,) = re.findall(rf"([\d,]+) B [\d.]+ KiB[^A-Za-z]*{collective}", out)
    return int(found.replace(",", ""))


def test_shapes(shown, tmp_path):
    shapes = {
        "layers.0.up": [64, 256],
        "layers.0.down": {"shape": [256, 64], "dtype": "float32"},
        "head": [64, 1000],
        "layers.0.scale": [],
        "layers.0.nothing": [0, 4],
    }
    arguments = ("--mesh", "dp=8", "--fsdp", "dp", "--optimizer", "none")
    status, out, _ = shown("estimate", write(tmp_path / "shapes.json", shapes), *arguments)
    assert status == 0
    assert f"{2 * 64 * 256 + 64 * 1000 + 1:,} in all" in out
    assert f"{64 * 256 * (2 + 4) + 64 * 1000 * 2 + 2:,} B" in out
    # A rank receives seven eighths of what it gathers and reduces.
    total = 64 * 256 * (2 + 4) + 64 * 1000 * 2
    assert received(out, "reduce_scatter over dp") == received(out, "all_gather over dp") == total * 7 // 8
    assert "layers.0" in out


def test_a_config(shown, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 7,
    }
    text = "--mesh dp=4,tp=2 --plan llama --fsdp dp --batch 8 --sequence 16 --layers 1"
    arguments = text.split()
    status, out, _ = shown("estimate", write(tmp_path / "config.json", config), *arguments)
    assert status == 0
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert f"parameters {layer + 2 * 128 * 64 + 64:,} in all" in out
    for words in (
        "peak of memory",
        "gathered parameters",
        "all_gather over dp",
        "all_reduce over tp",
        "flops",
    ):
        assert words in out
    assert "model.layers.0" in out


def squares():
    """What `module:function` may name."""
    plan = vs.Plan(vs.make_mesh({"dp": 1}), inputs={"x": vs.P(dp=vs.Shard(0))})
    params = {"w": torch.empty(32, 8, device="meta")}
    step = vs.value_and_grad(lambda params, x: (x @ params["w"]).square().mean())
    return step, (params, torch.empty(64, 32, device="meta")), plan


def test_a_function(shown, tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text("from tests.pure.test_cli import squares\n")
    monkeypatch.chdir(tmp_path)
    status, out, _ = shown("estimate", "of_mine:squares", "--mesh", "dp=16")
    assert status == 0
    assert "rank 0 of dp=16" in out
    assert f"{3 * 2 * 4 * 32 * 8 - 2 * 4 * 32 * 8:,}" in out  # flops: forward, and the gradient of w


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.json", "--mesh", "dp=2"), "the file is there and is JSON"),
        (("nothing", "--mesh", "dp=2"), "a source is a .json file"),
        (("of_nothing:f", "--mesh", "dp=2"), "No module named 'of_nothing'"),
        (("json:loads", "--mesh", "dp"), "for example --mesh dp=8,tp=8"),
        (("json:loads", "--mesh", "dp=2,dp=4"), "for example --mesh dp=8,tp=8"),
        (("x.json", "--mesh", "dp=2", "--dtype", "float31"), "a floating one of torch's"),
        (("x.json", "--mesh", "dp=2", "--dtype", "int32"), "a floating one of torch's"),
        ((":f", "--mesh", "dp=2"), "no name of a module"),
        (("json:__doc__", "--mesh", "dp=2"), "can't be called"),
        (("tests.pure.test_cli:no_arguments", "--mesh", "dp=2"), "arguments are a tuple"),
    ],
)
def test_a_wrong_use_is_said(shown, arguments, said):
    status, _, error = shown("estimate", *arguments)
    assert status == 1
    assert error.startswith("ArgumentError\nfound: ")
    assert said in error


def no_arguments():
    return squares, 3


@pytest.mark.parametrize("option", ["--batch", "--sequence", "--layers"])
def test_counts_are_positive(shown, option, capsys):
    with pytest.raises(SystemExit) as ended:
        shown("estimate", "x.json", "--mesh", "dp=2", option, "0")
    assert ended.value.code == 2
    assert "0 is not 1 or more" in capsys.readouterr().err


def test_a_model_type_that_nobody_knows(shown, tmp_path):
    path = write(tmp_path / "config.json", {"model_type": "not-a-model"})
    status, _, error = shown("estimate", path, "--mesh", "dp=2")
    assert status == 1
    assert "check model_type" in error


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--help"])
    assert ended.value.code == 0
    assert "python -m vescale estimate my_model:step --mesh dp=16" in capsys.readouterr().out


def test_as_a_module():
    """In a process of its own, with all of the self-test."""
    found = subprocess.run(
        [sys.executable, "-m", "vescale", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stderr == ""
    for wanted in ("bits of plain torch", "a token went around over gloo", "published blocks"):
        assert wanted in found.stdout
