"""Checks a buffer plan against the rules, boundary by boundary. Shares no code with the planner."""

from itertools import pairwise
from math import prod


def cut_is_legal(at: int, block: int, period: int) -> bool:
    """Whether a tensor may be cut after `at` elements."""
    return (at % period if period else at) % block == 0


def count_blocks(elements: int, block: int, period: int) -> int:
    """Whole blocks, counted one matrix after the other."""
    if not period:
        return elements // block
    full, rest = elements // period, elements % period
    return full * (period // block) + rest // block


def allowed_by_counting(plan, size: int) -> bool:
    """Whether shards of `size` elements pass the counting argument."""
    tensors = [(prod(spec.shape), spec.block, spec.period) for spec in plan.specs]
    if plan.num_shards * size < sum(elements for elements, _, _ in tensors):
        return False
    sized = [(min(block, elements), elements, period) for elements, block, period in tensors if elements]
    for least in {block for block, _, _ in sized}:
        blocks = sum(
            count_blocks(elements, block, period if block < elements else 0)
            for block, elements, period in sized
            if block >= least
        )
        if plan.num_shards * (size // least) < blocks:
            return False
    return True


def check_plan(plan) -> None:
    """Raises AssertionError when a rule of the plan is broken."""
    shard, shards = plan.shard_size, plan.num_shards
    item = plan.specs[0].dtype.itemsize
    assert {spec.dtype for spec in plan.specs} == {plan.specs[0].dtype}
    assert shard * item % plan.unit == 0, "a shard is not whole units"
    assert set(plan.offsets) == {spec.name for spec in plan.specs}
    assert len(plan.offsets) == len(plan.specs)
    taken, elements = [], 0
    for spec in plan.specs:
        start, size = plan.offsets[spec.name], prod(spec.shape)
        assert start >= 0
        assert start + size <= shard * shards, f"{spec.name} ends after the buffer"
        assert start * item % plan.unit == 0, f"{spec.name} is not aligned"
        elements += size
        if not size:
            continue
        taken.append((start, start + size, spec.name))
        boundary = (start // shard + 1) * shard
        while boundary < start + size:
            assert cut_is_legal(boundary - start, spec.block, spec.period), f"{spec.name} cut at {boundary}"
            boundary += shard
        held = [(count, ranks) for count, ranks in plan.units(spec.name)]
        assert sum(ranks for _, ranks in held) == shards
        assert sum(count * ranks for count, ranks in held) == size
        assert len(held) <= 5
        rank = 0
        for count, ranks in held:  # the first and last rank of each run, by intersection
            for r in {rank, rank + ranks - 1}:
                assert count == max(0, min(start + size, (r + 1) * shard) - max(start, r * shard))
            rank += ranks
    taken.sort()
    for (_, end, one), (start, _, other) in pairwise(taken):
        assert end <= start, f"{one} and {other} overlap"
    assert plan.elements == elements
    assert plan.padding == shard * shards - elements >= 0
    assert shard >= plan.lower_bound
    assert allowed_by_counting(plan, plan.lower_bound)
    assert not allowed_by_counting(plan, plan.lower_bound - plan.unit // item) or not plan.lower_bound


def check_buckets(specs, plans) -> None:
    """Each tensor is in one buffer, and every buffer passes."""
    assert sorted(spec.name for plan in plans for spec in plan.specs) == sorted(spec.name for spec in specs)
    for plan in plans:
        check_plan(plan)
