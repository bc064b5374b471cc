"""Functional optimizers: pairs of pure functions.

    opt = chain(clip_by_global_norm(1.0), adamw(schedules.cosine(1e-3, steps=1000, warmup=100)))
    state = opt.init(params)                                # once
    updates, state = opt.update(grads, state, params)       # each step
    params = apply_updates(params, updates)

`optimizer` says what an optimizer and an update are. Each optimizer has a file of its own (`adam`, which
`adamw` shares, and `sgd`), and so has what composes them: `chain`, `partition`, `scale`, `decay`, `skip`,
`loss_scale`. `norms` has what concerns all gradients at once; `schedules` are rates that change.
Underneath: `rates`, `labels`, `gradients`.
"""

from . import schedules
from .adam import adam
from .adamw import adamw
from .adamw_8bit import adamw_8bit
from .chain import chain
from .decay import decay
from .loss_scale import loss_scale
from .muon import muon
from .norms import all_finite, clip_by_global_norm, global_norm
from .optimizer import Optimizer, Updates, apply_updates
from .partition import freeze, partition
from .scale import scale
from .sgd import sgd
from .shampoo import shampoo
from .skip import skip_if_nonfinite

__all__ = [
    "Optimizer",
    "Updates",
    "apply_updates",
    "sgd",
    "adam",
    "adamw",
    "adamw_8bit",
    "muon",
    "shampoo",
    "chain",
    "partition",
    "freeze",
    "scale",
    "decay",
    "schedules",
    "global_norm",
    "all_finite",
    "clip_by_global_norm",
    "skip_if_nonfinite",
    "loss_scale",
]
