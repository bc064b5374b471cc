"""Collectives of lanes: what lanes of one process exchange is copied, the rest goes in one collective.

What several lanes of a process need alike is sent to it once. A reduction takes its tree over the lanes; here
for 8 lanes in 2 processes:

    lane      0   1   2   3    4   5   6   7
              |___|   |___|    |___|   |___|
                |_______|        |_______|       each process sums what it hosts,
                    |________________|           and goes on with what the others send

What a process sends is the sum of a subtree, so the bytes are those of a reduction over processes. It sends
the largest subtrees that it hosts whole; where the tree is over several axes and lanes are not next to each
other in it, these are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from .lanes import LaneMesh, host_of, lanes_of, widths
from .layout import AbstractMesh
from .mesh import group_ranks
from .redistribute_plan import GATHER_BYTES, Step, chunk
from .reduction import Reduction
from .regions import Block, Region, overlap, region, strides
from .transport import Assemble, all_gather, all_to_all, assembler, start_all_gather, start_all_to_all

Pieces = Sequence[Sequence[Tensor]]  # for each step those of the lanes that live here
Lanes = Callable[[Pieces], list[list[Tensor]]]
Node = list[tuple[int, Block]]  # the parts of a value: in which tensor, and where


def bind_lanes(
    steps: tuple[Step, ...], mesh: LaneMesh, *, untold: Collection[str] = (), apart: bool = True
) -> Lanes:
    """`redistribute.bind_many` for a mesh of lanes: one collective between processes, at most.

    Lanes of a rank that get the same get one tensor, unless `apart`. Over the axes `untold` their values
    differ although the layouts don't say so.
    """
    sides = [_Side(step, mesh, untold) for step in steps]
    if steps[0].kind == "all_reduce" and not mesh.is_simulated and len(sides[0].peers) > 1:
        return _all_reduce(sides, apart)
    begin = begin_lanes(steps, mesh, untold=untold, apart=apart)
    return lambda locals: begin(locals)()


def begin_lanes(
    steps: tuple[Step, ...], mesh: LaneMesh, *, untold: Collection[str] = (), apart: bool = True
) -> Callable[[Pieces], Callable[[], list[list[Tensor]]]]:
    """The start of an exchange or a reduction; what it returns, called once, is the end."""
    sides = [_Side(step, mesh, untold) for step in steps]
    peers = sides[0].peers
    if mesh.is_simulated or len(peers) == 1:
        finish = _unpack(sides, False, apart)

        def copy(locals: Pieces) -> Callable[[], list[list[Tensor]]]:
            results = finish(_parcels(sides, locals))
            return lambda: results

        return copy
    me = mesh.hosts.rank
    group = mesh.late_group(steps[0].axes)
    counts = [sum(side.count(peer, me) for side in sides) for peer in peers]
    # All need all of the same size; every process of the group sees that.
    gathers = steps[0].kind == "all_gather" and len(set(counts)) == 1
    packed, in_splits = _pack(sides, [next(peer for peer in peers if peer != me)] if gathers else peers, me)
    out_splits = [count * (peer != me) for peer, count in zip(peers, counts, strict=True)]
    finish = _unpack(sides, gathers, apart)

    def begin(locals: Pieces) -> Callable[[], list[list[Tensor]]]:
        parcels = _parcels(sides, locals)
        if gathers:
            arrival = start_all_gather(packed(parcels).view(-1), len(peers), group())
        else:
            arrival = start_all_to_all(packed(parcels), in_splits, out_splits, group())
        return lambda: finish([*parcels, arrival()])

    return begin


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a process has to send: the sum of some lanes' pieces, or one lane's piece.

    `key` says in which group, `node` which node of the tree of contributions it is.
    """

    lanes: tuple[int, ...]
    region: Region
    key: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Receiver:
    """Lanes of a process that need the same."""

    lanes: tuple[int, ...]
    region: Region
    shape: tuple[int, ...]
    key: tuple[int, ...]


