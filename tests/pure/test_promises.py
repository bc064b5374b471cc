"""The promises of docs/consistency.md, measured again on a part of the ops; `make consistency` does all."""

import re
from pathlib import Path

import pytest
import torch

from tests.elementwise import ALONG, measure, measure_rows
from vescale.testing.promises import ELEMENTWISE, MOVES, ROUNDED, is_exact

PAGE = Path(__file__).parents[2] / "docs/consistency.md"
aten = torch.ops.aten


@pytest.mark.parametrize(
    "name", ["add", "mul", "div", "sqrt", "exp", "tanh", "lerp", "addcdiv", "addcmul", "where", "relu", "log"]
)
def test_arithmetic_has_the_same_bits_on_slices(name):
    found = measure(name)
    assert set(found.ulps.values()) == {0}


@pytest.mark.parametrize("name", ["softmax of each row", "layer_norm of each row", "amax of each row"])
def test_rows_have_the_same_bits_alone(name):
    assert measure_rows(name, (torch.float32,)).is_exact


def test_the_measure_sees_a_kernel_that_looks_beside(monkeypatch):
    """Of what depends on how many rows there are, slices have other bits."""
    monkeypatch.setitem(ALONG, "counted", lambda x: x * (1 + 2**-20 * len(x)))
    found = measure_rows("counted", (torch.float32,))
    assert found.ulps[torch.float32] > 1
    assert found.error[torch.float32] > 1


def test_the_page_lists_every_op():
    words = set(re.findall(r"[a-z_0-9]+", PAGE.read_text()))
    assert words >= ELEMENTWISE | ROUNDED


def test_names_are_those_of_ops():
    for name in ELEMENTWISE | ROUNDED | MOVES:
        assert hasattr(aten, name), name
    assert not ELEMENTWISE & ROUNDED
    assert not MOVES & ROUNDED


def test_sums_that_are_pending_round_in_each_part():
    assert is_exact(aten.div.Tensor)
    assert not is_exact(aten.div.Tensor, pending=True)
    assert is_exact(aten.view.default, pending=True)
    assert not is_exact(aten.mm.default)
