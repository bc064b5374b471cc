"""Abstract arguments: tensors that have a shape and no values, for lowering what fits no machine at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._compat import FakeTensor
from .._errors import ArgumentError, explain
from .program.ir import TensorMeta


def standing_for(meta: TensorMeta, device: torch.device) -> TensorMeta:
    """What a tensor on the meta device stands for: the same on `device`. Others stand for themselves."""
    return replace(meta, device=device) if meta.device.type == "meta" else meta


def refuse_abstract(leaves: Sequence[Any], paths: Callable[[], list[str]], where: str) -> None:
    """Raises ArgumentError when a call, which needs values, is given a tensor without."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.Tensor) and leaf.is_meta):
            raise ArgumentError(
                explain(
                    f"{paths()[index]!r} without values ({TensorMeta.of(leaf)} on {leaf.device})",
                    where=where,
                    rule="a call computes; tensors on the meta device and fake ones have shapes only",
                    remedy="call .lower(...) to look at the program, or pass tensors with values",
                )
            )
