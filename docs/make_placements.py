"""Write docs/placements.md: what moves between all pairs of placements give, and which layouts there are not.

    python -m docs.make_placements [--quick]

Takes some minutes, most of them for 8 processes on as many cores as there are. `--quick` is a sample, to see
that the script works; it writes nothing.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from tests.conformance import (
    KINDS,
    MESHES,
    SHAPES,
    Case,
    check,
    digest,
    every_pair,
    move,
    move_here,
    refusal,
    sampled,
)
from vescale.testing.pool import RankPool

OUT = Path(__file__).with_name("placements.md")
CONTEXTS = {"simulated": 20, "processes": 5}

HEAD = """# Placements: every pair

Whether every move from one layout to another gives the right bits, pair by pair; what layouts are is in
[layouts](layouts.md). Made by `make conformance` (`docs/make_placements.py`); don't edit.

A layout has one placement an axis of the mesh, in the order of the mesh. A move from one layout to another is
*right* when each rank ends with the bits that plain slicing of the global tensor gives it; where a pending
reduction is completed, with those of the sum in the stated order, one binary tree over the ranks of the
group. Values are noisy float32. Processes must end with the bits of the simulated ranks.

On one and two axes every legal layout goes to every other. On three axes every pair of placements on each
axis is met in {simulated} (simulated) or {processes} (processes) random legal settings of the other axes.

| short | placement |
| --- | --- |
| RaggedShard a | `from_sizes((0,), ..)`: rows, none on the first rank |
| RaggedShard b | `from_sizes(all dims, ..)`: elements, none on the last rank |
| RaggedShard () | `on_rank`: the whole piece on the last rank of the axis |
| StridedRaggedShard | `a` turned around, after every other Shard |
| InterleavedShard | `InterleavedShard(0, 2)` |
"""


def cases(world: str, axes: int, size: str, quick: bool) -> Iterator[Case]:
    if axes == 1 or (axes == 2 and not quick):
        return every_pair(axes, size)
    return sampled(axes, size, 1 if quick else CONTEXTS[world])


def simulated(found: Sequence[Case]) -> list[str | None]:
    """For each case None, or what was wrong."""
    faults: list[str | None] = []
    for case in found:
        try:
            check(case, move(case))
            faults.append(None)
        except Exception as error:  # whatever it is, it is wrong
            faults.append(f"{type(error).__name__}: {error}")
    return faults


def processes(found: Sequence[Case], pool: RankPool) -> list[str | None]:
    faults: list[str | None] = []
    for start in range(0, len(found), 500):
        part = found[start : start + 500]
        answers = pool.run(move_here, part)
        for number, case in enumerate(part):
            expected = [digest(tensor) for tensor in move(case)]
            same = [answers[rank][number] for rank in range(len(expected))] == expected
            faults.append(None if same else "other bits than simulated")
    return faults


def refusals() -> tuple[Counter[tuple[int, str]], dict[str, tuple[int, str]]]:
    """How many layouts there are not, by axes and size; and for each rule how many, and a message."""
    counts: Counter[tuple[int, str]] = Counter()
    rules: dict[str, tuple[int, str]] = {}
    for axes, size in product(MESHES, SHAPES):
        for kinds in product(KINDS, repeat=axes):
            message = refusal(kinds, size)
            if message is not None:
                counts[axes, size] += 1
                rule = next(line for line in message.splitlines() if line.startswith("rule: "))
                rule = "".join("n" if c.isdigit() else c for c in rule)  # numbers differ
                rule = rule.split(" (")[0]  # what is listed differs
                count, first = rules.get(rule, (0, message))
                rules[rule] = count + 1, first
    return counts, rules


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    counts, rules = refusals()
    table: list[str] = []
    pairs: dict[int, Counter[tuple[str, str]]] = {axes: Counter() for axes in MESHES}
    wrong: list[str] = []
    with RankPool(8, timeout=300) as pool:
        for world, axes, size in product(("simulated", "processes"), MESHES, SHAPES):
            found, start = list(cases(world, axes, size, quick)), time.perf_counter()
            faults = simulated(found) if world == "simulated" else processes(found, pool)
            seconds = time.perf_counter() - start
            bad = [f"{world}: {case}: {fault}" for case, fault in zip(found, faults) if fault]
            wrong += bad
            mesh = "x".join(map(str, MESHES[axes].values()))
            absent = f"{counts[axes, size]} of {len(KINDS) ** axes}"
            row = (
                world,
                axes,
                mesh,
                size,
                SHAPES[size][axes],
                absent,
                len(found),
                len(found) - len(bad),
                len(bad),
            )
            table.append("| " + " | ".join(map(str, row)) + " |")
            print(table[-1], f"{seconds:.0f} s", flush=True)
            for case, fault in zip(found, faults):
                if not fault:
                    pairs[axes].update(zip(case.src, case.dst))
    if not quick:
        OUT.write_text("\n".join(page(table, pairs, rules, wrong)) + "\n")
        print(f"wrote {OUT}")
    raise SystemExit(f"{len(wrong)} wrong, the first: {wrong[0]}" if wrong else 0)


def page(
    table: list[str],
    pairs: dict[int, Counter[tuple[str, str]]],
    rules: dict[str, tuple[int, str]],
    wrong: list[str],
) -> list[str]:
    lines = [HEAD.format(**CONTEXTS), "## Moves", ""]
    columns = ["world", "axes", "mesh", "size", "shape", "no such layout", "moves", "right", "wrong"]
    lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|", *table, ""]
    lines += [f"Wrong: {len(wrong)}.", *(f"* {fault}" for fault in wrong), ""]
    for axes, found in pairs.items():
        lines += [f"## From (rows) to (columns) on {axes} {'axis' if axes == 1 else 'axes'}: right moves", ""]
        lines += ["| |" + "|".join(KINDS) + "|", "| --- " * (len(KINDS) + 1) + "|"]
        lines += [f"| {src} | " + " | ".join(str(found[src, dst]) for dst in KINDS) + " |" for src in KINDS]
        lines += ["", "Each move counts once for each axis.", ""]
    lines += ["## Layouts that there are not", ""]
    lines += ["Each is an error when the layout is made, before anything is sent, and the same on all ranks."]
    for _, (count, message) in sorted(rules.items(), key=lambda entry: -entry[1][0]):
        lines += ["", f"{count} times, the first:", "", *(f"    {line}" for line in message.splitlines())]
    lines += [
        "",
        "Also refused: a reduction of whole numbers by `avg`, of complex numbers by `max` or `min`, and any",
        "of 8-bit floats (before anything is sent); `x.placements` of uneven splits of one dim that are in",
        "another order than the mesh's, which only `x.layout.spec` can say.",
    ]
    return lines


if __name__ == "__main__":
    main()
