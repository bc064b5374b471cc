"""`plan_buffer` and `plan_buckets`: from specs to plans. Pure: no ranks, no memory, no devices.

Given tensors with blocks, and m shards, find the least shard size and an address for each tensor so that
tensors are contiguous and disjoint, no shard boundary cuts a block, and everything is aligned to the
collective unit. The problem is NP-hard (veScale-FSDP, arXiv 2602.22437); `search` is a heuristic, `bound`
says how far off it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch

from .bound import counting_bound
from .buckets import splits
from .buffer_plan import BufferPlan
from .packing import Kind
from .search import search
from .spec import TensorSpec, check_names, grain_of

UNIT = 16  # bytes: what collectives move at full speed, and what vector loads want

# A further buffer is a further collective. It has to make the shard smaller by this part of the bound.
SAVING = 1 / 400


def plan_buffer(specs: Sequence[TensorSpec], num_shards: int, unit: int = UNIT) -> BufferPlan:
    """Place the tensors of one bucket in one buffer of `num_shards` equal shards.

    `unit` is in bytes: every tensor and every shard starts at a multiple of it. Tensors without
    elements are legal. Planning time doesn't grow with `num_shards`.

    Raises PlanError, by name, for mixed dtypes, names given twice, or a unit that isn't a whole number of
    items.

    >>> import torch
    >>> specs = [TensorSpec(name, (64, 64), torch.bfloat16, block=1024) for name in "qkvo"]
    >>> plan_buffer(specs, num_shards=8)
    BufferPlan(4 tensors, 8 shards of 2048, padding 0 = 0.0%, bound 2048)
    """
    plan = _place(tuple(specs), num_shards, unit)
    assert plan is not None, "one shard holds everything"
    return plan


def plan_buckets(specs: Sequence[TensorSpec], num_shards: int, unit: int = UNIT) -> tuple[BufferPlan, ...]:
    """Place the tensors of one bucket in as many buffers as it takes to keep the padding low.

    Each dtype has buffers of its own. Those of one dtype are split where that saves memory: tensors whose
    cuts don't repeat with one shard size need not share it, and tensors of one width may go to several
    buffers. Each further buffer costs a collective, and has to make the shards smaller by 1/400 of the
    counting bound.

    Raises what `plan_buffer` raises, but for mixed dtypes.

    >>> import torch
    >>> specs = [TensorSpec("wide", (64, 7168), torch.bfloat16, 7168)]
    >>> specs += [TensorSpec("narrow", (640, 1536), torch.bfloat16, 1536)]
    >>> plan_buffer(specs, 64).shard_size, [plan.shard_size for plan in plan_buckets(specs, 64)]
    (43008, [7168, 15360])
    """
    check_names(specs)
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in specs:
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return tuple(plan for same in by_dtype.values() or [[]] for plan in _split(tuple(same), num_shards, unit))


def _split(specs: tuple[TensorSpec, ...], num_shards: int, unit: int) -> tuple[BufferPlan, ...]:
    """Buffers for tensors of one dtype."""
    single = plan_buffer(specs, num_shards, unit)
    grain, bound = grain_of(specs, num_shards, unit), single.lower_bound
    charge = SAVING * bound
    best, cost = (single,), single.shard_size + charge
    if cost <= bound + 2 * charge:
        return best
    alike = _alike(specs, grain)
    for split in splits(list(alike), num_shards, charge / grain):
        spare = cost - split.cost * grain  # what this split may still come to above its estimate
        if spare <= 0:
            break
        waiting, plans = [iter(numbers) for numbers in alike.values()], []
        for buffer in split.buffers:
            inside = [next(waiting[kind]) for kind, count in enumerate(buffer.counts) for _ in range(count)]
            if not plans:  # those without elements go along
                inside += [number for number, spec in enumerate(specs) if not spec.elements]
            limit = math.ceil(buffer.shard * grain + spare)
            plan = _place(tuple(specs[number] for number in sorted(inside)), num_shards, unit, limit)
            if plan is None:
                break
            spare -= plan.shard_size - buffer.shard * grain
            plans.append(plan)
        else:
            best, cost = tuple(plans), sum(plan.shard_size + charge for plan in plans)
    first = {spec.name: number for number, spec in enumerate(specs)}
    return tuple(sorted(best, key=lambda plan: first[plan.specs[0].name]))


def _place(
    specs: tuple[TensorSpec, ...], num_shards: int, unit: int, limit: int | None = None
) -> BufferPlan | None:
    """A plan with shards smaller than `limit` elements, None where none is found."""
    grain = grain_of(specs, num_shards, unit)
    floor = counting_bound(Counter((spec.elements, spec.cuts) for spec in specs), num_shards, grain)
    numbers = _alike(specs, grain)
    starts = [0] * len(specs)
    if not numbers:  # no elements at all
        return BufferPlan(specs, num_shards, unit, 0, tuple(starts), floor)
    declared = [
        Kind(*key, count=len(list(same)))
        for key, same in groupby(_in_units(spec, grain) for spec in specs if spec.elements)
    ]
    most = sum(kind.size * kind.count for kind in declared) + floor.size + 1  # never reached
    found = search(declared, num_shards, floor.size // grain, most if limit is None else -(-limit // grain))
    if found is None:
        return None
    shard, runs = found
    waiting = {kind[:3]: iter(same) for kind, same in numbers.items()}
    for kind, run in runs:
        for place in range(run.count):
            starts[next(waiting[kind[:3]])] = (run.start + place * kind.size) * grain
    return BufferPlan(specs, num_shards, unit, shard * grain, tuple(starts), floor)


def _alike(specs: Sequence[TensorSpec], grain: int) -> dict[Kind, list[int]]:
    """The kinds of tensors, in units, and the numbers of the specs of each; none for empty tensors."""
    numbers: dict[tuple[int, int, int], list[int]] = {}
    for number, spec in enumerate(specs):
        if spec.elements:
            numbers.setdefault(_in_units(spec, grain), []).append(number)
    return {Kind(*key, count=len(same)): same for key, same in numbers.items()}


def _in_units(spec: TensorSpec, grain: int) -> tuple[int, int, int]:
    """(size, block, period) in units, where a cut is legal only if it is one of units too."""
    size, (block, period) = -(-spec.elements // grain), spec.cuts
    if period % grain:
        block, period = period, 0  # of the cuts that a block and a unit share, those between matrices
    block, period = math.lcm(block, grain) // grain, period // grain
    if period and (block >= period or period % block == 0):
        block, period = min(block, period), 0
    return (size, size, 0) if block >= size else (size, block, period)
