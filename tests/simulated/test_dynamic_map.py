"""shard_map on real values: static=False."""

import pytest
import torch

import vescale as vs
from tests.dynamic_map_cases import CASES, X, run
from vescale import P, Shard

MESH = vs.make_mesh({"dp": 4}, backend="simulated")
ROWS = P(dp=Shard(0))


@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_static_mode(name):
    assert torch.equal(run(name, MESH, static=False), run(name, MESH, static=True))


def mapped(fn, out_specs=ROWS):
    return vs.shard_map(fn, mesh=MESH, in_specs=(ROWS,), out_specs=out_specs, static=False)


def test_python_sees_values():
    seen = []

    def fn(x):
        if vs.axis_index("dp") == 1 and x.sum() > 0:
            seen.append(float(x.sum()))
            x = -x
        return x

    result = mapped(fn)(X).full_tensor()
    expected = X.clone()
    expected[2:4] *= -1
    assert torch.equal(result, expected)
    assert seen == [float(X[2:4].sum())]


def test_types_are_checked():
    with pytest.raises(vs.VescaleError, match="varies over dp"):
        mapped(lambda x: x.sum(), P())(X)


def test_ranks_that_part_at_a_collective_are_named():
    def fn(x):
        return vs.psum(x, "dp") if vs.axis_index("dp") == 2 else vs.pmax(x, "dp")

    with pytest.raises(vs.VescaleError, match=r"different collectives.*dp 2: psum"):
        mapped(fn, P())(X[:4])


def test_gradients_are_taken_inside():
    with pytest.raises(vs.VescaleError, match="taken inside"):
        mapped(lambda x: x)(X.clone().requires_grad_())
    with pytest.raises(vs.VescaleError, match="taken inside"):
        vs.parallelize(mapped(lambda x: x), vs.Plan(MESH))(X)
