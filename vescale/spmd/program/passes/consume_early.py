"""Consume early: an update is applied as soon as it is there, and not after all of them have been made.

    u1 = mul(m1, r)                 u1 = mul(m1, r)
    u2 = mul(m2, r)                 q1 = sub(p1, u1)
    q1 = sub(p1, u1)                u2 = mul(m2, r)
    q2 = sub(p2, u2)                q2 = sub(p2, u2)

An optimizer as one writes it makes an update for every parameter and applies them later; the updates of a
large model then live together. An elementwise call that frees as much as it makes is moved up to where its
last operand is made; what it needs besides, of inputs alone, is made right before it. An input that the
call uses up has been read by everybody else by then, so that it can still be overwritten.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import torch

from ...._compat import OpOverload
from ..emit import Call, Instruction, Listing


def consume_early(listing: Listing) -> Listing:
    """The same calls in another order."""
    calls, inputs = listing.instructions, set(listing.inputs)
    readers: defaultdict[int, list[int]] = defaultdict(list)
    makers: dict[int, int] = {}
    for index, call in enumerate(calls):
        for value in dict.fromkeys(call.reads()):
            readers[value].append(index)
        makers.update((value, index) for value in call.makes())
    shown = {value for value in listing.outputs if value is not None}

    def dies(value: int, index: int) -> bool:
        return value not in shown and readers[value][-1] == index

    def is_sunk(index: int) -> bool:
        """Made of inputs alone, for one reader: it is made when that one needs it."""
        call = calls[index]
        if not _is_elementwise(call) or not inputs.issuperset(call.reads()):
            return False
        (result,) = call.makes()
        return result not in shown and len(readers[result]) == 1

    sunk = {index for index in range(len(calls)) if is_sunk(index)}
    wanted: dict[int, set[int]] = {}  # a call that is moved up -> the calls that come before it
    for index, call in enumerate(calls):
        if index in sunk or not _is_elementwise(call):
            continue
        operands = dict.fromkeys(call.reads())
        freed = sum(
            _nbytes(listing, value) for value in operands if value not in inputs and dies(value, index)
        )
        if freed < sum(_nbytes(listing, value) for value in call.makes()):
            continue
        before: set[int] = set()
        for value in operands:
            maker = makers.get(value)
            if maker in sunk:
                taken, user = tuple(calls[maker].reads()), maker
            else:
                taken, user = (value,), index
                before.update(() if maker is None else (maker,))
            for operand in taken:
                if operand in inputs and dies(operand, user):
                    before.update(at for at in readers[operand] if at != user)
        wanted[index] = before
    return replace(listing, instructions=tuple(_ordered(calls, makers, sunk, wanted)))


def _ordered(
    calls: tuple[Instruction, ...], makers: dict[int, int], sunk: set[int], wanted: dict[int, set[int]]
) -> list[Instruction]:
    left = {index: len(before) for index, before in wanted.items()}
    after: defaultdict[int, list[int]] = defaultdict(list)
    for index, before in wanted.items():
        for at in before:
            after[at].append(index)
    done: list[Instruction] = []
    emitted: set[int] = set()

    def emit(index: int) -> None:
        pending = [index]
        while pending:
            at = pending.pop()
            if at in emitted:
                continue
            for value in calls[at].reads():
                maker = makers.get(value)
                if maker in sunk and maker not in emitted:
                    emitted.add(maker)
                    done.append(calls[maker])
            emitted.add(at)
            done.append(calls[at])
            counts = Counter(after[at])
            for user in counts:
                left[user] -= 1
            pending += [user for user in reversed(counts) if not left[user]]

    for index in range(len(calls)):
        if index not in sunk:
            emit(index)
    return done


def _is_elementwise(call: Instruction) -> bool:
    return (
        isinstance(call, Call)
        and isinstance(call.fn, OpOverload)
        and not call.origin.region  # forward and backward keep the order of one device
        and not call.overwrites
        and len(call.makes()) == 1
        and torch.Tag.pointwise in call.fn.tags
        and torch.Tag.nondeterministic_seeded not in call.fn.tags
    )


def _nbytes(listing: Listing, value: int) -> int:
    shape, dtype = listing.looks(value)
    return math.prod(shape) * dtype.itemsize
