"""In place: an elementwise op whose first operand dies in it writes its result there.

The operand must be ours to write (a donated input or a temporary, see `memory`), contiguous, of the result's
shape and dtype, and no other value that shares its memory may be read later, be read by the same call, or
be a result of the program. The kernel is the same one, so the bits are.

    v3 = mul(v1, 0.9)       # v1 donated, read here for the last time
    -> mul_(v1, 0.9)        # v3 is v1's memory from here on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...._compat import OpOverload, in_place_form
from ..emit import Call, Instruction, Listing
from ..ir import Ref, refs_of
from ..last_use import last_uses
from .memory import Memory

aten = torch.ops.aten

# Ops whose results are contiguous whatever their operands are.
_CONTIGUOUS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding.default})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def in_place(listing: Listing) -> Listing:
    """The same listing, with results in the memory of operands that die."""
    return _Walk(listing).run()


class _Walk:
    def __init__(self, listing: Listing) -> None:
        self.listing, self.looks = listing, listing.looks
        self.last_use = last_uses(listing.instructions, listing.outputs)
        self.memory = Memory(listing)
        self.sharing: defaultdict[int | None, list[int]] = defaultdict(
            list
        )  # origin -> values that may be it
        self.contiguous = set(listing.inputs)  # as a call hands them over, see `boundary.enter`
        for value in listing.inputs:
            self.note(value)

    def run(self) -> Listing:
        done: list[Instruction] = []
        for index, instruction in enumerate(self.listing.instructions):
            for part in self.visit(index, instruction):
                self.memory.follow(part)
                for value in part.makes():
                    self.note(value)
                if isinstance(part, Call) and self.is_contiguous(part):
                    self.contiguous.update(part.makes())
                done.append(part)
        return replace(self.listing, instructions=tuple(done))

    def note(self, value: int) -> None:
        for origin in self.memory.origins[value]:
            self.sharing[origin].append(value)

    def visit(self, index: int, instruction: Instruction) -> Iterator[Instruction]:
        if not isinstance(instruction, Call) or not isinstance(instruction.fn, OpOverload):
            yield instruction
        elif _is_foreach(instruction):
            yield from self.foreach(index, instruction)
        elif (
            torch.Tag.pointwise in instruction.fn.tags
            and torch.Tag.nondeterministic_seeded not in instruction.fn.tags
            and len(instruction.outs) == 1
            and instruction.args
            and isinstance(instruction.args[0], Ref)
            and (form := in_place_form(instruction.fn)) is not None
            and self.may_write(
                index, instruction.args[0].id, instruction.makes()[0], list(instruction.reads())
            )
        ):
            yield replace(instruction, fn=form, overwrites=(instruction.args[0].id,))
        else:
            yield instruction

    def foreach(self, index: int, call: Call) -> Iterator[Call]:
        """Those elements of lists whose operand may be written in one call, the others in a second."""
        form, count = in_place_form(call.fn), len(call.outs)
        elements = [
            [value.id for arg in call.args if isinstance(arg, list) for value in [arg[place]]]
            for place in range(count)
        ]
        shared = [arg.id for arg in call.args if isinstance(arg, Ref)]
        everything = [value for element in elements for value in element] + shared
        writes = []
        for place, (element, out) in enumerate(zip(elements, call.outs, strict=True)):
            assert out is not None
            target = element[0]
            alone = everything.count(target) == element.count(target)
            if form is not None and alone and self.may_write(index, target, out, everything):
                writes.append(place)
        for places, fn in ((writes, form), ([p for p in range(count) if p not in writes], call.fn)):
            if places:
                part = _elements(call, places)
                overwrites = tuple(elements[place][0] for place in places) if fn is form else ()
                yield replace(part, fn=fn, overwrites=overwrites)

    def may_write(self, index: int, target: int, out: int, read: list[int]) -> bool:
        """Whether the instruction may put `out` where its operand `target` is."""
        origins = self.memory.origins[target]
        if (
            self.last_use[target] != index
            or target not in self.contiguous
            or None in origins
            or self.looks(target) != self.looks(out)
        ):
            return False
        others = {value for origin in origins for value in self.sharing[origin]} - {target}
        return all(self.last_use.get(value, -1) < index for value in others) and others.isdisjoint(read)

    def is_contiguous(self, call: Call) -> bool:
        """Whether the results are known to lie in memory row by row."""
        if call.overwrites or call.fn in _CONTIGUOUS:
            return True
        if not isinstance(call.fn, OpOverload):
            return False
        if call.fn in _VIEWS:
            return isinstance(call.args[0], Ref) and call.args[0].id in self.contiguous
        if torch.Tag.pointwise in call.fn.tags or _is_foreach(call):
            shapes = {self.looks(value)[0] for value in call.makes()}
            alike = [value for value in refs_of(call.args) if self.looks(value)[0] in shapes]
            return bool(alike) and all(value in self.contiguous for value in alike)
        return False


def _is_foreach(call: Call) -> bool:
    return call.fn.overloadpacket.__name__.startswith("_foreach_")


def _elements(call: Call, places: list[int]) -> Call:
    """The call for some elements of its lists."""

    def chosen(arg: Any) -> Any:
        return [arg[place] for place in places] if isinstance(arg, list) else arg

    return replace(call, args=tuple(map(chosen, call.args)), outs=tuple(call.outs[place] for place in places))
