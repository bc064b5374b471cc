"""Into the buffer: an op whose result is only written into a gradient buffer computes it there.

    g = mm(x, y)                            b1 = mm(b0, x, y), into the place of w
    b1 = write w (b0, g)

Only overloads that write to `out=` directly count. Many generated ones compute elsewhere and copy, which a
profile shows: layer norm's, the embedding's and the convolution's backward among them. Their results are
written as before: one counted copy each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..spmd.program.emit import Call, Instruction, Listing
from ..spmd.program.ir import Ref
from .bucket import Address
from .memory import Write

aten = torch.ops.aten

# Each op that computes where `out=` says, and how it is told so.
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, torch.reshape}


class WriteResult:
    """(buffer, *operands) -> [buffer], with the op's result at its place; `shape` is that of the result."""

    def __init__(self, op: Any, place: Address, shape: tuple[int, ...], turned: bool) -> None:
        self.op, self.place, self.shape, self.turned = op, place, shape, turned
        self.__name__ = f"{op}_into_buffer"

    def __call__(self, flat: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        view = self.place.view(flat)
        self.op(*args, **kwargs, out=view.t() if self.turned else view.view(self.shape))
        return [flat]


def into_buffer(listing: Listing) -> Listing:
    """The same listing, with results of such ops computed in the buffer."""
    makers = {value: call for call in listing.instructions for value in call.makes()}
    uses = Counter(value for call in listing.instructions for value in call.reads())
    uses.update(value for value in listing.outputs if value is not None)
    dropped: set[int] = set()
    joined: dict[int, Call] = {}
    for write in listing.instructions:
        if not isinstance(write, Call) or not isinstance(write.fn, Write):
            continue
        buffer, gradient = (value for value in write.reads())
        chain = _chain(makers, uses, gradient)
        if chain is None:
            continue
        source, turned = chain[-1], sum(call.fn is aten.t.default for call in chain) % 2 == 1
        shape, dtype = listing.looks(source.makes()[0])
        mixed = len({call.fn in _RESHAPES for call in chain[:-1]}) > 1
        if dtype != listing.looks(buffer)[1] or mixed:
            continue
        fn = WriteResult(DIRECT[source.fn], write.fn.place, shape, turned)
        joined[id(write)] = replace(write, fn=fn, args=(Ref(buffer), *source.args), kwargs=source.kwargs)
        dropped.update(map(id, chain))
    kept: list[Instruction] = [
        joined.get(id(call), call) if isinstance(call, Call) else call
        for call in listing.instructions
        if id(call) not in dropped
    ]
    return replace(listing, instructions=tuple(kept))


def _chain(makers: dict[int, Instruction], uses: Counter[int], value: int) -> list[Call] | None:
    """From the value back to the op that can compute it there: transposes or reshapes, then the op."""
    chain: list[Call] = []
    while uses[value] == 1:
        call = makers.get(value)
        if not isinstance(call, Call) or call.overwrites or len(call.makes()) != 1:
            return None
        chain.append(call)
        if call.fn in DIRECT:
            return chain
        if call.fn is not aten.t.default and call.fn not in _RESHAPES:
            return None
        (value,) = call.reads()
    return None
