"""Linear algebra and Fourier transforms: matrices and transformed dims are whole, batches are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..program.ir import Node, TensorMeta
from .elementwise import broadcast_pattern
from .notation import Dims, LocalCall, Pattern, argument, operand_metas, result_shapes, rule

aten = torch.ops.aten

# How many trailing dims of each operand the op is about.
_CORE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("linalg_inv_ex", "linalg_cholesky_ex", "cholesky", "cholesky_inverse"), (2,)),
    **dict.fromkeys(("linalg_lu_factor_ex", "linalg_lu", "linalg_qr", "_linalg_svd", "_linalg_eigh"), (2,)),
    **dict.fromkeys(("linalg_eig", "_linalg_eigvals", "_linalg_slogdet", "_linalg_det", "geqrf"), (2,)),
    **dict.fromkeys(("linalg_ldl_factor_ex", "linalg_matrix_exp"), (2,)),
    **dict.fromkeys(("cholesky_solve", "linalg_solve_triangular", "triangular_solve"), (2, 2)),
    **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve"), (2, 1, 2)),
    "lu_unpack": (2, 1),
    "linalg_householder_product": (2, 1),
    "ormqr": (2, 1, 2),
    "_cdist_forward": (2, 2),
    "_euclidean_dist": (2, 2),
}


@rule([getattr(aten, name).default for name in _CORE])
def batched(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    return _batched(node, metas, _CORE[node.op.overloadpacket.__name__])


@rule(aten._linalg_solve_ex.default)
def solve(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    matrix, right = (meta.shape for meta in operand_metas(node, metas))
    is_vector = len(right) == 1 or right == matrix[:-1]
    return _batched(node, metas, (2, 1 if is_vector else 2))


def _batched(node: Node, metas: Sequence[TensorMeta], core: Sequence[int]) -> Pattern:
    """Leading dims are broadcast; the others are whole. A result without the batch makes it whole too."""
    shapes = [meta.shape for meta in operand_metas(node, metas)]
    batches = [shape[: len(shape) - count] for shape, count in zip(shapes, core, strict=True)]
    batch = torch.broadcast_shapes(*batches)
    sizes = {f"b{dim}": size for dim, size in enumerate(batch)}
    whole: set[str] = set()

    def dims(shape: Sequence[int], leading: int) -> Dims:
        offset = len(batch) - leading
        made = [
            () if size == 1 and batch[offset + dim] != 1 else (f"b{offset + dim}",)
            for dim, size in enumerate(shape[:leading])
        ]
        for size in shape[leading:]:
            name = f"w{len(whole)}"
            sizes[name] = size
            whole.add(name)
            made.append((name,))
        return tuple(made)

    operands = tuple(dims(shape, len(shape) - count) for shape, count in zip(shapes, core, strict=True))
    made = result_shapes(node, metas)
    has_batch = [tuple(shape[: len(batch)]) == tuple(batch) for shape in made]
    results = tuple(dims(shape, len(batch) if has else 0) for shape, has in zip(made, has_batch, strict=True))
    if not all(has_batch):
        whole.update(f"b{dim}" for dim in range(len(batch)))
    return Pattern(operands, results, sizes, whole=frozenset(whole))


@rule(aten._cdist_backward.default)
def cdist_backward(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    """(rows, columns), points and other points, distances, to the gradient of the points."""
    return _batched(node, metas, (2, 2, 2, 2))


@rule([aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default])
def fft(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    source, target = operand_metas(node, metas)[0].shape, result_shapes(node, metas)[0]
    along = {dim % len(source) for dim in argument(node, 1, "dim")}
    sizes = {f"d{dim}": size for dim, size in enumerate(source)}
    sizes |= {f"f{dim}": target[dim] for dim in along}
    operand: Dims = tuple((f"d{dim}",) for dim in range(len(source)))
    result: Dims = tuple((f"f{dim}" if dim in along else f"d{dim}",) for dim in range(len(source)))
    whole = frozenset(name for dim in along for name in (f"d{dim}", f"f{dim}"))
    linear = (frozenset((0,)),)
    return Pattern((operand,), (result,), sizes, whole=whole, linear=linear, local=_unless_empty)


def _unless_empty(call: LocalCall) -> LocalCall:
    """Transform libraries refuse a batch of none."""
    shape = call.results[0].local_shape(call.rank)
    if math.prod(shape):
        return call
    kwargs = {"dtype": call.meta.dtype, "device": call.meta.device}
    return replace(call, fn=torch.empty, args=(shape,), kwargs=kwargs)


@rule(aten.linalg_pinv.atol_rtol_tensor)
def pinv(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    tolerances = len(operand_metas(node, metas)) - 1  # one a matrix
    return _batched(node, metas, (2, *(0,) * tolerances))


@rule(aten.linalg_cross.default)
def cross(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    made = broadcast_pattern(node, metas)
    ndim = len(made.results[0])
    whole = frozenset((f"d{node.kwargs.get('dim', -1) % ndim}",))
    return Pattern(made.operands, made.results, made.sizes, whole=whole)
