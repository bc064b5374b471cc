"""Accumulate: gradients that are only added up are added first, and reduced once.

    r1 = reduce(g1)                         g = add(g1, g2)
    r2 = reduce(g2)                         r = reduce(g)
    r = add(r1, r2)

So a loop of `value_and_grad` over microbatches reduces as often as one batch does. In between the sum is held
before its reduction, as large as the parameters in use. Scaling by a number on the way, as a mean takes it,
is moved along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..spmd.layout import Layout
from ..spmd.program.partition import AnyStep, Compute, Move, Partitioned, operands, results
from .chains import Chain, chains
from .editing import Program, renamed

aten = torch.ops.aten

_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}


@dataclass(frozen=True)
class _Late:
    """A value that may be had before its reduction: the moves of that, and what it takes to make it so."""

    chain: Chain
    way: tuple[Layout, ...]
    leaves: tuple[Chain, ...]
    ops: tuple[int, ...] = ()  # positions


def accumulate(partitioned: Partitioned) -> Partitioned:
    """The program with such sums taken before the reduction."""
    buckets = partitioned.facts.notes.get("buckets", ())
    names = [name for bucket in buckets for name in bucket.names]
    program = Program(partitioned)
    found = chains(program.steps, names, partitioned.outputs)
    if len({chain.name for chain in found}) == len(found):
        return partitioned  # no gradient is taken twice
    users, outputs = program.users(), set(partitioned.outputs)
    late = {chain.target: _Late(chain, _way(program, chain), (chain,)) for chain in found}
    inner: set[int] = set()  # those that are only read to make others
    for at, step in enumerate(program.steps):
        read = operands(step)
        if (
            not isinstance(step, Compute)
            or len(results(step)) != 1
            or not read
            or not late.keys() >= set(read)
        ):
            continue
        if any(len(users[number]) > 1 or number in outputs for number in read):
            continue
        is_sum = step.node.op is aten.add.Tensor and len(set(read)) == 2
        is_scaled = step.node.op in _SCALES and len(read) == 1
        parts = [late[number] for number in read]
        if len({part.way for part in parts}) == 1 and (is_sum or is_scaled):
            leaves = tuple(leaf for part in parts for leaf in part.leaves)
            ops = (*(op for part in parts for op in part.ops), at)
            late[results(step)[0]] = _Late(parts[0].chain, parts[0].way, leaves, ops)
            inner.update(read)
    after = {
        value.ops[-1]: _reduce_last(program, number, value)
        for number, value in late.items()
        if number not in inner and len(value.leaves) > 1
    }
    program.edit({}, after, ())  # what reduced each is dead now
    return program.finished()


def _way(program: Program, chain: Chain) -> tuple[Layout, ...]:
    """The layouts that a gradient goes through."""
    return tuple(program.values[number].layout for number in (chain.source, *_targets(program, chain)))


def _targets(program: Program, chain: Chain) -> list[int]:
    return [results(program.steps[at])[0] for at in chain.at]


def _reduce_last(program: Program, number: int, value: _Late) -> list[AnyStep]:
    """Make a value from what is not reduced; the moves that then reduce it."""
    names = {leaf.target: leaf.source for leaf in value.leaves}
    for at in value.ops:
        (made,) = results(program.steps[at])
        names[made] = program.like(made, value.way[0])
        program.steps[at] = renamed(program.steps[at], names, True)
    moves = [program.steps[at] for at in value.chain.at]
    source, after = names[number], list[AnyStep]()
    for move, layout in zip(moves, value.way[1:], strict=True):
        assert isinstance(move, Move)
        target = number if move is moves[-1] else program.like(number, layout)
        after.append(replace(move, source=source, target=target))
        source = target
    return after
