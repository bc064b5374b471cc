"""Plain: a traced graph run as one device would, node by node: torch's own ops on global values.

The counterpart of `stepwise`, and independent of it: no layout, no rule and no decision takes part, but for a
mapped function, which means nothing on one device and runs on simulated ranks of its mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._compat import below_autograd
from ..locals import assemble, local_slice
from ..mapped_call import mapped_call
from ..mesh import make_mesh
from .draw import run_whole
from .ir import Graph, Node, Ref, map_args, refs_of
from .program import compile_mapped
from .torch_draws import set_torch_state, torch_draw, torch_state

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PlainNode:
    """What a node of the graph was just given and made, by the numbers of the graph's values."""

    index: int
    node: Node
    operands: Mapping[int, Tensor]
    results: Mapping[int, Tensor]


def run_plainly(
    graph: Graph,
    inputs: Sequence[Tensor],
    hidden: Sequence[Tensor],
    watch: Callable[[PlainNode], None] = lambda node: None,
) -> list[Any]:
    """The outputs of a graph for global inputs and closed-over tensors; `watch` is told of each node.

    Draws of torch's read and move the generators, as the program does. A value goes when it was read for the
    last time.
    """
    given = (*graph.inputs, *(value for value, _ in graph.hidden))
    values: dict[int, Tensor] = dict(zip(given, (*inputs, *hidden), strict=True))
    left = Counter(value for node in graph.nodes for value in node.refs()) + Counter(refs_of(graph.outputs))
    for index, node in enumerate(graph.nodes):
        with below_autograd():
            made = run_node(node, values)
        results = {out: one for out, one in zip(node.outs, made) if out is not None}
        watch(PlainNode(index, node, {value: values[value] for value in node.refs()}, results))
        values.update(results)
        left.subtract(node.refs())
        for value in (*node.refs(), *results):
            if left[value] <= 0:
                values.pop(value, None)
    return [values[output.id] if isinstance(output, Ref) else output for output in graph.outputs]


def run_node(node: Node, values: Mapping[int, Tensor]) -> Sequence[Any]:
    """The results of one node, of global values by number."""
    op = node.op
    if op is torch_draw:
        stream, source = node.args
        out = torch.empty_strided(stream.shape, stream.stride, dtype=stream.dtype, device=stream.device)
        getattr(out, stream.kind)(*stream.numbers, generator=source.find())
        return [out.permute(stream.order)]
    if op is torch_state:
        return [node.args[0].find().get_state()]
    if op is set_torch_state:
        node.args[1].find().set_state(values[node.args[0].id])
        return []
    if op.name() == "vescale::constrain":
        return [values[node.args[0].id]]
    if op.name() == "vescale::mapped":
        return _mapped(node.args[1], [values[value] for value in node.refs()])
    if torch.Tag.nondeterministic_seeded in op.tags:
        result = run_whole(node, [values[value] for value in node.refs()])
    else:
        # Tracing saw other strides than those that come here where cleanup shares views.
        fn: Any = torch.reshape if op in (aten.view.default, aten._unsafe_view.default) else op
        read: Callable[[Ref], Tensor] = lambda ref: values[ref.id]  # noqa: E731
        kwargs = {name: map_args(value, read) for name, value in node.kwargs.items()}
        result = fn(*map_args(node.args, read), **kwargs)
    return result if node.returns_list else [result]


def _mapped(handle: int, operands: Sequence[Tensor]) -> list[Tensor]:
    """A mapped function of global values, on simulated ranks."""
    made = mapped_call(handle)
    abstract = made.traced.mesh
    mesh = make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    inputs = [
        [
            local_slice(value, layout, rank).contiguous()
            for value, layout in zip(operands, made.operands, strict=True)
        ]
        for rank in mesh.local_ranks
    ]
    results = compile_mapped(made.traced, mesh)(inputs)
    tensors = [place for place, out in enumerate(made.traced.first.graph.outputs) if isinstance(out, Ref)]
    return [
        assemble({rank: results[rank][place] for rank in mesh.local_ranks}, layout)
        for place, layout in zip(tensors, made.results, strict=True)
    ]
