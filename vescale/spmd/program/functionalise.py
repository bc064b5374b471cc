"""Functionalise: in-place ops on temporaries to values. `Graph -> Graph`, on the recorded graph.

A tensor that was written gets a new value, and so does everything that shares its memory: the write is
carried up to the tensor of which it is a view (the inverse of the view), and other views of that are taken
again when somebody reads them. Inputs are never written: tracing refuses that before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..._compat import FakeTensorMode, OpOverload, functional_form, is_mutable, view_source, written_arguments
from ..._errors import TraceError, explain
from .ir import Graph, Node, Ref, TensorMeta, map_args
from .running import is_batch_norm, without_writes, writes_statistics
from .torch_draws import overwrite

aten = torch.ops.aten

# Functional forms that don't have the name of the in-place op.
_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.zero_.default: lambda x: (aten.full_like.default, (x, 0)),
    # What is overwritten isn't read: `write` brings the source to its dtype and shape.
    aten.copy_.default: lambda x, source, non_blocking=False: (aten.clone.default, (source,)),
    overwrite: lambda x, source: (aten.alias.default, (source,)),
    aten.relu_.default: lambda x: (aten.relu.default, (x,)),
    aten.polygamma_.default: lambda x, n: (aten.polygamma.default, (n, x)),
}


def functionalise(graph: Graph) -> Graph:
    """The same computation without in-place ops."""
    if not any(is_mutable(node.op) or is_batch_norm(node) for node in graph.nodes):
        return graph
    return _Walk(graph).run()


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas = list(graph.metas)
        self.nodes: list[Node] = []
        self.current = {value: value for value in range(len(self.metas))}  # recorded value -> what it is now
        self.views: dict[
            int, tuple[Node, int]
        ] = {}  # recorded value -> the view that made it, and which result
        self.children: dict[int, list[int]] = {}
        self.stale: set[int] = set()

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if torch.Tag.inplace_view in node.op.tags:  # squeeze_ writes no memory: it is a view
                self.keep(replace(node, op=self.form(node)))
            elif is_batch_norm(node):
                self.normalise(node)
            elif is_mutable(node.op):
                self.write(node)
            else:
                self.keep(node)
        outputs = tuple(map_args(output, lambda ref: Ref(self.get(ref.id))) for output in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs, metas=tuple(self.metas))

    def keep(self, node: Node) -> None:
        source = view_source(node.op)
        if source is not None and isinstance(node.args[source], Ref):
            parent = node.args[source].id
            for place, out in enumerate(node.outs):
                if out is not None:
                    self.views[out] = node, place
                    self.children.setdefault(parent, []).append(out)
        self.nodes.append(self.renamed(node))

    def renamed(self, node: Node) -> Node:
        now: Callable[[Ref], Ref] = lambda ref: Ref(self.get(ref.id))  # noqa: E731
        kwargs = {name: map_args(value, now) for name, value in node.kwargs.items()}
        return replace(node, args=map_args(node.args, now), kwargs=kwargs)

    def get(self, value: int) -> int:
        """What a recorded value is now; a view of something written since is taken again."""
        if value in self.stale:
            self.stale.discard(value)
            node, place = self.views[value]
            outs = [None if out is None else self.new(self.metas[out]) for out in node.outs]
            self.nodes.append(replace(self.renamed(node), outs=tuple(outs)))
            self.current[value] = outs[place] or 0
        return self.current[value]

    def new(self, meta: TensorMeta) -> int:
        self.metas.append(meta)
        return len(self.metas) - 1

    def emit(
        self, op: OpOverload, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
    ) -> int:
        out = self.new(self.result_meta(op, args, kwargs or {}))
        self.nodes.append(Node(op, args, kwargs or {}, (out,), like.origin))
        return out

    def result_meta(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorMeta:
        with FakeTensorMode():
            made: Callable[[Ref], torch.Tensor] = lambda ref: torch.empty(  # noqa: E731
                self.metas[ref.id].shape, dtype=self.metas[ref.id].dtype, device=self.metas[ref.id].device
            )
            return TensorMeta.of(
                op(*map_args(args, made), **{name: map_args(v, made) for name, v in kwargs.items()})
            )

    def form(self, node: Node) -> OpOverload:
        """The op that computes out of place what this one writes."""
        form = functional_form(node.op)
        if form is None:
            raise self.refuse(node, f"{node.op} has no form out of place")
        return form

    def write(self, node: Node) -> None:
        written = written_arguments(node.op)
        if written != [0] or not isinstance(node.args[0], Ref) or len(node.outs) != 1:
            raise self.refuse(node, f"{node.op} writes to an argument")
        target = node.args[0].id
        renamed = self.renamed(node)
        if node.op in _FORMS:
            op, args = _FORMS[node.op](*renamed.args, **renamed.kwargs)
            kwargs: dict[str, Any] = {}
        else:
            op, args, kwargs = self.form(node), renamed.args, dict(renamed.kwargs)
        meta = self.metas[target]
        value = self.emit(op, args, node, kwargs)
        keeps = {"dtype": meta.dtype, "device": meta.device}  # an in-place op keeps those of what it writes
        if any(getattr(self.metas[value], name) != kept for name, kept in keeps.items()):
            value = self.emit(aten._to_copy.default, (Ref(value),), node, keeps)
        if self.metas[value].shape != meta.shape:
            value = self.emit(aten.expand.default, (Ref(value), tuple(meta.shape)), node)
        (out,) = node.outs
        assert out is not None
        self.assign(target, value, node)
        self.current[out] = value
        self.views[out], self.children[out] = (
            (Node(aten.alias.default, (Ref(target),), {}, (out,), node.origin), 0),
            [],
        )
        self.children.setdefault(target, []).append(out)

    def normalise(self, node: Node) -> None:
        """A batch norm: its running statistics are results too, and are written when it has run."""
        pure = self.renamed(without_writes(node))
        if not writes_statistics(node):
            self.nodes.append(pure)
        else:
            written = [ref.id for ref in node.args[3:5]]
            for target in written:
                self.check_temporary(target, node)
            news = [self.new(self.metas[target]) for target in written]
            self.nodes.append(replace(pure, outs=(*pure.outs, *news)))
            for target, new in zip(written, news, strict=True):
                self.assign(target, new, node)
        for out in node.outs[3:]:  # the reserve of cudnn's form
            if out is not None:
                kwargs = {"dtype": self.metas[out].dtype, "device": self.metas[out].device}
                self.current[out] = self.emit(aten.empty.memory_format, ((0,),), node, kwargs)

    def check_temporary(self, target: int, node: Node) -> None:
        """Refuse a hidden write to what was there before the call; torch counts no version for it."""
        while target in self.views:
            view = self.views[target][0]
            target = view.args[view_source(view.op) or 0].id
        if target in (*self.graph.inputs, *(value for value, _ in self.graph.hidden)):
            raise TraceError(
                explain(
                    "an update of the running statistics of a batch norm in training",
                    where=node.origin,
                    rule="a function doesn't mutate its arguments, nor what it closes over",
                    remedy="clone the buffers inside the function and return them, or set "
                    "track_running_stats=False",
                )
            )

    def assign(self, target: int, value: int, node: Node) -> None:
        """`target` is `value` from now on; what shares its memory follows."""
        root, path = target, [target]
        self.current[target] = value
        self.stale.discard(target)
        while root in self.views:
            view, place = self.views[root]
            parent = view.args[view_source(view.op) or 0].id
            value = self.put_back(view, place, self.get(parent), value, node)
            self.current[parent] = value
            self.stale.discard(parent)
            root = parent
            path.append(root)
        pending = [root]
        while pending:
            here = pending.pop()
            for child in self.children.get(here, ()):
                if child not in path:
                    self.stale.add(child)
                pending.append(child)

    def put_back(self, view: Node, place: int, parent: int, value: int, node: Node) -> int:
        """The parent with `value` in the place of its view: the view's inverse."""
        op, args, shape = view.op, view.args, self.metas[parent].shape
        base, part = Ref(parent), Ref(value)
        get: Callable[[int, str, Any], Any] = lambda index, name, default: (  # noqa: E731
            args[index] if len(args) > index else view.kwargs.get(name, default)
        )
        if op in (aten.alias.default, aten.detach.default, aten.lift_fresh.default):
            return value
        if op in (aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.unsqueeze.default):
            return self.emit(aten.view.default, (part, tuple(shape)), node)
        if op in (aten.squeeze.dim, aten.squeeze.dims):
            return self.emit(aten.view.default, (part, tuple(shape)), node)
        if op is aten.t.default:
            return self.emit(aten.t.default, (part,), node)
        if op is aten.transpose.int:
            return self.emit(aten.transpose.int, (part, args[1], args[2]), node)
        if op is aten.permute.default:
            order = [dim % len(shape) for dim in args[1]]
            return self.emit(
                aten.permute.default, (part, tuple(order.index(dim) for dim in range(len(order)))), node
            )
        if op is aten.select.int:
            return self.emit(aten.select_scatter.default, (base, part, args[1], args[2]), node)
        if op is aten.slice.Tensor:
            rest = (get(1, "dim", 0), get(2, "start", None), get(3, "end", None), get(4, "step", 1))
            return self.emit(aten.slice_scatter.default, (base, part, *rest), node)
        if op is aten.diagonal.default:
            rest = (get(1, "offset", 0), get(2, "dim1", 0), get(3, "dim2", 1))
            return self.emit(aten.diagonal_scatter.default, (base, part, *rest), node)
        if op is aten.as_strided.default:
            rest = (args[1], args[2], get(3, "storage_offset", None))
            return self.emit(aten.as_strided_scatter.default, (base, part, *rest), node)
        if op is aten.unbind.int:
            return self.emit(aten.select_scatter.default, (base, part, get(1, "dim", 0), place), node)
        if op in (aten.split.Tensor, aten.split_with_sizes.default):
            dim = get(2, "dim", 0)
            start = sum(self.metas[out].shape[dim] for out in view.outs[:place] if out is not None)
            stop = start + self.metas[value].shape[dim]
            return self.emit(aten.slice_scatter.default, (base, part, dim, start, stop, 1), node)
        raise self.refuse(node, f"a write through {op}")

    def refuse(self, node: Node, what: str) -> TraceError:
        return TraceError(
            explain(
                what,
                where=node.origin,
                rule="in-place ops on temporaries are turned into values, where the op has such a form",
                remedy="compute the new value out of place",
            )
        )
