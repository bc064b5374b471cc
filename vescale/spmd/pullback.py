"""Gradients through a mapped function from outside: a forward and a backward program, residuals local.

The function and its vector-Jacobian product are traced as one graph. What does not depend on the
cotangents is the forward program; the values that cross are the residuals, which stay on the ranks where
they are. A gradient of the gradient maps the product itself, so that every order works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _tree
from .._compat import base_tensor
from .boundary import Static, leave, own
from .closure import Getter
from .collective_ops import differentiable
from .dtensor import DTensor, place
from .layout import Layout
from .placements import P, Partial
from .program.ir import Graph, Ref, refs_of
from .program.mapped import MappedTrace, Variant, shared_outputs
from .program.program import Program, compile_mapped
from .signature import Signature

if TYPE_CHECKING:
    from .shard_map import ShardMapped


@dataclass(frozen=True)
class Pullback:
    """The traced function with its product: `forward` gives the results and the residuals."""

    traced: MappedTrace
    hidden: tuple[Getter, ...]
    forward: Program
    backward: Program
    layouts: tuple[Layout | None, ...]  # of the leaves
    out_spec: _tree.TreeSpec
    out_layouts: tuple[Layout | Static, ...]
    paths: tuple[str, ...]
    inputs: tuple[int, ...]  # which of the tensor leaves have a gradient
    results: tuple[int, ...]  # which of the results do
    shared: tuple[int, ...]  # results that would otherwise be memory of an argument or of a residual


@dataclass
class Residuals:
    """What the forward program left for the backward one, by hosted rank; None before it has run.

    The pullback is that of the forward call: by the time of the backward a module may be in another mode.
    """

    pullback: Pullback
    values: list[list[Any]] | None = None


def cotangent_layout(layout: Layout) -> Layout:
    """That of a result's cotangent: a contribution to a sum gets the whole cotangent."""
    kept = P.of(
        (axis, placement) for axis, placement in layout.spec.items() if not isinstance(placement, Partial)
    )
    return Layout(layout.mesh, kept, layout.shape)


def split(graph: Graph, arguments: int, results: int) -> tuple[Graph, Graph]:
    """(forward, backward): the first `arguments` inputs are fn's, the rest cotangents; likewise `results`."""
    late = set(graph.inputs[arguments:])
    early_nodes, late_nodes = [], []
    for node in graph.nodes:
        if any(value in late for value in node.refs()):
            late.update(out for out in node.outs if out is not None)
            late_nodes.append(node)
        else:
            early_nodes.append(node)
    outputs, gradients = graph.outputs[:results], graph.outputs[results:]
    needed = {value for node in late_nodes for value in node.refs()} | set(refs_of(gradients))
    residuals = tuple(Ref(value) for value in sorted(needed - late))
    forward = replace(
        graph, inputs=graph.inputs[:arguments], nodes=tuple(early_nodes), outputs=(*outputs, *residuals)
    )
    values = (*(ref.id for ref in residuals), *graph.inputs[arguments:])
    return forward, replace(graph, inputs=values, hidden=(), nodes=tuple(late_nodes), outputs=gradients)


def compile_pullback(
    mapped: ShardMapped, traced: MappedTrace, arguments: int, results: int
) -> tuple[Program, Program, tuple[int, ...]]:
    """The forward and the backward program, and the results that need memory of their own."""
    parts = {id(variant): split(variant.graph, arguments, results) for variant in traced.variants.values()}

    def part(index: int) -> Any:
        return lambda variant: parts[id(variant)][index]

    shared: set[int] = set()
    for forward, _ in parts.values():
        kept = [ref.id for ref in forward.outputs[results:]]
        shared.update(shared_outputs(replace(forward, outputs=forward.outputs[:results]), kept))
    programs = (compile_mapped(traced, mapped.mesh, part(index)) for index in (0, 1))
    return (*programs, tuple(sorted(shared)))  # pyright: ignore[reportReturnType] - two programs


