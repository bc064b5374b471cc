"""Block-wise quantization: 8-bit codes of a dynamic map, and one float32 scale a block.

    s = max |x| of the block                 nan when an element is not finite, as all of the block is then
    code = the nearest number's to x / s     (`quantize_map.encode`; x / s is 0 where s is 0)
    x' = number of the code * s

    vescale::quantize_blocks(Tensor x, Tensor? noise, str map, ..) -> (Tensor codes, Tensor scales)
    vescale::dequantize_blocks(Tensor codes, Tensor scales, str map, ..) -> Tensor
    vescale::zero_blocks(Tensor like, str map, ..) -> (Tensor codes, Tensor scales)     quantized zeros

`..` are `grid`, the size of a block along each dim; `tiling`, how the blocks lie in the memory of this
tensor; `blocks`, the shape of the scales; and `name`, for errors. On a rank `tiling` and `blocks` are those
of its local tensor, see `quantize_rules`. The ops are elementwise but for the maximum, so a rank's codes are
those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..spmd.dtensor import DTensor
from .quantize_layout import Block, Tiling, grid, grid_shape, scales_layout, tiling
from .quantize_map import decode, encode, zero_code

library = torch.library.Library("vescale", "FRAGMENT")


def quantize(
    x: Tensor, kind: str, block: Block, noise: Tensor | None = None, name: str = ""
) -> tuple[Tensor, Tensor]:
    """float32 -> (uint8 codes of its shape, float32 scales of its blocks).

    `kind` is "signed" or "unsigned", whose codes of negative numbers are 0's. `noise`, uniform in [0, 1) and
    of the shape of x, rounds to one of the two codes around x / s, with x' = x in expectation; but from -s to
    -0.993 s, where a signed map has no number, always to the latter. Raises ShardingError, naming `name`, for
    a layout that cuts a block. No gradient.

    >>> codes, scales = quantize(torch.tensor([[0.0, 1.0, -2.0, 0.5]]), "signed", (1, 2))
    >>> codes, scales
    (tensor([[127, 255,   0, 201]], dtype=torch.uint8), tensor([[1., 2.]]))
    >>> dequantize(codes, scales, "signed", (1, 2))
    tensor([[ 0.0000,  1.0000, -1.9859,  0.4953]])
    """
    sizes, lies, blocks, name = _described(x, block, name)
    return torch.ops.vescale.quantize_blocks.default(x, noise, kind, sizes, lies, blocks, name)


def dequantize(codes: Tensor, scales: Tensor, kind: str, block: Block, name: str = "") -> Tensor:
    """(uint8 codes, float32 scales) -> the float32 numbers that they stand for. No gradient."""
    sizes, lies, _, name = _described(codes, block, name)
    return torch.ops.vescale.dequantize_blocks.default(codes, scales, kind, sizes, lies, name)


def quantized_zeros(like: Tensor, kind: str, block: Block, name: str = "") -> tuple[Tensor, Tensor]:
    """(codes, scales) of zeros, of the shape and in the layout of `like`, whose values are not read."""
    sizes, lies, blocks, name = _described(like, block, name)
    return torch.ops.vescale.zero_blocks.default(like, kind, sizes, lies, blocks, name)


def _described(x: Tensor, block: Block, name: str) -> tuple[list[int], list[int], list[int], str]:
    """The grid, the tiling, the shape of the scales, and the name as an op is told it."""
    sizes = grid(x.shape, block)
    if isinstance(x, DTensor):  # checked here, so that tensors that are alike share one program of the op
        scales_layout(x.layout, sizes, name)
        name = ""
    return list(sizes), as_ints(tiling(x.shape, sizes)), list(grid_shape(x.shape, sizes)), name


def as_ints(lies: Tiling) -> list[int]:
    """A tiling as the ops take it."""
    return [lies.height, lies.width, lies.r, lies.c, lies.first]


# How blocks lie: maxima of blocks, and scales spread over them.


def _block_shape(x: Tensor, lies: Tiling) -> tuple[int, int, int, int] | None:
    """x as (bands, r, columns, c), None where a block is short."""
    rows = x.numel() // lies.width
    anew = lies.first + rows > lies.height and lies.height % lies.r  # bands begin anew after a short one
    if rows % lies.r or lies.width % lies.c or lies.first % lies.r or anew:
        return None
    return rows // lies.r, lies.r, lies.width // lies.c, lies.c


def _bands(rows: int, lies: Tiling, device: torch.device) -> Tensor:
    """The band of each row, counted from the first."""
    row = torch.arange(lies.first, lies.first + rows, device=device)
    band = row // lies.height * -(-lies.height // lies.r) + row % lies.height // lies.r
    return band - lies.first // lies.r


def _maxima(x: Tensor, lies: Tiling, blocks: Sequence[int]) -> Tensor:
    """max |x| of each block, nan where one is not finite."""
    shape = _block_shape(x, lies)
    if shape is not None:
        found = x.reshape(shape).abs().amax((1, 3))
    else:
        rows = x.numel() // lies.width
        padded = torch.nn.functional.pad(x.reshape(rows, lies.width).abs(), (0, -lies.width % lies.c))
        columns = padded.view(rows, -1, lies.c).amax(2)
        band = _bands(rows, lies, x.device).unsqueeze(1).expand_as(columns)
        found = columns.new_zeros(math.prod(blocks) // columns.shape[1], columns.shape[1])
        found.scatter_reduce_(0, band, columns, "amax")
    return torch.where(found.isfinite(), found, torch.nan).view(tuple(blocks))


def _spread(scales: Tensor, x: Tensor, lies: Tiling) -> tuple[Tensor, Tensor]:
    """x and the scale of each of its elements, in shapes that are broadcast together."""
    shape = _block_shape(x, lies)
    if shape is not None:
        return x.reshape(shape), scales.reshape(shape[0], 1, shape[2], 1)
    rows = x.numel() // lies.width
    rows_of = scales.reshape(-1, -(-lies.width // lies.c)).index_select(0, _bands(rows, lies, x.device))
    return x.reshape(rows, lies.width), rows_of.repeat_interleave(lies.c, 1)[:, : lies.width]


# The ops.


def _quantize(
    x: Tensor,
    noise: Tensor | None,
    kind: str,
    grid: Sequence[int],
    lies: Sequence[int],
    blocks: Sequence[int],
    name: str,
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x.new_empty(x.shape, dtype=torch.uint8), x.new_zeros(tuple(blocks), dtype=torch.float32)
    tiles = Tiling(*lies)
    scales = _maxima(x, tiles, blocks)
    whole, scale = _spread(scales.masked_fill(scales == 0, 1.0), x, tiles)
    return encode((whole / scale).view(x.shape), kind, noise), scales


def _dequantize(
    codes: Tensor, scales: Tensor, kind: str, grid: Sequence[int], lies: Sequence[int], name: str
) -> Tensor:
    numbers = decode(codes, kind)
    if not codes.numel():
        return numbers
    whole, scale = _spread(scales, numbers, Tiling(*lies))
    return whole.mul_(scale).view(codes.shape)


def _zeros(
    like: Tensor, kind: str, grid: Sequence[int], lies: Sequence[int], blocks: Sequence[int], name: str
) -> tuple[Tensor, Tensor]:
    codes = torch.full(tuple(like.shape), zero_code(kind), dtype=torch.uint8, device=like.device)
    return codes, torch.zeros(tuple(blocks), dtype=torch.float32, device=like.device)


_WHERE = "int[] grid, SymInt[] tiling"
for _signature, _run in (
    (f"quantize_blocks(Tensor x, Tensor? noise, str map, {_WHERE}, SymInt[] blocks, str name)", _quantize),
    (f"zero_blocks(Tensor like, str map, {_WHERE}, SymInt[] blocks, str name)", _zeros),
):
    library.define(f"{_signature} -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_signature.partition("(")[0], _run, "CompositeExplicitAutograd")
library.define(
    f"dequantize_blocks(Tensor codes, Tensor scales, str map, {_WHERE}, str name) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("dequantize_blocks", _dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::quantize_blocks", lib=library)
def _(x, noise, map, grid, tiling, blocks, name):
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.float32)


@torch.library.register_fake("vescale::zero_blocks", lib=library)
def _(like, map, grid, tiling, blocks, name):
    return like.new_empty(like.shape, dtype=torch.uint8), like.new_empty(blocks, dtype=torch.float32)


@torch.library.register_fake("vescale::dequantize_blocks", lib=library)
def _(codes, scales, map, grid, tiling, name):
    return codes.new_empty(codes.shape, dtype=torch.float32)
