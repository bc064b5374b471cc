"""Precondition: Shampoo's statistics, their inverse roots, and gradients between them, as one op.

    vescale::precondition(Tensor g, Tensor left, Tensor right, Tensor left_root, Tensor right_root,
                          Tensor squares, Tensor step, str matrices, ..)
        -> (Tensor direction, Tensor left, Tensor right, Tensor left_root, Tensor right_root, Tensor squares)

`matrices` says how g is a batch of matrices (see `spmd.matrices`). The rest but `step` is what is kept for
each matrix, (*batch, rows, columns), and lies with it (see `beside`). What isn't kept has no rows.

One op, as a matrix goes to where its statistics are once, and one result comes back. `step` is a 0-d tensor
that all ranks have: the op reads it, so that roots are computed in some steps and cost nothing in others,
in one program. On a GPU it waits for the device to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spmd.matrices import Matrices
from ..spmd.program.replay import shown_by
from .beside import rule_beside

GRAFTINGS = (None, "sgd", "rmsprop", "adam")
SQUARED = ("rmsprop", "adam")  # those that keep squares of gradients


class Kept(NamedTuple):
    """What is kept for each matrix; of a single matrix, or of a batch with leading dims."""

    left: Tensor  # [rows, rows]
    right: Tensor  # [columns, columns]
    left_root: Tensor
    right_root: Tensor
    squares: Tensor  # [rows, columns]


@dataclass(frozen=True)
class Recipe:
    """The numbers of `shampoo` that the op needs; `power` is the p of an inverse p-th root."""

    beta: float
    eps: float
    power: int
    interval: int
    grafting: str | None
    grafting_eps: float
    root_dtype: torch.dtype


def statistic(old: Tensor, factor: Tensor, beta: float) -> Tensor:
    """beta old + (1 - beta) F F^T, and with a beta of 1 the sum old + F F^T: T[n, n], T[n, m] -> T[n, n]."""
    return torch.addmm(old, factor, factor.T, beta=beta, alpha=1 - beta if beta < 1 else 1)


def inverse_root(matrix: Tensor, since: float, how: Recipe) -> Tensor:
    """((M + eps max(eigenvalues) I) / since)^(-1 / power), in `root_dtype`: T[n, n] -> T[n, n].

    M is symmetric; what rounding made negative of its eigenvalues counts as 0. The root of 0 is the identity
    here, as there is nothing to precondition. Numbers that aren't finite make all of it nan: eigenvalues
    can't be had of these, and an error on one rank would stop the others.

    >>> how = Recipe(1.0, 0.0, 4, 1, None, 0.0, torch.float64)
    >>> inverse_root(torch.diag(torch.tensor([16.0, 1.0])), 1.0, how)
    tensor([[0.5000, 0.0000],
            [0.0000, 1.0000]])
    """
    if not matrix.isfinite().all():
        return torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix.to(how.root_dtype))
    values = values.clamp(min=0)
    if not values[-1] > 0:
        return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    scaled = ((values + how.eps * values[-1]) / since).pow(-1 / how.power)
    return ((vectors * scaled) @ vectors.T).to(matrix.dtype)


def precondition_matrix(g: Tensor, kept: Kept, step: int, renew: bool, how: Recipe) -> tuple[Tensor, Kept]:
    """The direction for one gradient T[r, c], and what is kept afterwards; `step` updates came before."""
    since = 1 - how.beta ** (step + 1) if how.beta < 1 else 1.0  # so much weight averages from zero have
    left, right, left_root, right_root, squares = kept
    direction = g
    if left.numel():
        left = statistic(left, g, how.beta)
        left_root = inverse_root(left, since, how) if renew else left_root
        direction = left_root @ direction
    if right.numel():
        right = statistic(right, g.T, how.beta)
        right_root = inverse_root(right, since, how) if renew else right_root
        direction = direction @ right_root
    if how.grafting is not None:
        grafted, squares = graft(g, squares, since, how)
        length = direction.norm()
        direction = direction * (grafted.norm() / torch.where(length > 0, length, torch.ones_like(length)))
    return direction, Kept(left, right, left_root, right_root, squares)


def graft(g: Tensor, squares: Tensor, since: float | Tensor, how: Recipe) -> tuple[Tensor, Tensor]:
    """The step of the grafted method for a gradient, and its squares afterwards: elementwise."""
    if how.grafting not in SQUARED:
        return g, squares
    squares = torch.addcmul(squares * how.beta, g, g, value=1 - how.beta if how.beta < 1 else 1)
    size = squares / since if how.grafting == "adam" else squares
    return g / (size.sqrt() + how.grafting_eps), squares


def flops(rows: int, columns: int, left: bool, right: bool, interval: int) -> int:
    """Floating-point operations for one matrix in a step, roots spread over their interval.

    Of a side of n elements, the other of m: 2 n^2 m for the statistic, as many to precondition, and about
    27 n^3 for a root: 25 n^3 by tridiagonal form and for the vectors, 2 n^3 for the product.

    >>> flops(10, 10, True, True, 1)
    62000
    """
    sides = [(rows, columns)] * left + [(columns, rows)] * right
    return sum(4 * n * n * m + 27 * n**3 // interval for n, m in sides)


def _precondition(
    g: Tensor,
    left: Tensor,
    right: Tensor,
    left_root: Tensor,
    right_root: Tensor,
    squares: Tensor,
    step: Tensor,
    matrices: str,
    *numbers: Any,
    renew: bool | None = None,
) -> tuple[Tensor, ...]:
    kept, how = Kept(left, right, left_root, right_root, squares), Matrices.of(matrices)
    recipe = Recipe(*numbers)
    if not g.numel():
        return _fake(g, *kept)
    before = 1 if renew is not None else int(step.item())
    renew = before % recipe.interval == 0 if renew is None else renew
    # One after the other, each in memory of its own: a batched product, and one of matrices that begin
    # somewhere else, may have other bits.
    dtype = left.dtype
    gradients = how.split(g).to(dtype)
    apart = [value.reshape(len(gradients), *value.shape[-2:]) for value in kept]
    done = [
        precondition_matrix(gradient.clone(), Kept(*(x.clone() for x in own)), before, renew, recipe)
        for gradient, *own in zip(gradients, *apart, strict=True)
    ]
    direction = how.join(torch.stack([d for d, _ in done]), g.shape).to(g.dtype).contiguous()
    after = zip(*(k for _, k in done))
    return direction, *(torch.stack(new).view(old.shape) for new, old in zip(after, kept, strict=True))


def _fake(g: Tensor, *kept: Any) -> tuple[Tensor, ...]:
    made = (g, *kept[: len(Kept._fields)])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in made)


def _shown(*args: Any) -> tuple[Tensor, ...]:
    return _precondition(*args, renew=False)


_KEPT = "Tensor left, Tensor right, Tensor left_root, Tensor right_root, Tensor squares"
_library = torch.library.Library("vescale", "FRAGMENT")
_library.define(
    f"precondition(Tensor g, {_KEPT}, Tensor step, str matrices, float beta, float eps, int power, "
    "int interval, str? grafting, float grafting_eps, ScalarType root_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("precondition", _precondition, "CompositeExplicitAutograd")
_library.impl("precondition", _fake, "Meta")
rule_beside(torch.ops.vescale.precondition.default)
shown_by(torch.ops.vescale.precondition.default, _shown)


def precondition(g: Tensor, kept: Kept, step: Tensor, matrices: Matrices, how: Recipe) -> tuple[Tensor, Kept]:
    """`precondition_matrix` for each matrix of g, as one op: T[...] -> T[...]. It has no gradient.

    `kept` is in the shapes of `beside.kept_shape`; computed with is its dtype. Roots are computed anew where
    `step`, the number of updates before this one, is a multiple of the interval.
    """
    numbers = how.beta, how.eps, how.power, how.interval, how.grafting, how.grafting_eps, how.root_dtype
    direction, *new = torch.ops.vescale.precondition(g, *kept, step, matrices.text, *numbers)
    return direction, Kept(*new)