def call(mapped: ShardMapped, signature: Signature, tensors: Sequence[Tensor]) -> Any:
    """The mapped function of tensors through which gradients flow."""
    pullback = mapped.pullback(signature)
    results = list(_Forward.apply(mapped, signature, Residuals(pullback), *tensors))
    leaves = [
        layout.value if isinstance(layout, Static) else results.pop(0) for layout in pullback.out_layouts
    ]
    return _tree.unflatten(pullback.out_spec, leaves)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(mapped: ShardMapped, signature: Signature, residuals: Residuals, *tensors: Tensor) -> Any:
        outputs = run_forward(mapped, signature, residuals, tensors)
        return tuple(output for output in outputs if isinstance(output, Tensor))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mapped, ctx.signature, ctx.residuals, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in output if not differentiable(result)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        pullback = ctx.residuals.pullback
        layouts = [layout for layout in pullback.out_layouts if isinstance(layout, Layout)]
        given = []
        places = [index for index, layout in enumerate(pullback.out_layouts) if isinstance(layout, Layout)]
        for index, layout, cotangent in zip(places, layouts, cotangents, strict=True):
            if index in pullback.results:
                given.append(_as(cotangent, cotangent_layout(layout), ctx.mapped))
        gradients = _Backward.apply(ctx.mapped, ctx.signature, ctx.residuals, *ctx.saved_tensors, *given)
        filled: list[Any] = [None] * len(ctx.saved_tensors)
        for index, gradient in zip(pullback.inputs, gradients, strict=True):
            filled[index] = gradient
        return (None, None, None, *filled)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(mapped: ShardMapped, signature: Signature, residuals: Residuals, *tensors: Tensor) -> Any:
        pullback = residuals.pullback
        count = len(signature.tensors())
        arguments, cotangents = tensors[:count], tensors[count:]
        if residuals.values is None:
            run_forward(mapped, signature, residuals, arguments)
        assert residuals.values is not None
        inputs = [
            [*kept, *(_locals(cotangent)[rank] for cotangent in cotangents)]
            for rank, kept in enumerate(residuals.values)
        ]
        gradients = pullback.backward(inputs)
        tensor_layouts = [layout for layout in pullback.layouts if layout is not None]
        wrapped = leave(mapped.mesh, gradients, [tensor_layouts[index] for index in pullback.inputs])
        return tuple(
            gradient if isinstance(arguments[index], DTensor) else gradient.full_tensor()
            for index, gradient in zip(pullback.inputs, wrapped, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mapped, ctx.signature, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        # The gradient of the product: map the product, and take its own product.
        product, signature = ctx.mapped.product(ctx.signature, ctx.saved_tensors)
        pullback = product.pullback(signature)
        given = [
            _as(cotangent, cotangent_layout(layout), product)
            for layout, cotangent in zip(pullback.out_layouts, cotangents, strict=True)
        ]
        gradients = _Backward.apply(product, signature, Residuals(pullback), *ctx.saved_tensors, *given)
        filled: list[Any] = [None] * len(ctx.saved_tensors)
        for index, gradient in zip(pullback.inputs, gradients, strict=True):
            filled[index] = gradient
        return (None, None, None, *filled)


def run_forward(
    mapped: ShardMapped, signature: Signature, residuals: Residuals, tensors: Sequence[Tensor]
) -> list[Any]:
    """Run the forward program; the residuals are filled in."""
    pullback = residuals.pullback
    leaves = list(signature.leaves)
    for index, tensor in zip(signature.tensors(), tensors, strict=True):
        leaves[index] = tensor
    values = mapped.run(pullback, pullback.forward, leaves)
    count = len(pullback.out_layouts)
    residuals.values = [list(results[count:]) for results in values]
    outputs = own([results[:count] for results in values], pullback.shared)
    return leave(mapped.mesh, outputs, pullback.out_layouts)


def _as(cotangent: Any, layout: Layout, mapped: ShardMapped) -> Tensor:
    """The cotangent in the layout that the backward program takes."""
    base = base_tensor(cotangent)
    if not isinstance(base, DTensor):
        return place(cotangent, mapped.mesh, layout)
    return cotangent if base.layout is layout else DTensor.redistribute(cotangent, layout.spec)


def _locals(tensor: Tensor) -> list[Tensor]:
    assert isinstance(tensor, DTensor)
    return [local.contiguous() for local in tensor._locals]


__all__ = [
    "Pullback",
    "Residuals",
    "Variant",
    "call",
    "compile_pullback",
    "cotangent_layout",
    "differentiable",
    "split",
]
