"""Ops on whole matrices: each matrix is computed with on one rank, and which one it is doesn't matter.

A rank may hold any of the matrices: some of the batch (sharded, or cut raggedly between matrices), all of
a tensor with the others having nothing (`RaggedShard.on_rank`), or everything. It never has a part of one.
How a tensor is a batch of matrices is the text that is the op's second argument: see `spmd.matrices`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..._compat import OpOverload
from ..layout import Layout
from ..matrices import Matrices
from ..program.ir import Node, TensorMeta
from .notation import LocalCall, Pattern, operand_metas, rule

on_matrices: set[OpOverload] = set()  # the ops that have this rule


def matrix_rule(op: OpOverload) -> None:
    """Registers the rule of `op(Tensor x, str matrices, ...) -> Tensor`: the same shape, matrix by matrix."""
    on_matrices.add(op)
    rule(op, _pattern)


def matrix_pattern(matrices: Matrices, shape: Sequence[int]) -> Pattern:
    """Rows and columns are whole, the batch is free; a ragged cut passes if it cuts no matrix."""
    sizes = matrices.sizes(shape)
    whole = {*matrices.rows, *matrices.columns}
    if not matrices.follow:  # a rank reads its sizes off its piece: those in the text stay what they are
        whole |= dict(matrices.given).keys()
    return Pattern(
        (matrices.dims,),
        (matrices.dims,),
        sizes,
        whole=frozenset(whole),
        ragged=len(matrices.dims),
        between=lambda layout: cuts_between(matrices, layout),
        local=_local,
    )


def cuts_between(matrices: Matrices, layout: Layout) -> bool:
    """Whether the ragged cut of a layout goes through no matrix.

    >>> from ..layout import AbstractMesh
    >>> from ..placements import P, RaggedShard
    >>> heads, mesh = Matrices.of("(h d=4) k -> h d k"), AbstractMesh(("dp",), (2,))
    >>> rows = [Layout(mesh, P(dp=RaggedShard((0,), units)), (12, 5)) for units in ((1, 2), (5, 7))]
    >>> [cuts_between(heads, layout) for layout in rows]
    [True, False]
    """
    if layout.ragged is None or not layout.ragged[1].dims:
        return True
    _, rows, columns = matrices.grid(layout.shape)
    if not matrices.follow:
        return False
    piece = math.prod(layout.piece_shape(0))
    return not rows * columns or piece // layout.ragged[1].total % (rows * columns) == 0


def _pattern(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
    (meta,) = operand_metas(node, metas)
    return matrix_pattern(Matrices.of(node.args[1]), meta.shape)


def _local(call: LocalCall) -> LocalCall:
    text = merged_text(Matrices.of(call.node.args[1]), call.operands[0], call.meta.shape)
    return call.with_arg(1, text)


def merged_text(matrices: Matrices, layout: Layout, shape: Sequence[int]) -> str:
    """The text for a rank's part: it has another number of matrices, maybe its leading dims flattened."""
    if not matrices.follow:
        return matrices.text
    merged = 1 if layout.ragged is None else max(len(layout.ragged[1].dims), 1)
    return matrices.merged(shape, merged)
