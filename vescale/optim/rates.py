"""Hyper-parameters that several optimizers share: rates that are numbers, tensors or schedules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._errors import ArgumentError, explain
from .optimizer import Scalar

Rate = Scalar | Callable[[torch.Tensor], Scalar]


def rate_at(rate: Rate, step: torch.Tensor) -> Scalar:
    """The rate after `step` updates: a number as it is, a 0-d tensor in float64."""
    found = rate(step) if callable(rate) else rate
    return found.to(torch.float64) if isinstance(found, torch.Tensor) else found


def check_rate(where: str, name: str, rate: Any, least: float | None = 0.0) -> None:
    """Raises ArgumentError for what is no rate, or a number below the `least`."""
    if callable(rate):
        return
    if isinstance(rate, torch.Tensor):
        if rate.dim() != 0:
            raise ArgumentError(
                explain(
                    f"{name} of shape {tuple(rate.shape)}",
                    where=where,
                    rule="one number for all parameters",
                    remedy="pass a number, a 0-d tensor or a function of the step",
                )
            )
    elif not isinstance(rate, float | int) or isinstance(rate, bool):
        raise ArgumentError(
            explain(
                f"{name}={rate!r}",
                where=where,
                rule="a number, a 0-d tensor, or a function of the step: see vs.optim.schedules",
            )
        )
    elif least is not None and not rate >= least:
        raise ArgumentError(explain(f"{name}={rate}", where=where, rule=f"at least {least:g}"))


def check_numbers(where: str, at_least_0: Mapping[str, float], below_1: Mapping[str, float]) -> None:
    """Raises ArgumentError for numbers out of range: x >= 0, or 0 <= x < 1."""
    for name, value in at_least_0.items():
        if not value >= 0:
            raise ArgumentError(explain(f"{name}={value}", where=where, rule="at least 0"))
    for name, value in below_1.items():
        if not 0 <= value < 1:
            raise ArgumentError(explain(f"{name}={value}", where=where, rule=f"0 <= {name} < 1"))
