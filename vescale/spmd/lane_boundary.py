"""Into lanes and back: the pieces of a rank cut into those of its lanes, and put together again.

Lanes are next to each other, and so their pieces mostly are, in the memory of their rank: cutting takes views,
and pieces that were updated in place are put together by taking one view of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .boundary import Boundary, Static
from .dtensor import DTensor, remember, wrap
from .lanes import grouped, lanes_of, refined, sources, widths
from .layout import AbstractMesh, Layout
from .locals import in_memory, local_slice
from .mesh import Mesh
from .placements import P
from .regions import overlap, region
from .transport import assembler, picker

Cut = Callable[[Tensor], list[Tensor]]
Join = Callable[[Sequence[Tensor]], Tensor]


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

    def enter(
        self,
        leaves: Sequence[Any],
        layouts: Sequence[Layout | None],
        hidden: Sequence[Tensor],
        mismatch: Callable[[int, DTensor, Layout], Exception],
    ) -> list[list[Tensor]]:
        """`boundary.enter`, with `layouts` over lanes."""
        inputs: dict[int, list[Tensor]] = {lane: [] for lane in self._here}
        hosts = self.hosted
        for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
            if layout is None:
                continue
            if isinstance(leaf, DTensor):
                if leaf.mesh is not hosts or leaf.layout is not self.outside(layout):
                    raise mismatch(index, leaf, layout)
                for host, local in zip(hosts.local_ranks, leaf._locals, strict=True):
                    lanes, pieces = cut(layout, leaf.layout, host)
                    for lane, piece in zip(lanes, pieces(local), strict=True):
                        inputs[lane].append(piece)
            else:
                for lane, values in inputs.items():
                    values.append(local_slice(leaf.detach(), layout, lane).contiguous())
        for tensor in hidden:
            whole = in_memory(tensor.detach()).contiguous()
            for values in inputs.values():
                values.append(whole)
        return list(inputs.values())

    def leave(
        self,
        results: Sequence[Sequence[Any]],
        layouts: Sequence[Layout | Static],
        kinds: Sequence[Any] | None = None,
    ) -> list[Any]:
        """`boundary.leave`, with `layouts` over lanes and `kinds` those outside."""
        hosts = self.hosted
        remember(hosts)
        place = {lane: at for at, lane in enumerate(self._here)}
        outputs: list[Any] = []
        for index, (layout, kind) in enumerate(zip(layouts, kinds or repeat(None, len(layouts)))):
            if not isinstance(layout, Layout):
                outputs.append(layout.value)
                continue
            outer = self.outside(layout)
            assert outer is not None, layout
            pieces = []
            for host in hosts.local_ranks:
                lanes, together = join(layout, outer, host)
                pieces.append(together([results[place[lane]][index] for lane in lanes]))
            outputs.append(wrap(pieces, hosts, outer, pieces[0].dtype, kind))
        return outputs

    @property
    def _here(self) -> tuple[int, ...]:
        assert isinstance(self.lanes, Mesh)
        return self.lanes.local_ranks


@lru_cache(maxsize=65536)
def cut(layout: Layout, outer: Layout, host: int) -> tuple[tuple[int, ...], Cut]:
    """The lanes of a host, and the function from its piece of `outer` to theirs of `layout`: views if it can."""
    lanes = lanes_of(host, layout.mesh, outer.mesh)
    if len(sources(layout, outer, host)) == 1:  # all have the same
        return lanes, lambda local: [local if local.is_contiguous() else local.contiguous()] * len(lanes)
    takes = [
        picker(overlap(region(outer, host), region(layout, lane)), layout.local_shape(lane)) for lane in lanes
    ]

    def pieces(local: Tensor) -> list[Tensor]:
        local = local if local.is_contiguous() else local.contiguous()
        return [take(local).contiguous() for take in takes]

    return lanes, pieces


@lru_cache(maxsize=65536)
def join(layout: Layout, outer: Layout, host: int) -> tuple[tuple[int, ...], Join]:
    """The lanes that hold each element of a host's piece once, and the function that puts it together."""
    lanes, shape = sources(layout, outer, host), outer.local_shape(host)
    if len(lanes) == 1:
        return lanes, lambda pieces: pieces[0] if pieces[0].shape == shape else pieces[0].view(shape)
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
        if in_order and (one := _in_one_memory(pieces, shape)) is not None:
            return one
        return assemble([piece.contiguous() for piece in pieces])

    return lanes, together


def _in_one_memory(pieces: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor | None:
    """One view of pieces that lie end to end."""
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
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())


__all__ = ["LaneBoundary", "cut", "join"]
