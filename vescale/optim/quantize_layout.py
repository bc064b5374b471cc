"""Blocks of a quantized tensor, and where their scales live: pure, decided from layouts alone.

A block is a tile of r x c elements over the last two dims, or a run of n elements. `grid` writes both as one
size a dim, so that a tensor of shape (.., H, W) has (.., ceil(H / r), ceil(W / c)) scales: blocks begin anew
at each leading index, and the last of a dim may be short. Runs that don't fit the rows are those of the
flattened tensor: a grid of one size.

A layout that cuts no block says where each block is, and so where its scale is. One that cuts a block is an
error: the block would need a number from another rank at each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .._errors import ShardingError, explain
from ..spmd.layout import Layout
from ..spmd.placements import InterleavedShard, P, Placement, RaggedShard, Shard

Grid = tuple[int, ...]
Block = tuple[int, int] | int  # rows and columns, or elements


def grid(shape: Sequence[int], block: Block) -> Grid:
    """The size of a block along each dim; a single size where blocks are runs of the flattened tensor.

    A 1-d tensor has runs of r * c elements in the place of tiles.

    >>> grid((8, 64, 96), (32, 32)), grid((64, 96), 48), grid((64, 96), 192)
    ((1, 32, 32), (1, 48), (2, 96))
    >>> grid((4096,), (32, 32)), grid((64, 96), 100)
    ((1024,), (100,))
    """
    if len(shape) == 1 or not isinstance(block, tuple):
        n = math.prod(block) if isinstance(block, tuple) else block
        *lead, width = shape
        if not lead or (n % width and width % n):
            return (n,)
        ones = (1,) * (len(lead) - 1)
        if width % n == 0:
            return (*ones, 1, n)
        rows = n // width
        return (*ones, rows, width) if len(lead) == 1 or lead[-1] % rows == 0 else (n,)
    return (*(1,) * (len(shape) - 2), *block)


def grid_shape(shape: Sequence[int], sizes: Grid) -> tuple[int, ...]:
    """How many blocks there are along each dim: the shape of the scales.

    >>> grid_shape((70, 64), (32, 32))
    (3, 2)
    """
    shape = shape if len(shape) == len(sizes) else (math.prod(shape),)
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Blocks of a local tensor, as rows of `width` elements: bands of `r` rows by columns of `c` elements.

    Bands begin anew after every `height` rows; the tensor begins with row `first` of these, at a band's edge.
    """

    height: int
    width: int
    r: int
    c: int
    first: int = 0


def tiling(shape: Sequence[int], sizes: Grid, offset: int = 0) -> Tiling:
    """The blocks of what begins `offset` elements into a tensor of `shape`.

    >>> tiling((8, 64, 96), (1, 32, 32), 96 * 96)
    Tiling(height=64, width=96, r=32, c=32, first=32)
    """
    if len(sizes) == 1:
        height, width, r, c = math.prod(shape), 1, sizes[0], 1
    elif sizes[-2] == 1:  # a row has blocks of its own, and may end after any of them
        height, width, r, c = shape[-1], 1, sizes[-1], 1
    else:
        (height, width), (r, c) = shape[-2:], sizes[-2:]
    first = offset // width % height if width and height else 0
    return Tiling(height, width, r, c, first)


def local_tiling(layout: Layout, sizes: Grid, rank: int) -> Tiling:
    """The blocks of the local tensor of `rank`, in a layout that cuts none."""
    if len(sizes) < len(layout.shape):  # whole blocks, one after the other
        return tiling((math.prod(layout.local_shape(rank)),), sizes)
    rows, piece = layout.rows(rank), layout.piece_shape(rank)
    if rows is None or layout.ragged is None:
        return tiling(piece, sizes)
    return tiling(piece, sizes, rows[0] * math.prod(piece[len(layout.ragged[1].dims) :]))


class _Cut(Exception):
    """A placement cuts a block: where."""


@lru_cache(maxsize=16384)
def scales_layout(layout: Layout, sizes: Grid, name: str) -> Layout:
    """The layout of the scales of a tensor in `layout`: each with its block.

    Raises ShardingError, which names the tensor, the cut and the block to declare, when a block is cut.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> layout = Layout(AbstractMesh(("dp",), (2,)), P(dp=RaggedShard((0,), (32, 38))), (70, 64))
    >>> scales_layout(layout, (32, 32), "w").spec
    P(dp=RaggedShard((0,), (1, 2)))
    """
    try:
        placed = _flat(layout, sizes[0]) if len(sizes) < len(layout.shape) else _placed(layout, sizes)
        return Layout(layout.mesh, P.of(placed), grid_shape(layout.shape, sizes))
    except _Cut as cut:
        raise ShardingError(_explained(layout, sizes, name, str(cut))) from None


