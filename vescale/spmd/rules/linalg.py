"""Batches of matrices: the dims of the matrices are whole, the dims before them free; distances of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..program.ir import Node, TensorMeta
from .batched import trailing, unless_empty
from .elementwise import broadcast_pattern
from .notation import Pattern, argument, bind, operand_metas, result_shapes, rule

aten = torch.ops.aten

# How many of its last dims belong to each operand and each result: 2 a matrix, 1 a vector, 0 a number.
_WORKED: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {
    aten.linalg_cholesky_ex.default: ((2,), (2, 0)),
    aten.cholesky.default: ((2,), (2,)),
    aten.cholesky_inverse.default: ((2,), (2,)),
    aten.linalg_qr.default: ((2,), (2, 2)),
    aten.geqrf.default: ((2,), (2, 1)),
    aten.linalg_householder_product.default: ((2, 1), (2,)),
    aten.ormqr.default: ((2, 1, 2), (2,)),
    aten._linalg_svd.default: ((2,), (2, 1, 2)),
    aten._linalg_eigh.default: ((2,), (1, 2)),
    aten.linalg_eig.default: ((2,), (1, 2)),
    aten.linalg_eigvals.default: ((2,), (1,)),
    aten._linalg_eigvals.default: ((2,), (1,)),
    aten.linalg_inv_ex.default: ((2,), (2, 0)),
    aten._linalg_det.default: ((2,), (0, 2, 1)),
    aten._linalg_slogdet.default: ((2,), (0, 0, 2, 1)),
    aten.linalg_matrix_exp.default: ((2,), (2,)),
    aten.linalg_lu.default: ((2,), (2, 2, 2)),
    aten.linalg_lu_factor_ex.default: ((2,), (2, 1, 0)),
    aten.lu_unpack.default: ((2, 1), (2, 2, 2)),
    aten.linalg_ldl_factor_ex.default: ((2,), (2, 1, 0)),
    aten.linalg_pinv.default: ((2,), (2,)),
    aten.linalg_pinv.atol_rtol_float: ((2,), (2,)),
    aten.linalg_pinv.atol_rtol_tensor: ((2, 0, 0), (2,)),  # one of the tolerances may be missing
    aten.linalg_pinv.rcond_tensor: ((2, 0), (2,)),
}
# Those that solve, and which operand they are linear in.
_SOLVERS: dict[object, tuple[tuple[int, ...], int]] = {
    aten.linalg_lu_solve.default: ((2, 1, 2), 2),
    aten.linalg_ldl_solve.default: ((2, 1, 2), 2),
    aten.linalg_solve_triangular.default: ((2, 2), 1),
    aten.cholesky_solve.default: ((2, 2), 0),
}


@rule(list(_WORKED))  # type: ignore[arg-type]
def decomposition(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """What wasn't asked for, such as the vectors of singular values, is a tensor of no elements."""
    operands, results = _WORKED[node.op]
    shapes = result_shapes(node, metas)
    spare = frozenset(place for place, shape in enumerate(shapes) if len(shape) < results[place])
    counts = [min(len(shape), last) for shape, last in zip(shapes, results, strict=True)]
    given = len(operand_metas(node, metas))
    return trailing(node, metas, (operands[:given], counts), spare=spare, ragged=int(not spare))


@rule(list(_SOLVERS))  # type: ignore[arg-type]
def solve(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    operands, linear = _SOLVERS[node.op]
    return trailing(node, metas, (operands, (2,)), linear=(frozenset((linear,)),), ragged=1)


@rule(aten._linalg_solve_ex.default)
def solve_and_factor(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """The right side is a matrix, or a vector for each matrix of the batch."""
    left, right = (meta.shape for meta in operand_metas(node, metas))
    vector = len(right) == 1 or right == left[:-1]
    last = 1 if vector else 2
    return trailing(node, metas, ((2, last), (last, 2, 1, 0)), ragged=1)


# Distances between each of two sets of points: the points are free, their coordinates whole.


def _distances(node: Node, metas: Sequence[TensorMeta], text: str, **options: object) -> Pattern:
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    whole = options.pop("whole", ())
    made = bind(text, shapes, result_shapes(node, metas), whole=whole, sum=("r",), **options)
    return replace(made, local=unless_empty(node, metas))


@rule([aten._cdist_forward.default, aten._euclidean_dist.default])
def distances(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _distances(node, metas, "... p m, ... r m -> ... p r", whole=("m",))


@rule(aten._cdist_backward.default)
def distances_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    text = "... p r, ... p m, ... r m, ... p r -> ... p m"
    return _distances(node, metas, text, linear=(frozenset((0,)),))


@rule(aten.linalg_cross.default)
def cross(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """Operands are broadcast; the dim of the three coordinates is whole."""
    made = broadcast_pattern(node, metas, linear=(frozenset((0,)), frozenset((1,))))
    dim = argument(node, 2, "dim", -1) % len(made.results[0])
    return replace(made, whole=frozenset(made.results[0][dim]))
