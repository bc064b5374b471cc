"""What layouts and plans cost on many ranks, and how many bytes plans move:

    python benchmarks/layouts.py [--check]

The first table makes ragged layouts and plans between them on 8, 1,024 and 10,240 ranks, with nothing cached:
time is the best of some rounds, memory what is still held afterwards. The second takes 200 random pairs of
layouts on 8 ranks and sets the bytes that each rank receives against the least that a direct exchange
can do, counted element by element from `Layout.regions`: every rank needs each contribution to each of its
elements, except those that it has. An all-reduce in parts does with less. `--check` fails when a cost differs
by more than 2x, when a rank receives more than the least in a plan of one step, or all together in any plan.
"""

import argparse
import gc
import math
import random
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable

from vescale.spmd import layout as layouts, mesh as meshes, redistribute_plan, regions
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, Placement, RaggedShard, Replicate, Shard
from vescale.spmd.redistribute_plan import plan

SIZES, LIMIT, ROUNDS = (8, 1024, 10_240), 2.0, 15
PAIRS, SEED = 200, 0


# Cost.


def even(size: int) -> RaggedShard:
    return RaggedShard.even(size)


def planned(size: int) -> RaggedShard:
    """What an FSDP buffer leaves of a tensor: nothing, a part, whole shards, a part, nothing."""
    return RaggedShard.from_runs((0,), [(0, size // 4), (3, 1), (8, size // 4), (5, 1), (0, size // 2 - 2)])


def other(size: int) -> RaggedShard:
    return RaggedShard.from_runs((0,), [(0, size // 4), (8, size // 4), (4, 2), (0, size // 2 - 2)])


MOVES: dict[str, Callable[[int], tuple[Placement, Placement]]] = {
    "even ragged to Shard(0)": lambda size: (even(size), Shard(0)),
    "planned ragged to Replicate": lambda size: (planned(size), Replicate()),
    "planned ragged to other ragged": lambda size: (planned(size), other(size)),
    "planned ragged to Shard(0)": lambda size: (planned(size), Shard(0)),
    "Partial to planned ragged": lambda size: (Partial(), planned(size)),
    "uneven Shard(0) to Shard(1)": lambda size: (Shard(0), Shard(1)),
}


def shape(size: int, name: str) -> tuple[int, int]:
    return (size * 8 * 7 - 3 * ("uneven" in name), 7) if "planned" not in name else (size // 4 * 8 + 8, 7)


def forget() -> None:
    """Empty every cache of layouts, regions and plans."""
    for module in (layouts, regions, redistribute_plan, meshes):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    AbstractMesh.coordinate.cache_clear()
    layouts._layouts.clear()


def work(name: str, size: int) -> object:
    """Both layouts, what one rank holds of each, the plan and that rank's bytes."""
    mesh, rank = AbstractMesh(("dp",), (size,)), size // 4 + 1
    src, dst = (Layout(mesh, P(dp=p), shape(size, name)) for p in MOVES[name](size))
    route = plan(src, dst)
    return src, dst, src.local_shape(rank), next(dst.regions(rank), None), route, route.bytes_moved(rank, 2)


def cost(name: str, size: int) -> tuple[float, int]:
    """Microseconds and bytes."""
    best = math.inf
    for _ in range(ROUNDS):
        forget()
        start = time.perf_counter()
        work(name, size)
        best = min(best, time.perf_counter() - start)
    forget()
    gc.collect()
    tracemalloc.start()
    held = work(name, size)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held
    return best * 1e6, memory


def cost_table() -> float:
    """Prints it; the worst ratio of a cost on more ranks to the one on 8."""
    print(
        f"{'layouts and plan':32}" + "".join(f"{size:>10} ranks      " for size in SIZES) + "  time  memory"
    )
    worst = 0.0
    for name in MOVES:
        found = [cost(name, size) for size in SIZES]
        ratios = [max(column[1:]) / column[0] for column in zip(*found)]
        worst = max(worst, *ratios)
        cells = "".join(f"{us:9.0f} us {memory / 1024:5.1f} KB " for us, memory in found)
        print(f"{name:32}{cells}  {ratios[0]:4.2f}x {ratios[1]:5.2f}x")
    print(f"worst ratio to 8 ranks: {worst:.2f}x")
    return worst


# Bytes.


def random_layout(draw: random.Random, mesh: AbstractMesh, shape: tuple[int, ...], partial: bool) -> Layout:
    while True:
        items: list[tuple[str, Placement]] = []
        ragged = None
        for axis in draw.sample(mesh.axis_names, len(mesh.axis_names)):
            kind = draw.choice(["shard", "ragged", "interleaved", "replicate"] + ["partial"] * 2 * partial)
            dim = draw.randrange(len(shape))
            if kind == "ragged" and ragged is None:
                ragged = axis
            elif kind == "shard":
                items.append((axis, Shard(dim)))
            elif kind == "interleaved":
                items.append((axis, InterleavedShard(dim, 2)))
            elif kind == "partial":
                items.append((axis, Partial()))
        try:
            found = Layout(mesh, P.of(items), shape)
            if ragged is None:
                return found
            dims = tuple(range(draw.randint(1, len(shape))))
            rows = math.prod(found.piece_shape(0)[: len(dims)])
            cuts = sorted(draw.randint(0, rows) for _ in range(mesh.axis_size(ragged) - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, rows])]
            return Layout(mesh, P.of([*items, (ragged, RaggedShard(dims, sizes))]), shape)
        except layouts.LayoutError:
            continue


def least(src: Layout, dst: Layout, rank: int) -> int:
    """Elements that `rank` must receive when contributions come directly from the ranks that have them."""
    mesh = src.mesh
    reduced = [axis for axis in src.partials if axis not in dst.partials]
    contributions = math.prod(mesh.axis_size(axis) for axis in reduced)
    held, wanted = ({i for a, b in side.regions(rank) for i in range(a, b)} for side in (src, dst))
    return contributions * len(wanted) - len(wanted & held)


def bytes_table() -> float:
    """Prints it; the worst ratio, of a rank in one step or of all ranks together."""
    draw = random.Random(SEED)
    ratios: dict[str, list[float]] = defaultdict(list)
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    together = 0.0
    for number in range(PAIRS):
        mesh = draw.choice(
            [
                AbstractMesh(("dp",), (8,)),
                AbstractMesh(("dp", "tp"), (2, 4)),
                AbstractMesh(("dp", "tp", "pp"), (2, 2, 2)),
            ]
        )
        size = draw.choice([(16, 8), (15, 7), (16, 4, 3), (64,)])
        src = random_layout(draw, mesh, size, partial=number % 2 == 1)
        dst = random_layout(draw, mesh, size, partial=False)
        route = plan(src, dst)
        kinds = [step.kind for step in route]
        name = kinds[0] if len(kinds) == 1 else ", ".join(kinds) or "nothing"
        found = [(route.bytes_moved(rank), least(src, dst, rank)) for rank in range(mesh.size)]
        ratios[name] += [moved / needed if needed else 1.0 + moved for moved, needed in found]
        both = [sum(column) for column in zip(*found)]
        totals[name] = [a + b for a, b in zip(totals[name], both)]
        together = max(together, both[0] / max(both[1], 1))
    print(f"\n{PAIRS} random pairs on 8 ranks: bytes received / the least of a direct exchange, per rank")
    print(f"{'steps':44}{'ranks':>8}{'total':>8}{'worst':>8}")
    for name, found in sorted(ratios.items(), key=lambda entry: -len(entry[1])):
        print(f"{name:44}{len(found):8}{totals[name][0] / max(totals[name][1], 1):8.2f}{max(found):8.2f}")
    single = max(max(found) for name, found in ratios.items() if "," not in name)
    several = max(map(max, ratios.values()))
    print(
        f"worst rank in one step {single:.2f}, in several {several:.2f}; worst pair as a whole {together:.2f}"
    )
    return max(single, together)


def main() -> None:
    parser = argparse.ArgumentParser(description="What layouts and plans cost.")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    worst, excess = cost_table(), bytes_table()
    if check and (worst > LIMIT or excess > 1):
        sys.exit(f"cost ratio {worst:.2f} (at most {LIMIT}), bytes ratio {excess:.2f} (at most 1)")


if __name__ == "__main__":
    main()
