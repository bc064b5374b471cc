"""What optimizers take: parameters, their gradients, a state; and weight decay that is added to gradients."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from .optimizer import Updates


def check_parameters(params: Any, where: str, *, complex_too: bool = False) -> None:
    """Raises ArgumentError for what no step can be taken with: all but real floating-point tensors."""
    for path, leaf in zip(_tree.paths(params), _tree.leaves(params), strict=True):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() or (complex_too and leaf.is_complex()):
                continue
            found = f"{path or 'a parameter'} of {leaf.dtype}"
        else:
            found = f"{path or 'a parameter'}, {type(leaf).__name__}"
        kind = "real or complex" if complex_too else "real"
        raise ArgumentError(
            explain(
                found,
                where=where,
                rule=f"its parameters are {kind} floating-point tensors",
                remedy="leave it to another optimizer, or freeze it: vs.optim.partition",
            )
        )


def entries(state: Any, names: Sequence[Hashable], where: str) -> list[Any]:
    """What a state has by these names. Raises ArgumentError for the state of something else."""
    if isinstance(state, Mapping) and all(name in state for name in names):
        return [state[name] for name in names]
    keys = f"with {', '.join(map(repr, state)) or 'nothing'}" if isinstance(state, Mapping) else ""
    raise ArgumentError(
        explain(
            f"a state that is a {type(state).__name__} {keys}".rstrip(),
            where=where,
            rule=f"its state has {', '.join(map(repr, names))}",
            remedy="give update the state that init, or the last update, of this optimizer made",
        )
    )


def gradients(grads: Any, params: Any, where: str) -> list[torch.Tensor]:
    """The gradient of each parameter.

    Raises ArgumentError for another structure, for an `Updates`, and for a gradient that is missing, or of
    another shape or dtype than its parameter.
    """
    if isinstance(grads, Updates):
        raise ArgumentError(
            explain(
                "the updates of an optimizer",
                where=where,
                rule="an optimizer makes updates of gradients: a chain has one",
                remedy="use vs.optim.partition to give parameters different optimizers",
            )
        )
    paths, leaves, spec = _tree.flatten_with_path(params)
    found = _tree.leaves_like(spec, grads, where="grads")
    for path, p, g in zip(paths, leaves, found, strict=True):
        if not isinstance(g, torch.Tensor):
            what = "no gradient" if g is None else f"{type(g).__name__} as the gradient"
            remedy = "freeze it, vs.optim.partition(.., {.., label: None}), or give a gradient of zeros"
        elif not isinstance(g, DTensor) and g.layout is not torch.strided:
            what, remedy = f"a gradient in the layout {g.layout}", "pass g.to_dense()"
        elif g.shape != p.shape or g.dtype is not p.dtype:
            what = f"a gradient of shape {tuple(g.shape)}, {g.dtype},"
            remedy = "differentiate by this parameter, or cast: g.to(p.dtype)"
        else:
            continue
        raise ArgumentError(
            explain(
                f"{what} for {path or 'the parameter'} of shape {tuple(p.shape)}, {p.dtype}",
                where=where,
                rule="each parameter has a dense gradient of its shape and dtype",
                remedy=remedy,
            )
        )
    return found


def decayed(
    grads: Sequence[torch.Tensor], params: Sequence[torch.Tensor], rate: float, mask: Sequence[bool]
) -> list[torch.Tensor]:
    """g + rate p, rounded once, where the mask says so."""
    return [torch.add(g, p, alpha=rate) if m else g for g, p, m in zip(grads, params, mask, strict=True)]
