"""Into lanes and back: the pieces of a rank cut into those of its lanes, and put together again.

Lanes are next to each other, and so their pieces mostly are, in the memory of their rank: cutting takes
views, and pieces that were updated in place are put together by taking one view of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

from torch import Tensor

from .boundary import Boundary, Static
from .dtensor import DTensor, remember, wrap
from .lanes import distinct, grouped, lanes_of, refined, representative, widths
from .layout import AbstractMesh, Layout
from .locals import in_memory, local_slice
from .mesh import Mesh
from .placements import P
from .regions import overlap, region, strides
from .transport import assembler, picker


class LaneBoundary(Boundary):
    """Values on the mesh of hosts outside, a piece for each lane inside."""

    def __init__(self, mesh: Mesh | AbstractMesh, lanes: Mesh | AbstractMesh) -> None:
        super().__init__(mesh)
        self.lanes = lanes

    def inside(self, layout: Layout, wanted: Layout | None, likely: Layout | None) -> Layout | None:
        for finer in (wanted, likely):
            if finer is not None and finer.shape == layout.shape and self.outside(finer) is layout:
                return finer
        return None if wanted is not None else refined(layout, self.lanes.abstract)

    def outside(self, layout: Layout) -> Layout | None:
        return grouped(layout, self.mesh.abstract)

    def nearest(self, layout: Layout) -> Layout:
        """Whole over the axes whose ranks have several lanes."""
        wide = widths(self.lanes.abstract, self.mesh.abstract)
        kept = [(axis, placement) for axis, placement in layout.spec.items() if axis not in wide]
        return Layout(layout.mesh, P.of(kept), layout.shape)

    def places(self, layouts: Sequence[Layout | None]) -> list[range]:
        """A value that varies over lanes has a place for each of a rank's, others one for all."""
        found, at = [], 0
        for layout in layouts:
            count = 1 if layout is None else len(distinct(layout, self.mesh.abstract, 0))
            found.append(range(at, at + count))
            at += count
        return found

    def enter(
        self,
        leaves: Sequence[Any],
        layouts: Sequence[Layout | None],
        hidden: Sequence[Tensor],
        mismatch: Callable[[int, DTensor, Layout], Exception],
    ) -> list[list[Tensor]]:
        """`boundary.enter`, with `layouts` over lanes: the pieces of all lanes of each rank."""
        hosts = self.hosted
        inputs: list[list[Tensor]] = [[] for _ in hosts.local_ranks]
        for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
            if layout is None:
                continue
            if isinstance(leaf, DTensor):
                if leaf.mesh is not hosts or leaf.layout is not self.outside(layout):
                    raise mismatch(index, leaf, layout)
                for values, host, local in zip(inputs, hosts.local_ranks, leaf._locals, strict=True):
                    values += cut(layout, leaf.layout, host)(local)
            else:
                for values, host in zip(inputs, hosts.local_ranks, strict=True):
                    for lane in distinct(layout, hosts.abstract, host):
                        values.append(local_slice(leaf.detach(), layout, lane).contiguous())
        for tensor in hidden:
            for values in inputs:
                values.append(in_memory(tensor.detach()).contiguous())
        return inputs

    def each(self, inputs: list[list[Tensor]], layouts: Sequence[Layout]) -> list[list[Tensor]]:
        lanes, hosts = self.lanes, self.hosted
        assert isinstance(lanes, Mesh)
        wide, places = widths(lanes.abstract, hosts.abstract), self.places(layouts)
        end = places[-1].stop if places else 0  # closed-over tensors follow
        found: dict[int, list[Tensor]] = {}
        for host, values in zip(hosts.local_ranks, inputs, strict=True):
            for lane in lanes_of(host, lanes.abstract, hosts.abstract):
                found[lane] = []
                for layout, there in zip(layouts, places, strict=True):
                    first = representative(lane, frozenset(layout.spec), lanes.abstract, wide)
                    at = distinct(layout, hosts.abstract, host).index(first)
                    found[lane].append(values[there[at]])
                found[lane] += values[end:]
        return [found[lane] for lane in lanes.local_ranks]

    def kept(self, results: Sequence[list[Any]], layouts: Sequence[Layout | Static]) -> Sequence[list[Any]]:
        lanes, hosts = self.lanes, self.hosted
        assert isinstance(lanes, Mesh)
        by_lane, kept = dict(zip(lanes.local_ranks, results, strict=True)), []
        for host in hosts.local_ranks:
            first = lanes_of(host, lanes.abstract, hosts.abstract)[:1]
            holders = [
                distinct(layout, hosts.abstract, host) if isinstance(layout, Layout) else first
                for layout in layouts
            ]
            kept.append([by_lane[lane][at] for at, held in enumerate(holders) for lane in held])
        return kept

    def leave(
        self,
        results: Sequence[Sequence[Any]],
        layouts: Sequence[Layout | Static],
        kinds: Sequence[Any] | None = None,
    ) -> list[Any]:
        """`boundary.leave`, with `layouts` over lanes and `kinds` those outside."""
        hosts = self.hosted
        remember(hosts)
        at, outputs = 0, list[Any]()
        for layout, kind in zip(layouts, kinds or repeat(None, len(layouts))):
            if not isinstance(layout, Layout):
                outputs.append(layout.value)
                at += 1
                continue
            outer = self.outside(layout)
            assert outer is not None, layout
            count, pieces = len(distinct(layout, hosts.abstract, 0)), []
            for host, values in zip(hosts.local_ranks, results, strict=True):
                pieces.append(join(layout, outer, host)(values[at : at + count]))
            outputs.append(wrap(pieces, hosts, outer, pieces[0].dtype, kind))
            at += count
        return outputs


