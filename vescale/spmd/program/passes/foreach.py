"""Foreach: the same elementwise op on many small tensors as one `torch._foreach_*` call.

An elementwise call waits until somebody needs its result; those of one kind that wait together are made
together. Kind: the op and its numbers, the region, the dtype, and how many waiting calls lie below it, so
that no group needs itself. An optimizer's update, which is one chain of calls a parameter, becomes one call
for each link. The bits stay: on cpu `_foreach_` runs the op's own kernel on each tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...._compat import OpOverload, foreach_form
from ..emit import Call, Instruction, Listing
from ..ir import Ref

aten = torch.ops.aten

# A larger tensor's kernel takes longer than its dispatch.
SMALL_BYTES = 64 * 1024

# Results of one call in all: the next links of the chains find them in the cache, which they would not
# after a pass over all parameters.
GROUP_BYTES = 256 * 1024

# A chain longer than this is no optimizer's, and starts anew.
MAX_LEVEL = 64

_OPS = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.maximum.default,
    aten.sqrt.default,
    aten.abs.default,
    aten.neg.default,
    aten.reciprocal.default,
    aten.lerp.Scalar,
    aten.addcmul.default,
    aten.addcdiv.default,
)


# In 16 bits a product with a number rounds the number in one of the forms and not in the other.
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What calls have in common that are made together; `args` has None for an operand of each call."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    region: str
    level: int
    group: int = 0


def fuse_foreach(listing: Listing) -> Listing:
    """The same listing with elementwise calls put together."""
    if listing.device != "cpu":  # other devices have kernels of their own for lists, with other bits
        return listing
    return _Fusion(listing).run()


class _Fusion:
    def __init__(self, listing: Listing) -> None:
        self.listing, self.looks = listing, listing.looks
        self.done: list[Instruction] = []
        self.waiting: dict[_Kind, list[Call]] = {}
        self.kind_of: dict[int, _Kind] = {}  # of the calls that make the values that wait
        self.bytes: Counter[_Kind] = Counter()  # seen so far of each kind, all groups together

    def run(self) -> Listing:
        for instruction in self.listing.instructions:
            kind = self.kind(instruction) if isinstance(instruction, Call) else None
            if kind is None:
                for value in instruction.reads():
                    self.need(value)
                self.done.append(instruction)
            else:
                assert isinstance(instruction, Call)
                self.waiting.setdefault(kind, []).append(instruction)
                self.kind_of[instruction.makes()[0]] = kind
        for value in list(self.kind_of):
            self.need(value)
        return replace(self.listing, instructions=tuple(self.done))

    def need(self, value: int) -> None:
        """Make the group of a value that waits, after those that it needs."""
        kind = self.kind_of.get(value)
        if kind is None:
            return
        calls = self.waiting.pop(kind)
        for call in calls:
            del self.kind_of[call.makes()[0]]
        for call in calls:
            for read in call.reads():
                self.need(read)
        self.done.append(together(calls, kind.args) if len(calls) > 1 else calls[0])

    def kind(self, call: Call) -> _Kind | None:
        """None for a call that is not made together with others."""
        if call.fn not in _OPS or call.overwrites or len(call.makes()) != 1:
            return None
        shape, dtype = self.looks(call.makes()[0])
        if not shape or dtype not in _DTYPES or math.prod(shape) * dtype.itemsize > SMALL_BYTES:
            return None
        args: list[Any] = []
        for position, arg in enumerate(call.args):
            if isinstance(arg, Ref):
                look = self.looks(arg.id)
                if look == (shape, dtype):
                    args.append(None)
                elif position == 1 and look == ((), dtype) and call.fn in (aten.mul.Tensor, aten.div.Tensor):
                    args.append(arg)  # one number for all, that is not known yet
                else:
                    return None
            else:
                args.append(_typed(arg))
        if args[0] is not None:  # a number first, or a 0-d tensor
            return None
        kwargs = tuple((name, _typed(value)) for name, value in call.kwargs.items())
        below = [self.kind_of[value] for value in call.reads() if value in self.kind_of]
        level = 1 + max((kind.level for kind in below), default=-1)
        assert isinstance(call.fn, OpOverload)
        kind = _Kind(call.fn, tuple(args), kwargs, dtype, call.origin.region, level)
        takes_alpha = _overload(kind.args) == "List"
        if (call.kwargs.keys() - {"value"} and not takes_alpha) or level > MAX_LEVEL:
            return None
        if foreach_form(kind.op, _overload(kind.args)) is None:
            return None
        # Chains stay in one group; their first links are counted alike, kind by kind.
        group = below[0].group if below else self.bytes[kind] // GROUP_BYTES
        self.bytes[kind] += math.prod(shape) * dtype.itemsize
        return replace(kind, group=group)


def together(calls: list[Call], args: tuple[Any, ...]) -> Call:
    """One call for several of a kind; `args` has None for the operands of each."""
    first, kwargs = calls[0], dict(calls[0].kwargs)
    operands = [
        [call.args[place] for call in calls] if arg is None else first.args[place]
        for place, arg in enumerate(args)
    ]
    if "value" in kwargs:  # by place in the forms for lists
        operands.append(kwargs.pop("value"))
    outs = tuple(call.makes()[0] for call in calls)
    form = foreach_form(first.fn, _overload(args))
    return Call(form, tuple(operands), kwargs, outs, True, first.origin)


def _overload(args: tuple[Any, ...]) -> str:
    """Which overload of the form for lists takes arguments like these."""
    if len(args) == 1:
        return "default"
    if len(args) == 3:  # lerp, addcmul, addcdiv
        return "Scalar"
    return "List" if args[1] is None else "Tensor" if isinstance(args[1], Ref) else "Scalar"


def _typed(value: Any) -> Hashable:
    """A number by its type and its text: 1 is not 1.0, and -0.0 not 0.0."""
    return type(value).__name__, repr(value)
