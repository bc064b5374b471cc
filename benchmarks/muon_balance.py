"""How even Muon's owners are loaded, and how few bytes move, for the matrices of real models:

    python benchmarks/muon_balance.py [--check]

Parameters rest as `vs.FSDP` shards them, a layer a bucket, on 64 and 256 ranks, and get owners as
`vs.optim.muon` gives them; embeddings and heads are left to another optimizer. Nothing runs: layouts and
owners are pure functions.

    busiest   operations of the busiest owner's Newton-Schulz iterations, over the mean
    bound     no assignment of whole matrices has less
    rest      busiest if matrices that are whole at rest never moved
    moved     GB of bfloat16 that go to owners, of all ranks together; as many come back
    least     of these, what would go if each matrix went where most of it is, however busy that rank
    a rank    GB that a rank receives on average, there and back
    seconds   to decide the owners

`(fused)` has its experts as stacks of three dims, whose owners are one ragged cut: a rank has a run of them.
`blocks` declares each of these matrices as a block, which FSDP then doesn't cut. `--check` fails when
the busiest has more than 1.05 of the mean or, where that can't be, of the bound.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import vescale as vs  # noqa: E402
from vescale.optim.at_owners import ownerships  # noqa: E402
from vescale.optim.orthogonalize import flops  # noqa: E402
from vescale.optim.owners import Ownership, assign  # noqa: E402
from vescale.spmd.layout import AbstractMesh, Layout  # noqa: E402
from vescale.spmd.matrices import Matrices  # noqa: E402

SHAPES = ROOT / "tests" / "data" / "param_shapes.json"
CASES = [
    ("llama3-70b", False),
    ("qwen3-235b-a22b", False),
    ("deepseek-v3-671b", False),
    ("deepseek-v3-671b(fused)", False),
    ("deepseek-v3-671b(fused)", True),
]
RANKS = [64, 256]
NEAR = 1.05


def layers(model: str) -> list[dict[str, torch.Tensor]]:
    """The matrices of each bucket of a model, abstract, by path; buckets that are alike share them."""
    found = []
    for number, bucket in enumerate(json.loads(SHAPES.read_text())[model]):
        own = {
            f"bucket{number}.{name}": torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for name, shape, _ in bucket["params"]
            if len(shape) > 1 and not re.search("embed|lm_head", f"{bucket['bucket']}.{name}")
        }
        found += [own] * bucket["repeat"] if own else []
    return found


def at_rest(layer: dict[str, torch.Tensor], ranks: int, blocks: bool) -> list[Layout]:
    block = {
        re.escape(path): vs.fsdp.Elements(math.prod(p.shape[1:])) for path, p in layer.items() if p.dim() == 3
    }
    fsdp = vs.FSDP("dp", r"bucket\d+", block=block if blocks else {}, max_padding=1.0)
    plan = vs.Plan(AbstractMesh(("dp",), (ranks,)), fsdp=fsdp)
    by_path = {entry.path: entry.rest for entry in plan.resolve(layer)}
    return [by_path[path] for path in layer]


def unmoved(ownership: Ownership) -> float:
    """The imbalance if matrices that one rank has stayed there, and the others had owners."""
    fixed, others = [0] * ownership.ranks, []
    for work in ownership.works:
        if all(start % work.size == 0 for _, start, _ in work.held):
            for rank, start, stop in work.held:
                fixed[rank] += work.cost * ((stop - start) // work.size)
        else:
            others.append(work)
    return assign(others, ownership.ranks, fixed).imbalance


def rows() -> Iterable[tuple[str, bool]]:
    """A line of the table for each case, and whether the busiest is as busy as it may be."""
    for model, blocks in CASES:
        params = layers(model)
        for ranks in RANKS:
            known = {id(layer): at_rest(layer, ranks, blocks) for layer in params}
            layouts = [layout for layer in params for layout in known[id(layer)]]
            how = [Matrices.of("r c -> r c" if len(x.shape) == 2 else "b r c -> b r c") for x in layouts]
            begun = time.process_time()
            ownership = ownerships(layouts, how, lambda rows, columns: flops(rows, columns, 5))[
                "dp"
            ].ownership
            seconds = time.process_time() - begun
            count = sum(work.count for work in ownership.works)
            moved, least = (2e-9 * n for n in (ownership.moved, ownership.least_moved))
            line = (
                f"{model:24} {'yes' if blocks else 'no':6} {ranks:5} {count:8,} {ownership.imbalance:8.3f} "
                f"{ownership.bound:6.3f} {unmoved(ownership):6.2f} {moved:8.1f} {least:8.1f} "
                f"{moved / least if least else 1:6.2f} {2 * moved / ranks:7.2f} {seconds:8.2f}"
            )
            yield line, ownership.imbalance <= NEAR * (ownership.bound if ownership.bound > NEAR else 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail when an owner is busier than it need be")
    check = parser.parse_args().check
    print(
        f"{'model':24} {'blocks':6} {'ranks':>5} {'matrices':>8} {'busiest':>8} {'bound':>6} {'rest':>6} "
        f"{'moved':>8} {'least':>8} {'ratio':>6} {'a rank':>7} {'seconds':>8}"
    )
    fine = []
    for line, near in rows():
        print(line, flush=True)
        fine.append(near)
    print(f"{sum(fine)} of {len(fine)} within {NEAR} of the mean, or of the bound where that is above it")
    if check and not all(fine):
        sys.exit(1)


if __name__ == "__main__":
    main()
