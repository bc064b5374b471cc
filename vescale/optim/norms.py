"""Numbers that concern all tensors of a tree at once: norms, and whether everything is finite.

One reduction for all of them, whatever their placements and dtypes are. Inside a program that is how it is
traced: the parts of a rank are stacked, and what is pending is the stack, once. Outside, and op by op, the
local pieces of DTensors are combined before anything is sent.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.program.partition import without_partials
from ..spmd.redistribute_many import redistribute_many
from ..spmd.tensor_group import reduced
from .optimizer import Optimizer, Updates
from .scale import times


def global_norm(tree: Any, norm_type: float = 2.0) -> torch.Tensor:
    """The 2-norm of all elements of a tree together, or with `norm_type=inf` their largest magnitude.

        global_norm : tree of T[...] -> T[]

    Sums are in float32, in float64 when the tree has float64 or complex128 tensors; the result has that
    dtype, and is equal on all ranks. One all-reduce of a scalar for all tensors, for DTensors on several
    meshes one for each. An element that several ranks hold counts once; pending reductions are finished
    first. A tree without elements has the norm 0; of complex numbers magnitudes count. NaN and inf come out
    as in torch. Raises ArgumentError for another `norm_type`, and for leaves that are no tensors.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    >>> global_norm([torch.tensor([3.0, -4.0])], norm_type=float("inf"))
    tensor(4.)
    """
    if norm_type not in (2, math.inf):
        raise ArgumentError(
            explain(f"norm_type={norm_type!r}", where="vs.optim.global_norm", rule="2 or inf")
        )
    if math.isinf(norm_type):
        return _together(tree, lambda x, dtype: _real(x, dtype).abs().amax(), "max")
    return _together(tree, _squares, "sum").sqrt()


def all_finite(tree: Any) -> torch.Tensor:
    """Whether no element of a tree is inf or NaN: a 0-d bool, equal on all ranks.

    One reduction for all tensors, as in `global_norm`.


    >>> all_finite([torch.ones(2), torch.tensor([1.0, float("nan")])])
    tensor(False)
    """
    return _together(tree, lambda x, dtype: (x.abs() * 0).sum(), "sum") == 0  # 0 times inf is NaN


def clip_by_global_norm(max_norm: float, norm_type: float = 2.0) -> Optimizer:
    """Scales gradients down to a global norm of at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

        g <- g min(1, max_norm / (norm + 1e-6))

    One reduction for all gradients: see `global_norm`. Behind an optimizer it clips the updates' deltas. A
    norm that isn't finite makes gradients 0 or NaN, as torch does without `error_if_nonfinite`: a program
    has no value to raise an error about; see `skip_if_nonfinite`. 16-bit gradients are measured in float32,
    where torch rounds the norm of each to 16 bits. The state is {}.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, {}, None)[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    where = "vs.optim.clip_by_global_norm"
    if norm_type not in (2, math.inf):
        raise ArgumentError(explain(f"norm_type={norm_type!r}", where=where, rule="2 or inf"))
    if isinstance(max_norm, bool) or not (isinstance(max_norm, float | int) and max_norm > 0):
        raise ArgumentError(explain(f"max_norm={max_norm!r}", where=where, rule="a number, more than 0"))

    def clip(tree: Any) -> Any:
        return times(tree, (max_norm / (global_norm(tree, norm_type) + 1e-6)).clamp(max=1.0))

    def update(updates: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(updates, Updates):
            return Updates(updates.keep, clip(updates.delta), updates.rate), state
        return clip(updates), state

    return Optimizer(lambda params: {}, update)


def _squares(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = _real(x, dtype)
    return (wide * wide).sum()


def _real(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`; of complex numbers their magnitudes."""
    return (x.abs() if x.is_complex() else x).to(dtype)


def _together(tree: Any, each: Callable[[torch.Tensor, torch.dtype], torch.Tensor], op: str) -> torch.Tensor:
    """`each` tensor's number, of a dtype that suits all, reduced over all tensors and ranks."""
    leaves = _tree.leaves(tree)
    for path, x in zip(_tree.paths(tree), leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            rule, remedy = "a tree of tensors", "pass gradients, or the delta of an Updates"
            what = f"{type(x).__name__} at {path!r}"
            raise ArgumentError(explain(what, where="vs.optim.norms", rule=rule, remedy=remedy))
    wide = (torch.float64, torch.complex128)
    dtype = torch.float64 if any(x.dtype in wide for x in leaves) else torch.float32
    full = [x for x in leaves if x.numel()]
    if not full:
        return torch.zeros((), dtype=dtype, device=leaves[0].device if leaves else None)

    def combined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = torch.stack([each(x, dtype).to(dtype) for x in tensors])
        return parts.amax() if op == "max" else parts.sum()

    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in full)
    if recorded or not any(type(x) is DTensor for x in full):
        return combined(full)  # traced, plain, or with a gradient: the ops themselves
    plain = [x for x in full if type(x) is not DTensor]
    by_mesh: dict[Any, list[DTensor]] = {}
    for x in full:
        if isinstance(x, DTensor):
            by_mesh.setdefault(x.mesh, []).append(x)
    totals = [reduced(_finished(xs), mesh, combined, op, dtype) for mesh, xs in by_mesh.items()]
    totals += [combined(plain)] if plain else []
    if len(totals) == 1:
        return totals[0]
    return torch.stack(totals).amax() if op == "max" else torch.stack(totals).sum()


def _finished(tensors: Sequence[DTensor]) -> list[DTensor]:
    """The tensors without pending reductions, which are finished together."""
    pending = [x for x in tensors if x.layout.partials]
    done = iter(redistribute_many(pending, [without_partials(x.layout).spec for x in pending]))
    return [next(done) if x.layout.partials else x for x in tensors]
