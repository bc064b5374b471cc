"""Collectives of lanes: what lanes of one process exchange is copied, the rest goes in one collective.

What several lanes of a process need alike is sent to it once. A reduction takes its tree over the lanes; here
for 8 lanes in 2 processes:

    lane      0   1   2   3    4   5   6   7
              |___|   |___|    |___|   |___|
                |_______|        |_______|       each process sums what it hosts,
                    |________________|           and goes on with what the others send

What a process sends is the sum of a subtree, so the bytes are those of a reduction over processes. The nodes
that are sent are the largest subtrees that are hosted whole; where the tree is over several axes and lanes are
not next to each other in it, these are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

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


def bind_lanes(steps: tuple[Step, ...], mesh: LaneMesh) -> Lanes:
    """`redistribute.bind_many` for a mesh of lanes in processes: one collective at most."""
    if steps[0].kind == "all_reduce":
        return _all_reduce(steps, mesh)
    begin = begin_lanes(steps, mesh)
    return lambda locals: begin(locals)()


def begin_lanes(
    steps: tuple[Step, ...], mesh: LaneMesh
) -> Callable[[Pieces], Callable[[], list[list[Tensor]]]]:
    """The start of an exchange or a reduce-scatter; what it returns, called once, is the end."""
    sides = [_Side(step, mesh) for step in steps]
    me, peers = mesh.hosts.rank, sides[0].peers
    group = _group(sides[0])
    counts = [[side.count(peer, me) for peer in peers] for side in sides]
    # All need all of the same size; every process of the group sees that.
    gathers = steps[0].kind == "all_gather" and len(peers) > 1
    gathers = gathers and len({sum(sizes) for sizes in zip(*counts)}) == 1
    other = next((peer for peer in peers if peer != me), me)
    packed, in_splits = _pack(sides, [other] if gathers else peers, me)
    arrived_from = [sum(sizes) if gathers or peer != me else 0 for peer, sizes in zip(peers, zip(*counts))]
    finish = _unpack(sides, me, gathers)

    def begin(locals: Pieces) -> Callable[[], list[list[Tensor]]]:
        parcels = [side.sums(pieces) for side, pieces in zip(sides, locals, strict=True)]
        flat = [parcel for mine in parcels for parcel in mine]
        if len(peers) == 1:
            return lambda: finish(flat[0], flat)
        if gathers:
            arrival = start_all_gather(packed(flat).view(-1), len(peers), group())
        else:
            arrival = start_all_to_all(packed(flat), in_splits, arrived_from, group())
        return lambda: finish(arrival(), flat)

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
    """A step as processes see it: pure, but for `sums` and `shared`."""

    def __init__(self, step: Step, mesh: LaneMesh) -> None:
        self.step, self.mesh = step, mesh
        self.lanes, self.hosts = mesh.abstract, mesh.hosts.abstract
        self.peers = group_ranks(self.hosts, step.axes, mesh.hosts.rank)
        self.reduced = tuple(axis for axis, _ in step.reductions)
        self.reduce = Reduction(self.lanes, dict(step.reductions)) if self.reduced else None
        self.level, self.nodes = _frontier(self.lanes, self.hosts, self.reduced)
        self.parcels, self.receivers = cache(self._parcels), cache(self._receivers)
        place = {lane: number for number, lane in enumerate(mesh.local_ranks)}
        self._mine = [[place[lane] for lane in parcel.lanes] for parcel in self.parcels(mesh.hosts.rank)]
        self._wanted = [[place[lane] for lane in wanted.lanes] for wanted in self.receivers(mesh.hosts.rank)]

    def _parcels(self, host: int) -> list[Parcel]:
        """What a process has to send, in order."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[int]] = {}
        for lane in lanes_of(host, self.lanes, self.hosts):
            coordinate = self.lanes.coordinate(lane)
            # Of lanes with equal values, over an axis that is not exchanged, the first speaks for all.
            if any(coordinate[axis] % self._alike[axis] for axis in self._alike):
                continue
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
        """What a process has to receive, in order: the same for lanes with the same region."""
        found: dict[tuple[tuple[int, ...], Region], list[int]] = {}
        dst = self.step.dst
        for lane in lanes_of(host, self.lanes, self.hosts):
            found.setdefault((self.key(lane), region(dst, lane)), []).append(lane)
        return [
            Receiver(tuple(lanes), where, dst.local_shape(lanes[0]), key)
            for (key, where), lanes in found.items()
        ]

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
        """How many elements go from one process to another."""
        return sum(block.numel for found in self.blocks(sender, receiver) for _, _, block in found)

    def key(self, lane: int) -> tuple[int, ...]:
        """The group of a lane, among those of its process."""
        coordinate = self.lanes.coordinate(lane)
        return tuple(
            index
            for axis, index in coordinate.items()
            if axis not in self.step.axes and axis not in self._alike
        )

    @cached_property
    def _alike(self) -> dict[str, int]:
        """The axes over which the lanes of a process have equal values, and how many lanes that are."""
        wide = widths(self.lanes, self.hosts)
        return {a: n for a, n in wide.items() if a not in self.step.axes and a not in self.step.src.spec}

    def sums(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The parcels of this process, contiguous."""
        made = []
        for lanes in self._mine:
            mine = [pieces[lane].contiguous() for lane in lanes]
            made.append(mine[0] if len(mine) == 1 else self.reduce.partial(mine))  # type: ignore[union-attr]
        return made

    def shared(self, results: Sequence[Tensor]) -> list[Tensor]:
        """What each receiver got, for each lane in memory of its own."""
        by_lane: dict[int, Tensor] = {}
        for (first, *others), result in zip(self._wanted, results, strict=True):
            by_lane[first] = result
            by_lane.update((lane, result.clone()) for lane in others)
        return [by_lane[lane] for lane in range(len(by_lane))]


@lru_cache(maxsize=4096)
def _frontier(lanes: AbstractMesh, hosts: AbstractMesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """How high in the tree over `axes` the nodes are that processes send, and how many there are."""
    members = group_ranks(lanes, axes, 0)
    owners = [host_of(lane, lanes, hosts) for lane in members]
    level = 0
    while len(owners) > 1 and all(len(set(owners[at : at + 2])) == 1 for at in range(0, len(owners), 2)):
        owners, level = owners[::2], level + 1
    return level, len(owners)


def _group(side: _Side) -> Callable[[], Any]:
    """The processes that take part; none is asked for where one hosts all lanes."""
    return side.mesh.late_group(side.step.axes) if len(side.peers) > 1 else lambda: None


def _pack(sides: Sequence[_Side], receivers: Sequence[int], me: int) -> tuple[Assemble, list[int]]:
    """One send buffer from all parcels, and how much of it each of these processes gets: this one nothing."""
    pieces: list[tuple[int, Block]] = []
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
    sides: Sequence[_Side], me: int, gathers: bool
) -> Callable[[Tensor, Sequence[Tensor]], list[list[Tensor]]]:
    """What arrived and the parcels of this process -> for each step what its lanes get."""
    # By step, receiver and node: where the parts are. 0 is what arrived, then come our own parcels.
    parts = [
        [[[] for _ in range(side.nodes)] for _ in side.receivers(me)] for side in sides
    ]  # type: list[list[list[list[tuple[int, Block]]]]]
    offset = 0
    for peer in sides[0].peers:
        first = 1
        for side, mine in zip(sides, parts, strict=True):
            for nodes, found in zip(mine, side.blocks(peer, me), strict=True):
                for node, which, block in found:
                    if peer == me and not gathers:
                        nodes[node].append((first + which, block))
                        continue
                    flat = strides(block.sizes)
                    here = Block(block.sizes, offset, flat, block.dst_offset, block.dst_strides)
                    nodes[node].append((0, here))
                    offset += block.numel
            first += len(side.parcels(me))
    alone = sum(len(mine) for mine in parts) == 1  # then it may be the memory of what arrived

    def value(pieces: list[tuple[int, Block]], shape: tuple[int, ...], summed: bool) -> Assemble:
        ours = any(which for which, _ in pieces)
        return assembler(pieces, shape, own=not summed and (ours or not alone))

    make = [
        [
            [value(pieces, wanted.shape, side.nodes > 1) for pieces in nodes]
            for wanted, nodes in zip(side.receivers(me), mine, strict=True)
        ]
        for side, mine in zip(sides, parts, strict=True)
    ]

    def finish(buffer: Tensor, parcels: Sequence[Tensor]) -> list[list[Tensor]]:
        tensors = [buffer, *parcels]
        results = []
        for side, receivers in zip(sides, make, strict=True):
            found = []
            for nodes in receivers:
                values = [assemble(tensors) for assemble in nodes]
                if len(values) > 1:
                    assert side.reduce is not None
                    found.append(side.reduce.tree(values))
                else:
                    found.append(side.reduce.finish(values[0]) if side.reduce is not None else values[0])
            results.append(side.shared(found))
        return results

    return finish


def _all_reduce(steps: tuple[Step, ...], mesh: LaneMesh) -> Lanes:
    """Every process sums its subtrees; then as between ranks: small ones are gathered, others cut in parts."""
    sides = [_Side(step, mesh) for step in steps]
    peers, me, reduce = sides[0].peers, mesh.hosts.rank, sides[0].reduce
    assert reduce is not None
    count, index, group = len(peers), peers.index(me), _group(sides[0])
    shapes = [wanted.shape for side in sides for wanted in side.receivers(me)]
    sizes = [math.prod(shape) for shape in shapes]
    numel, nodes = sum(sizes), sides[0].nodes
    owned = [sorted({parcel.node for parcel in sides[0].parcels(peer)}) for peer in peers]
    rows = len(owned[index])  # of each process as many: its nodes of the tree
    place = [owned.index(mine) * rows + mine.index(node) for node in range(nodes) for mine in owned if node in mine]
    in_order = place == list(range(nodes))
    splits = [stop - start for start, stop in (chunk(numel, count, i) for i in range(count))]
    mine = splits[index]

    def vectors(locals: Pieces) -> Tensor:
        """A row for each node that is hosted here: the groups' sums of all steps, end to end."""
        found: dict[int, list[Tensor]] = {node: [] for node in owned[index]}
        for side, pieces in zip(sides, locals, strict=True):
            for parcel, total in zip(side.parcels(me), side.sums(pieces), strict=True):
                found[parcel.node].append(total.reshape(-1))
        made = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in found.values()]
        return made[0].view(1, -1) if rows == 1 else torch.stack(made)

    def tree(found: Tensor) -> Tensor:
        contributions = found.unbind()
        return reduce.tree(contributions if in_order else [contributions[at] for at in place])

    def total(flat: Tensor) -> Tensor:
        if nodes == 1:  # this process hosts the whole tree
            return reduce.finish(flat.view(-1).clone())
        if flat.nbytes * count <= GATHER_BYTES:
            return tree(all_gather(flat.view(-1), count, group()).view(nodes, numel))
        send = flat.view(-1) if rows == 1 else torch.cat([part.reshape(-1) for part in flat.split(splits, 1)])
        arrived = all_to_all(send, [rows * size for size in splits], [rows * mine] * count, group())
        part = tree(arrived.view(nodes, mine))
        if len(set(splits)) == 1:
            return all_gather(part, count, group())
        return all_to_all(part.repeat(count), [mine] * count, splits, group())

    def apply(locals: Pieces) -> list[list[Tensor]]:
        parts = iter(total(vectors(locals)).split(sizes))
        one = len(sizes) == 1
        results = []
        for side in sides:
            found = [next(parts) for _ in side.receivers(me)]
            wanted = side.receivers(me)
            shaped = [(p if one else p.clone()).view(r.shape) for p, r in zip(found, wanted, strict=True)]
            results.append(side.shared(shaped))
        return results

    return apply


__all__ = ["begin_lanes", "bind_lanes"]
