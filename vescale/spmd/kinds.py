"""Kinds: what a program depends on in a DTensor, as one object that costs nothing to hash and compare."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from .layout import Layout


class Kind:
    """A layout and a dtype, one object for each pair: compared by identity, which costs nothing."""

    __slots__ = ("__weakref__", "dtype", "layout")

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype

    def __repr__(self) -> str:
        return f"({self.layout!r}, {self.dtype})"


def kind_of(layout: Layout, dtype: torch.dtype) -> Any:
    """What a program depends on in a DTensor.

    A 0-d value is whole either way: a step count that went in plain comes back as a DTensor.
    """
    if not layout.shape:
        return dtype
    kind = _kinds.get((layout, dtype))
    if kind is None:
        kind = _kinds.setdefault((layout, dtype), Kind(layout, dtype))
    return kind


_kinds: WeakValueDictionary[tuple[Layout, torch.dtype], Kind] = WeakValueDictionary()
