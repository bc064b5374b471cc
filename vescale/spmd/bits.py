"""The elements of a tensor in a row, so that their bits can be viewed as integers or bytes."""

from torch import Tensor


def in_a_row(tensor: Tensor) -> Tensor:
    """The elements in row-major order, 1-d of stride 1; of a contiguous tensor, its own memory.

    >>> import torch
    >>> in_a_row(torch.tensor(1.0).expand(1)).view(torch.int32)
    tensor([1065353216], dtype=torch.int32)
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One element or none is contiguous in any stride, which view(-1) and reshape keep, and then no other
    # dtype can be viewed.
    return dense.as_strided((dense.numel(),), (1,))
