"""What an optimizer is: `init` and `update`; and what an update is: a scale and a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _tree
from .products import added

Scalar = float | torch.Tensor


class Optimizer(NamedTuple):
    """A pair of pure functions over trees of tensors.

    `init(params) -> state` makes the complete state: `update` returns one of the same structure,
    shapes and dtypes, so that a train step is a fixed point. It works on meta tensors too.

    `update(grads, state, params) -> (updates, state)` changes none of its arguments.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


@_tree.register
@dataclasses.dataclass(frozen=True)
class Updates:
    """What `apply_updates` does to parameters p: p * keep + delta, `delta` in the units of p.

    `delta` is a tree like the parameters. `keep` is one scalar, or a tree prefix of scalars where
    parameters differ, as under a weight decay mask; 1.0 means no decay.

    Why not the plain sum p + u of other functional libraries: decay as torch writes it is
    p * (1 - lr * decay) + delta, two roundings, and no u makes p + u round to the same bits. A pair
    composes as well as a sum does: scaling an update by c is (1 - c * (1 - keep), c * delta), and
    clipping or adding acts on `delta` alone.
    """

    keep: Any
    delta: Any


def apply_updates(params: Any, updates: Any) -> Any:
    """The new parameters; `updates` is an `Updates`, or a tree of increments.

    >>> p = {"w": torch.tensor([1.0, 2.0])}
    >>> apply_updates(p, {"w": torch.tensor([0.5, 0.5])})
    {'w': tensor([1.5000, 2.5000])}
    >>> apply_updates(p, Updates(keep=0.5, delta={"w": torch.tensor([0.5, 0.5])}))
    {'w': tensor([1.0000, 1.5000])}
    """
    if not isinstance(updates, Updates):
        updates = Updates(1.0, updates)
    leaves, spec = _tree.flatten(params)
    deltas = _tree.leaves_like(spec, updates.delta, where="updates")
    keeps = _tree.broadcast_prefix(updates.keep, params, where="updates.keep")
    cast = functools.cache(cast_scalar)  # once for each dtype, not for each parameter

    def leaf(p: torch.Tensor, keep: Scalar, delta: torch.Tensor) -> torch.Tensor:
        if isinstance(keep, float) and keep == 1.0:  # one op less for each parameter
            return added(p, delta)
        return added(p * cast(keep, scalar_dtype(p)), delta)

    return _tree.unflatten(spec, map(leaf, leaves, keeps, deltas))


def scalar_dtype(like: torch.Tensor) -> torch.dtype:
    """The dtype in which a 0-d tensor meets `like` without changing its dtype, nor losing bits.

    A 0-d operand promotes only another 0-d tensor of its kind. Kernels of 16-bit types read their
    0-d operands as float32, so rounding them earlier would only lose bits.
    """
    return torch.float32 if like.dtype.itemsize < 4 and like.dim() > 0 else like.dtype


def cast_scalar(x: Scalar, dtype: torch.dtype) -> Scalar:
    """x as an operand of a kernel; a number is cast by the kernel itself."""
    return x.to(dtype) if isinstance(x, torch.Tensor) else x
