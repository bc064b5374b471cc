"""What optimizers take: gradients, and weight decay that is added to them."""

from collections.abc import Sequence
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from .optimizer import Updates


def gradients(grads: Any, spec: _tree.TreeSpec, where: str) -> list[torch.Tensor]:
    """The gradient of each parameter. Raises ArgumentError for another structure, and for an `Updates`."""
    if isinstance(grads, Updates):
        raise ArgumentError(
            explain(
                "the updates of an optimizer",
                where=where,
                rule="an optimizer makes updates of gradients: a chain has one",
                remedy="use vs.optim.partition to give parameters different optimizers",
            )
        )
    return _tree.leaves_like(spec, grads, where="grads")


def decayed(
    grads: Sequence[torch.Tensor], params: Sequence[torch.Tensor], rate: float, mask: Sequence[bool]
) -> list[torch.Tensor]:
    """g + rate p, rounded once, where the mask says so."""
    return [torch.add(g, p, alpha=rate) if m else g for g, p, m in zip(grads, params, mask, strict=True)]
