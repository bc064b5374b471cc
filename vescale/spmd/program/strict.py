"""Strict: communication that the plan did not ask for is an error. A filter over causes, see `cause`."""

from __future__ import annotations

from ..._errors import ShardingError, explain
from .cause import REFUSED
from .partition import Move, Partitioned

_SHOWN = 4


def unasked(partitioned: Partitioned) -> list[Move]:
    """The collectives that no constraint, result or pending reduction asks for."""
    return [
        step
        for step in partitioned.steps
        if isinstance(step, Move) and step.step.is_collective and step.cause.reason(step.step) in REFUSED
    ]


def refuse_unasked(partitioned: Partitioned, where: str) -> None:
    """Raises ShardingError that names each such collective: the op, its source line, the bytes, the fix."""
    found = unasked(partitioned)
    if not found:
        return
    shown = []
    for move in found[:_SHOWN]:
        meta, step = partitioned.values[move.source].meta, move.step
        nbytes = step.bytes_moved(0, meta.dtype.itemsize)
        shown.append(
            f"{step.kind} over {'+'.join(step.axes)} of {meta} ({nbytes:,} bytes to rank 0), "
            f"{step.src.spec} -> {step.dst.spec}: {move.cause}"
            f"\n    at {move.cause.user or move.origin}\n    ask for it: {move.cause.remedy}"
        )
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    raise ShardingError(
        explain(
            f"communication that the plan did not ask for, {len(found)} in all\n  " + "\n  ".join(shown),
            where=where,
            rule="strict=True: values move where a constraint, a result's layout or a pending reduction "
            "asks for it, not because an op needs it",
            remedy="ask for each where it is meant to be, choose layouts that need none, or leave "
            "strict out; lower(...).collectives() then lists all",
        )
    )
