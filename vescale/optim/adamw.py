"""AdamW, with the bits of torch.optim.AdamW(foreach=False, fused=False)."""

from .adam import adam_like
from .labels import Mask
from .optimizer import Optimizer
from .rates import Rate


def adamw(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
    mask: Mask = None,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

        m <- b1 m + (1 - b1) g                     t = 1, 2, ...
        v <- b2 v + (1 - b2) g^2
        p <- p (1 - lr weight_decay)  -  lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    As in torch, the decay is scaled by lr, which the paper keeps apart. With `amsgrad` the largest v so far
    takes the place of v (Reddi et al., 2018). `mask` says which parameters decay: see `vs.optim.labels`.

    `lr` is a number, a 0-d tensor, or a schedule: a function of the number of updates already
    made (a 0-d float64 tensor, 0 at the first update) that returns one of the two. It must use
    torch ops on that tensor: inside a program the step has no value to branch on. See `vs.optim.schedules`.

    The state is {"step": 0-d float64, "exp_avg": like params, "exp_avg_sq": like params}, and
    "max_exp_avg_sq" with `amsgrad`. float32 and float64 parameters get torch's bits on cpu, which is why

    * the step and the bias corrections are float64 tensors, as torch's are Python floats; only the
      finished scalars are cast, once for each dtype and not for each parameter;
    * the square root of the correction is a power of 0.5, as in torch: on cpu the kernel of a
      float64 sqrt gives other bits for 4 of 100 steps;
    * the update is a scale and a step, see `Updates`.

    16-bit parameters round m / (...) once more than torch does, which divides and adds in one op.

    >>> import torch
    >>> opt = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, -1.0])}
    >>> state = opt.init(params)
    >>> updates, state = opt.update({"w": torch.tensor([3.0, -4.0])}, state, params)
    >>> updates.delta["w"]  # the first step is lr against the sign of the gradient
    tensor([-0.1000,  0.1000])
    """
    return adam_like("vs.optim.adamw", lr, betas, eps, weight_decay, amsgrad, mask, decoupled=True)
