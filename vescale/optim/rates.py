"""Hyper-parameters that several optimizers share: rates that are numbers, tensors or schedules."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._errors import ArgumentError, explain
from .optimizer import Scalar

Rate = Scalar | Callable[[torch.Tensor], Scalar]


def rate_at(rate: Rate, step: torch.Tensor) -> Scalar:
    """The rate after `step` updates: a number as it is, a 0-d tensor in float64."""
    found = rate(step) if callable(rate) else rate
    if callable(rate) and not (found.dim() == 0 if isinstance(found, torch.Tensor) else is_number(found)):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise ArgumentError(
            explain(
                f"a schedule that returns {what}",
                where="vs.optim",
                rule="it takes the number of updates, a 0-d tensor, and returns a number or a 0-d tensor",
                remedy="see vs.optim.schedules",
            )
        )
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
    elif not is_number(rate):
        raise ArgumentError(
            explain(
                f"{name}={rate!r}",
                where=where,
                rule="a finite number, a 0-d tensor, or a function of the step: see vs.optim.schedules",
            )
        )
    elif least is not None and not rate >= least:
        raise ArgumentError(explain(f"{name}={rate}", where=where, rule=f"at least {least:g}"))


def check_numbers(where: str, at_least_0: Mapping[str, float], below_1: Mapping[str, float]) -> None:
    """Raises ArgumentError for numbers out of range: x >= 0, or 0 <= x < 1."""
    for name, value in at_least_0.items():
        if not (is_number(value) and value >= 0):
            raise ArgumentError(explain(f"{name}={value!r}", where=where, rule="a finite number, at least 0"))
    for name, value in below_1.items():
        if not (is_number(value) and 0 <= value < 1):
            raise ArgumentError(explain(f"{name}={value!r}", where=where, rule=f"a number, 0 <= {name} < 1"))


def is_number(x: Any) -> bool:
    """Whether x is a finite Python number."""
    return isinstance(x, float | int) and not isinstance(x, bool) and math.isfinite(x)


def pair(where: str, betas: Any) -> tuple[float, float]:
    """The two of `betas`. Raises ArgumentError for anything else."""
    if isinstance(betas, tuple | list) and len(betas) == 2:
        return betas[0], betas[1]
    rule = "two numbers, of the first and the second moment"
    raise ArgumentError(explain(f"betas={betas!r}", where=where, rule=rule, remedy="betas=(0.9, 0.999)"))
