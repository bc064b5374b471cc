"""`x + n / d` as one call, `addcdiv(x, n, d)`.

On cpu the kernel divides and then adds, each rounded, so the bits stay; elsewhere it may not, and nothing is
joined there. 16-bit types stay apart too: their kernel rounds once where the two calls round twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..emit import Call, Instruction, Listing
from ..ir import Ref

aten = torch.ops.aten


def join_addcdiv(listing: Listing) -> Listing:
    """Sums whose second term is a quotient that nobody else reads, as one call."""
    if listing.device != "cpu":
        return listing
    reads = Counter(value for instruction in listing.instructions for value in instruction.reads())
    reads.update(value for value in listing.outputs if value is not None)
    quotients: dict[int, Call] = {}
    joined: set[int] = set()
    instructions: list[Instruction] = []
    for instruction in listing.instructions:
        if isinstance(instruction, Call) and not instruction.kwargs:
            shapes = {listing.looks(value) for value in (*instruction.reads(), *instruction.makes())}
            of_two = (
                len(instruction.args) == 2
                and all(isinstance(arg, Ref) for arg in instruction.args)
                and len(shapes) == 1
                and next(iter(shapes))[1] in (torch.float32, torch.float64)
            )
            if of_two and instruction.fn is aten.div.Tensor and reads[instruction.makes()[0]] == 1:
                quotients[instruction.makes()[0]] = instruction
            elif of_two and instruction.fn is aten.add.Tensor:
                total, term = instruction.args
                quotient = quotients.get(term.id)
                if quotient is not None and quotient.origin.region == instruction.origin.region:
                    joined.add(term.id)
                    instruction = replace(instruction, fn=aten.addcdiv.default, args=(total, *quotient.args))
        instructions.append(instruction)
    return replace(
        listing,
        instructions=tuple(
            instruction for instruction in instructions if not joined.intersection(instruction.makes())
        ),
    )
