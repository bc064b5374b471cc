"""Memory: which values of a listing may share memory, and whose it is.

Each value gets its origins: the values whose memory it may be. A fresh result is its own origin, a view
has those of what it views, a donated input is one. What is not ours to write has the origin None: other
inputs, and all that comes out of a function of which we know nothing.
"""

from __future__ import annotations

import torch

from ...._compat import OpOverload, is_mutable, view_source
from ..emit import Call, DrawExchange, Exchange, Instruction, Listing, StartExchange, WaitExchange
from ..ir import Ref, refs_of

aten = torch.ops.aten

Origins = frozenset[int | None]

FOREIGN: Origins = frozenset({None})


class Memory:
    """Origins of the values so far; `follow` takes the instructions in order."""

    def __init__(self, listing: Listing) -> None:
        self.origins: dict[int, Origins] = {
            value: frozenset({value}) if value in listing.donated else FOREIGN for value in listing.inputs
        }
        # The donated inputs are apart from all others: a call makes sure of that, see `boundary.apart`.

    @classmethod
    def of(cls, listing: Listing) -> Memory:
        """With all instructions followed."""
        memory = cls(listing)
        for instruction in listing.instructions:
            memory.follow(instruction)
        return memory

    def follow(self, instruction: Instruction) -> None:
        if isinstance(instruction, Exchange):
            # Memory of its own, except where there was nothing to exchange.
            made = frozenset({instruction.target})
            self.origins[instruction.target] = self.origins[instruction.source] | made
        elif isinstance(instruction, WaitExchange):
            everything = frozenset[int | None]().union(*(self.origins[v] for v in instruction.sources))
            for target in instruction.targets:
                self.origins[target] = everything | {target}
        elif isinstance(instruction, StartExchange):
            pass
        elif isinstance(instruction, DrawExchange):
            self.origins.update((target, frozenset({target})) for target in instruction.makes())
        elif instruction.overwrites:
            for out, operand in zip(instruction.outs, instruction.overwrites, strict=True):
                if out is not None:
                    self.origins[out] = self.origins[operand]
        else:
            shared = self._shared(instruction)
            for out in instruction.makes():
                self.origins[out] = frozenset({out}) if shared is None else shared

    def _shared(self, call: Call) -> Origins | None:
        """The origins of a call's results; None for memory of their own."""
        if call.fresh:
            return None
        if not isinstance(call.fn, OpOverload) or call.fn.namespace != "aten" or is_mutable(call.fn):
            return FOREIGN.union(*(self.origins[value] for value in call.reads()))
        # A view in all but its schema, which promises that nobody writes: we do.
        source = 0 if call.fn is aten._unsafe_view.default else view_source(call.fn)
        if source is None:
            return None
        viewed = call.args[source]
        assert isinstance(viewed, (Ref, tuple, list)), call
        return frozenset[int | None]().union(*(self.origins[value] for value in refs_of(viewed)))
