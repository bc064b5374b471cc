"""Functional optimizers: pairs of pure functions.

    opt = adamw(1e-3)
    state = opt.init(params)                                # once
    updates, state = opt.update(grads, state, params)       # each step
    params = apply_updates(params, updates)

`optimizer.py` says what an optimizer and an update are; each optimizer has a file of its own.
"""

from .adamw import adamw
from .adamw_8bit import adamw_8bit
from .optimizer import Optimizer, Updates, apply_updates

__all__ = ["Optimizer", "Updates", "apply_updates", "adamw", "adamw_8bit"]
