"""What a search for the first difference finds."""

from __future__ import annotations

from dataclasses import dataclass

from .compare import Difference


@dataclass(frozen=True)
class Divergence:
    """Where a run parts from plain torch: an instruction, or what else was found.

    `op` is what is done, `line` the user's source line, `text` the instruction as `as_text` prints it.
    `excused` says why the bits may differ; "" where they may not, and then `why` is what is wrong.
    """

    op: str
    line: str
    text: str
    why: str
    excused: str = ""
    difference: Difference | None = None

    def __str__(self) -> str:
        head = "first instruction that differs" if self.excused else "the fault is at"
        lines = [f"{head}: {self.op}  {self.line}".rstrip(), f"    {self.text}" if self.text else ""]
        lines += [f"    {self.difference}" if self.difference is not None else "", f"    {self.why}"]
        lines.append(f"    {self.excused}" if self.excused else "")
        return "\n".join(line for line in lines if line.strip())
