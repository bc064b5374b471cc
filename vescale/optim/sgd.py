"""SGD, with the bits of torch.optim.SGD(foreach=False, fused=False)."""

from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from .gradients import check_parameters, decayed, entries, gradients
from .labels import Mask, mask_of
from .optimizer import Optimizer, Updates, state_scalar
from .rates import Rate, check_numbers, check_rate, rate_at


def sgd(
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    *,
    mask: Mask = None,
) -> Optimizer:
    """Stochastic gradient descent, with momentum as torch has it.

        g <- g + weight_decay p
        b <- momentum b + g                        b = 0 before the first step
        p <- p - lr b                              with nesterov: p - lr (g + momentum b)

    `mask` says which parameters decay: see `vs.optim.labels`. `lr` is as in `adamw`.

    The state is {"step": 0-d float64}, and with momentum "momentum_buffer" like params. float32 and float64
    parameters get torch's bits on cpu: the last line rounds once, hence the rate of `Updates`.

    >>> opt = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = opt.init(params)
    >>> for _ in range(2):
    ...     updates, state = opt.update({"w": torch.tensor([1.0])}, state, params)
    >>> updates.delta, updates.rate
    ({'w': tensor([1.9000])}, -0.1)
    """
    where = "vs.optim.sgd"
    check_rate(where, "lr", lr)
    check_numbers(where, {"momentum": momentum, "weight_decay": weight_decay}, {})
    if nesterov and not momentum:
        raise ArgumentError(
            explain(
                "nesterov=True, momentum=0",
                where=where,
                rule="it looks ahead along momentum",
                remedy="give a momentum, such as 0.9",
            )
        )

    def init(params: Any) -> dict[str, Any]:
        check_parameters(params, where, complex_too=True)
        state: dict[str, Any] = {"step": state_scalar(params)}
        if momentum:
            state["momentum_buffer"] = _tree.tree_map(torch.zeros_like, params)
        return state

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        deltas = gradients(grads, params, where)
        step, *kept = entries(state, ("step", "momentum_buffer") if momentum else ("step",), where)
        if weight_decay:
            deltas = decayed(deltas, leaves, weight_decay, mask_of(mask, params, where))
        new: dict[str, Any] = {"step": step + 1}
        if momentum:
            old = _tree.leaves_like(spec, kept[0], where="state['momentum_buffer']")
            buffers = [b * momentum + g for b, g in zip(old, deltas, strict=True)]
            new["momentum_buffer"] = _tree.unflatten(spec, buffers)
            if nesterov:
                deltas = [torch.add(g, b, alpha=momentum) for g, b in zip(deltas, buffers, strict=True)]
            else:
                deltas = buffers
        return Updates(1.0, _tree.unflatten(spec, deltas), -rate_at(lr, step)), new

    return Optimizer(init, update)
