"""`torch._foreach_*` on DTensors: element by element, so that each may have its own layout and mesh."""

from __future__ import annotations

from typing import Any

import torch

from ..._compat import OpOverload, is_mutable, overload_name

aten = torch.ops.aten

# Where the op on one element has another name, or takes by name what is the argument number .. here.
_NAMES = {"norm": "linalg_vector_norm", "powsum": "linalg__powsum"}
_NAMES_WITH_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # maximum takes no numbers
_NAMED = {"norm": (2, "dtype"), "powsum": (2, "dtype"), "addcmul": (3, "value"), "addcdiv": (3, "value")}


def is_foreach(func: OpOverload) -> bool:
    """Whether the op works on lists of tensors, element by element."""
    return func.namespace == "aten" and func.overloadpacket.__name__.startswith("_foreach_")


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The list of results; None for an in-place op."""
    base = func.overloadpacket.__name__.removeprefix("_foreach_").removesuffix("_")
    name = _NAMES.get(base, base)
    if "Scalar" in overload_name(func):
        name = _NAMES_WITH_NUMBERS.get(base, name)
    op, in_place = getattr(aten, name), getattr(aten, f"{name}_", None)
    if overload_name(func) == "Tensor" and base in _NAMED:  # the numbers are the elements of a tensor
        args = (*args[:-1], [number.item() for number in args[-1].unbind()])
    position, keyword = _NAMED.get(base, (len(args), ""))
    results = []
    for index in range(next(len(arg) for arg in args if isinstance(arg, (list, tuple)))):
        element = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
        named = dict(zip((keyword,), element[position:]), **kwargs)
        if not is_mutable(func):
            results.append(op(*element[:position], **named))
        elif in_place is not None:
            in_place(*element[:position], **named)
        else:  # maximum has no form in place
            element[0].copy_(op(*element[:position], **named))
    return None if is_mutable(func) else results
