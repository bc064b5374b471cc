"""AdamW, with the bits of torch.optim.AdamW(foreach=False, fused=False)."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from .optimizer import Optimizer, Scalar, Updates, cast_scalar, scalar_dtype


def adamw(
    lr: Scalar | Callable[[torch.Tensor], Scalar],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

        m <- b1 m + (1 - b1) g                     t = 1, 2, ...
        v <- b2 v + (1 - b2) g^2
        p <- p (1 - lr weight_decay)  -  lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    As in torch, the decay is scaled by lr, which the paper keeps apart.

    `lr` is a number, a 0-d tensor, or a schedule: a function of the number of updates already
    made (a 0-d float64 tensor, 0 at the first update) that returns one of the two. It must use
    torch ops on that tensor: inside a program the step has no value to branch on.

    The state is {"step": 0-d float64, "exp_avg": like params, "exp_avg_sq": like params}. float32
    and float64 parameters get torch's bits on cpu, which is why

    * the step and the bias corrections are float64 tensors, as torch's are Python floats; only the
      finished scalars are cast, once for each dtype and not for each parameter;
    * the square root of the correction is a power of 0.5, as in torch: on cpu the kernel of a
      float64 sqrt gives other bits for 4 of 100 steps;
    * the update is a pair, see `Updates`.

    16-bit parameters round m / (...) once more than torch does, which divides and adds in one op.

    >>> opt = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, -1.0])}
    >>> state = opt.init(params)
    >>> updates, state = opt.update({"w": torch.tensor([3.0, -4.0])}, state, params)
    >>> updates.delta["w"]  # the first step is lr against the sign of the gradient
    tensor([-0.1000,  0.1000])
    """
    beta1, beta2 = betas
    _check(lr, beta1, beta2, eps, weight_decay)

    def init(params: Any) -> dict[str, Any]:
        leaves = _tree.leaves(params)
        device = leaves[0].device if leaves else None
        return {
            "step": torch.zeros((), dtype=torch.float64, device=device),
            "exp_avg": _tree.tree_map(torch.zeros_like, params),
            "exp_avg_sq": _tree.tree_map(torch.zeros_like, params),
        }

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        gs = _tree.leaves_like(spec, grads, where="grads")
        ms = _tree.leaves_like(spec, state["exp_avg"], where="state['exp_avg']")
        vs = _tree.leaves_like(spec, state["exp_avg_sq"], where="state['exp_avg_sq']")

        rate = lr(state["step"]) if callable(lr) else lr
        if isinstance(rate, torch.Tensor):
            rate = rate.to(torch.float64)
        step = state["step"] + 1
        # As a tensor: a number divided by a tensor would be a product with the reciprocal.
        step_size = _as_tensor(-rate, step) / (1 - beta1**step)
        root = torch.pow(1 - beta2**step, _as_tensor(0.5, step))
        cast = functools.cache(cast_scalar)  # once for each dtype, not for each parameter

        def leaf(p, g, m, v):
            dtype = scalar_dtype(p)
            m = torch.lerp(m, g, 1 - beta1)
            v = torch.addcmul(v * beta2, g, g, value=1 - beta2)
            delta = m * cast(step_size, dtype) / (v.sqrt() / cast(root, dtype) + eps)
            return m, v, delta

        ms, vs, deltas = zip(*map(leaf, leaves, gs, ms, vs)) if leaves else ((), (), ())
        keep = 1 - rate * weight_decay if weight_decay else 1.0
        return Updates(keep, _tree.unflatten(spec, deltas)), {
            "step": step,
            "exp_avg": _tree.unflatten(spec, ms),
            "exp_avg_sq": _tree.unflatten(spec, vs),
        }

    return Optimizer(init, update)


def _as_tensor(x: Scalar, like: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.full_like(like, x)


def _check(lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    found = {"betas[0]": beta1, "betas[1]": beta2, "eps": eps, "weight_decay": weight_decay}
    if isinstance(lr, float | int):
        found["lr"] = lr
    for name, value in found.items():
        if not (0 <= value < 1 if name.startswith("betas") else value >= 0):
            rule = "0 <= beta < 1" if name.startswith("betas") else "at least 0"
            raise ArgumentError(explain(f"{name}={value}", where="vs.optim.adamw", rule=rule))
    if isinstance(lr, torch.Tensor) and lr.dim() != 0:
        raise ArgumentError(
            explain(
                f"lr of shape {tuple(lr.shape)}",
                where="vs.optim.adamw",
                rule="one learning rate for all parameters",
                remedy="pass a number, a 0-d tensor or a function of the step",
            )
        )
