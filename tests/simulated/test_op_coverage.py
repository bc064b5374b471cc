"""Every tenth op of torch's op database, two samples each: right, or refused for a reason of a few.

`make coverage` does them all, and writes docs/op_coverage.md.
"""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from tests.op_coverage import DATA, REFUSED, WRONG, every_op, name_of, run_op

OPS = {name_of(op): op for op in every_op()[::10]}

# Reasons for which an ordinary op may be refused, as its message says it.
ALLOWED = (
    "in-place update of the argument",  # batch norms that update running statistics
    "an update of the running statistics",
    "writes to an argument",
    "the value of a traced tensor",  # some samples, or the derivative, read values
    "a random op of torch",
    "torch.sparse",
    "a torch.autograd.Function whose forward takes",
)


def faults(result):
    """What an op may not be."""
    for verdict, note in result.notes:
        if verdict == WRONG or (verdict == REFUSED and not any(reason in note for reason in ALLOWED)):
            yield f"{result.name}: {note}"
    if result.category == DATA and set(result.cases) - {REFUSED}:
        yield f"{result.name}: its shapes or values depend on data, and it was not refused"


@pytest.mark.parametrize("name", OPS)
def test_every_tenth_op(name):
    assert not list(faults(run_op(OPS[name], count=2)))


MESH = vs.make_mesh({"dp": 4}, backend="simulated")


def run(fn, *args):
    """Whole results of fn over rows."""
    placed = [vs.distribute_tensor(arg, MESH, vs.P(dp=vs.Shard(0))) for arg in args]
    return vs.parallelize(fn, vs.Plan(MESH))(*placed)


def test_conjugates_are_values():
    x = torch.randn(6, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    found = run(lambda x: x.conj(), x)
    assert not any(piece.is_conj() for piece in found.locals)
    assert torch.equal(found.full_tensor(), x.conj())


def test_a_write_through_strides_is_seen_by_the_base():
    def fn(x):
        y = x * 1
        y.as_strided((2,), (4,)).zero_()
        return y

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(run(fn, x).full_tensor(), fn(x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss])
def test_a_loss_is_that_of_all_elements(loss, reduction):
    """Six rows over four ranks: a mean of the ranks' means would be another number."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.rand(6, 3, generator=generator), torch.rand(6, 3, generator=generator).round()
    both = vs.value_and_grad(lambda x, target: loss(x, target, reduction=reduction))
    value, gradient = run(both, x, target)
    wanted, slope = both(x, target)
    torch.testing.assert_close(value.full_tensor(), wanted)
    torch.testing.assert_close(gradient.full_tensor(), slope)
    assert gradient.layout.spec == vs.P(dp=vs.Shard(0))