class _Side:
    """A step as the hosts of lanes see it."""

    def __init__(self, step: Step, mesh: LaneMesh, untold: Collection[str]) -> None:
        self.step, self.mesh = step, mesh
        self.lanes, self.hosts = mesh.abstract, mesh.hosts.abstract
        self.here = mesh.hosts.local_ranks
        self.reduced = tuple(axis for axis, _ in step.reductions)
        self.reduce = Reduction(self.lanes, dict(step.reductions)) if self.reduced else None
        self.level, self.nodes = _frontier(self.lanes, self.hosts, self.reduced)
        wide = widths(self.lanes, self.hosts)
        # Over these axes the lanes of a host have equal values, and exchange nothing: as many lanes.
        told = {*step.axes, *step.src.spec, *untold}
        self.alike = {axis: count for axis, count in wide.items() if axis not in told}
        self.parcels, self.receivers = cache(self._parcels), cache(self._receivers)
        place = {lane: number for number, lane in enumerate(mesh.local_ranks)}
        self.taken = [[place[lane] for lane in p.lanes] for host in self.here for p in self.parcels(host)]
        self.given = [[place[lane] for lane in r.lanes] for host in self.here for r in self.receivers(host)]

    @property
    def peers(self) -> tuple[int, ...]:
        """The processes that take part, where each has a rank."""
        return self.members(self.here[0])

    def members(self, host: int) -> tuple[int, ...]:
        """The hosts with which one exchanges, itself among them."""
        return group_ranks(self.hosts, self.step.axes, host)

    def _parcels(self, host: int) -> list[Parcel]:
        found: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[int]] = {}
        for lane in lanes_of(host, self.lanes, self.hosts):
            coordinate = self.lanes.coordinate(lane)
            if any(coordinate[axis] % count for axis, count in self.alike.items()):
                continue  # the first of the lanes that are alike speaks for all
            place = 0
            for axis in self.reduced:
                place = place * self.lanes.axis_size(axis) + coordinate[axis]
            column = tuple(coordinate[a] for a in self.step.axes if a not in self.reduced)
            found.setdefault((self.key(lane), column, place >> self.level), []).append(lane)
        src = self.step.src
        return [
            Parcel(tuple(lanes), region(src, lanes[0]), key, node)
            for (key, _, node), lanes in sorted(found.items())
        ]

    def _receivers(self, host: int) -> list[Receiver]:
        found: dict[tuple[tuple[int, ...], Region], list[int]] = {}
        dst = self.step.dst
        for lane in lanes_of(host, self.lanes, self.hosts):
            found.setdefault((self.key(lane), region(dst, lane)), []).append(lane)
        return [
            Receiver(tuple(lanes), where, dst.local_shape(lanes[0]), key)
            for (key, where), lanes in found.items()
        ]

    def key(self, lane: int) -> tuple[int, ...]:
        """The group of a lane, among those of its host."""
        coordinate = self.lanes.coordinate(lane)
        return tuple(i for a, i in coordinate.items() if a not in self.step.axes and a not in self.alike)

    def blocks(self, sender: int, receiver: int) -> list[list[tuple[int, int, Block]]]:
        """For each receiver there, in the order of the wire: (node, which parcel, block)."""
        return [
            [
                (parcel.node, which, block)
                for which, parcel in enumerate(self.parcels(sender))
                if parcel.key == wanted.key
                for block in overlap(parcel.region, wanted.region)
            ]
            for wanted in self.receivers(receiver)
        ]

    def count(self, sender: int, receiver: int) -> int:
        """How many elements go from one host to another."""
        return sum(block.numel for found in self.blocks(sender, receiver) for _, _, block in found)

    def sums(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The parcels of the hosts that live here, contiguous."""
        made = []
        for lanes in self.taken:
            mine = [pieces[lane].contiguous() for lane in lanes]
            if len(mine) > 1:
                assert self.reduce is not None
                mine = [self.reduce.partial(mine)]
            made += mine
        return made

    def to_lanes(self, results: Sequence[Tensor], apart: bool) -> list[Tensor]:
        """What each receiver got, for each of its lanes."""
        by_lane: dict[int, Tensor] = {}
        for lanes, result in zip(self.given, results, strict=True):
            by_lane[lanes[0]] = result
            by_lane.update((lane, result.clone() if apart else result) for lane in lanes[1:])
        return [by_lane[lane] for lane in range(len(by_lane))]


@lru_cache(maxsize=4096)
def _frontier(lanes: AbstractMesh, hosts: AbstractMesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """How high in the tree over `axes` the nodes are that hosts send, and how many there are."""
    members = group_ranks(lanes, axes, 0)
    owners = [host_of(lane, lanes, hosts) for lane in members]
    level = 0
    while len(owners) > 1 and all(len(set(owners[at : at + 2])) == 1 for at in range(0, len(owners), 2)):
        owners, level = owners[::2], level + 1
    return level, len(owners)


def _parcels(sides: Sequence[_Side], locals: Pieces) -> list[Tensor]:
    return [parcel for side, pieces in zip(sides, locals, strict=True) for parcel in side.sums(pieces)]


def _pack(sides: Sequence[_Side], receivers: Sequence[int], me: int) -> tuple[Assemble, list[int]]:
    """One send buffer from all parcels, and how much of it each of these hosts gets: this one nothing."""
    pieces: Node = []
    splits, offset = [], 0
    for host in receivers:
        start, first = offset, 0
        for side in sides:
            for found in side.blocks(me, host) if host != me else ():
                for _, which, block in found:
                    flat = strides(block.sizes)
                    moved = Block(block.sizes, block.src_offset, block.src_strides, offset, flat)
                    pieces.append((first + which, moved))
                    offset += block.numel
            first += len(side.parcels(me))
        splits.append(offset - start)
    return assembler(pieces, (offset,), own=False), splits


def _unpack(
    sides: Sequence[_Side], gathers: bool, apart: bool
) -> Callable[[list[Tensor]], list[list[Tensor]]]:
    """The parcels that are here, and what arrived after them -> for each step what its lanes get."""
    here = sides[0].here
    last = sum(len(side.taken) for side in sides)  # what arrived
    parts: list[list[list[Node]]] = [[] for _ in sides]  # of each step, receiver and node
    for host in here:
        at, nodes = 0, [[[[] for _ in range(s.nodes)] for _ in s.receivers(host)] for s in sides]
        for peer in sides[0].members(host):
            first = 0
            for side, mine in zip(sides, nodes, strict=True):
                before = sum(len(side.parcels(h)) for h in here if h < peer)
                for into, found in zip(mine, side.blocks(peer, host), strict=True):
                    for node, which, block in found:
                        if peer in here and not gathers:
                            into[node].append((first + before + which, block))
                            continue
                        flat = strides(block.sizes)
                        moved = Block(block.sizes, at, flat, block.dst_offset, block.dst_strides)
                        into[node].append((last, moved))
                        at += block.numel
                first += len(side.taken)
        for side, mine in zip(parts, nodes, strict=True):
            side += mine
    alone = sum(map(len, parts)) == 1

    def value(pieces: Node, shape: tuple[int, ...], side: _Side) -> Assemble:
        # What is only read on, or is nobody else's, need not be copied.
        arrived = alone and all(which == last for which, _ in pieces)
        summed = len(here) == 1 and side.reduce is not None and side.level > 0
        return assembler(pieces, shape, own=not (side.nodes > 1 or arrived or summed))

    make = []
    for side, receivers in zip(sides, parts, strict=True):
        shapes = [wanted.shape for host in here for wanted in side.receivers(host)]
        make.append(
            [
                [value(pieces, shape, side) for pieces in nodes]
                for nodes, shape in zip(receivers, shapes, strict=True)
            ]
        )

    def finish(tensors: list[Tensor]) -> list[list[Tensor]]:
        results = []
        for side, receivers in zip(sides, make, strict=True):
            found = []
            for nodes in receivers:
                values = [assemble(tensors) for assemble in nodes]
                if side.reduce is None:
                    found += values
                elif len(values) == 1:
                    found.append(side.reduce.finish(values[0]))
                else:
                    found.append(side.reduce.tree(values))
            results.append(side.to_lanes(found, apart))
        return results

    return finish


def _all_reduce(sides: Sequence[_Side], apart: bool) -> Lanes:
    """Between processes: each sums its subtrees, then small ones are gathered and others cut in parts."""
    side, mesh = sides[0], sides[0].mesh
    peers, me, reduce = side.peers, mesh.hosts.rank, side.reduce
    assert reduce is not None
    count, index, group = len(peers), peers.index(me), mesh.late_group(side.step.axes)
    shapes = [[wanted.shape for wanted in side.receivers(me)] for side in sides]
    sizes = [math.prod(shape) for found in shapes for shape in found]
    numel, nodes = sum(sizes), side.nodes
    owned = [sorted({parcel.node for parcel in side.parcels(peer)}) for peer in peers]
    rows = len(owned[index])  # of each process as many: its nodes of the tree
    order = [node for mine in owned for node in mine]
    place = [order.index(node) for node in range(nodes)]
    splits = [stop - start for start, stop in (chunk(numel, count, i) for i in range(count))]
    mine = splits[index]

    def vectors(locals: Pieces) -> Tensor:
        """A row for each node that is hosted here: the groups' sums of all steps, end to end."""
        found: dict[int, list[Tensor]] = {node: [] for node in owned[index]}
        for side, pieces in zip(sides, locals, strict=True):
            for parcel, total in zip(side.parcels(me), side.sums(pieces), strict=True):
                found[parcel.node].append(total.view(-1))
        made = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in found.values()]
        return made[0].view(1, -1) if rows == 1 else torch.stack(made)

    def tree(found: Tensor) -> Tensor:
        contributions = found.unbind()
        return reduce.tree([contributions[at] for at in place])

    def total(flat: Tensor) -> Tensor:
        if flat.nbytes * count <= GATHER_BYTES:
            return tree(all_gather(flat.view(-1), count, group()).view(nodes, numel))
        send = flat.view(-1) if rows == 1 else torch.cat([part.reshape(-1) for part in flat.split(splits, 1)])
        arrived = all_to_all(send, [rows * size for size in splits], [rows * mine] * count, group())
        part = tree(arrived.view(nodes, mine))
        if len(set(splits)) == 1:
            return all_gather(part, count, group())
        return all_to_all(part.repeat(count), [mine] * count, splits, group())

    def apply(locals: Pieces) -> list[list[Tensor]]:
        flat = total(vectors(locals))
        parts = iter([flat] if len(sizes) == 1 else [part.clone() for part in flat.split(sizes)])
        return [
            side.to_lanes([next(parts).view(shape) for shape in found], apart)
            for side, found in zip(sides, shapes, strict=True)
        ]

    return apply


__all__ = ["begin_lanes", "bind_lanes"]
