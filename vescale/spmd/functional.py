"""`vs.functional`: a module as a pure function of its parameters and buffers.

Works in plain torch, inside `vs.parallelize`, and under `vs.value_and_grad` and torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ArgumentError, explain

Tensors = dict[str, Tensor]


def functional(module: Any) -> tuple[Callable[..., Any], Tensors, Tensors]:
    """`(fn, params, buffers)` of a module: `fn(params, buffers, *args, **kwargs) -> (out, buffers)`.

    Parameters and buffers are flat dicts by qualified name; tied ones are there once, under their first name,
    and one array serves every use. They share the module's memory and are cut off its autograd graph. `fn`
    runs `module.forward` on the tensors that it is given: it writes to none of them, nor to the module.
    Buffers come back as new tensors, with what the call did to them in place or replaced (batch norm's
    statistics). `params` may hold some of the names only; the module's own tensors stand in for the rest.

    Of a module from `vs.parallelize` or `vs.init` the tensors are its DTensors. Training flags and attributes
    such as a dropout rate are read from the module at each call. Raises ArgumentError for what is no module,
    and for a name that the module doesn't have.

    >>> import torch, vescale as vs
    >>> fn, params, buffers = vs.functional(torch.nn.BatchNorm1d(2))
    >>> out, after = fn(params, buffers, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> after["num_batches_tracked"], buffers["num_batches_tracked"]
    (tensor(1), tensor(0))
    >>> loss = lambda params, x: fn(params, buffers, x)[0].square().sum()
    >>> vs.grad(loss)(params, torch.ones(2, 2))["bias"]
    tensor([0., 0.])
    """
    skeleton = getattr(module, "module", None) if not isinstance(module, nn.Module) else module
    if not isinstance(skeleton, nn.Module):
        raise ArgumentError(
            explain(
                f"functional({module!r})",
                rule="the argument is an nn.Module, or what vs.parallelize made of one",
                remedy="pass the module itself, not its class",
            )
        )
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return functional_call(skeleton), params, buffers


def functional_call(module: nn.Module) -> Callable[..., Any]:
    """The pure function of `functional` alone."""

    def fn(params: Tensors, buffers: Tensors, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        _check_names(module, params, buffers)
        # What the module may write to is made here, also for torch.func, which protects what is captured.
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        given = {**params, **copies}  # torch puts buffers that forward replaces back into this dict
        out = torch.func.functional_call(module, given, args, kwargs)
        # All of them: torch doesn't count batch norm's writes as versions, so none is known to be as it was.
        return out, {name: given[name] for name in buffers}

    return fn


def _check_names(module: nn.Module, params: Tensors, buffers: Tensors) -> None:
    for kind, tensors in (("params", params), ("buffers", buffers)):
        if not isinstance(tensors, Mapping):
            raise ArgumentError(
                explain(
                    f"{kind} of type {type(tensors).__name__}",
                    where=type(module).__name__,
                    rule="the function takes params, buffers and then the module's arguments",
                    remedy="pass both dicts of vs.functional; {} where the module has no buffers",
                )
            )
    known = {
        *(name for name, _ in module.named_parameters(remove_duplicate=False)),
        *(name for name, _ in module.named_buffers(remove_duplicate=False)),
    }
    unknown = [name for name in (*params, *buffers) if name not in known]
    if unknown:
        raise ArgumentError(
            explain(
                f"{', '.join(unknown[:4])}: no parameter or buffer",
                where=type(module).__name__,
                rule="params and buffers are dicts by the module's qualified names",
                remedy=f"names such as {', '.join(sorted(known)[:4]) or '(none: the module has no tensors)'}",
            )
        )


__all__ = ["functional", "functional_call"]
