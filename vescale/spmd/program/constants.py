"""Constants: what is filled like a value needs its shape alone. `Graph -> Graph`, for local shapes.

The gradient of a loss starts from ones like the loss; without this pass nobody could drop the collective
that made the loss, when only the gradient is asked for.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .ir import Graph, Node

aten = torch.ops.aten

_FILLED = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


def fill_by_shape(graph: Graph) -> Graph:
    """The same graph, in which ones and zeros like a value don't read it."""

    def filled(node: Node) -> Node:
        if node.op not in _FILLED:
            return node
        meta = graph.metas[node.outs[0] or 0]
        return replace(
            node,
            op=aten.full.default,
            args=(tuple(meta.shape), _FILLED[node.op]),
            kwargs={"dtype": meta.dtype, "device": meta.device},
        )

    return replace(graph, nodes=tuple(map(filled, graph.nodes)))
