"""Every tenth op of torch's op database, two samples each: right, or refused for a reason of a few.

`make coverage` does them all, and writes docs/op_coverage.md.
"""

import pytest

from tests.op_coverage import DATA, REFUSED, WRONG, every_op, name_of, run_op

OPS = {name_of(op): op for op in every_op()[::10]}

# Reasons for which an ordinary op may be refused, as its message says it.
ALLOWED = (
    "in-place update of the argument",  # batch norms that update running statistics
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
