"""Dead code: calls whose results nobody reads go. Exchanges stay: the other ranks take part in them."""

from __future__ import annotations

from dataclasses import replace

from ..emit import EXCHANGES, Instruction, Listing


def dead_code(listing: Listing) -> Listing:
    """Without calls whose results are neither read nor results of the program."""
    needed = {value for value in listing.outputs if value is not None}
    kept: list[Instruction] = []
    for instruction in reversed(listing.instructions):
        if isinstance(instruction, EXCHANGES) or needed.intersection(instruction.makes()):
            kept.append(instruction)
            needed.update(instruction.reads())
    return replace(listing, instructions=tuple(reversed(kept)))
