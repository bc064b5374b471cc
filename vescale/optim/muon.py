"""Muon: momentum, orthogonalized matrix by matrix, with the bits of torch.optim.Muon in bfloat16."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from .arrangements import arrangements, checked_texts
from .at_owners import at_owners, decide, layouts_at_rest
from .gradients import check_parameters, entries, gradients
from .optimizer import Optimizer, Updates, state_scalar
from .orthogonalize import COEFFICIENTS, flops, orthogonalize
from .rates import Rate, check_numbers, check_rate, is_number, rate_at

_WHERE = "vs.optim.muon"
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def muon(
    lr: Rate,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    adjust_lr: str | None = None,
    matrix_dims: Mapping[str, str] | None = None,
) -> Optimizer:
    """Momentum made orthogonal by Newton-Schulz iterations (Jordan et al., 2024), for matrices.

        m <- momentum m + (1 - momentum) g
        u  = momentum m + (1 - momentum) g   (m itself without nesterov)
        p <- p (1 - lr weight_decay)  -  lr adjusted orthogonal(u)

    `adjust_lr` scales lr with the rows and columns of a matrix: sqrt(max(1, rows / columns)), "original" or
    None as in torch, or 0.2 sqrt(max(rows, columns)), "match_rms_adamw" (Liu et al., 2025). `lr` is a number,
    a 0-d tensor or a schedule, as for `adamw`. Newton-Schulz runs in `ns_dtype`: in bfloat16 the bits are
    those of torch.optim.Muon, for a matrix, with lr a number.

    Parameters are matrices; three dims are a batch of them, such as a stack of experts. `matrix_dims` says it
    for other parameters, by a regex that fullmatches their paths: `"(h d=128) k -> h d k"` makes each head a
    matrix, `"o i y x -> o (i y x)"` is for convolutions. Other parameters are an error: `vs.optim.partition`
    gives these to another optimizer.

    Inside a program momentum is where the parameter is. A matrix that is cut there is brought together on
    one rank, an owner, and goes back when it is done; owners have about as many operations to do each, and
    many matrices move in one collective while others are computed with: see `docs/muon.md`. Matrices that
    are whole on a rank don't move. The state is {"step": 0-d float64, "momentum": like params}.

    Raises ArgumentError for hyperparameters out of range, parameters that are no matrices, and texts of
    `matrix_dims` that don't fit.

    >>> from vescale.optim import apply_updates
    >>> opt = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.eye(2)}
    >>> state = opt.init(params)
    >>> updates, state = opt.update({"w": 5 * torch.eye(2)}, state, params)
    >>> apply_updates(params, updates)["w"]  # about lr less, whatever the size of the gradient
    tensor([[0.8875, 0.0000],
            [0.0000, 0.8875]])
    """
    _check(lr, momentum, weight_decay, ns_steps, ns_coefficients, ns_dtype, eps, adjust_lr)
    texts = checked_texts(matrix_dims, _WHERE)

    def init(params: Any) -> dict[str, Any]:
        check_parameters(params, _WHERE)
        arrangements(texts, params, _WHERE)
        return {
            "step": state_scalar(params),
            "momentum": _tree.tree_map(torch.zeros_like, params),
        }

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        gs = gradients(grads, params, _WHERE)
        step, ms = entries(state, ("step", "momentum"), _WHERE)
        ms = _tree.leaves_like(spec, ms, where="state['momentum']")
        paths, matrices = arrangements(texts, params, _WHERE)

        ms = [torch.lerp(m, g, 1 - momentum) for m, g in zip(ms, gs, strict=True)]
        us = [torch.lerp(g, m, momentum) if nesterov else m for m, g in zip(ms, gs, strict=True)]
        us = [u.to(ns_dtype) for u in us]  # on the shard: fewer bytes move

        layouts = layouts_at_rest(leaves)
        where = decide(layouts, matrices, lambda rows, columns: flops(rows, columns, ns_steps))
        compute = [
            functools.partial(
                orthogonalize, matrices=how, coefficients=ns_coefficients, steps=ns_steps, eps=eps
            )
            for how in matrices
        ]
        us = at_owners(us, paths, layouts, where, compute)

        rate = rate_at(lr, step)
        grids = [how.grid(p.shape) for p, how in zip(leaves, matrices, strict=True)]
        rates = [-rate * _adjustment(adjust_lr, rows, columns) for _, rows, columns in grids]
        deltas = [u.to(p.dtype) for p, u in zip(leaves, us, strict=True)]
        keep = 1 - rate * weight_decay if weight_decay else 1.0
        return Updates(keep, _tree.unflatten(spec, deltas), _tree.unflatten(spec, rates)), {
            "step": step + 1,
            "momentum": _tree.unflatten(spec, ms),
        }

    return Optimizer(init, update)


def _adjustment(adjust_lr: str | None, rows: int, columns: int) -> float:
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _check(
    lr: Any,
    momentum: float,
    weight_decay: float,
    ns_steps: int,
    ns_coefficients: Sequence[float],
    ns_dtype: torch.dtype,
    eps: float,
    adjust_lr: str | None,
) -> None:
    check_rate(_WHERE, "lr", lr)
    check_numbers(_WHERE, {"weight_decay": weight_decay}, {"momentum": momentum})
    three = isinstance(ns_coefficients, Sequence) and len(ns_coefficients) == 3
    floats = isinstance(ns_dtype, torch.dtype) and ns_dtype.is_floating_point
    faults = [
        (type(ns_steps) is int and 0 <= ns_steps < 100, f"ns_steps={ns_steps}", "0 to 99 steps"),
        (
            three and all(map(is_number, ns_coefficients)),
            f"ns_coefficients={ns_coefficients!r}",
            "three numbers",
        ),
        (floats, f"ns_dtype={ns_dtype!r}", "a floating-point dtype"),
        (is_number(eps) and eps > 0, f"eps={eps!r}", "above 0"),
        (adjust_lr in _ADJUSTMENTS, f"adjust_lr={adjust_lr!r}", f"one of {_ADJUSTMENTS}"),
    ]
    for fine, found, rule in faults:
        if not fine:
            raise ArgumentError(explain(found, where=_WHERE, rule=rule))
