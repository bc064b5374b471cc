"""Recompute: what the backward can make again, elementwise, from what it keeps anyway is not kept.

    h = mm(x, w)                            h = mm(x, w)
    y = gelu(h)                             y = gelu(h)
    ...                                     ...
    g = gelu_backward(.., h)                g = gelu_backward(.., h)
    r = mm(.., y)                           y2 = gelu(h)
                                            r = mm(.., y2)

The op is the same, so the bits are. Source: the choice of elementwise ops follows the partitioner of
torch's AOTAutograd; ours keeps to what costs no other memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..spmd.program.partition import AnyStep, Compute, LocalValue, Partitioned, operands, results
from .editing import is_view, origin_of, renamed

SMALL = 16 * 1024  # bytes on a rank: not worth an op


def recompute(partitioned: Partitioned) -> Partitioned:
    """The program with such results made twice, when parameters are freed after the forward."""
    buckets = partitioned.facts.notes.get("buckets", ())
    if not any(bucket.reshard_after_forward for bucket in buckets):
        return partitioned
    steps, values = partitioned.steps, list(partitioned.values)
    backward = [origin_of(step).region == "backward" for step in steps]
    read = {number for index, step in enumerate(steps) if backward[index] for number in operands(step)}
    views: dict[int, AnyStep] = {}
    for index, step in enumerate(steps):
        if not backward[index] and is_view(step):
            views.update(dict.fromkeys(results(step), step))
    kept = set(read)  # what is read in the backward, and what the views that are read there are views of
    for number in sorted(views, reverse=True):
        if number in kept:
            kept.update(operands(views[number]))
    shown = set(partitioned.outputs)
    again: dict[int, AnyStep] = {}  # value -> the step that makes it once more
    for index, step in enumerate(steps):
        if backward[index]:
            continue
        if is_view(step) and operands(step)[0] in again:
            again.update(dict.fromkeys(results(step), step))
        elif _is_elementwise(step, values):
            (result,) = results(step)
            # A value that is made again itself is not there for others to be made of.
            there = kept.issuperset(operands(step)) and not again.keys() & set(operands(step))
            if result in kept and there and result not in shown:
                again[result] = step
    names: dict[int, int] = {}
    done: list[AnyStep] = []

    def remake(number: int, user: AnyStep) -> None:
        if number not in again or number in names:
            return
        step = again[number]
        for operand in operands(step):
            remake(operand, user)
        for result in results(step):
            values.append(values[result])
            names[result] = len(values) - 1
        done.append(_in_backward(renamed(step, names, True), user))

    for index, step in enumerate(steps):
        if backward[index]:
            for number in operands(step):
                remake(number, step)
            step = renamed(step, names)
        done.append(step)
    return replace(partitioned, steps=tuple(done), values=tuple(values))


def _is_elementwise(step: AnyStep, values: list[LocalValue]) -> bool:
    if not isinstance(step, Compute) or len(step.results) != 1 or step.results[0] is None:
        return False
    tags = step.node.op.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or step.pattern.view:
        return False
    value = values[step.results[0]]
    held = value.meta.dtype.itemsize
    for size in value.layout.local_shape(0):
        held *= size
    return held >= SMALL


def _in_backward(step: AnyStep, user: AnyStep) -> AnyStep:
    assert isinstance(step, Compute)
    origin = replace(step.node.origin, region=origin_of(user).region)
    return replace(step, node=replace(step.node, origin=origin))
