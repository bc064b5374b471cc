"""The graph: a flat list of ATen calls at global shapes. Frozen data, printable.

Values are numbered; `Ref(3)` in an argument means value 3. What a value looks like is in
`graph.metas[3]`; where a node came from is in `node.origin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import OpOverload


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the graph, by number."""

    id: int

    def __repr__(self) -> str:
        return f"v{self.id}"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a value looks like at its global shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the user's line, the module path, and forward, backward or neither."""

    line: str = ""
    module: str = ""
    region: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.region, self.module, self.line) if part)


@dataclass(frozen=True, slots=True)
class Node:
    """One ATen call. `outs` numbers the results; None stands for a result that is no tensor."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    origin: Origin
    returns_list: bool = False

    def refs(self) -> Iterator[int]:
        """The values that the node reads, in the order of its arguments."""
        yield from refs_of(self.args)
        yield from refs_of(tuple(self.kwargs.values()))


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced function: `inputs` and `hidden` (closed-over tensors) to `outputs`."""

    inputs: tuple[int, ...]
    hidden: tuple[tuple[int, torch.Tensor], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]  # Ref, or a static value
    metas: tuple[TensorMeta, ...]
    constraints: tuple[Any, ...] = ()

    def __str__(self) -> str:
        lines = [f"inputs {', '.join(f'v{value}' for value in self.inputs)}"]
        for node in self.nodes:
            outs = ", ".join(f"v{out}: {self.metas[out]}" for out in node.outs if out is not None)
            lines.append(f"{outs} = {node.op}({_text(node)})  # {node.origin}")
        return "\n".join([*lines, f"return {', '.join(map(str, self.outputs))}"])


def map_args(value: Any, leaf: Callable[[Ref], Any]) -> Any:
    """`value`, an argument of a node, with each Ref replaced by `leaf(ref)`."""
    if isinstance(value, Ref):
        return leaf(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_args(item, leaf) for item in value])
    return value


def refs_of(value: Any) -> Iterator[int]:
    """The values named in an argument."""
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs_of(item)


def _text(node: Node) -> str:
    return ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
