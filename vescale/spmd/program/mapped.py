"""Mapped programs: a function of local tensors, traced at local shapes, to instructions and exchanges.

There is nothing to decide here: the function says what it communicates. Each collective becomes an
exchange within the groups of its axes, done by the same steps as a redistribution: a psum completes a
Partial, an all_gather undoes a Shard, an all_to_all turns one Shard into another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..._compat import view_source
from ..._errors import TraceError, explain
from ..collective_ops import OPS
from ..lanes import LaneMesh, lanes_of
from ..layout import AbstractMesh, Layout
from ..mesh import Mesh, group_ranks, make_mesh
from ..placements import P, Partial, RaggedShard, Shard
from ..redistribute import Collective, bind, bind_local, plan
from ..redistribute_plan import chunk
from ..transport import all_to_all, broadcast as broadcast_over
from ..varying import Apart, Lockstep, Mapped, within
from .cleanup import cleanup
from .constants import fill_by_shape
from .emit import Call, Exchange, Instruction
from .ir import Graph, Node, Ref, TensorMeta
from .trace import Tracing, trace

aten = torch.ops.aten

LOCAL = ("pvary", "axis_index", "own_slice", "root_only")


@dataclass(frozen=True)
class Variant:
    """The trace of one class of ranks, the axes over which its outputs vary, the modules that it called."""

    graph: Graph
    varying: tuple[frozenset[str], ...]
    modules: tuple[torch.nn.Module, ...] = ()


@dataclass(frozen=True)
class MappedTrace:
    """A traced mapped function: one variant for each place on the axes along which shapes differ."""

    mesh: AbstractMesh
    apart: tuple[str, ...]
    variants: Mapping[tuple[int, ...], Variant]

    def variant(self, rank: int) -> Variant:
        """That of a rank."""
        coordinate = self.mesh.coordinate(rank)
        return self.variants[tuple(coordinate[axis] for axis in self.apart)]

    def lines(self) -> list[str]:
        """All variants as ranks compare them: the same list on every rank."""
        return [
            line.split("  # ")[0]
            for variant in self.variants.values()
            for line in str(variant.graph).splitlines()
        ]

    def shared(self) -> tuple[int, ...]:
        """The outputs that may share memory with something, on any rank."""
        return tuple(sorted({index for v in self.variants.values() for index in shared_outputs(v.graph)}))

    @property
    def first(self) -> Variant:
        return self.variant(0)


def trace_mapped(
    fn: Callable[[list[Tensor]], Sequence[Any]],
    mesh: AbstractMesh,
    axes: tuple[str, ...],
    layouts: Sequence[Layout],
    metas: Sequence[TensorMeta],
    varying: Sequence[frozenset[str]],
    paths: Sequence[str],
) -> MappedTrace:
    """Trace `fn` at the local shapes of inputs in `layouts` (`metas`: dtypes), once a class of ranks."""
    apart = frozenset(axis for layout in layouts for axis in uneven_axes(layout))
    while True:
        split = tuple(axis for axis in mesh.axis_names if axis in apart)
        try:
            return MappedTrace(mesh, split, _variants(fn, mesh, axes, layouts, metas, varying, paths, split))
        except Apart as found:
            apart |= frozenset(found.axes)


def uneven_axes(layout: Layout) -> set[str]:
    """The axes along which local shapes of the layout may differ."""
    uneven = set()
    for axis, placement in layout.spec.items():
        if isinstance(placement, RaggedShard):
            if len(placement.runs) > 1:
                uneven.add(axis)
        elif axis not in layout.digits and not isinstance(placement, Partial):
            uneven.add(axis)
    return uneven


def _variants(
    fn: Callable[[list[Tensor]], Sequence[Any]],
    mesh: AbstractMesh,
    axes: tuple[str, ...],
    layouts: Sequence[Layout],
    metas: Sequence[TensorMeta],
    varying: Sequence[frozenset[str]],
    paths: Sequence[str],
    apart: tuple[str, ...],
) -> dict[tuple[int, ...], Variant]:
    places = [dict(zip(apart, place)) for place in product(*(range(mesh.axis_size(axis)) for axis in apart))]
    lockstep = Lockstep(places)

    def traced(place: Mapping[str, int]) -> Variant:
        rank = rank_at(mesh, place)
        local = [
            TensorMeta(layout.local_shape(rank), meta.dtype, meta.device)
            for layout, meta in zip(layouts, metas, strict=True)
        ]
        mapped = Mapped(mesh, axes, place, lockstep, given=varying)
        outputs: list[frozenset[str]] = []

        def run(tensors: list[Tensor]) -> Sequence[Any]:
            results = within(mapped, lambda: fn(tensors))
            outputs[:] = [
                mapped.over(result) if isinstance(result, Tensor) else frozenset() for result in results
            ]
            return results

        tracing = Tracing(observer=mapped)
        graph = cleanup(fill_by_shape(trace(run, local, paths, tracing)))
        return Variant(graph, tuple(outputs), tuple(tracing.roots))

    calls = [lambda place=place: traced(place) for place in places]
    variants = dict(zip((tuple(place.values()) for place in places), lockstep.run(calls), strict=True))
    _check_sequences(variants, apart)
    return _share_hidden(variants)


def _share_hidden(variants: dict[tuple[int, ...], Variant]) -> dict[tuple[int, ...], Variant]:
    """The variants with one list of closed-over tensors: those that any of them reads."""
    tensors = {id(tensor): tensor for variant in variants.values() for _, tensor in variant.graph.hidden}
    shared = {}
    for place, variant in variants.items():
        graph, values = variant.graph, {id(tensor): value for value, tensor in variant.graph.hidden}
        missing = [tensor for key, tensor in tensors.items() if key not in values]
        values |= {id(tensor): len(graph.metas) + number for number, tensor in enumerate(missing)}
        graph = replace(
            graph,
            hidden=tuple((values[key], tensor) for key, tensor in tensors.items()),
            metas=(*graph.metas, *map(TensorMeta.of, missing)),
        )
        shared[place] = replace(variant, graph=graph)
    return shared


def rank_at(mesh: AbstractMesh, place: Mapping[str, int]) -> int:
    """The first rank with these coordinates."""
    rank = 0
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        rank = rank * size + place.get(axis, 0)
    return rank


def exchanges_of(graph: Graph) -> list[Node]:
    """The collectives of a graph that exchange something, in order."""
    return [
        node
        for node in graph.nodes
        if collective_name(node) is not None and collective_name(node) not in LOCAL
    ]


def collective_name(node: Node) -> str | None:
    name = node.op.overloadpacket.__name__
    return name if node.op.namespace == "vescale" and name in OPS else None


def _check_sequences(variants: Mapping[tuple[int, ...], Variant], apart: tuple[str, ...]) -> None:
    first, *others = variants
    mine = [(collective_name(node), node.args[1]) for node in exchanges_of(variants[first].graph)]
    for place in others:
        theirs = [(collective_name(node), node.args[1]) for node in exchanges_of(variants[place].graph)]
        if mine != theirs:
            index = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs))
            )
            shown = [
                f"{calls[index][0]} over {', '.join(calls[index][1])}" if index < len(calls) else "none"
                for calls in (mine, theirs)
            ]
            raise TraceError(
                explain(
                    f"collective {index} is {shown[0]} at {dict(zip(apart, first))} "
                    f"and {shown[1]} at {dict(zip(apart, place))}",
                    rule="all ranks run the same collectives in the same order",
                    remedy="don't branch on local shapes around a collective",
                )
            )


# Instructions.


def local_instruction(node: Node, mesh: AbstractMesh, rank: int) -> Instruction:
    """What `rank` does for a node of its variant."""
    name = collective_name(node)
    if name is None:
        fn: Any = torch.reshape if node.op in (aten.view.default, aten._unsafe_view.default) else node.op
        return Call(fn, node.args, node.kwargs, node.outs, node.returns_list, node.origin)
    (out,), source, axes = node.outs, node.args[0], node.args[1]
    assert out is not None
    index = member_index(mesh, axes, rank)
    if name == "pvary" or (name == "root_only" and index == node.args[2]):
        return Call(same, (source,), {}, node.outs, False, node.origin)
    if name == "axis_index":
        return Call(torch.full, ((), index), {"dtype": torch.int64}, node.outs, False, node.origin)
    if name == "own_slice":
        _, _, dim, sizes, own = node.args
        return Call(torch.narrow, (source, dim, sum(sizes[:index]), own), {}, node.outs, False, node.origin)
    if name == "root_only":
        return Call(torch.zeros_like, (source,), {}, node.outs, False, node.origin)
    return Exchange(source.id, out, node.origin)


def same(tensor: Tensor) -> Tensor:
    """What a value does that only changes its name."""
    return tensor


def shared_outputs(graph: Graph, also: Sequence[int] = ()) -> tuple[int, ...]:
    """The outputs that may be memory of an input, of an earlier output, or of the values `also`."""
    roots: dict[int, int] = {}
    for node in graph.nodes:
        kept = collective_name(node) in ("own_slice", "root_only")
        source = 0 if kept or node.op is aten._unsafe_view.default else view_source(node.op)
        if source is not None and isinstance(node.args[source], Ref):
            parent: int = node.args[source].id
            for out in node.outs:
                if out is not None:
                    roots[out] = roots.get(parent, parent)
    taken = {*graph.inputs, *(value for value, _ in graph.hidden), *(roots.get(v, v) for v in also)}
    shared = []
    for index, output in enumerate(graph.outputs):
        if isinstance(output, Ref):
            root = roots.get(output.id, output.id)
            if root in taken:
                shared.append(index)
            taken.add(root)
    return tuple(shared)


def member_index(mesh: AbstractMesh, axes: Sequence[str], rank: int) -> int:
    """The place of `rank` among the members of its group over `axes`, the first named outermost."""
    coordinate, index = mesh.coordinate(rank), 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + coordinate[axis]
    return index


# Exchanges: one collective within every group of its axes.


def bind_all(traced: MappedTrace, mesh: Mesh, graphs: Callable[[Variant], Graph]) -> list[Collective]:
    """The exchanges of a mapped function, in order, bound to the ranks that are hosted here."""
    nodes = {place: exchanges_of(graphs(variant)) for place, variant in traced.variants.items()}

    def node_of(index: int) -> Callable[[int], tuple[Node, Graph]]:
        def find(rank: int) -> tuple[Node, Graph]:
            coordinate = mesh.abstract.coordinate(rank)
            place = tuple(coordinate[axis] for axis in traced.apart)
            return nodes[place][index], graphs(traced.variants[place])

        return find

    return [bind_groups(mesh, node_of(index)) for index in range(len(exchanges_of(graphs(traced.first))))]


def bind_groups(mesh: Mesh, node_of: Callable[[int], tuple[Node, Graph]]) -> Collective:
    axes = tuple(node_of(mesh.local_ranks[0])[0].args[1])
    if isinstance(mesh, LaneMesh) and not mesh.is_simulated:
        return _bind_lane_groups(mesh, axes, node_of)
    if not mesh.is_simulated:
        return bind_node(*node_of(mesh.rank), mesh[axes])
    inside = group_mesh(mesh.abstract, axes)
    groups: dict[tuple[int, ...], Collective] = {}
    for rank in range(mesh.size):
        members = group_ranks(mesh.abstract, axes, rank)
        if members not in groups:
            groups[members] = bind_node(*node_of(members[0]), inside)

    return _one_by_one(list(groups.items()))


def _bind_lane_groups(
    mesh: LaneMesh, axes: tuple[str, ...], node_of: Callable[[int], tuple[Node, Graph]]
) -> Collective:
    """For lanes of processes: the groups that have lanes here, one after another."""
    place = {lane: at for at, lane in enumerate(mesh.local_ranks)}
    groups: dict[tuple[int, ...], tuple[list[int], Collective]] = {}
    for lane in mesh.local_ranks:
        members = group_ranks(mesh.abstract, axes, lane)
        if members not in groups:
            here = [place[member] for member in members if member in place]
            groups[members] = here, _bind_lane_group(mesh[axes], node_of, members)

    return _one_by_one(list(groups.values()))


def _one_by_one(groups: Sequence[tuple[Sequence[int], Collective]]) -> Collective:
    """The collectives of groups, each at its places among the values here, one after another."""

    def exchange(locals: Sequence[Tensor]) -> list[Tensor]:
        results: list[Any] = [None] * len(locals)
        for places, run in groups:
            for at, result in zip(places, run([locals[at] for at in places]), strict=True):
                results[at] = result
        return results

    return exchange


def _bind_lane_group(
    part: Mesh, node_of: Callable[[int], tuple[Node, Graph]], members: Sequence[int]
) -> Collective:
    """What is planned as steps is an exchange of lanes; else all have all, and each does its part of it."""
    assert isinstance(part, LaneMesh)
    mine = node_of(members[part.local_ranks[0]])
    if collective_name(mine[0]) not in ("all_to_all", "broadcast", "ppermute"):
        return bind_node(*mine, part)
    shapes = []
    for member in members:
        node, graph = node_of(member)
        shapes.append(graph.metas[node.args[0].id].shape)
    gather, run = _gather_lanes(part, shapes), bind_node(*mine, group_mesh(part.abstract, part.axis_names))

    def exchange(locals: Sequence[Tensor]) -> list[Tensor]:
        results = run(gather(locals))
        return [results[lane].clone() for lane in part.local_ranks]

    return exchange


def _gather_lanes(part: LaneMesh, shapes: Sequence[Sequence[int]]) -> Collective:
    """The values of the lanes of this process -> those of all lanes, in order."""
    hosts = [lanes_of(host, part.abstract, part.hosts.abstract) for host in range(part.hosts.size)]
    if len(hosts) == 1:
        return list
    order = [lane for lanes in hosts for lane in lanes]
    sizes = [math.prod(shapes[lane]) for lane in order]
    receive = [sum(math.prod(shapes[lane]) for lane in lanes) for lanes in hosts]
    group = part.late_group(part.axis_names)

    def gather(locals: Sequence[Tensor]) -> list[Tensor]:
        send = torch.cat([value.reshape(-1) for value in locals])
        arrived = all_to_all(send.repeat(len(hosts)), [send.numel()] * len(hosts), receive, group())
        found = dict(zip(order, arrived.split(sizes), strict=True))
        return [found[lane].view(tuple(shapes[lane])) for lane in range(part.size)]

    return gather


def group_mesh(mesh: AbstractMesh, axes: Sequence[str]) -> Mesh:
    """The members of one group over `axes` as a simulated mesh of their own."""
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.axis_names if axis in axes}
    return make_mesh(sizes, backend="simulated")


def bind_node(node: Node, graph: Graph, group: Mesh) -> Collective:
    """The collective over a group of ranks, a mesh of its own."""
    name, shape = collective_name(node), graph.metas[node.args[0].id].shape
    axes = tuple(node.args[1])
    if name in ("psum", "pmax", "pmin"):
        src = P.of((axis, Partial(name.removeprefix("p"))) for axis in axes)
        return _steps(group, shape, src, P())
    if name in ("all_gather", "all_gather_invariant"):
        _, _, dim, sizes = node.args
        return _along(group, axes, shape, dim, sizes, gather=True)
    if name == "psum_scatter":
        _, _, dim, sizes, _ = node.args
        return _along(group, axes, shape, dim, sizes, gather=False)
    if name == "all_to_all":
        return _bind_all_to_all(group, axes, shape, *node.args[2:6])
    order = [_mesh_index(group.abstract, axes, member) for member in range(group.size)]
    if name == "broadcast":
        return _bind_broadcast(group, order[node.args[2]])
    assert name == "ppermute"
    _, _, sources, result_shape = node.args
    from_mesh = [-1] * group.size
    for target, source in enumerate(sources):
        from_mesh[order[target]] = order[source] if source >= 0 else -1
    return _bind_permute(group, from_mesh, tuple(result_shape))


def _steps(group: Mesh, shape: Sequence[int], src: P, dst: P) -> Collective:
    runs = []
    for step in plan(Layout(group.abstract, src, tuple(shape)), Layout(group.abstract, dst, tuple(shape))):
        if step.is_collective:
            runs.append(bind(step, group))
        else:
            local = [bind_local(step, rank) for rank in group.local_ranks]
            runs.append(
                lambda values, local=local: [fn(value) for fn, value in zip(local, values, strict=True)]
            )
    if not runs:
        return lambda values: [value.clone() for value in values]
    if len(runs) == 1:
        return runs[0]

    def chain(values: Sequence[Tensor]) -> list[Tensor]:
        for run in runs:
            values = run(values)
        return list(values)

    return chain


def _is_chunked(sizes: Sequence[int]) -> bool:
    total, count = sum(sizes), len(sizes)
    return list(sizes) == [
        stop - start for start, stop in (chunk(total, count, index) for index in range(count))
    ]


def _split_spec(axes: tuple[str, ...], dim: int, sizes: Sequence[int]) -> tuple[P, bool]:
    """The placements of parts of these sizes along `dim`; True when they are of dim 0 in its place."""
    if len(set(sizes)) == 1 or (len(axes) == 1 and _is_chunked(sizes)):
        return P.of((axis, Shard(dim)) for axis in axes), False
    assert len(axes) == 1, axes  # the callers take several axes one by one when parts differ
    return P.of([(axes[0], RaggedShard.from_sizes((0,), sizes))]), True


def _along(
    group: Mesh, axes: tuple[str, ...], shape: Sequence[int], dim: int, sizes: Sequence[int], gather: bool
) -> Collective:
    spec, moved = _split_spec(axes, dim, sizes)
    whole = [sum(sizes) if index == dim else size for index, size in enumerate(shape)]
    if moved:
        whole.insert(0, whole.pop(dim))
    partial = P.of((axis, Partial()) for axis in axes)
    run = _steps(group, whole, spec, P()) if gather else _steps(group, whole, partial, spec)
    if not moved or dim == 0:
        return run
    return lambda values: [
        result.movedim(0, dim) for result in run([value.movedim(dim, 0).contiguous() for value in values])
    ]


def _bind_all_to_all(
    group: Mesh,
    axes: tuple[str, ...],
    shape: Sequence[int],
    split: int,
    concat: int,
    split_sizes: Sequence[int],
    concat_sizes: Sequence[int],
) -> Collective:
    order = [_mesh_index(group.abstract, axes, member) for member in range(group.size)]
    member_at = [order.index(rank) for rank in range(group.size)]
    if group.is_simulated or group.size == 1:

        def exchange(values: Sequence[Tensor]) -> list[Tensor]:
            cut = [value.split(split_sizes, split) for value in values]
            return [torch.cat([cut[rank][member] for rank in order], concat) for member in member_at]

        return exchange
    me, process_group = member_at[group.rank], group.late_group(group.axis_names)
    shapes = [list(shape) for _ in order]
    for member, arrives in enumerate(shapes):
        if split != concat:
            arrives[concat] = concat_sizes[member]
        arrives[split] = split_sizes[me]
    receive = [math.prod(shapes[member]) for member in member_at]

    def exchange_here(values: Sequence[Tensor]) -> list[Tensor]:
        cut = values[0].split(split_sizes, split)
        send = [cut[member].reshape(-1) for member in member_at]
        arrived = all_to_all(torch.cat(send), [part.numel() for part in send], receive, process_group())
        parts = arrived.split(receive)
        return [torch.cat([parts[rank].view(shapes[member]) for member, rank in enumerate(order)], concat)]

    return exchange_here


def _mesh_index(mesh: AbstractMesh, axes: Sequence[str], member: int) -> int:
    """The rank in `mesh` of the member number `member` in the order of `axes`."""
    place: dict[str, int] = {}
    for axis in reversed(axes):
        member, place[axis] = divmod(member, mesh.axis_size(axis))
    return rank_at(mesh, place)


def _bind_broadcast(group: Mesh, root: int) -> Collective:
    if group.is_simulated:
        return lambda values: [values[root].clone() for _ in values]
    if group.size == 1:
        return lambda values: [values[0].clone()]
    process_group = group.late_group(group.axis_names)

    def broadcast(values: Sequence[Tensor]) -> list[Tensor]:
        result = values[0].clone(memory_format=torch.contiguous_format)
        broadcast_over(result, root, process_group())
        return [result]

    return broadcast


def _bind_permute(group: Mesh, sources: Sequence[int], shape: tuple[int, ...]) -> Collective:
    if group.is_simulated:
        return lambda values: [
            values[source].clone() if source >= 0 else values[target].new_zeros(values[target].shape)
            for target, source in enumerate(sources)
        ]
    me = group.rank
    source = sources[me]
    target = sources.index(me) if me in sources else -1
    numel = 1
    for size in shape:
        numel *= size
    receive = [numel if member == source else 0 for member in range(group.size)]
    if group.size == 1:
        return lambda values: [values[0].clone() if source == 0 else torch.zeros_like(values[0])]
    process_group = group.late_group(group.axis_names)

    def permute(values: Sequence[Tensor]) -> list[Tensor]:
        (value,) = values
        flat = value.contiguous().view(-1)
        send = [flat.numel() if member == target else 0 for member in range(group.size)]
        arrived = all_to_all(flat if target >= 0 else flat[:0], send, receive, process_group())
        return [arrived.view(shape) if source >= 0 else value.new_zeros(shape)]

    return permute
