"""Split: one decided program, forward and backward, to two; what passes between them are local residuals.

The gradient that will come from outside is the op `vescale::cotangent(out, index)` in the trace: a tensor in
the layout of the result that it belongs to, whose value arrives with the second half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..._errors import TraceError, explain
from ..rules.elementwise import broadcast_pattern
from ..rules.notation import rule
from .partition import AnyStep, Compute, Draw, Partitioned, Start, Wait, operands, results

_library = torch.library.Library("vescale", "FRAGMENT")
_library.define("cotangent(Tensor out, int index) -> Tensor")


def _refuse(out: torch.Tensor, index: int) -> torch.Tensor:
    raise TraceError(explain("a cotangent outside a program", rule="the node is only ever traced"))


_library.impl("cotangent", _refuse, "CompositeExplicitAutograd")
_library.impl("cotangent", lambda out, index: torch.empty_like(out), "Meta")

cotangent = torch.ops.vescale.cotangent.default
rule([cotangent])(broadcast_pattern)


@dataclass(frozen=True, slots=True)
class Split:
    """Two programs. The inputs of `backward` are the residuals, then the `cotangents`.

    The outputs of `forward` are the results, then the residuals. `cotangents` are their indices, in the
    order in which `backward` takes them, and their values' numbers.
    """

    forward: Partitioned
    backward: Partitioned
    cotangents: tuple[tuple[int, int], ...]


def split(partitioned: Partitioned, count: int) -> Split:
    """The half that the first `count` outputs need, and the half that the other outputs need besides."""
    steps, outputs = partitioned.steps, partitioned.outputs
    forward = _ancestors(steps, outputs[:count], frozenset(), False)
    arriving = {
        step.results[0]: step.node.args[1]
        for step in steps
        if isinstance(step, Compute) and step.node.op is cotangent
    }
    made = {number for index in forward for number in results(steps[index])}
    known = frozenset((*made, *partitioned.inputs, *(n for n in arriving if n is not None)))
    backward = _ancestors(steps, outputs[count:], known, True)
    read = {n for index in backward for n in operands(steps[index])}
    read.update(n for n in outputs[count:] if n is not None)
    residuals = tuple(sorted(n for n in read & known if n not in arriving))
    cotangents = tuple((index, n) for n, index in arriving.items() if n is not None and n in read)
    return Split(
        replace(
            partitioned,
            steps=tuple(steps[index] for index in forward),
            outputs=(*outputs[:count], *residuals),
        ),
        replace(
            partitioned,
            steps=tuple(steps[index] for index in backward),
            inputs=(*residuals, *(n for _, n in cotangents)),
            outputs=outputs[count:],
        ),
        cotangents,
    )


def _ancestors(
    steps: Sequence[AnyStep], wanted: Sequence[int | None], known: frozenset[int], backward: bool
) -> list[int]:
    """The steps, in order, that make the wanted values of the known ones; and the draws of that half."""
    needed = {number for number in wanted if number is not None}
    waited: set[int] = set()
    found = []
    for index, step in reversed(tuple(enumerate(steps))):
        begins = isinstance(step, Start) and step.ticket in waited
        if isinstance(step, Draw):  # draws when the function does
            begins = (step.origin.region == "backward") is backward
        if begins or any(number in needed and number not in known for number in results(step)):
            found.append(index)
            needed.update(operands(step))
            if isinstance(step, Wait):
                waited.add(step.start.ticket)
    return found[::-1]


__all__ = ["Split", "cotangent", "split"]
