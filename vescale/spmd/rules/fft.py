"""Fourier transforms: the dims that are transformed are whole, the others free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .batched import FIRST, along
from .notation import Pattern, rule

aten = torch.ops.aten


@rule([aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default])
def transform(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return along(node, metas, node.args[1], linear=FIRST, ragged=1)
