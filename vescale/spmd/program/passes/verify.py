"""Verify: what every pass has to leave as it was.

For both kinds of program data: each value is defined once, before it is used, and the outputs are; the
collectives are those there were, in order; nothing of one region is done in another. For a listing also: what
was overwritten is not read again, under no other name either, what is not ours is not written, and shapes and
dtypes are those that the calls give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...._compat import FakeTensorMode, OpOverload
from ...._errors import VescaleError, explain
from ..emit import EXCHANGES, Call, Instruction, Listing
from ..ir import Ref, map_args
from ..last_use import last_uses
from ..partition import (
    AnyStep,
    Compute,
    Draw,
    Map,
    Move,
    Partitioned,
    Start,
    Wait,
    operands,
    results,
)
from ..trace import SHAPED
from .memory import Memory


class InvalidProgram(VescaleError):
    """A pass broke a program: a fault of the pass, never of its input."""


def verify(before: Any, after: Any, name: str, *, merges: bool = False, rewrites: bool = False) -> None:
    """Raises InvalidProgram when the pass `name` made something of `before` that it must not.

    `merges`: collectives may be missing that were there before. `rewrites`: they may be others.
    """
    try:
        if isinstance(after, Listing):
            _listing(before, after)
        else:
            _decisions(before, after, merges, rewrites)
    except _Fault as fault:
        raise InvalidProgram(explain(str(fault), where=name, rule="a pass keeps what it is given")) from None


class _Fault(Exception):
    pass


def _check(condition: bool, found: str) -> None:
    if not condition:
        raise _Fault(found)


def _definitions(
    inputs: Sequence[int],
    steps: Iterable[tuple[Any, Sequence[int], Sequence[int]]],
    outputs: Sequence[int | None],
) -> None:
    """Each value is made once, and before it is read. `steps` are (what, read, made)."""
    known = set(inputs)
    for what, read, made in steps:
        if not known.issuperset(read):
            value = next(value for value in read if value not in known)
            raise _Fault(f"v{value} is read before it is made, in {what}")
        for value in made:
            if value in known:
                raise _Fault(f"v{value} is made twice, in {what}")
            known.add(value)
    for value in outputs:
        _check(value is None or value in known, f"the output v{value} is not made")


# Decisions.


def _decisions(before: Partitioned, after: Partitioned, merges: bool, rewrites: bool) -> None:
    _check(before.inputs == after.inputs, "other inputs")
    _definitions(after.inputs, ((step, operands(step), results(step)) for step in after.steps), after.outputs)
    _tickets(after.steps)
    for step in after.steps:
        for move in step.moves if isinstance(step, Start) else [step] if isinstance(step, Move) else []:
            here, there = after.values[move.source], after.values[move.target]
            _check(
                here.layout is move.step.src, f"v{move.source} is not in the layout that its move starts from"
            )
            _check(
                there.layout is move.step.dst, f"v{move.target} is not in the layout that its move ends in"
            )
            _check(here.meta == there.meta, f"the move of v{move.source} changes its shape or dtype")
    _check(len(before.outputs) == len(after.outputs), "another number of outputs")
    for old, new in zip(before.outputs, after.outputs):
        looks = [
            None if value is None else data.values[value] for data, value in ((before, old), (after, new))
        ]
        _check(looks[0] == looks[1], f"the output v{new} is not like v{old}")
    if not rewrites:
        _sequence(_collectives(before.steps), _collectives(after.steps), merges)
    _sequence([_draw(step) for step in before.steps], [_draw(step) for step in after.steps], False)


def _tickets(steps: Sequence[AnyStep]) -> None:
    """What is started is waited for, once."""
    started: dict[int, Start] = {}
    for step in steps:
        if isinstance(step, Start):
            _check(step.ticket not in started, f"t{step.ticket} is started twice")
            started[step.ticket] = step
        elif isinstance(step, Wait):
            _check(started.get(step.start.ticket) == step.start, f"t{step.start.ticket} was not started so")
            started[step.start.ticket] = replace(step.start, moves=())  # no second wait finds it
    left = [ticket for ticket, start in started.items() if start.moves]
    _check(not left, f"nobody waits for {', '.join(f't{ticket}' for ticket in left)}")


def _collectives(steps: Sequence[AnyStep]) -> list[Any]:
    """What ranks do together, in the order in which it begins."""
    found: list[Any] = []
    for step in steps:
        if isinstance(step, Map):
            found.append(step.handle)
        elif isinstance(step, Start):
            found += [(move.step, move.origin) for move in step.moves]
        elif isinstance(step, Move) and step.step.is_collective:
            found.append((step.step, step.origin))
    return found


def _draw(step: AnyStep) -> Any:
    if isinstance(step, Draw):
        return step
    if isinstance(step, Compute) and torch.Tag.nondeterministic_seeded in step.node.op.tags:
        return step.node
    return None


def _sequence(before: list[Any], after: list[Any], merges: bool) -> None:
    """The effects after are those before, in order; with `merges` some may be missing."""
    old, new = ([effect for effect in found if effect is not None] for found in (before, after))
    if not merges and old != new:
        raise _Fault(f"effects {new} in the place of {old}")
    left = iter(old)
    for effect in new:
        if effect not in left:
            raise _Fault(f"{effect} is new, or out of order")


# A listing.


def _listing(before: Listing, after: Listing) -> None:
    _check(before.inputs == after.inputs, "other inputs")
    _check(before.donated == after.donated, "other donated inputs")
    steps = [(step, list(step.reads()), step.makes()) for step in after.instructions]
    _definitions(after.inputs, steps, after.outputs)
    _check(len(before.outputs) == len(after.outputs), "another number of outputs")
    for old, new in zip(before.outputs, after.outputs):
        _check((old is None) == (new is None), "an output is missing")
        _check(
            old is None or new is None or before.looks(old) == after.looks(new), f"v{new} is not like v{old}"
        )
    _sequence(
        [_effect(step) for step in before.instructions], [_effect(step) for step in after.instructions], False
    )
    region = {value: step.origin.region for step in before.instructions for value in step.makes()}
    for step in after.instructions:
        for value in step.makes():
            _check(
                region.get(value, step.origin.region) == step.origin.region,
                f"v{value} is made in another region",
            )
    _overwrites(after)
    known = {id(step) for step in before.instructions}
    for step in after.instructions:
        if (
            isinstance(step, Call)
            and isinstance(step.fn, OpOverload)
            and (before is after or id(step) not in known)
        ):
            _shapes(step, step.fn, after)


def _effect(step: Instruction) -> Any:
    if isinstance(step, EXCHANGES):
        return type(step).__name__, step.origin
    if isinstance(step.fn, OpOverload) and torch.Tag.nondeterministic_seeded in step.fn.tags:
        return step.fn, step.origin
    return None


def _overwrites(listing: Listing) -> None:
    """No value is read after it, or memory that it may share, was overwritten."""
    last = last_uses(listing.instructions, listing.outputs)
    memory = Memory(listing)
    known = list(listing.inputs)
    for index, step in enumerate(listing.instructions):
        if isinstance(step, Call) and step.overwrites:
            read = set(step.reads())
            _check(len(step.overwrites) == len(step.outs), "overwrites without results")
            _check(len(set(step.overwrites)) == len(step.overwrites), "a value overwritten twice")
            for out, target in zip(step.outs, step.overwrites, strict=True):
                if target not in read:
                    raise _Fault(f"v{target} is overwritten and no operand of {step}")
                _check(
                    out is None or listing.looks(out) == listing.looks(target),
                    f"v{out} is not like v{target}",
                )
                origins = memory.origins[target]
                if None in origins:
                    raise _Fault(f"v{target} is not ours to write, in {step}")
                for value in known:
                    if value == target or origins & memory.origins[value]:
                        late = last.get(value, -1) > index or (value != target and value in read)
                        if late:
                            raise _Fault(
                                f"v{value} is read after v{target}, its memory, was overwritten by {step}"
                            )
        memory.follow(step)
        known += step.makes()


def _shapes(call: Call, op: OpOverload, listing: Listing) -> None:
    """The results look as the listing says, by the op's own reckoning."""
    with FakeTensorMode():

        def fill(ref: Ref) -> torch.Tensor:
            shape, dtype = listing.looks(ref.id)
            return torch.empty(shape, dtype=dtype)

        args = map_args(call.args, fill)
        found = SHAPED.get(op, op)(
            *args, **{name: map_args(value, fill) for name, value in call.kwargs.items()}
        )
    if call.overwrites:
        return  # the operand keeps its look, and the op has not refused
    made = found if call.unpack else [found]
    for out, tensor in zip(call.outs, made, strict=True):
        if out is not None and isinstance(tensor, torch.Tensor):
            look = tuple(tensor.shape), tensor.dtype
            if listing.looks(out) != look:
                raise _Fault(f"v{out} is {look}, not {listing.looks(out)}, in {call}")
