"""`decay`: weight decay as a transform of its own."""

from typing import Any

from .. import _tree
from .gradients import decayed
from .labels import Mask, mask_of
from .optimizer import Optimizer, Updates
from .rates import check_numbers


def decay(rate: float, mask: Mask = None) -> Optimizer:
    """Weight decay: of gradients before an optimizer, of parameters behind it.

        before:  g <- g + rate p
        behind:  p <- p (keep - rate) + delta      not scaled by the learning rate, as in the AdamW paper

    `mask` says which parameters decay: see `vs.optim.labels`. The state is {}.

    >>> import torch
    >>> from vescale.optim import apply_updates, chain, sgd
    >>> params = {"w": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    >>> opt = chain(sgd(0.1), decay(0.5, mask="w"))
    >>> zero = {"w": torch.tensor([0.0]), "b": torch.tensor([0.0])}
    >>> apply_updates(params, opt.update(zero, opt.init(params), params)[0])
    {'w': tensor([0.5000]), 'b': tensor([1.])}
    """
    where = "vs.optim.decay"
    check_numbers(where, {"rate": rate}, {})

    def update(updates: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        meant = mask_of(mask, params, where)
        if isinstance(updates, Updates):
            keeps = _tree.broadcast_prefix(updates.keep, params, where="updates.keep")
            less = [keep - rate if m else keep for keep, m in zip(keeps, meant, strict=True)]
            return Updates(_tree.unflatten(spec, less), updates.delta, updates.rate), state
        grads = _tree.leaves_like(spec, updates, where="grads")
        return _tree.unflatten(spec, decayed(grads, leaves, rate, meant)), state

    return Optimizer(lambda params: {}, update)
