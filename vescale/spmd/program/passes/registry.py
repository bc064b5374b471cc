"""The ordered lists of passes, and how they are applied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ...._errors import ArgumentError, explain
from .verify import verify

DECISIONS, LISTING = "decisions", "listing"


@dataclass(frozen=True, slots=True)
class Pass:
    """A named pass over "decisions" (`Partitioned`) or a "listing" (`Listing`).

    `merges`: it may drop a collective that repeats an earlier one. `rewrites`: it may put other collectives
    in the place of those there were; the verifier then doesn't compare them.
    """

    name: str
    kind: str
    run: Callable[[Any], Any]
    merges: bool = False
    rewrites: bool = False


_passes: dict[str, list[Pass]] = {DECISIONS: [], LISTING: []}
_left_out: ContextVar[frozenset[str]] = ContextVar("vescale_passes_left_out", default=frozenset())
_verify: ContextVar[bool | None] = ContextVar("vescale_verify", default=None)


def register(new: Pass, *, before: str | None = None) -> Pass:
    """Add a pass at the end of its list, or in front of the one named `before`; returns it.

    Raises ArgumentError for a name that is taken, a list or a neighbour that doesn't exist.
    """
    if new.kind not in _passes:
        raise ArgumentError(
            explain(f"kind={new.kind!r}", where=f"pass {new.name!r}", rule=f"one of {', '.join(_passes)}")
        )
    if any(known.name == new.name for listed in _passes.values() for known in listed):
        raise ArgumentError(explain(f"a second pass {new.name!r}", rule="a pass is registered once, by name"))
    listed = _passes[new.kind]
    order = [known.name for known in listed]
    if before is not None and before not in order:
        raise ArgumentError(
            explain(f"before={before!r}", where=f"pass {new.name!r}", rule=f"one of {', '.join(order)}")
        )
    listed.insert(len(listed) if before is None else order.index(before), new)
    return new


def unregister(name: str) -> None:
    """Take a registered pass out again."""
    for listed in _passes.values():
        listed[:] = [known for known in listed if known.name != name]


def names(kind: str) -> tuple[str, ...]:
    """The passes of a list, in order."""
    return tuple(known.name for known in _passes[kind])


def apply(kind: str, data: Any) -> Any:
    """The program data after all passes of a list."""
    check = _verify.get()
    check = os.environ.get("VESCALE_VERIFY") == "1" if check is None else check
    if check:
        verify(data, data, f"what the passes over {kind} start from")
    for known in _passes[kind]:
        if known.name in _left_out.get():
            continue
        after = known.run(data)
        if check:
            verify(data, after, known.name, merges=known.merges, rewrites=known.rewrites)
        data = after
    return data


@contextmanager
def without(*left_out: str) -> Iterator[None]:
    """Programs compiled inside are made without the passes of these names."""
    unknown = set(left_out) - {name for kind in _passes for name in names(kind)}
    if unknown:
        raise ArgumentError(explain(f"no pass {', '.join(sorted(unknown))}", rule="passes have names"))
    token = _left_out.set(_left_out.get() | set(left_out))
    try:
        yield
    finally:
        _left_out.reset(token)


@contextmanager
def verifying(on: bool = True) -> Iterator[None]:
    """Programs compiled inside are checked between passes (or not)."""
    token = _verify.set(on)
    try:
        yield
    finally:
        _verify.reset(token)