@lru_cache(maxsize=65536)
def cut(layout: Layout, outer: Layout, host: int) -> Callable[[Tensor], list[Tensor]]:
    """The function from a host's piece of `outer` to those of its lanes that differ: views where it can."""
    lanes = distinct(layout, outer.mesh, host)
    if len(lanes) == 1:
        return lambda local: [local if local.is_contiguous() else local.contiguous()]
    takes = [
        picker(overlap(region(outer, host), region(layout, lane)), layout.local_shape(lane)) for lane in lanes
    ]

    def pieces(local: Tensor) -> list[Tensor]:
        local = local if local.is_contiguous() else local.contiguous()
        return [take(local).contiguous() for take in takes]

    return pieces


@lru_cache(maxsize=65536)
def join(layout: Layout, outer: Layout, host: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """The function that puts the pieces of a host's lanes together to its piece of `outer`."""
    lanes, shape = distinct(layout, outer.mesh, host), outer.local_shape(host)
    if len(lanes) == 1:
        return lambda pieces: pieces[0] if pieces[0].shape == shape else pieces[0].view(shape)
    blocks = [
        (at, block)
        for at, lane in enumerate(lanes)
        for block in overlap(region(layout, lane), region(outer, host))
    ]
    assemble = assembler(blocks, shape)
    end, in_order = 0, True
    for _, block in blocks:
        in_order &= block.dst_offset == end and block.src_offset == 0 and block.dst_strides == (1,)
        end += block.numel

    def together(pieces: Sequence[Tensor]) -> Tensor:
        if in_order and (one := end_to_end(pieces, shape)) is not None:
            return one
        return assemble([piece.contiguous() for piece in pieces])

    return together


def end_to_end(pieces: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """One view of pieces that lie in one memory, one after another; None where they don't."""
    held = [piece for piece in pieces if piece.numel()]
    if not held:
        return None
    first, end = held[0], held[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in held:
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != storage:
            return None
        if not piece.is_contiguous():
            return None
        end += piece.nbytes
    return first.as_strided(shape, strides(shape))


__all__ = ["LaneBoundary", "cut", "join"]
