"""Matrix products: a sharded contraction leaves a Partial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..program.ir import Node, TensorMeta
from .notation import Dims, Pattern, broadcast_dims, operand_metas, result_shapes, rule

aten = torch.ops.aten

rule(aten.mm.default, "i k, k j -> i j", sum="k", linear=([0], [1]))
rule(aten.bmm.default, "b i k, b k j -> b i j", sum="k", linear=([0], [1]))
rule(aten.mv.default, "i k, k -> i", sum="k", linear=([0], [1]))
rule([aten.dot.default, aten.vdot.default], "k, k ->", sum="k", linear=([0], [1]))


# A product that is added to a bias, which is broadcast. What is summed is added up before the bias is:
# inside the op a replicated bias would be added once a rank.


def _apart(multiply: Callable[..., Any]) -> Callable[..., Any]:
    def run(bias: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        product = multiply(left, right)
        product = product if alpha == 1 else product * alpha
        # Without a beta the bias is not read: there may be NaN in it.
        return (
            torch.add(product, bias, alpha=beta)
            if beta
            else product.expand(torch.broadcast_shapes(bias.shape, product.shape))
        )

    return run


_ADDED: dict[Any, tuple[str, str, str, str, Callable[..., Any]]] = {
    aten.addmm.default: ("i k", "k j", "i j", "k", _apart(torch.mm)),
    aten.addmv.default: ("i k", "k", "i", "k", _apart(torch.mv)),
    aten.baddbmm.default: ("b i k", "b k j", "b i j", "k", _apart(torch.bmm)),
    aten.addbmm.default: ("b i k", "b k j", "i j", "b k", _apart(lambda x, y: torch.bmm(x, y).sum(0))),
    aten.addr.default: ("i", "j", "i j", "", _apart(torch.outer)),
}


@rule(list(_ADDED))
def added_product(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    left, right, result, summed, apart = _ADDED[node.op]
    bias, *factors = (meta.shape for meta in operand_metas(node, metas))
    (full,) = result_shapes(node, metas)
    names = (left.split(), right.split())
    sizes = {
        name: size for dims, shape in zip(names, factors, strict=True) for name, size in zip(dims, shape)
    }
    whole: Dims = tuple((name,) for name in result.split())
    offset = len(full) - len(bias)
    added: Dims = tuple(
        () if size == 1 and full[dim] != 1 else whole[dim] for dim, size in enumerate(bias, offset)
    )
    operands = (added, *(tuple((name,) for name in dims) for dims in names))
    return Pattern(operands, (whole,), sizes, expand=dict.fromkeys(summed.split(), apart))


@rule(aten._trilinear.default)
def trilinear(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Three operands with dims put in, multiplied, and summed over some dims."""
    shapes, summed = [meta.shape for meta in operand_metas(node, metas)], node.args[6]
    ndim = len(shapes[0]) + len(node.args[3])
    places = [[dim for dim in range(ndim) if dim not in new] for new in node.args[3:6]]
    sizes = {
        f"d{dim}": size for dims, shape in zip(places, shapes) for dim, size in zip(dims, shape, strict=True)
    }
    operands = tuple(tuple((f"d{dim}",) for dim in dims) for dims in places)
    result = tuple((f"d{dim}",) for dim in range(ndim) if dim not in summed)
    linear = tuple(frozenset((index,)) for index in range(3))
    return Pattern(operands, (result,), sizes, sum=frozenset(f"d{dim}" for dim in summed), linear=linear)


@rule(aten.dist.default)
def dist(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """The norm of a difference: over split elements the norm has its own rule."""
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    full = torch.broadcast_shapes(*shapes)
    sizes = {f"d{dim}": size for dim, size in enumerate(full)}
    operands = broadcast_dims(shapes, full)

    def apart(x: Any, y: Any, p: float = 2) -> Any:
        return torch.linalg.vector_norm(x - y, p)

    return Pattern(operands, ((),), sizes, expand=dict.fromkeys(sizes, apart))
