"""The published heuristic for planning a buffer (veScale-FSDP, arXiv 2602.22437), plainly: to compare with.

Candidate shard sizes are multiples of cumulative least common multiples of the blocks, taken over tensors
from the largest to the smallest; for each the least multiple is found by binary search; tensors are placed in
the order given, each at its earliest legal start. All in elements. Shares no code with the planner.
"""

from math import lcm, prod


def earliest_start(start: int, size: int, block: int, period: int, shard: int) -> int | None:
    """The first legal start at or after `start`, None where this shard size allows none."""
    for _ in range(2):
        boundary = (start // shard + 1) * shard
        if start + size <= boundary:
            return start
        room = boundary - start
        head = room // period * period + room % period // block * block if period else room // block * block
        if head and repeats(head, size, block, period, shard):
            return boundary - head
        start = boundary
    return None


def repeats(head: int, size: int, block: int, period: int, shard: int) -> bool:
    if size - head <= shard or shard % (period or block) == 0:
        return True
    while (head := head + shard) < size:
        if (head % period if period else head) % block:
            return False
    return True


def places(tensors, shard: int, shards: int) -> bool:
    end = 0
    for size, block, period in tensors:
        start = earliest_start(end, size, block, period, shard)
        if start is None:
            return False
        end = start + size
    return end <= shard * shards


def published_shard_size(specs, num_shards: int, unit: int = 16) -> int:
    """The shard size in elements that the published heuristic finds."""
    grain = unit // specs[0].dtype.itemsize
    tensors = []
    for spec in specs:
        size, block, period = prod(spec.shape), lcm(spec.block, grain), spec.period
        if period and (period % grain or period % block == 0):
            block, period = lcm(period, grain), 0
        size = -(-size // grain) * grain
        tensors.append((size, min(block, size), period if block < size else 0) if size else (0, grain, 0))
    total = sum(size for size, _, _ in tensors)
    largest = max(size if block >= size else block for size, block, _ in tensors)
    candidates, step = {grain}, grain
    for size, block, period in sorted(tensors, key=lambda tensor: -tensor[0]):
        if block < size:
            step = lcm(step, period or block)
        candidates.add(step)
    best = total
    for step in sorted(candidates):
        low, high = -(-max(-(-total // num_shards), largest, 1) // step), -(-total // step)
        if not places(tensors, high * step, num_shards):
            continue
        while low < high:
            middle = (low + high) // 2
            if places(tensors, middle * step, num_shards):
                high = middle
            else:
                low = middle + 1
        best = min(best, high * step)
    return best
