"""Cleanup: the traced graph without what computes nothing. `Graph -> Graph`.

Autograd takes views of views (the transpose of a transposed weight), aliases and repeated transposes;
each would be a call at run time, and none moves data.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from .ir import Graph, Node, Ref, map_args, refs_of
from .torch_draws import is_effect, set_torch_state, torch_state
from .trace import is_strided_view

aten = torch.ops.aten

# Ops whose last result is the info of what went wrong, which they raise when told to check it.
_CHECKING = (
    aten.linalg_cholesky_ex.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten._linalg_solve_ex.default,
)
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


def cleanup(graph: Graph) -> Graph:
    """Drop aliases, undo transposes of transposes, share equal views, drop what nobody reads."""
    return drop_dead(join_cross_entropy(share_views(in_values(join_checks(without_states(graph))))))


# What torch may only note on a tensor, to be done when it is read: a collective sends memory as it is.
_NOTED = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
_NOTED |= {aten.resolve_conj.default: aten.alias.default, aten.resolve_neg.default: aten.alias.default}


def in_values(graph: Graph) -> Graph:
    """Conjugates and negatives that are values, and strides that count in memory of one's own."""
    nodes: list[Node] = []
    metas = list(graph.metas)
    for node in graph.nodes:
        if node.op in _NOTED:
            node = replace(node, op=_NOTED[node.op])
        elif is_strided_view(node.op):  # tracing saw to it that the operand is contiguous there
            base, *rest = node.args
            metas.append(metas[base.id])
            dense = Ref(len(metas) - 1)
            kwargs = {"memory_format": torch.contiguous_format}
            nodes.append(Node(aten.clone.default, (base,), kwargs, (dense.id,), node.origin))
            node = replace(node, args=(dense, *rest))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), metas=tuple(metas))


def share_views(graph: Graph) -> Graph:
    """One node for each distinct transpose or reshape of a value in a region; none for aliases."""
    same: dict[int, int] = {}  # value -> the value that it equals
    made: dict[tuple, int] = {}
    transposed: dict[int, int] = {}
    nodes: list[Node] = []

    def resolve(ref: Ref) -> Ref:
        return Ref(same.get(ref.id, ref.id))

    for node in graph.nodes:
        node = replace(
            node,
            args=map_args(node.args, resolve),
            kwargs={name: map_args(value, resolve) for name, value in node.kwargs.items()},
        )
        if node.op in IDENTITIES or node.op.name() == "vescale::pvary":  # typing is over
            same[_out(node)] = node.args[0].id
            continue
        if node.op in (aten.t.default, aten.transpose.int, aten.view.default, aten._unsafe_view.default):
            source = node.args[0].id
            if node.op is aten.t.default and source in transposed:
                same[_out(node)] = transposed[source]
                continue
            if (
                node.op in (aten.view.default, aten._unsafe_view.default)
                and graph.metas[source].shape == graph.metas[_out(node)].shape
            ):
                same[_out(node)] = source
                continue
            key = (node.op, node.args)
            if key in made:
                same[_out(node)] = made[key]
                continue
            made[key] = _out(node)
            if node.op is aten.t.default:
                transposed[_out(node)] = source
        nodes.append(node)
    return replace(
        graph, nodes=tuple(nodes), outputs=tuple(map_args(output, resolve) for output in graph.outputs)
    )


def join_checks(graph: Graph) -> Graph:
    """`linalg.inv` is `inv_ex`, then a look at its info that has no result: the op is to look itself."""
    checked = {node.args[0].id for node in graph.nodes if node.op.name() == "aten::_linalg_check_errors"}
    nodes = [
        replace(node, kwargs=node.kwargs | {"check_errors": True})
        if node.op in _CHECKING and node.outs[-1] in checked
        else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def join_cross_entropy(graph: Graph) -> Graph:
    """nll_loss_backward into log_softmax's backward, over the last dim: one node, see rules/softmax."""
    uses = Counter(value for node in graph.nodes for value in node.refs()) + Counter(refs_of(graph.outputs))
    made = {out: node for node in graph.nodes for out in node.outs if out is not None}
    nodes: list[Node] = []
    for node in graph.nodes:
        inner = made.get(node.args[0].id) if node.op is aten._log_softmax_backward_data.default else None
        if inner is not None and inner.op is aten.nll_loss_backward.default and uses[_out(inner)] == 1:
            gradient, log_probs, target, weight, reduction, ignore_index, total_weight = inner.args
            shape = graph.metas[log_probs.id].shape
            same = (
                node.args[1] == log_probs
                and node.args[2] % len(shape) == len(shape) - 1
                and node.args[3] == graph.metas[log_probs.id].dtype
            )
            if same and weight is None and len(shape) == 2 and reduction in (1, 2):
                joined = torch.ops.vescale.cross_entropy_backward.default
                node = replace(
                    node,
                    op=joined,
                    args=(gradient, log_probs, target, reduction, ignore_index, total_weight),
                    kwargs={},
                )
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def without_states(graph: Graph) -> Graph:
    """Without the states of generators that nobody draws from: a recomputation can't know that before."""
    states = (torch_state, set_torch_state)
    if any(is_effect(node.op) and node.op not in states for node in graph.nodes):
        return graph
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.op not in states))


def drop_dead(graph: Graph) -> Graph:
    """Without nodes whose results nobody reads. Keyed draws are pure; torch's own move their generator."""
    needed = set(refs_of(graph.outputs))
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if is_effect(node.op) or any(out in needed for out in node.outs):
            kept.append(node)
            needed.update(node.refs())
    return replace(graph, nodes=tuple(reversed(kept)))


def _out(node: Node) -> int:
    (out,) = node.outs
    assert out is not None
    return out
