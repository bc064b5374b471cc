"""Orthogonalize: the nearest matrix with orthonormal rows or columns, nearly, by Newton-Schulz iterations.

    vescale::orthogonalize(Tensor x, str matrices, float[] coefficients, int steps, float eps) -> Tensor

`matrices` says how x is a batch of matrices (see `spmd.matrices`). Each is computed with in the dtype of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spmd.matrices import Matrices
from ..spmd.program.replay import shown_by
from ..spmd.rules.matrices import matrix_rule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """T[r, c] -> T[r, c]: singular values to about 1, singular vectors kept, in the dtype of the matrix.

    With X of at most as many rows as columns, and of norm 1 to begin with, a step is

        A = X X^T           X <- a X + (b A + c A A) X

    In bfloat16 the bits are those of torch.optim.Muon. Source: the quintic iteration of Jordan et al., "Muon:
    an optimizer for hidden layers in neural networks", 2024.

    >>> newton_schulz(torch.diag(torch.tensor([1.0, 0.9])), COEFFICIENTS, 5, 1e-7).diag() > 0.6
    tensor([True, True])
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations for one matrix: of a step 4 r^2 c + 2 r^3 with r the smaller side.

    >>> flops(10, 20, 5)
    50000
    """
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def _orthogonalize(x: Tensor, matrices: str, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    how = Matrices.of(matrices)
    # One after the other: a batched product of the same matrices may have other bits.
    done = [newton_schulz(matrix, coefficients, steps, eps) for matrix in how.split(x)]
    return how.join(torch.stack(done), x.shape).contiguous()


_library = torch.library.Library("vescale", "FRAGMENT")
_library.define("orthogonalize(Tensor x, str matrices, float[] coefficients, int steps, float eps) -> Tensor")
_library.impl("orthogonalize", _orthogonalize, "CompositeExplicitAutograd")


def _fake(x: Tensor, *how: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("orthogonalize", _fake, "Meta")
matrix_rule(torch.ops.vescale.orthogonalize.default)
shown_by(torch.ops.vescale.orthogonalize.default, _orthogonalize)


def orthogonalize(
    x: Tensor,
    matrices: Matrices,
    coefficients: Sequence[float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """`newton_schulz` of each matrix in x, as one op: T[...] -> T[...]. It has no gradient.

    >>> x = torch.randn(2, 3, 4)
    >>> y = orthogonalize(x, Matrices.of("b r c -> b r c"))
    >>> torch.equal(y[1], newton_schulz(x[1], COEFFICIENTS, 5, 1e-7))
    True
    """
    return torch.ops.vescale.orthogonalize(x, matrices.text, list(coefficients), steps, eps)
