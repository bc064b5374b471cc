"""Resampling of images: batch and channels are free, the dims of space whole; a sampler's places are free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..program.ir import Node, TensorMeta
from .batched import FIRST, local_size, trailing, unless_empty
from .notation import Dims, LocalCall, Pattern, operand_metas, rule

aten = torch.ops.aten

_FORWARD = {
    aten.upsample_nearest1d.default: 1,
    aten.upsample_nearest2d.default: 2,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact1d.default: 1,
    aten._upsample_nearest_exact2d.default: 2,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_linear1d.default: 1,
    aten.upsample_bilinear2d.default: 2,
    aten.upsample_trilinear3d.default: 3,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
}
_BACKWARD = {
    aten.upsample_nearest1d_backward.default: 1,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_nearest3d_backward.default: 3,
    aten._upsample_nearest_exact1d_backward.default: 1,
    aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 3,
    aten.upsample_linear1d_backward.default: 1,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_trilinear3d_backward.default: 3,
    aten.upsample_bicubic2d_backward.default: 2,
    aten._upsample_bilinear2d_aa_backward.default: 2,
    aten._upsample_bicubic2d_aa_backward.default: 2,
}


@rule(list(_FORWARD))
def upsample(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return trailing(node, metas, _FORWARD[node.op], linear=FIRST, ragged=1)


@rule(list(_BACKWARD))
def upsample_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return trailing(node, metas, _BACKWARD[node.op], linear=FIRST, ragged=1, local=local_size(2))


def _sampled(image: Sequence[int], grid: Sequence[int]) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """Factors of an image n c x.., a grid of places n y.. 2, and what is sampled, n c y.."""
    space = len(image) - 2
    sizes = {"n": image[0], "c": image[1], "xy": grid[-1]}
    sizes |= {f"x{dim}": image[2 + dim] for dim in range(space)}
    sizes |= {f"y{dim}": grid[1 + dim] for dim in range(space)}
    xs: Dims = tuple((f"x{dim}",) for dim in range(space))
    ys: Dims = tuple((f"y{dim}",) for dim in range(space))
    return (("n",), ("c",), *xs), (("n",), *ys, ("xy",)), (("n",), ("c",), *ys), sizes


@rule([aten.grid_sampler_2d.default, aten.grid_sampler_3d.default])
def grid_sampler(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    image, grid, sampled, sizes = _sampled(*(meta.shape for meta in operand_metas(node, metas)))
    whole = frozenset(name for name in sizes if name.startswith("x"))
    return Pattern(
        (image, grid),
        (sampled,),
        sizes,
        whole=whole,
        linear=FIRST,
        ragged=1,
        local=unless_empty(node, metas),
    )


@rule([aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default])
def grid_sampler_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Channels are summed over for the grid, places for the image."""
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    image, grid, sampled, sizes = _sampled(shapes[1], shapes[2])
    results = [of for of, out in zip((image, grid), node.outs, strict=True) if out is not None]
    return Pattern(
        (sampled, image, grid),
        tuple(results),
        sizes,
        sum=frozenset(name for name in sizes if name == "c" or name.startswith("y")),
        whole=frozenset(name for name in sizes if name.startswith("x")),
        local=unless_empty(node, metas),
    )


@rule(aten.affine_grid_generator.default)
def affine_grid(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    space = len(node.args[1]) - 2
    return trailing(node, metas, ((2,), (space + 1,)), linear=FIRST, ragged=1, local=_own_batch)


def _own_batch(call: LocalCall) -> LocalCall:
    return call.with_arg(1, [call.results[0].local_shape(call.rank)[0], *call.args[1][1:]])
