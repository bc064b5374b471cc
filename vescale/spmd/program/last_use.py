"""Where values are read for the last time."""

from __future__ import annotations

from collections.abc import Sequence

from .emit import Instruction


def last_uses(instructions: Sequence[Instruction], outputs: Sequence[int | None]) -> dict[int, int]:
    """The index of the last instruction that reads each value; outputs at infinity (past the end).

    A value that nobody reads is used where it is made. Inputs that nobody reads are not in the result.
    """
    last: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        last.update((value, index) for value in instruction.reads())
        for made in instruction.makes():
            last.setdefault(made, index)
    last.update((value, len(instructions)) for value in outputs if value is not None)
    return last
