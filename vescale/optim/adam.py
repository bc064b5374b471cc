"""Adam, with the bits of torch.optim.Adam(foreach=False, fused=False); and what AdamW shares with it."""

import functools
from typing import Any

import torch

from .. import _tree
from .gradients import check_parameters, decayed, entries, gradients
from .labels import Mask, mask_of
from .optimizer import Optimizer, Scalar, Updates, cast_scalar, scalar_dtype, state_scalar
from .rates import Rate, check_numbers, check_rate, pair, rate_at


def adam(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    amsgrad: bool = False,
    mask: Mask = None,
) -> Optimizer:
    """Adam (Kingma and Ba, 2015), its weight decay added to the gradient as torch does.

        g <- g + weight_decay p                    t = 1, 2, ...
        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p  -  lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    With `amsgrad` the largest v so far takes the place of v (Reddi et al., 2018). `mask` says which
    parameters decay: see `vs.optim.labels`. `lr`, the state and the bits are those of `adamw`.

    >>> opt = adam(0.1)
    >>> params = {"w": torch.tensor([1.0, -1.0])}
    >>> updates, _ = opt.update({"w": torch.tensor([3.0, -4.0])}, opt.init(params), params)
    >>> updates.delta["w"]  # the first step is lr against the sign of the gradient
    tensor([-0.1000,  0.1000])
    """
    return adam_like("vs.optim.adam", lr, betas, eps, weight_decay, amsgrad, mask, decoupled=False)


def adam_like(
    where: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    mask: Mask,
    *,
    decoupled: bool,
) -> Optimizer:
    """Adam with its weight decay in the gradient, or `decoupled` from it."""
    beta1, beta2 = pair(where, betas)
    check_rate(where, "lr", lr)
    check_numbers(where, {"eps": eps, "weight_decay": weight_decay}, {"betas[0]": beta1, "betas[1]": beta2})
    moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))

    def init(params: Any) -> dict[str, Any]:
        check_parameters(params, where)
        return {
            "step": state_scalar(params),
            **{name: _tree.tree_map(torch.zeros_like, params) for name in moments},
        }

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        gs = gradients(grads, params, where)
        before, *kept = entries(state, ("step", *moments), where)
        old = [
            _tree.leaves_like(spec, tree, where=f"state[{name!r}]")
            for name, tree in zip(moments, kept, strict=True)
        ]

        rate = rate_at(lr, before)
        step = before + 1
        step_size, root = corrections(rate, step, beta1, beta2)
        cast = functools.cache(cast_scalar)  # once for each dtype, not for each parameter
        keep: Any = 1.0
        if weight_decay and decoupled:
            keep = 1 - rate * weight_decay
            if mask is not None:
                keep = _tree.unflatten(spec, [keep if m else 1.0 for m in mask_of(mask, params, where)])
        elif weight_decay:
            gs = decayed(gs, leaves, weight_decay, mask_of(mask, params, where))

        def leaf(p, g, m, v, *largest):
            dtype = scalar_dtype(p)
            m = torch.lerp(m, g, 1 - beta1)
            v = torch.addcmul(v * beta2, g, g, value=1 - beta2)
            largest = [torch.maximum(old, v) for old in largest]
            size = largest[0] if largest else v
            delta = m * cast(step_size, dtype) / (size.sqrt() / cast(root, dtype) + eps)
            return delta, m, v, *largest

        found = list(zip(*map(leaf, leaves, gs, *old))) or [()] * (1 + len(moments))
        deltas, *new = (_tree.unflatten(spec, column) for column in found)
        return Updates(keep, deltas), {"step": step, **dict(zip(moments, new, strict=True))}

    return Optimizer(init, update)


def corrections(
    rate: Scalar, step: torch.Tensor, beta1: float, beta2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-rate / (1 - beta1^step) and sqrt(1 - beta2^step), with torch's bits."""
    # As a tensor: a number divided by a tensor would be a product with the reciprocal.
    return _as_tensor(-rate, step) / (1 - beta1**step), torch.pow(1 - beta2**step, _as_tensor(0.5, step))


def _as_tensor(x: Scalar, like: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.full_like(like, x)
