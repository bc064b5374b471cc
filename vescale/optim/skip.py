"""`skip_if_nonfinite`: a step whose gradients aren't finite changes nothing."""

from typing import Any

import torch

from .. import _tree
from .norms import all_finite
from .optimizer import Optimizer, Scalar, Updates, check_optimizer, is_one


def skip_if_nonfinite(opt: Optimizer) -> Optimizer:
    """`opt`, but a step with an inf or a NaN in its gradients leaves all state and parameters bit-unchanged.

    Decided by a 0-d tensor without a branch, so it works inside a program; one reduction for all gradients.
    The state is that of `opt`.

    >>> import torch
    >>> from vescale.optim import apply_updates, sgd
    >>> opt, params = skip_if_nonfinite(sgd(0.1)), {"w": torch.tensor([1.0])}
    >>> updates, _ = opt.update({"w": torch.tensor([float("nan")])}, opt.init(params), params)
    >>> apply_updates(params, updates)
    {'w': tensor([1.])}
    """

    check_optimizer(opt, "vs.optim.skip_if_nonfinite")

    def update(grads: Any, state: Any, params: Any) -> tuple[Updates, Any]:
        return unless_skipped(all_finite(grads), *opt.update(grads, state, params), state)

    return Optimizer(opt.init, update)


def unless_skipped(taken: torch.Tensor, updates: Any, new: Any, old: Any) -> tuple[Updates, Any]:
    """Updates and new state of a step that is `taken`, else updates that change nothing and the old state."""
    if not isinstance(updates, Updates):
        updates = Updates(1.0, updates)

    def one_unless(x: Scalar) -> Scalar:
        if is_one(x):
            return x
        value = (
            x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.float64, device=taken.device)
        )
        return torch.where(taken, value, 1.0)

    # p + -0.0 has the bits of p, also where that is -0.0; with a rate of 1.
    still = Updates(
        _tree.tree_map(one_unless, updates.keep),
        _tree.tree_map(lambda x: torch.where(taken, x, -0.0), updates.delta),
        _tree.tree_map(one_unless, updates.rate),
    )
    state = _tree.tree_map(
        lambda now, was: torch.where(taken, now, was) if isinstance(now, torch.Tensor) else now, new, old
    )
    return still, state
