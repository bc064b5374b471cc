"""Signature: the arguments of one call, flat, and the part of them that a program depends on."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _tree
from .._compat import default_device
from .._errors import ArgumentError, explain
from .dtensor import DTensor
from .kinds import kind_of

# The names of the parts of a key, in order: misses are explained with them.
PARTS = ("argument names", "structure", "leaf", "mode")


@dataclass(frozen=True)
class Signature:
    """The arguments of one call: flat leaves and what they mean."""

    names: tuple[str, ...]  # of the arguments, in order
    spec: _tree.TreeSpec
    leaves: list[Any]
    key: tuple[Any, ...]

    def tensors(self) -> list[int]:
        """Which of the leaves are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def paths(self) -> list[str]:
        """Dotted paths of the leaves, the argument's name first."""
        paths, _, _ = _tree.flatten_with_path(_tree.unflatten(self.spec, self.leaves))
        named = []
        for path in paths:
            position, _, rest = path.partition(".")
            named.append(self.names[int(position)] + (f".{rest}" if rest else ""))
        return named


class Arguments:
    """How a function takes its arguments: binds calls to signatures, and calls it with other leaves."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.parameters = inspect.signature(fn)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(p.name for p in self.parameters.parameters.values() if p.kind in kinds)
        self._complete = len(self._positional) == len(self.parameters.parameters)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(self.parameters.parameters)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """The signature of a call."""
        if self._complete and not kwargs and len(args) <= len(self._positional):
            names = self._positional[: len(args)]
        else:
            arguments = self.parameters.bind(*args, **kwargs).arguments
            names, args = tuple(arguments), tuple(arguments.values())
        leaves, spec = _tree.flatten(args)
        return Signature(names, spec, leaves, (names, spec, _leaf_keys(leaves), _mode()))

    def with_tensors(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> Signature:
        """The same call with other tensors."""
        leaves = list(signature.leaves)
        for index, tensor in zip(signature.tensors(), tensors, strict=True):
            leaves[index] = tensor
        key = (signature.names, signature.spec, _leaf_keys(leaves), _mode())
        return Signature(signature.names, signature.spec, leaves, key)

    def call(self, signature: Signature, tensors: Sequence[Any]) -> Any:
        """fn, with `tensors` in the place of the signature's."""
        leaves = list(signature.leaves)
        for index, value in zip(signature.tensors(), tensors, strict=True):
            leaves[index] = value
        args = _tree.unflatten(signature.spec, leaves)
        if signature.names == self._positional[: len(args)]:
            return self.fn(*args)
        bound = inspect.BoundArguments(self.parameters, dict(zip(signature.names, args, strict=True)))  # type: ignore[arg-type]
        return self.fn(*bound.args, **bound.kwargs)


def _leaf_keys(leaves: list[Any]) -> tuple[Any, ...]:
    """The keys of the leaves; those of most DTensors are known to them."""
    return tuple([(type(leaf) is DTensor and leaf._kind) or _leaf_key(leaf) for leaf in leaves])


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        leaf._kind = kind_of(leaf.layout, leaf.dtype)
        return leaf._kind
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device) if leaf.dim() else leaf.dtype
    if isinstance(leaf, torch.Generator):
        return torch.Generator, leaf.device  # its state is read when the program runs
    if isinstance(leaf, float):
        return repr(leaf)  # -0.0 == 0.0, and 1.0 == 1 == True
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentError(
            explain(
                f"a static argument of type {type(leaf).__name__}: {reprlib.repr(leaf)}",
                rule="what is not a tensor is static, and part of the signature: it is hashable",
                remedy="pass a tensor (of an array: torch.from_numpy), a number, a string, a tuple of them",
            )
        ) from None
    return type(leaf), leaf


def _mode() -> tuple[Any, ...]:
    """The torch modes that change what a traced function means."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        default_device(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.are_deterministic_algorithms_enabled(),
    )
