"""Matrix products: a sharded contraction leaves a Partial."""

from __future__ import annotations

from typing import Any

import torch

from .notation import rule

aten = torch.ops.aten


def addmm_apart(bias: Any, x: Any, w: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """mm, then add: inside addmm a replicated bias would be added once a rank of the contraction."""
    product = torch.mm(x, w)
    return torch.add(product if alpha == 1 else product * alpha, bias, alpha=beta)


rule(aten.mm.default, "i k, k j -> i j", sum="k", linear=([0], [1]))
rule(aten.bmm.default, "b i k, b k j -> b i j", sum="k", linear=([0], [1]))
rule(aten.mv.default, "i k, k -> i", sum="k", linear=([0], [1]))
rule(aten.dot.default, "k, k ->", sum="k", linear=([0], [1]))


@rule(aten.addmm.default)
def addmm(node: Any, metas: Any) -> Any:
    from .notation import bind, operand_metas, result_shapes

    bias, x, w = (meta.shape for meta in operand_metas(node, metas))
    result = result_shapes(node, metas)[0]
    names = " ".join(
        ("1" if size == 1 and full != 1 else name)
        for size, full, name in zip(reversed(bias), reversed(result), "ji", strict=False)
    )
    names = " ".join(reversed(names.split()))
    return bind(
        f"{names}, i k, k j -> i j", [bias, x, w], [result], sum=["k"], whole=[], expand={"k": addmm_apart}
    )
