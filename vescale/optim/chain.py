"""`chain`: gradient transforms and an optimizer, one after the other."""

from typing import Any

from .._errors import ArgumentError, explain
from .optimizer import Optimizer, check_optimizer


def chain(*transforms: Optimizer) -> Optimizer:
    """Each takes what the one before it made: gradients, then the updates of the optimizer among them.

        chain(clip_by_global_norm(1.0), adamw(1e-3), scale(0.5))

    What stands before the optimizer changes gradients, what stands behind it changes its updates. A chain
    without an optimizer is a transform again. The state is the tuple of their states.

    >>> import torch
    >>> from vescale.optim import apply_updates, scale, sgd
    >>> opt = chain(scale(2.0), sgd(0.1))
    >>> params = {"w": torch.tensor([1.0])}
    >>> updates, _ = opt.update({"w": torch.tensor([1.0])}, opt.init(params), params)
    >>> apply_updates(params, updates)
    {'w': tensor([0.8000])}
    """

    for number, transform in enumerate(transforms):
        check_optimizer(transform, f"vs.optim.chain, transform {number}")

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        if not isinstance(state, tuple | list) or len(state) != len(transforms):
            size = f" of {len(state)}" if isinstance(state, tuple | list) else ""
            raise ArgumentError(
                explain(
                    f"a state that is a {type(state).__name__}{size}",
                    where="vs.optim.chain",
                    rule=f"a tuple of the states of its {len(transforms)} transforms",
                    remedy="give update the state that init, or the last update, of this chain made",
                )
            )
        new = []
        for transform, own in zip(transforms, state, strict=True):
            updates, own = transform.update(updates, own, params)
            new.append(own)
        return updates, tuple(new)

    return Optimizer(init, update)
