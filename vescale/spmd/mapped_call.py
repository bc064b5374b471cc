"""A mapped function called inside a traced one: one node, whose specs are constraints.

`vs.shard_map` inside `vs.parallelize` records the op `vescale::mapped`. Partition brings its operands to
the layouts of the specs; each rank then runs the mapped instructions in the place of the node. The
gradient is the mapped vector-Jacobian product, a node too, which computes the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import TraceError, explain
from .boundary import Static
from .collective_ops import differentiable
from .layout import Layout, replicated
from .signature import Signature

if TYPE_CHECKING:
    from .program.mapped import MappedTrace
    from .shard_map import ShardMapped


@dataclass(frozen=True)
class MappedCall:
    """What the node of a mapped function stands for. `operands` include what the function closes over."""

    name: str
    traced: MappedTrace
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]


_calls: list[MappedCall] = []  # by the handle that the op carries: an op has no other way to name one

_library = torch.library.Library("vescale", "FRAGMENT")
_library.define("mapped(Tensor[] inputs, int handle) -> Tensor[]")


def _refuse(inputs: Sequence[Tensor], handle: int) -> list[Tensor]:
    raise TraceError(explain("a mapped node outside a program", rule="the node is only ever traced"))


def _fake(inputs: Sequence[Tensor], handle: int) -> list[Tensor]:
    made = mapped_call(handle)
    device = inputs[0].device if inputs else None
    return [
        torch.empty(layout.shape, dtype=dtype, device=device)
        for layout, dtype in zip(made.results, made.dtypes)
    ]


_library.impl("mapped", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("vescale::mapped", _fake, lib=_library)


def mapped_call(handle: int) -> MappedCall:
    """What a node's handle stands for."""
    return _calls[handle]


def handle_of(mapped: ShardMapped, signature: Signature) -> int:
    """A handle for the mapped function with arguments of this signature."""
    made = mapped.trace(signature)
    graph = made.traced.first.graph
    known = [layout for layout in made.layouts if layout is not None]
    hidden = [replicated(mapped.mesh.abstract, tuple(tensor.shape)) for _, tensor in graph.hidden]
    results = [
        (layout, graph.metas[output.id].dtype)
        for layout, output in zip(made.out_layouts, graph.outputs, strict=True)
        if isinstance(layout, Layout)
    ]
    layouts, dtypes = zip(*results) if results else ((), ())
    _calls.append(MappedCall(mapped.name, made.traced, (*known, *hidden), layouts, dtypes))
    return len(_calls) - 1


def call_in_trace(mapped: ShardMapped, signature: Signature, tensors: Sequence[Tensor]) -> Any:
    """The mapped function of traced tensors, recorded as one node."""
    made = mapped.trace(signature)
    hidden = [tensor for _, tensor in made.traced.first.graph.hidden]
    outputs = list(_Node.apply(mapped, signature, *tensors, *hidden))
    leaves = [layout.value if isinstance(layout, Static) else outputs.pop(0) for layout in made.out_layouts]
    return _tree.unflatten(made.out_spec, leaves)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(mapped: ShardMapped, signature: Signature, *tensors: Tensor) -> Any:
        return tuple(torch.ops.vescale.mapped(list(tensors), mapped.handle(signature)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mapped, ctx.signature, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.shapes = [(tuple(result.shape), result.dtype) for result in output]
        ctx.mark_non_differentiable(*(result for result in output if not differentiable(result)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        count = len(ctx.signature.tensors())
        arguments = ctx.saved_tensors[:count]
        given = [
            torch.zeros(shape, dtype=dtype) if cotangent is None else cotangent
            for cotangent, (shape, dtype) in zip(cotangents, ctx.shapes, strict=True)
            if dtype.is_floating_point or dtype.is_complex
        ]
        product, signature = ctx.mapped.product(ctx.signature, [*arguments, *given])
        gradients = call_in_trace(product, signature, [*arguments, *given])
        filled: list[Any] = [None] * len(ctx.saved_tensors)
        for index, gradient in zip(ctx.mapped.differentiated(ctx.signature), gradients, strict=True):
            filled[index] = gradient
        return (None, None, *filled)
