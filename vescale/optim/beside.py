"""Beside: what an op keeps for each matrix of a tensor lies with the matrix, whatever has the matrices.

A tensor that is a batch of matrices (see `spmd.matrices`) has, for each of them, some numbers rows x columns
of another size: a statistic, its root. They are one tensor (*batch, rows, columns), with a leading dim of 1
for a single matrix; its layout follows from that of the tensor of matrices.

    rule_beside(op)     of op(Tensor x, Tensor kept, .., Tensor step, str matrices, ..) -> (Tensor, ..)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from .._compat import OpOverload
from ..spmd.layout import Layout, replicated
from ..spmd.matrices import Matrices
from ..spmd.placements import P, RaggedShard
from ..spmd.program.candidates import carry
from ..spmd.program.ir import Node, TensorMeta
from ..spmd.program.partition import whole_pattern
from ..spmd.rules.matrices import cuts_between, matrix_pattern, merged_text, on_matrices
from ..spmd.rules.notation import LocalCall, Pattern, operand_metas, result_shapes, rule


def is_whole(layout: Layout, matrices: Matrices) -> bool:
    """Whether no rank has a part of a matrix."""
    if not cuts_between(matrices, layout):
        return False
    return carry(matrix_pattern(matrices, layout.shape), layout.mesh, layout, 0, layout.shape) is layout


def kept_shape(matrices: Matrices, shape: Sequence[int], rows: int, columns: int) -> tuple[int, ...]:
    """The shape of rows x columns numbers for each matrix: one dim for each dim that has any of the batch.

    >>> kept_shape(Matrices.of("(h d=4) k -> h d k"), (12, 5), 4, 4)
    (3, 4, 4)
    >>> kept_shape(Matrices.of("r c -> r c"), (12, 5), 5, 5)
    (1, 5, 5)
    """
    sizes = matrices.sizes(shape)
    return (*(math.prod(sizes[name] for name in dim) for dim in _batch(matrices)), rows, columns)


def _batch(matrices: Matrices) -> list[tuple[str, ...]]:
    """The factors of the batch in each dim that has some; those of one matrix are none."""
    found = [tuple(name for name in dim if name in matrices.batch) for dim in matrices.dims]
    return [dim for dim in found if dim] or [()]


@lru_cache(maxsize=65536)
def beside(layout: Layout, matrices: Matrices, rows: int, columns: int) -> Layout:
    """Where rows x columns numbers for each matrix are, of a tensor in a layout that cuts no matrix.

    >>> from ..spmd.layout import AbstractMesh
    >>> mesh, heads = AbstractMesh(("dp",), (2,)), Matrices.of("(h d=4) k -> h d k")
    >>> beside(Layout(mesh, P(dp=RaggedShard((0,), (4, 8))), (12, 5)), heads, 4, 4)
    Layout(dp=2, P(dp=RaggedShard((0,), (1, 2))), shape=(3, 4, 4))
    """
    shape, batch = kept_shape(matrices, layout.shape, rows, columns), _batch(matrices)
    pattern = matrix_pattern(matrices, layout.shape)
    pattern = replace(
        pattern,
        results=((*batch, ("kept rows",), ("kept columns",)),),
        sizes={**pattern.sizes, "kept rows": rows, "kept columns": columns},
    )
    mesh = layout.mesh
    splits = [(axis, placed) for axis, placed in layout.spec.items() if mesh.axis_size(axis) > 1]
    ragged = [(axis, placed) for axis, placed in splits if isinstance(placed, RaggedShard)]
    even = Layout(mesh, P.of(split for split in splits if split not in ragged), layout.shape)
    carried = carry(pattern, mesh, even, 0, shape)
    assert carried is not None, (layout, matrices.text)
    # Cuts are between matrices: as units, reduced by their gcd, they are those of what is beside.
    cuts = [
        (axis, RaggedShard.from_runs(range(min(len(placed.dims), len(batch))), placed.runs))
        for axis, placed in ragged
    ]
    return Layout(mesh, P.of([*carried.spec.items(), *cuts]), shape) if cuts else carried


def rule_beside(op: OpOverload) -> None:
    """Registers the rule of an op that runs where its matrices are, with what is kept for each beside them.

    Operands and results are x, what is kept, and 0-d tensors, which are whole. Where x is cut through
    matrices, every rank computes with all of them.
    """
    on_matrices.add(op)
    rule(op, _pattern)


def _pattern(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    at = next(index for index, arg in enumerate(node.args) if isinstance(arg, str))
    matrices = Matrices.of(node.args[at])
    read, made = [meta.shape for meta in operand_metas(node, metas)], result_shapes(node, metas)

    def follow(layout: Layout) -> tuple[list[Layout], list[Layout]]:
        there = layout if is_whole(layout, matrices) else replicated(layout.mesh, layout.shape)

        def placed(shape: tuple[int, ...]) -> Layout:
            return beside(there, matrices, *shape[-2:]) if shape else replicated(there.mesh, ())

        return [there, *map(placed, read[1:])], [there, *map(placed, made[1:])]

    def local(call: LocalCall) -> LocalCall:
        return call.with_arg(at, merged_text(matrices, call.operands[0], call.meta.shape))

    return replace(whole_pattern(node, metas), follow=follow, local=local)
