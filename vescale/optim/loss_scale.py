"""`loss_scale`: dynamic loss scaling for 16-bit gradients, as torch.amp.GradScaler."""

from typing import Any

import torch

from .._errors import ArgumentError, explain
from .gradients import entries
from .norms import all_finite
from .optimizer import Optimizer, Updates, check_optimizer, state_scalar
from .rates import is_number
from .scale import times
from .skip import unless_skipped


def loss_scale(
    opt: Optimizer, init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
) -> Optimizer:
    """`opt` for gradients of a loss that was multiplied by `state["scale"]`, which fits the dtype.

        loss, grads = vs.value_and_grad(lambda *args: loss_fn(*args) * state["scale"])(params, batch)

    Gradients are divided by the scale. A step with an inf or a NaN in them leaves parameters and the state
    of `opt` bit-unchanged and multiplies the scale by `backoff`; after `interval` steps in a row that were
    taken it grows by `growth`, unless that overflows; it is never less than 2**-126, whose reciprocal
    is finite. One reduction for all gradients, no branch.

    The state is {"scale": 0-d float32, "taken": 0-d int32, steps in a row, "inner": that of `opt`}. Raises
    ArgumentError for numbers out of range.

    >>> import torch
    >>> from vescale.optim import apply_updates, sgd
    >>> opt, params = loss_scale(sgd(0.1), init=8.0), {"w": torch.tensor([1.0])}
    >>> updates, state = opt.update({"w": torch.tensor([8.0])}, opt.init(params), params)
    >>> apply_updates(params, updates)
    {'w': tensor([0.9000])}
    >>> opt.update({"w": torch.tensor([float("inf")])}, state, params)[1]["scale"]
    tensor(4.)
    """
    where = "vs.optim.loss_scale"
    check_optimizer(opt, where)
    numbers = torch.finfo(torch.float32)
    rules = {
        "init": (init, lambda x: numbers.tiny <= x <= numbers.max, "a normal float32, more than 0"),
        "growth": (growth, lambda x: x >= 1, "a number, at least 1"),
        "backoff": (backoff, lambda x: 0 < x <= 1, "a number, more than 0, at most 1"),
        "interval": (interval, lambda x: x >= 1 and x == int(x), "a whole number of steps, at least 1"),
    }
    for name, (value, fits, rule) in rules.items():
        if not (is_number(value) and fits(value)):
            raise ArgumentError(explain(f"{name}={value!r}", where=where, rule=rule))

    def make(params: Any) -> dict[str, Any]:
        return {
            "scale": state_scalar(params, init, torch.float32),
            "taken": state_scalar(params, 0, torch.int32),
            "inner": opt.init(params),
        }

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        scale, taken, old = entries(state, ("scale", "taken", "inner"), where)
        finite = all_finite(grads)
        true = times(grads, scale.to(torch.float64).reciprocal().to(torch.float32))
        updates, inner = unless_skipped(finite, *opt.update(true, old, params), old)
        taken = taken + 1
        grown = scale * growth
        grown = torch.where((taken == interval) & torch.isfinite(grown), grown, scale)
        return updates, {
            "scale": torch.where(finite, grown, (scale * backoff).clamp(min=numbers.tiny)),
            "taken": torch.where(finite & (taken != interval), taken, torch.zeros_like(taken)),
            "inner": inner,
        }

    return Optimizer(make, update)
