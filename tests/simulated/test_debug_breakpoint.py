"""A breakpoint in a function that runs op by op, with commands typed by a test."""

import io
import sys

import pytest
import torch

import vescale as vs
from vescale._errors import ArgumentError, TraceError
from vescale.spmd.placements import P, RaggedShard, Shard


@pytest.fixture
def typed(monkeypatch):
    """Sets what is typed at the prompt."""

    def commands(*lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    trace = sys.gettrace()
    yield commands
    sys.settrace(trace)


def plan(spec=None):
    return vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"), inputs={"x": spec or P(dp=Shard(0))})


def test_the_pieces_of_all_ranks_are_shown(typed, capsys):
    def fn(x):
        y = x + 1
        vs.debug.breakpoint()
        return y.sum()

    typed("ranks y", "whole y.sum()", "p x.shape", "ranks nothing", "c")
    step = vs.parallelize(fn, plan(P(dp=RaggedShard((0,), (3, 1)))), static=False)
    assert step(torch.arange(4.0)).full_tensor() == 10
    out = capsys.readouterr().out
    assert "y: float32[4] P(dp=RaggedShard((0,), (3, 1)))" in out
    assert "rank 0 [3]: [1.0, 2.0, 3.0]" in out
    assert "rank 1 [1]: [4.0]" in out
    assert "tensor(10.)" in out
    assert "torch.Size([4])" in out
    assert "NameError" in out
    assert "in fn, on Mesh(dp=2, simulated on cpu)" in out


def test_lines_can_be_stepped_through(typed, capsys):
    def fn(x):
        vs.debug.breakpoint()
        y = x * 2
        z = y + 1
        return z.sum()

    typed("n", "n", "ranks y", "p 'y' in locals()", "c")
    vs.parallelize(fn, plan(), static=False)(torch.ones(2))
    out = capsys.readouterr().out
    assert "-> z = y + 1" in out
    assert "tensor([2.])" in out
    assert "True" in out


def test_inside_a_gradient(typed, capsys):
    def loss(params, x):
        y = x @ params["w"]
        vs.debug.breakpoint()
        return y.square().sum()

    typed("ranks params", "whole y", "c")
    step = vs.parallelize(vs.value_and_grad(loss), plan(), static=False)
    step({"w": torch.ones(3, 2)}, torch.ones(4, 3))
    out = capsys.readouterr().out
    assert "params.w: float32[3,2]".replace(",", ", ") in out
    assert "y: float32[4, 2] P(dp=Shard(0))" in out
    assert "[3., 3.]" in out


def test_large_pieces_are_summed_up(typed, capsys):
    x = vs.from_local(
        [torch.arange(20.0), torch.arange(4.0)], vs.make_mesh({"dp": 2}), P(dp=RaggedShard((0,), (5, 1)))
    )
    typed("c")
    vs.debug.breakpoint()
    assert "rank 0 [20]: from 0 to 19, mean 9.5" in capsys.readouterr().out
    del x


def test_in_a_traced_function_it_is_an_error():
    def fn(x):
        vs.debug.breakpoint()
        return x

    with pytest.raises(TraceError, match="static=False") as caught:
        vs.parallelize(fn, plan())(torch.ones(2))
    assert "test_debug_breakpoint.py" in str(caught.value)


@pytest.mark.parametrize(("static", "error"), [(True, TraceError), (False, ArgumentError)])
def test_in_a_mapped_function_it_is_an_error(static, error):
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")

    def fn(x):
        vs.debug.breakpoint()
        return x

    mapped = vs.shard_map(fn, mesh=mesh, in_specs=(P(dp=Shard(0)),), out_specs=P(dp=Shard(0)), static=static)
    with pytest.raises(error, match=r"vs\.debug\.breakpoint"):
        mapped(torch.ones(2))
