"""Functional optimizers: pairs of pure functions.

    opt = adamw(1e-3)
    state = opt.init(params)                                # once
    updates, state = opt.update(grads, state, params)       # each step
    params = apply_updates(params, updates)

`optimizer.py` says what an optimizer and an update are; each optimizer has a file of its own.
"""

from .adamw import adamw
from .muon import muon
from .optimizer import Optimizer, Updates, apply_updates

__all__ = ["Optimizer", "Updates", "apply_updates", "adamw", "muon"]
