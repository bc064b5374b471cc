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
from typing import Any

import torch
from torch import Tensor

from ..spmd.dtensor import DTensor
from .quantize_layout import Block, Tiling, grid, grid_shape, scales_layout, tiling
from .quantize_map import decode, encode, zero_code

# Numbers to work on at a time on cpu: the temporaries stay in the cache.
_CHUNK = 1 << 16

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


# Memory as blocks, (bands, r, columns, c), and back.


def _height(rows: int, lies: Tiling) -> int | None:
    """None when bands begin anew within `rows` rows, after a short one; else the rows of the bands."""
    if lies.first + rows > lies.height and lies.height % lies.r:
        return None
    return -(-rows // lies.r) * lies.r


def _places(rows: Any, lies: Tiling) -> Any:
    """The places of rows when every band has r rows."""
    row = rows + lies.first
    return row + row // lies.height * (-lies.height % lies.r) - lies.first


def _blocked(x: Tensor, lies: Tiling) -> Tensor:
    """x as blocks: a view, or a copy in which short blocks are filled with zeros."""
    rows, short = x.numel() // lies.width, -lies.width % lies.c
    flat, height = x.reshape(rows, lies.width), _height(rows, lies)
    if height is None:
        places = _places(torch.arange(rows, device=x.device), lies)
        height = -(-(_places(rows - 1, lies) + 1) // lies.r) * lies.r
        flat = flat.new_zeros(height, lies.width).index_copy_(0, places, flat)
    if short or height > flat.shape[0]:
        flat = torch.nn.functional.pad(flat, (0, short, 0, height - flat.shape[0]))
    return flat.view(-1, lies.r, flat.shape[1] // lies.c, lies.c)


def _unblocked(blocks: Tensor, lies: Tiling, shape: Sequence[int]) -> Tensor:
    """The inverse of `_blocked`, for a tensor of `shape`."""
    rows = math.prod(shape) // lies.width
    flat = blocks.view(blocks.shape[0] * lies.r, -1)[:, : lies.width]
    if _height(rows, lies) is None:
        flat = flat.index_select(0, _places(torch.arange(rows, device=blocks.device), lies))
    return flat[:rows].reshape(tuple(shape))


def _parts(blocks: Tensor) -> list[slice]:
    """Bands to work on at a time."""
    bands = blocks.shape[0]
    each = bands if blocks.device.type != "cpu" else max(1, _CHUNK * bands // blocks.numel())
    return [slice(start, start + each) for start in range(0, bands, each)]


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
    numbers, draws = _blocked(x, tiles), None if noise is None else _blocked(noise, tiles)
    codes = torch.empty_like(numbers, dtype=torch.uint8, memory_format=torch.contiguous_format)
    scales = numbers.new_empty(numbers.shape[0], numbers.shape[2])
    for part in _parts(numbers):
        scale = numbers[part].abs().amax(1).amax(2)
        scale = scales[part] = torch.where(scale.isfinite(), scale, torch.nan)
        unit = scale.masked_fill(scale == 0, 1.0)[:, None, :, None]
        codes[part] = encode(numbers[part] / unit, kind, None if draws is None else draws[part])
    return _unblocked(codes, tiles, x.shape), scales.view(tuple(blocks))


def _dequantize(
    codes: Tensor, scales: Tensor, kind: str, grid: Sequence[int], lies: Sequence[int], name: str
) -> Tensor:
    if not codes.numel():
        return codes.new_empty(codes.shape, dtype=torch.float32)
    tiles = Tiling(*lies)
    blocked = _blocked(codes, tiles)
    scale = scales.reshape(blocked.shape[0], 1, blocked.shape[2], 1)
    numbers = torch.empty_like(blocked, dtype=torch.float32, memory_format=torch.contiguous_format)
    for part in _parts(blocked):
        torch.mul(decode(blocked[part], kind), scale[part], out=numbers[part])
    return _unblocked(numbers, tiles, codes.shape)


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
