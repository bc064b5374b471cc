"""The compiled kernel has the torch form's bits, and everything works without it."""

import importlib.resources
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale.rng.native as native
import vescale.rng.numbers as numbers
import vescale.rng.ranges as ranges
from vescale.rng import bits, gumbel, kernel_status, key, normal, randint, truncated_normal, uniform
from vescale.rng.inversion import invert
from vescale.rng.numbers import KINDS, compressed, draw, draw_at, from_torch, normal_from_bits

ROOT = Path(__file__).parents[2]
LARGE = native.WORTH_BUILDING


@pytest.fixture(scope="module")
def compiled():
    made = native.kernel(LARGE)
    if made is None:
        pytest.skip(f"no kernel on this machine: {kernel_status()}")
    return made


def in_torch(monkeypatch):
    for module in (numbers, ranges):
        monkeypatch.setattr(module, "kernel", lambda numel: None)


# Both forms


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_draw_is_the_torch_form(compiled, kind, monkeypatch):
    for seed, numel in ((0, 300_007), (2**64 - 1, 1025), (77, 1), (5, 3)):
        found = draw(key(seed).data, [numel], kind)
        with monkeypatch.context() as patch:
            in_torch(patch)
            assert torch.equal(found, draw(key(seed).data, [numel], kind))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_show(compiled, kind, monkeypatch):
    whole = draw(key(4).data, [10_003], kind)
    monkeypatch.setattr(numbers, "_PER_THREAD", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(draw(key(4).data, [10_003], kind), whole)
    finally:
        torch.set_num_threads(before)


runs_of = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(1, 40), st.integers(0, 3000), st.integers(1, 50)), max_size=6
)


@given(runs_of, st.sampled_from(list(KINDS)), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_any_runs(compiled, rows, kind, seed):
    runs = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    shape = (sum(length * count for _, length, _, count in rows),)
    out = torch.empty(shape, dtype=KINDS[kind].dtype)
    compiled.draw(KINDS[kind].code, key(seed).data, runs, out)
    assert torch.equal(out, from_torch(key(seed).data, runs, shape, kind))


def extremes(size):
    """The bits at which the inversions change branch or run out of room."""
    top = 2**size - 1
    near = [0, 1, 2, top >> 1, (top >> 1) + 1, top - 1, top]
    powers = [(1 << n) + d for n in range(size) for d in (-1, 0, 1)]
    halves = [int(top * math.sqrt(0.5)) + d for d in range(-40, 40)]
    return [value & top for value in (*near, *powers, *halves, *(~p for p in powers))]


def test_normals_of_given_bits(compiled):
    drawn = torch.tensor([v - 2**64 if v >= 2**63 else v for v in extremes(64)])
    assert torch.equal(compiled.normal64(drawn), invert(drawn, torch.float64))


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_scaling_is_exact_in_both_forms(values, last, low, wide):
    drawn = torch.tensor(values)
    more = drawn.flip(0) if wide else None
    found = ranges.scale(drawn, more, low, last).tolist()
    for value, rest, got in zip(values, values[::-1], found):
        total = value % 2**64 << 64 | rest % 2**64 if wide else value % 2**64
        want = low + (total * (last + 1) >> (128 if wide else 64))
        assert (got - want) % 2**64 == 0
    made = native.kernel(LARGE)
    if made is not None:
        signed = last - 2**64 if last >= 2**63 else last
        assert made.scale(drawn, more, low, signed).tolist() == found


def test_many_threads_at_once(compiled):
    want, found = draw(key(1).data, [50_000], "normal32"), [None] * 8

    def work(place):
        found[place] = draw(key(1).data, [50_000], "normal32")

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, want) for one in found)


# Runs


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=30))
@settings(deadline=None)
def test_runs_are_the_intervals(parts):
    intervals, at = [], 0
    for gap, length in parts:
        intervals.append((at + gap, at + gap + length))
        at += gap + length
    runs = compressed(intervals)
    index = [i for start, stop in intervals for i in range(start, stop)]
    whole = torch.arange(at + 1)
    shape = (len(index),)
    assert numbers._indices(runs).tolist() == whole[torch.tensor(index, dtype=torch.int64)].tolist()
    found = draw_at(key(3).data, runs, shape, "bits32")
    assert torch.equal(found, draw(key(3).data, (at + 1,), "bits32")[torch.tensor(index, dtype=torch.int64)])


