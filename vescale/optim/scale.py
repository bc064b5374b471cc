"""`scale`: gradients or updates times a number, a tensor or a schedule."""

import functools
from typing import Any

import torch

from .. import _tree
from .gradients import entries
from .optimizer import Optimizer, Scalar, Updates, cast_scalar, is_one, scalar_dtype, state_scalar
from .rates import Rate, check_rate, rate_at


def scale(factor: Rate) -> Optimizer:
    """Multiplies gradients, or the updates of an optimizer with their decay, by a factor.

    `factor` is a number, a 0-d tensor, or a schedule as in `adamw`. The state is {}, with a schedule
    {"step": 0-d float64}. Updates are scaled by their `rate`, which costs nothing for each parameter.

    >>> import torch
    >>> scale(-1.0).update({"w": torch.tensor([1.0, 2.0])}, {}, None)[0]
    {'w': tensor([-1., -2.])}
    """
    where = "vs.optim.scale"
    check_rate(where, "factor", factor, least=None)
    follows = callable(factor)

    def init(params: Any) -> dict[str, Any]:
        return {"step": state_scalar(params)} if follows else {}

    def update(updates: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        if not follows:
            return scaled(updates, rate_at(factor, torch.zeros(()))), {}
        (step,) = entries(state, ("step",), where)
        return scaled(updates, rate_at(factor, step)), {"step": step + 1}

    return Optimizer(init, update)


def scaled(updates: Any, by: Scalar) -> Any:
    """A tree of gradients or an `Updates`, times a scalar."""
    if isinstance(updates, Updates):
        keep = _tree.tree_map(lambda x: x if is_one(x) else 1 - by * (1 - x), updates.keep)
        return Updates(
            keep, updates.delta, _tree.tree_map(lambda x: by if is_one(x) else x * by, updates.rate)
        )
    return times(updates, by)


def times(tree: Any, by: Scalar) -> Any:
    """Each tensor of a tree times a scalar, in its own dtype."""
    cast = functools.cache(cast_scalar)
    return _tree.tree_map(lambda x: x * cast(by, scalar_dtype(x)), tree)
