"""`plan_buffer` and `plan_buckets`: from specs to plans. Pure: no ranks, no memory, no devices.

Given tensors with blocks, and m shards, find the least shard size and an address for each tensor so that tensors
are contiguous and disjoint, no shard boundary cuts a block, and everything is aligned to the collective unit.
The problem is NP-hard (veScale-FSDP, arXiv 2602.22437); `search` is a heuristic, `bound` says how far off it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from .bound import counting_bound
from .buffer_plan import BufferPlan
from .packing import Kind
from .search import estimate, search
from .spec import TensorSpec, check_names, grain_of

UNIT = 16  # bytes: what collectives move at full speed, and what vector loads want

# Each of n groups of widths goes with any others: 3^n steps. Above this many the smallest go together.
MAX_GROUPS = 7
# A further buffer is a further collective. It has to make the shard smaller by this part of the bound.
SAVING = 1 / 400
# How often a split is planned and found dearer than its estimate before the best known one is taken.
MAX_SPLITS = 8


def plan_buffer(specs: Sequence[TensorSpec], num_shards: int, unit: int = UNIT) -> BufferPlan:
    """Place the tensors of one bucket in one buffer of `num_shards` equal shards.

    `unit` is in bytes: every tensor and every shard starts at a multiple of it. The shard size doesn't depend
    on the order of `specs`, nor does planning time grow with `num_shards`. Tensors without elements are legal.

    Raises PlanError, by name, for mixed dtypes, names given twice, or a unit that isn't a whole number of items.

    >>> import torch
    >>> specs = [TensorSpec(name, (64, 64), torch.bfloat16, block=1024) for name in "qkvo"]
    >>> plan_buffer(specs, num_shards=8)
    BufferPlan(4 tensors, 8 shards of 2048, padding 0 = 0.0%, bound 2048)
    """
    specs = tuple(specs)
    return _place(specs, num_shards, unit, grain_of(specs, num_shards, unit))


def plan_buckets(specs: Sequence[TensorSpec], num_shards: int, unit: int = UNIT) -> tuple[BufferPlan, ...]:
    """Place the tensors of one bucket in as many buffers as it takes to keep the padding low.

    Each dtype has buffers of its own. Those of one dtype are split by block width where that saves memory: tensors
    whose cuts don't repeat with one shard size need not share it. Each further buffer costs a collective, and has
    to make the shards smaller by 1/400 of the counting bound.

    Raises what `plan_buffer` raises, but for mixed dtypes.

    >>> import torch
    >>> specs = [TensorSpec("wide", (70, 7168), torch.bfloat16, 7168)]
    >>> specs += [TensorSpec("narrow", (700, 512), torch.bfloat16, 512)]
    >>> plan_buffer(specs, 32).shard_size, [plan.shard_size for plan in plan_buckets(specs, 32)]
    (28672, [21504, 11264])
    """
    check_names(specs)
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in specs:
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return tuple(
        plan for same in by_dtype.values() or [[]] for plan in split_by_width(tuple(same), num_shards, unit)
    )


def split_by_width(specs: tuple[TensorSpec, ...], num_shards: int, unit: int) -> tuple[BufferPlan, ...]:
    """Buffers for tensors of one dtype: the cheapest way to put groups of block widths together.

    The cost of a set of groups is estimated from its bound; only sets that the cheapest split uses are planned,
    which may show that another one is cheaper.
    """
    grain = grain_of(specs, num_shards, unit)
    groups = _groups(specs, grain)
    everything = (1 << len(groups)) - 1
    plans = {everything: _place(specs, num_shards, unit, grain)}
    charge = SAVING * plans[everything].lower_bound

    def members(chosen: int) -> tuple[TensorSpec, ...]:
        inside = {spec.name for number, group in enumerate(groups) if chosen >> number & 1 for spec in group}
        return tuple(spec for spec in specs if spec.name in inside)

    if plans[everything].shard_size <= plans[everything].lower_bound + charge:
        return (plans[everything],)
    costs = [0.0, *(_estimate(members(chosen), num_shards, grain) for chosen in range(1, everything + 1))]
    costs[everything] = plans[everything].shard_size
    for _ in range(MAX_SPLITS):
        split = _cheapest_split(costs, charge)
        new = [chosen for chosen in split if chosen not in plans]
        if not new:
            return tuple(plans[chosen] for chosen in split)
        for chosen in new:
            plans[chosen] = _place(members(chosen), num_shards, unit, grain)
            costs[chosen] = plans[chosen].shard_size
    known = [cost if chosen in plans else math.inf for chosen, cost in enumerate(costs)]
    return tuple(plans[chosen] for chosen in _cheapest_split([0.0, *known[1:]], charge))


def _place(specs: tuple[TensorSpec, ...], num_shards: int, unit: int, grain: int) -> BufferPlan:
    floor = counting_bound(Counter((spec.elements, spec.cuts) for spec in specs), num_shards, grain)
    alike = _alike(specs, grain)
    starts = [0] * len(specs)
    if not alike:  # no elements at all
        return BufferPlan(specs, num_shards, unit, 0, tuple(starts), floor)
    shard, order, runs = search(list(alike), num_shards, floor.size // grain)
    waiting = {kind: iter(numbers) for kind, numbers in alike.items()}
    for run in runs:
        kind = order[run.kind]
        for place in range(run.count):
            starts[next(waiting[kind])] = (run.start + place * kind.size) * grain
    return BufferPlan(specs, num_shards, unit, shard * grain, tuple(starts), floor)


def _alike(specs: Sequence[TensorSpec], grain: int) -> dict[Kind, list[int]]:
    """The kinds of tensors, in units, and the numbers of the specs of each. Those without elements are left out."""
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


def _groups(specs: Sequence[TensorSpec], grain: int) -> list[list[TensorSpec]]:
    """Specs by the width that has to divide the shard; beyond MAX_GROUPS the smallest groups are one."""
    by_width: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        width = Kind(*_in_units(spec, grain), count=1).stride if spec.elements else 0
        by_width.setdefault(width, []).append(spec)
    groups = sorted(by_width.values(), key=lambda group: -sum(spec.elements for spec in group))
    rest = [spec for group in groups[MAX_GROUPS - 1 :] for spec in group]
    return [*groups[: MAX_GROUPS - 1], *([rest] if rest else [])]


def _estimate(specs: Sequence[TensorSpec], num_shards: int, grain: int) -> int:
    floor = counting_bound(Counter((spec.elements, spec.cuts) for spec in specs), num_shards, grain)
    return estimate(list(_alike(specs, grain)), floor.size // grain) * grain


def _cheapest_split(costs: Sequence[float], charge: float) -> list[int]:
    """Sets of groups, as bit masks, that hold each group once, at the least cost and a charge for each set.

    >>> _cheapest_split([0, 3, 4, 9], charge=1)  # costs of {}, {a}, {b}, {a, b}
    [2, 1]
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for chosen in range(1, len(costs)):
        lowest, part, options = chosen & -chosen, chosen, []
        while part:
            if part & lowest:
                cost, others = best[chosen ^ part]
                options.append((cost + costs[part] + charge, [*others, part]))
            part = (part - 1) & chosen
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]
