"""What a leaf of a tree is to a checkpoint: a tensor, a generator's state, or a plain value."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import FakeTensor
from .._errors import ArgumentError, explain, near_misses
from ..spmd.agree import digest
from ..spmd.dtensor import DTensor
from ..spmd.layout import Layout
from ..spmd.mesh import Mesh

VALUES = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as the index of a checkpoint says it: `value` is that of a plain value, else None."""

    path: str
    kind: str  # "tensor", "generator", or the name of a plain value's type
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    value: Any = None

    @classmethod
    def of(cls, path: str, leaf: Any) -> Leaf:
        """Of a leaf of a tree. Raises ArgumentError for what can't be saved."""
        if type(leaf) in VALUES:
            return cls(path, type(leaf).__name__, value=leaf)
        if isinstance(leaf, torch.Generator):
            state = leaf.get_state()
            return cls(path, "generator", state.dtype, tuple(state.shape))
        found = f"{type(leaf).__name__} {leaf!r}"[:200]
        if isinstance(leaf, DTensor):
            if not leaf.layout.partials:
                return cls(path, "tensor", leaf.dtype, tuple(leaf.shape))
            found = f"a tensor with pending reductions, {leaf.layout.spec}"
        elif isinstance(leaf, Tensor):
            if leaf.layout is torch.strided and not leaf.is_quantized:
                return cls(path, "tensor", leaf.dtype, tuple(leaf.shape))
            found = "a quantized tensor" if leaf.is_quantized else f"a tensor of layout {leaf.layout}"
        raise ArgumentError(
            explain(
                found,
                where=path,
                rule="a leaf is a DTensor without Partial, a dense tensor, a torch.Generator, or a number, "
                "bool or string",
                remedy="convert it, redistribute it, or leave it out of the tree",
            )
        )

    def line(self) -> dict[str, Any]:
        """As a line of the index."""
        told: dict[str, Any] = {"path": self.path, "kind": self.kind}
        if self.dtype is None:
            return told | {"value": self.value}
        return told | {"dtype": _name(self.dtype), "shape": self.shape}

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Leaf:
        """From a line of the index."""
        if "dtype" not in line:
            return cls(line["path"], line["kind"], value=line["value"])
        return cls(line["path"], line["kind"], getattr(torch, line["dtype"]), tuple(line["shape"]))

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        tensor = f"{_name(self.dtype)} of shape {self.shape}"
        return tensor if self.kind == "tensor" else f"the state of a generator, {tensor}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_paths(paths: Sequence[str]) -> None:
    """Raises ArgumentError when two leaves have one path."""
    counts = Counter(paths)
    if len(counts) < len(paths):
        raise ArgumentError(
            explain(
                f"two leaves called {', '.join(repr(path) for path in counts if counts[path] > 1)}",
                where="checkpoint",
                rule="leaves go by their dotted paths, which differ",
                remedy="rename a key: keys with dots can meet nested ones",
            )
        )


def saved_form(leaf: Any) -> Tensor | None:
    """The tensor that is saved for a leaf; None for a plain value, which stands in the index."""
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    return leaf.detach() if isinstance(leaf, Tensor) else None


def writes(path: str, leaf: Any, mesh: Mesh | None) -> bool:
    """Whether the rank of this process writes its part of a leaf, of which others may have replicas.

    Who does is spread over the ranks by the path, so that no rank writes all that is replicated. A
    simulated mesh has every rank here.
    """
    if mesh is None or mesh.is_simulated:
        return True
    if isinstance(leaf, DTensor):
        return holds_chosen(path, leaf.layout, leaf.mesh.rank)
    return mesh.rank == _number(path) % mesh.size


def holds_chosen(path: str, layout: Layout, rank: int) -> bool:
    """Whether the replica that `rank` holds is the one that is written."""
    replicas, place = 1, 0
    for axis, index in layout.mesh.coordinate(rank).items():
        if axis not in layout.spec:
            size = layout.mesh.axis_size(axis)
            replicas, place = replicas * size, place * size + index
    return place == _number(path) % replicas


def _number(path: str) -> int:
    return zlib.crc32(path.encode())


def digests(paths: Iterable[str], leaves: Iterable[Any]) -> dict[str, str]:
    """What has to be equal on all ranks, by path: plain tensors, generators and values."""
    found = {}
    for path, leaf in zip(paths, leaves):
        if not isinstance(leaf, DTensor):
            form = saved_form(leaf)
            found[path] = repr(leaf) if form is None else digest(form)
    return found


# Loading.


def misfit(wanted: Leaf, saved: dict[str, Leaf]) -> str | None:
    """Why the leaf that is wanted is not in a checkpoint as it is wanted; None if it is."""
    found = saved.get(wanted.path)
    if found is None:
        near = ", ".join(near_misses(wanted.path, saved, limit=1)) or "nothing"
        return f"no {wanted.path!r} (near: {near})"
    if (found.kind, found.dtype, found.shape) != (wanted.kind, wanted.dtype, wanted.shape):
        return f"{wanted.path!r} is {found}, not {wanted}"
    return None


def fresh(leaf: Any) -> Tensor | None:
    """Memory for the values of a leaf, where and in the layout in which they are wanted."""
    if isinstance(leaf, DTensor):
        device, mesh = leaf.mesh.device, leaf.mesh
        shapes = [leaf.layout.local_shape(rank) for rank in mesh.local_ranks]
        pieces = [torch.empty(shape, dtype=leaf.dtype, device=device) for shape in shapes]
        return DTensor(pieces, mesh, leaf.layout)
    if isinstance(leaf, Tensor):
        device = "cpu" if leaf.is_meta else leaf.device
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.empty_like(leaf.get_state()) if isinstance(leaf, torch.Generator) else None


def memory(leaf: Any) -> Tensor | None:
    """The memory that a leaf has; of a generator, whose state is no tensor's, a copy."""
    # The DTensor itself, not its alias: a piece that isn't contiguous is replaced in it.
    return leaf if isinstance(leaf, DTensor) else saved_form(leaf)


def restored(leaf: Any, form: Tensor | None, saved: Leaf, in_place: bool) -> Any:
    """The loaded leaf, of the kind of the one that was given."""
    if form is None:
        return saved.value
    if isinstance(leaf, torch.Generator):
        generator = leaf if in_place else torch.Generator(leaf.device)
        return generator.set_state(form)
    if in_place:
        return leaf
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(form, leaf.requires_grad)
    return form.requires_grad_(leaf.requires_grad)


def is_abstract(leaf: Any) -> bool:
    """Whether a tensor has a shape and no values."""
    pieces = leaf.locals if isinstance(leaf, DTensor) else [leaf]
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)
