"""How near to the counting bound buffer plans are, for the parameters of real models:

    python benchmarks/planner.py [--quick] [--check]

Of eight tables of shapes every bucket is planned, whole layers and with the experts apart, with blocks of 1,
16 and 128 rows and of 2,048 elements (1-d parameters by the element), on 8 to 8,192 ranks. Every plan passes
a checker that shares no code with the planner. A ratio is what a rank holds over the counting bound of one
buffer for the whole bucket, also where the bucket is split into several (their sizes added up). Buckets of
equal shapes count once.

Beside ours: the published heuristic in one buffer; FSDP2, which pads dim 0 of each parameter to a multiple of
the ranks and knows no blocks of several rows; and one flat buffer whose shards are multiples of the least
common multiple of all rows, which keeps single rows whole, no more. Both may be below the bound of larger
blocks.
`--check` fails when a target is missed; `--quick` takes transformer layers and four numbers of ranks.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.plan_checker import check_buckets, check_plan  # noqa: E402
from tests.published_planner import published_shard_size  # noqa: E402
from vescale.fsdp import (  # noqa: E402
    Block,
    BufferPlan,
    Elements,
    Rows,
    TensorSpec,
    binding,
    plan_buckets,
    plan_buffer,
)

RANKS = [8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 2048, 8192]
QUICK_RANKS = [8, 128, 896, 8192]
BLOCKS: dict[str, Block] = {
    "1 row": Rows(1),
    "16 rows": Rows(16),
    "128 rows": Rows(128),
    "2048 elements": Elements(2048),
}
NEAR, FAIR = (1.01, 0.80), (1.10, 0.90)  # (ratio to the bound, at least this part of the cases)
SECONDS, GROWTH = 0.3, 2.0  # of a plan, and of planning on the most ranks over the fewest

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    model: str
    bucket: str
    block: str
    ranks: int
    bound: int
    ours: int
    buffers: int
    single: int
    published: int
    dim0: int
    flat: int
    seconds: tuple[float, float]  # plan_buffer, plan_buckets
    reason: str

    @property
    def ratio(self) -> float:
        return self.ours / self.bound


def buckets(quick: bool) -> Iterator[tuple[str, str, Shapes]]:
    """(model, bucket, shapes), each list of shapes once."""
    tables = json.loads((ROOT / "tests" / "data" / "param_shapes.json").read_text())
    seen = set()
    for model, table in tables.items():
        for bucket in table:
            name, params = bucket["bucket"], [(name, tuple(shape)) for name, shape, _ in bucket["params"]]
            if quick and "layers" not in name:
                continue
            experts = [param for param in params if "expert" in param[0]]
            others = [param for param in params if "expert" not in param[0]]
            parts = {name: params}
            if experts:
                parts |= {f"{name}, experts": experts, f"{name}, the rest": others}
            for part, shapes in parts.items():
                if (key := tuple(shape for _, shape in shapes)) not in seen:
                    seen.add(key)
                    yield model, part, shapes


def dim0(shapes: Shapes, ranks: int) -> int:
    """Elements a rank holds when dim 0 of each parameter is padded to a multiple of the ranks."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for _, shape in shapes)