def _explained(layout: Layout, sizes: Grid, name: str, cut: str) -> str:
    size, quoted = math.prod(sizes), name.replace(".", r"\.")
    what, block = f"run of {size} elements", f"vs.Elements({size})"
    *_, rows, columns = (1, *sizes)
    if rows > 1:
        what, block = f"tile of {rows} x {columns}", f"vs.Tile({rows}, {columns})"
    return explain(
        f"{name or 'a parameter'} of shape {layout.shape} in {layout.spec}: {cut}, inside a {what}",
        where="vs.optim.adamw_8bit",
        rule="no block is cut: its elements share one scale, and updates communicate nothing",
        remedy=f"declare vs.FSDP(..., block={{r'{quoted}': {block}}}), or give placements that cut between "
        "blocks; or pass adamw_8bit a smaller block=",
    )


def _placed(layout: Layout, sizes: Grid) -> Iterator[tuple[str, Placement]]:
    """What each placement says of the scales."""
    lengths = [{length} for length in layout.shape]  # of the pieces, by dim
    for axis, placement in layout.spec.items():
        ranks = layout.mesh.axis_size(axis)
        if isinstance(placement, (Shard, InterleavedShard)):
            dim = placement.dim
            made = [_shard(placement, length, ranks, sizes[dim], axis) for length in lengths[dim]]
            lengths[dim] = {piece for _, pieces in made for piece in pieces}
            yield axis, made[0][0]
        else:
            assert isinstance(placement, RaggedShard)
            yield axis, _ragged(placement, [max(found) for found in lengths], sizes, axis)


def _shard(
    placement: Shard | InterleavedShard, length: int, ranks: int, size: int, axis: str
) -> tuple[Placement, set[int]]:
    """The placement of the scales, and the lengths of the pieces; the dim has `length`, its blocks `size`."""
    sections = placement.sections if isinstance(placement, InterleavedShard) else 1
    parts = (length // sections,) * sections if isinstance(sections, int) else sections
    for part in parts[:-1]:
        if part % size:
            raise _Cut(f"{placement} over {axis!r} has sections of {part} along dim {placement.dim}")
    held = [0] * (ranks + 1)
    for part in parts:
        chunk = -(-part // ranks)
        if chunk % size and chunk < part:
            raise _Cut(f"{placement} over {axis!r} cuts dim {placement.dim} at {chunk}")
        for rank in range(ranks):
            held[rank] += max(0, min(chunk, part - rank * chunk))
    if isinstance(sections, int):
        return placement, set(held[:ranks])
    blocks = tuple(-(-part // size) for part in parts)
    return InterleavedShard(placement.dim, blocks), set(held[:ranks])


def _ragged(placement: RaggedShard, piece: Sequence[int], sizes: Grid, axis: str) -> Placement:
    """Cuts of rows or elements as cuts of blocks."""
    count = len(placement.dims)
    cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))  # the first dim with blocks
    if count <= cut:  # it cuts between them
        return placement
    height, size, inner = piece[cut], sizes[cut], math.prod(piece[cut + 1 : count])
    bands = -(-height // size)

    def block(row: int) -> int:
        outer, rest = divmod(row, height * inner)
        if rest % (size * inner):
            where = f"row {row}" if count < len(piece) else f"element {row}"
            raise _Cut(f"the ragged split over {axis!r} cuts at {where}")
        return outer * bands + rest // (size * inner)

    unit_rows = math.prod(piece[:count]) // placement.total
    even = size * inner if height % size == 0 else height * inner
    return RaggedShard.from_runs(range(cut + 1), _counted(placement, unit_rows, even, block))


def _counted(
    placement: RaggedShard, unit_rows: int, even: int, block: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """Blocks of each rank, as runs. Ranks of one run that hold multiples of `even` rows hold equally many."""
    row = 0
    for units, count in placement.runs:
        rows = units * unit_rows
        if rows % even == 0:
            yield block(row + rows) - block(row), count
            row += rows * count
            continue
        for _ in range(count):
            yield block(row + rows) - block(row), 1
            row += rows


def _flat(layout: Layout, size: int) -> Iterable[tuple[str, Placement]]:
    """`_placed` for runs of the flattened tensor: of what is cut along dim 0, or raggedly."""
    splits = [(axis, placed) for axis, placed in layout.spec.items() if layout.mesh.axis_size(axis) > 1]
    if not splits:
        return []
    ((axis, placement), *others) = splits
    if isinstance(placement, Shard) and placement.dim == 0 and not others:
        placement = RaggedShard.chunks(layout.shape[0], layout.mesh.axis_size(axis))
    if not isinstance(placement, RaggedShard) or others:
        raise _Cut("it is cut along more than dim 0")
    if not placement.dims:
        return [(axis, placement)]
    inner, total = math.prod(layout.shape[len(placement.dims) :]), math.prod(layout.shape)

    def block(row: int) -> int:
        if row * inner % size and row * inner < total:
            raise _Cut(f"the split over {axis!r} cuts at element {row * inner}")
        return -(-row * inner // size)

    unit_rows = total // inner // placement.total
    even = math.lcm(size, inner) // inner
    return [(axis, RaggedShard.from_runs((0,), _counted(placement, unit_rows, even, block)))]
