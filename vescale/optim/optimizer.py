"""What an optimizer is: `init` and `update`; and what an update is: a scale and a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor, place
from ..spmd.layout import replicated

Scalar = float | torch.Tensor


class Optimizer(NamedTuple):
    """A pair of pure functions over trees of tensors.

    `init(params) -> state` makes the complete state: `update` returns one of the same structure,
    shapes, dtypes and layouts, so that a train step is a fixed point. It works on meta tensors too.

    `update(grads, state, params) -> (updates, state)` changes none of its arguments.

    A gradient transform is such a pair as well: where an optimizer makes `Updates` of gradients, it makes
    gradients of gradients, and `Updates` of `Updates`. See `chain`.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def check_optimizer(x: Any, where: str) -> None:
    """Raises ArgumentError for what is no Optimizer, such as a function that makes one."""
    if not isinstance(x, Optimizer):
        rule, remedy = "a pair of init and update", "such as vs.optim.adamw(1e-3), or vs.optim.Optimizer(..)"
        raise ArgumentError(explain(f"{x!r}", where=where, rule=rule, remedy=remedy))


@_tree.register
@dataclasses.dataclass(frozen=True)
class Updates:
    """What `apply_updates` does to parameters p: p * keep + rate * delta, `delta` in the units of p.

    `delta` is a tree like the parameters; None in the place of a tensor leaves that parameter as it is.
    `keep` and `rate` are one scalar each, or a tree prefix of scalars where parameters differ, as under a
    weight decay mask. A `keep` of 1.0 means no decay.

    Why not the plain sum p + u of other functional libraries: decay as torch writes it is p * (1 - lr *
    decay) + delta, two roundings, and no u makes p + u round to the same bits. Nor does it for SGD, whose
    product with the rate and sum are rounded once, which is why there is a `rate`. The triple composes as
    well as a sum does: scaling an update by c is (1 - c * (1 - keep), delta, c * rate), and clipping or
    adding acts on `delta` alone.
    """

    keep: Any
    delta: Any
    rate: Any = 1.0

    def by_leaf(self, params: Any) -> list[tuple[Scalar, torch.Tensor | None, Scalar]]:
        """(keep, delta, rate) for each parameter, in the order of the leaves."""
        spec = _tree.flatten(params)[1]
        keeps = _tree.broadcast_prefix(self.keep, params, where="updates.keep")
        deltas = _tree.leaves_like(spec, self.delta, where="updates")
        rates = _tree.broadcast_prefix(self.rate, params, where="updates.rate")
        return list(zip(keeps, deltas, rates, strict=True))


def apply_updates(params: Any, updates: Any) -> Any:
    """The new parameters; `updates` is an `Updates`, or a tree of increments.

    Raises ArgumentError for updates of another structure, shape or dtype than the parameters.

    >>> p = {"w": torch.tensor([1.0, 2.0])}
    >>> apply_updates(p, {"w": torch.tensor([0.5, 0.5])})
    {'w': tensor([1.5000, 2.5000])}
    >>> apply_updates(p, Updates(keep=0.5, delta={"w": torch.tensor([0.5, 0.5])}))
    {'w': tensor([1.0000, 1.5000])}
    """
    if not isinstance(updates, Updates):
        updates = Updates(1.0, updates)
    leaves, spec = _tree.flatten(params)
    cast = functools.cache(cast_scalar)  # once for each dtype, not for each parameter

    def leaf(p: torch.Tensor, keep: Scalar, delta: torch.Tensor | None, rate: Scalar) -> torch.Tensor:
        if delta is None:
            return p
        if delta.shape != p.shape or delta.dtype is not p.dtype:
            raise ArgumentError(
                explain(
                    f"an update of shape {tuple(delta.shape)}, {delta.dtype}, for a parameter of shape "
                    f"{tuple(p.shape)}, {p.dtype}",
                    where="vs.optim.apply_updates",
                    rule="a parameter keeps its shape and dtype",
                    remedy="make the update of this parameter's gradient, or cast it: delta.to(p.dtype)",
                )
            )
        if not is_one(keep):  # one op less for each parameter
            p = p * cast(keep, scalar_dtype(p))
        if is_one(rate):
            return p + delta
        # Kernels of 16-bit types round once in whole vectors, twice at their end: a shard has other bits.
        if p.dtype.itemsize < 4:
            return p + delta * cast(rate, scalar_dtype(p))
        # On cpu both round once, to the same bits.
        if isinstance(rate, torch.Tensor):
            return torch.addcmul(p, delta, cast(rate, scalar_dtype(p)))  # pyright: ignore[reportArgumentType]
        return torch.add(p, delta, alpha=rate)

    return _tree.unflatten(spec, [leaf(p, *each) for p, each in zip(leaves, updates.by_leaf(params))])


def is_one(x: Scalar) -> bool:
    """Whether x is the number 1, which changes nothing; a tensor has no value to ask."""
    return not isinstance(x, torch.Tensor) and x == 1


def scalar_dtype(like: torch.Tensor) -> torch.dtype:
    """The dtype in which a 0-d tensor meets `like` without changing its dtype, nor losing bits.

    A 0-d operand promotes only another 0-d tensor of its kind. Kernels of 16-bit types read their
    0-d operands as float32, so rounding them earlier would only lose bits.
    """
    return torch.float32 if like.dtype.itemsize < 4 and like.dim() > 0 else like.dtype


def cast_scalar(x: Scalar, dtype: torch.dtype) -> Scalar:
    """x as an operand of a kernel; a number is cast by the kernel itself."""
    return x.to(dtype) if isinstance(x, torch.Tensor) else x


def state_scalar(params: Any, value: float = 0.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A 0-d tensor of state: where the parameters are, and on their mesh when they have one."""
    leaves = _tree.leaves(params)
    return beside(params, torch.full((), value, dtype=dtype, device=leaves[0].device if leaves else None))


def beside(params: Any, x: torch.Tensor) -> torch.Tensor:
    """x, which all ranks have, as a replicated DTensor when the parameters are on one mesh."""
    meshes = {leaf.mesh if isinstance(leaf, DTensor) else None for leaf in _tree.leaves(params)}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return x if mesh is None else place(x, mesh, replicated(mesh.abstract, tuple(x.shape)))
