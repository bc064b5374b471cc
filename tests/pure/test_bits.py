"""Bits of tensors whose one element has any stride, and of those that are conjugated when they are read."""

import pytest
import torch

from vescale.checkpoint.files import as_bytes
from vescale.debug.fingerprint import fingerprint
from vescale.spmd.agree import digest
from vescale.spmd.bits import in_a_row
from vescale.spmd.program.stepwise import same_bits

ODD = {
    "expanded": torch.tensor(3.0).expand(1),
    "expanded twice": torch.tensor(3.0, dtype=torch.float64).expand(1, 1),
    "a corner": torch.arange(9.0, 15).view(2, 3)[:1, 1],
    "none of none": torch.ones(1).as_strided((0,), (0,)),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "0-d": torch.tensor(3),
    "expanded to many": torch.tensor([2.0]).expand(5),
    "transposed": torch.arange(6).view(2, 3).t(),
}


@pytest.mark.parametrize("name", ODD)
def test_bits_are_those_of_a_plain_copy(name):
    odd = ODD[name]
    plain = torch.empty(odd.shape, dtype=odd.dtype).copy_(odd.resolve_conj().resolve_neg())
    assert torch.equal(in_a_row(odd), plain.view(-1))
    assert torch.equal(as_bytes(odd), as_bytes(plain))
    assert same_bits(odd, plain)
    assert digest(odd) == digest(plain)
    assert torch.equal(fingerprint(odd), fingerprint(plain))
    if odd.numel():
        assert not same_bits(odd, plain + 1)
        assert digest(odd) != digest(plain + 1)


def test_memory_is_shared():
    """What is read from a file goes into the tensor itself."""
    corner = torch.zeros(2, 3)[:1, 1]
    in_a_row(corner).fill_(7)
    assert corner.item() == 7