def test_an_even_shard_is_one_run():
    rows, columns = 1024, 64
    assert len(compressed((row * columns + 8, row * columns + 16) for row in range(rows))) == 1


# Without it


def fresh(monkeypatch):
    """The module as a new process has it."""
    monkeypatch.setattr(native, "_tried", False)
    monkeypatch.setattr(native, "_kernel", None)
    monkeypatch.setattr(native, "_status", "")


FUNCTIONS = [
    lambda k, n: normal(k, (n,)),
    lambda k, n: uniform(k, (n,), torch.float64),
    lambda k, n: gumbel(k, (n,)),
    lambda k, n: bits(k, (n,)),
    lambda k, n: randint(k, (n,), -5, 2**40),
    lambda k, n: truncated_normal(k, 1, 2, (n,)),
]


@pytest.mark.parametrize("setting", [{"VESCALE_RNG_KERNEL": "0"}, {"CC": "false"}, {"PATH": "", "CC": ""}])
def test_without_a_compiler_the_numbers_are_the_same(setting, monkeypatch, tmp_path):
    want = [function(key(9), 5000) for function in FUNCTIONS]
    fresh(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    found = [function(key(9), 5000) for function in FUNCTIONS]
    assert kernel_status().startswith("torch: ")
    assert native._kernel is None
    for a, b in zip(found, want):
        assert torch.equal(a, b)


def test_small_draws_build_nothing(monkeypatch):
    fresh(monkeypatch)
    monkeypatch.setattr(native, "_load", lambda: pytest.fail("built"))
    for function in FUNCTIONS:
        function(key(1), 100)


def test_a_kernel_with_other_numbers_is_not_used(compiled, monkeypatch, tmp_path):
    fresh(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "prelude", lambda: PRELUDE.replace("0xd2511f53u", "0xd2511f55u"))
    want = draw(key(2).data, [LARGE], "bits32")
    assert kernel_status().startswith("torch: RuntimeError: the compiled kernel makes other numbers")
    monkeypatch.undo()
    assert torch.equal(want, draw(key(2).data, [LARGE], "bits32"))


PRELUDE = native.prelude()


def test_the_cache(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh(monkeypatch)
    assert native.kernel(LARGE) is not None
    (made,) = (tmp_path / "vescale").iterdir()  # and nothing half built beside it
    when = made.stat().st_mtime_ns
    fresh(monkeypatch)
    assert native.kernel(LARGE) is not None
    assert made.stat().st_mtime_ns == when
    assert kernel_status() == f"compiled: {made}"


def test_a_cache_that_others_can_write_is_not_used(compiled, monkeypatch, tmp_path):
    folder = tmp_path / "vescale"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh(monkeypatch)
    assert native.kernel(LARGE) is not None  # built elsewhere, for this process
    assert not list(folder.iterdir())
    assert kernel_status() == "compiled: for this process only"


def test_processes_may_build_at_once(compiled, tmp_path):
    code = (
        "import vescale as vs; k = vs.rng.key(5);"
        "print(float(vs.rng.normal(k, (5000,)).sum()), vs.rng.kernel_status().split(':')[0])"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=120)[0] for process in both}
    assert answers == {f"{float(normal(key(5), (5000,)).sum())} compiled\n"}


def test_the_source_is_shipped():
    assert importlib.resources.files("vescale.rng").joinpath("philox.c").is_file()
    assert '"rng/*.c"' in (ROOT / "pyproject.toml").read_text()


def test_pointwise_ops_take_views():
    drawn = bits(key(1), (6, 5))
    assert torch.equal(normal_from_bits(drawn.T), normal_from_bits(drawn).T)
    assert torch.equal(ranges.scale_bits(drawn.T, None, 0, 9), ranges.scale_bits(drawn, None, 0, 9).T)