def flat(shapes: Shapes, ranks: int) -> int:
    """Elements a rank holds of one flat buffer whose shards are multiples of every parameter's rows."""
    row = math.lcm(*(shape[-1] for _, shape in shapes if len(shape) > 1), 8)
    return -(-sum(math.prod(shape) for _, shape in shapes) // (ranks * row)) * row


def timed(plan: Callable, *args) -> tuple[float, object]:
    start = time.process_time()
    result = plan(*args)
    return time.process_time() - start, result


def run(quick: bool) -> list[Case]:
    cases = []
    for model, bucket, shapes in buckets(quick):
        for label, block in BLOCKS.items():
            specs = [
                TensorSpec.of(name, shape, torch.bfloat16, block if len(shape) > 1 else Elements(1))
                for name, shape in shapes
            ]
            for ranks in QUICK_RANKS if quick else RANKS:
                one_time, single = timed(plan_buffer, specs, ranks)
                all_time, plans = timed(plan_buckets, specs, ranks)
                assert isinstance(single, BufferPlan)
                assert isinstance(plans, tuple)
                check_plan(single)
                check_buckets(specs, plans)
                ours = sum(plan.shard_size for plan in plans)
                cases.append(
                    Case(
                        model=model,
                        bucket=bucket,
                        block=label,
                        ranks=ranks,
                        bound=single.lower_bound,
                        ours=ours,
                        buffers=len(plans),
                        single=single.shard_size,
                        published=published_shard_size(specs, ranks),
                        dim0=dim0(shapes, ranks),
                        flat=flat(shapes, ranks),
                        seconds=(one_time, all_time),
                        reason=binding(single).reason,
                    )
                )
    return cases


def part(ratios: list[float], limit: float) -> float:
    return sum(ratio <= limit for ratio in ratios) / len(ratios)


def line(title: str, cases: list[Case]) -> str:
    columns = []
    for size in (lambda c: c.ours, lambda c: c.published, lambda c: c.dim0, lambda c: c.flat):
        ratios = [size(case) / case.bound for case in cases]
        columns.append(f"{part(ratios, NEAR[0]):6.1%} {part(ratios, FAIR[0]):6.1%} {max(ratios):6.1f}x")
    return f"{title:26} {len(cases):5}   " + "   ".join(columns)


def summary(cases: list[Case]) -> None:
    print("Part of the cases at most 1.01 and at most 1.10 times the bound, and the most.\n")
    print(
        f"{'':26} {'cases':>5}   {'ours':^21}   {'published':^21}   {'FSDP2 dim 0':^21}   {'lcm of rows':^21}"
    )
    for label in BLOCKS:
        print(line(label, [case for case in cases if case.block == label]))
    layers = [case for case in cases if "layers" in case.bucket]
    print(line("transformer layers, whole", [case for case in layers if "," not in case.bucket]))
    print(line("experts apart", [case for case in layers if "," in case.bucket]))
    restart = [case for case in cases if case.block == "128 rows" and "gpt-oss" in case.model]
    print(line("gpt-oss, 128 rows", restart))
    print(line("all", cases))
    print(line("all but gpt-oss, 128 rows", [case for case in cases if case not in restart]))


def times(cases: list[Case]) -> float:
    """Prints planning times; returns how they grow with the ranks."""
    for index, name in enumerate(("plan_buffer", "plan_buckets")):
        seconds = [case.seconds[index] for case in cases]
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms, most {max(seconds) * 1e3:.0f} ms")
    few, many = (
        sum(sum(case.seconds) for case in cases if case.ranks == ranks) for ranks in (RANKS[0], RANKS[-1])
    )
    print(f"all plans on {RANKS[-1]:,} ranks take {many / few:.2f} times those on {RANKS[0]}")
    return many / few


def rest(cases: list[Case]) -> None:
    """The cases above 1.10, by bucket and block: on which ranks, and for the worst what binds one buffer."""
    print(f"\nAbove {FAIR[0]:.2f} times the bound:\n")
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        if case.ratio > FAIR[0]:
            groups.setdefault((case.model, case.bucket, case.block), []).append(case)
    for (model, bucket, block), found in groups.items():
        worst = max(found, key=lambda case: case.ratio)
        ranks = ", ".join(f"{case.ranks}: {case.ratio:.2f}" for case in found)
        print(f"{model} {bucket}, {block}\n    {ranks}")
        print(
            f"    on {worst.ranks} ({worst.buffers} buffers; published {worst.published / worst.bound:.2f}):"
        )
        print(f"    {worst.reason}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="transformer layers on four numbers of ranks")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    options = parser.parse_args()
    cases = run(options.quick)
    summary(cases)
    print()
    growth = times(cases)
    above = [case for case in cases if case.ours > case.published]
    print(f"above the published heuristic: {len(above)} of {len(cases)}")
    rest(cases)
    faults = [f"{c.model} {c.bucket} {c.block} on {c.ranks} is above the published heuristic" for c in above]
    slowest = statistics.quantiles([max(case.seconds) for case in cases], n=100)[-1]
    if slowest > SECONDS:
        faults.append(f"one plan in a hundred takes {slowest:.2f} s")
    if growth > GROWTH:
        faults.append(f"planning time grows {growth:.2f}x")
    if not options.quick:  # which has the hard cases only
        ratios = [case.ratio for case in cases]
        for limit, least in (NEAR, FAIR):
            if part(ratios, limit) < least:
                faults.append(f"only {part(ratios, limit):.1%} of the cases are within {limit} of the bound")
    print("\n".join(["", *faults]) if faults else "\nall targets met")
    return 1 if options.check and faults else 0


if __name__ == "__main__":
    sys.exit(main())
