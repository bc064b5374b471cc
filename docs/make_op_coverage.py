"""Write docs/op_coverage.md: every op of torch's op database through the engine, and through torch's DTensor.

    python -m docs.make_op_coverage [--every N] [--offset K]

Takes some minutes on two cores. With `--every` it does a part of the ops, prints what is not right and
writes nothing. The ops run in processes of their own, which are started again after a crash.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch

from tests import op_coverage_dtensor
from tests.op_coverage import (
    ABSENT,
    DATA,
    FREE,
    MOVED,
    MOVEMENT,
    OF_LARGEST,
    OPEN,
    ORDINARY,
    RANDOM,
    REFUSED,
    RELATIVE,
    REPLICATED,
    VERDICTS,
    WRONG,
    every_op,
    name_of,
    run_op,
)

OUT = Path(__file__).with_name("op_coverage.md")
PATIENCE = 120  # seconds for an op

HEAD = """# Op coverage: torch's own op database

Which ops of torch can be sharded, with the right results, and at which cost. Made by `make coverage`
(`docs/make_op_coverage.py`) with torch {version}; don't edit. Each op of
`torch.testing._internal.common_methods_invocations.op_db` that runs on a CPU: in float32, or the first dtype
that it takes, up to 6 samples, forward and, where torch differentiates it, backward, through
`vs.parallelize` and `vs.value_and_grad` on simulated ranks. The tensors of a sample are laid out in five
ways, each the nearest that a shape allows:

| way | mesh | layout |
| --- | --- | --- |
| Shard(0) | 4 | the first dim, whatever its length |
| Shard(last) | 4 | the last dim |
| mixed | 2x2 | in turn: two dims, interleaved, one axis only, one dim over both axes |
| uneven | 3 | a dim whose length 3 doesn't divide |
| ragged | 4 | `RaggedShard`: rows, and in turn elements; none on the first rank, most on the last |

In-place forms run once each. The oracle is plain torch on the global tensors, with random cotangents. Results
of movement ops must be equal bit for bit; of others, and of gradients, an element may differ by {relative:g}
of itself plus {largest:g} of the largest (or of 1), since sums over ranks are reordered.

* *free*: right, and nothing was sent for it. *moved*: right, with collectives. *replicated*: right, but an op
  had no rule and ran whole on every rank (`.collectives()` says so). *refused*: a `VescaleError` that says
  why, before anything was sent. *wrong*: other values, shapes or dtypes, or any other exception.
* An op is what its worst case is. Draws, shapes that depend on data, and memory that torch leaves
  uninitialised (shapes only are compared) are counted apart.
* DTensor: torch's own, one sample an op, `Shard(0)` for each tensor, on 4 threads as ranks, under the same
  oracle and tolerances; *crash* is a process that died or hung.
"""


# Workers: a process that answers op by op.


def work(kind: str, numbers: Sequence[int]) -> None:
    torch.set_num_threads(1)
    ops = every_op()
    for number in numbers:
        print("begin", number, flush=True)
        op = ops[number]
        answer: Any = run_op(op).as_json() if kind == "ours" else op_coverage_dtensor.run_op(op)
        print("end", number, json.dumps(answer), flush=True)


def answers(kind: str, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """(number, answer) of each op; the answer is a string for an op that its process did not survive."""
    left = list(numbers)
    while left:
        command = [sys.executable, "-m", "docs.make_op_coverage", "--worker", kind, *map(str, left)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines: Queue[str | None] = Queue()

        def listen(process: Any = process, lines: Any = lines) -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        Thread(target=listen, daemon=True).start()
        fault, began = "the process died", False
        while left:
            try:
                line = lines.get(timeout=PATIENCE)
            except Empty:
                fault, line = f"no answer in {PATIENCE} s", None
            if line is None:
                process.kill()
                if not began:
                    raise SystemExit(f"{' '.join(command[:5])} does not start")
                yield left.pop(0), fault
                break
            word, number, *rest = line.split(" ", 2)
            began = True
            if word == "end" and int(number) == left[0]:
                yield left.pop(0), json.loads(rest[0])
        process.wait()


def collect(kind: str, numbers: Sequence[int], tell: Callable[[int], None]) -> list[Any]:
    found = []
    for count, (_, answer) in enumerate(answers(kind, numbers)):
        found.append(answer)
        tell(count + 1)
    return found


# The page.


def verdict(result: dict[str, Any]) -> str:
    return max(result["cases"], key=VERDICTS.index, default=FREE)


SHORT = {FREE: "free", MOVED: "moved", REPLICATED: "replicated", REFUSED: "refused", WRONG: "wrong"}


def page(results: Sequence[dict[str, Any]], theirs: Sequence[tuple[str, str]]) -> list[str]:
    return [
        HEAD.format(version=torch.__version__.split("+")[0], relative=RELATIVE, largest=OF_LARGEST),
        *summary(results, theirs),
        *refusals(results),
        *without_rule(results),
        *table(results, theirs),
    ]


def summary(results: Sequence[dict[str, Any]], theirs: Sequence[tuple[str, str]]) -> Iterator[str]:
    pairs = list(zip(results, theirs, strict=True))
    ordinary = [result for result in results if result["category"] == ORDINARY]
    counts = Counter(verdict(result) for result in ordinary)
    cases: Counter[str] = Counter()
    for result in ordinary:
        cases.update(result["cases"])
    right = counts[FREE] + counts[MOVED] + counts[REPLICATED]
    yield "## Summary\n"
    yield f"| {len(ordinary)} ordinary ops | " + " | ".join(SHORT.values()) + " |"
    yield "| --- " * (len(SHORT) + 1) + "|"
    yield "| ops, by worst case | " + " | ".join(str(counts[name]) for name in VERDICTS) + " |"
    yield f"| cases ({sum(cases.values())}) | " + " | ".join(str(cases[name]) for name in VERDICTS) + " |"
    yield ""
    yield f"* Right: {share(right, len(ordinary))} of the ops (aim: 97 %)."
    yield f"* By replication: {share(counts[REPLICATED], len(ordinary))} (aim: at most 25 %)."
    wrong = sum(result["cases"].get(WRONG, 0) > 0 for result in results)
    yield f"* Wrong, in all {len(results)} ops: {wrong} (aim: 0)."
    for category in (RANDOM, DATA, OPEN):
        found = [result for result in results if result["category"] == category]
        verdicts = Counter(SHORT[verdict(result)] for result in found)
        text = ", ".join(f"{count} {name}" for name, count in verdicts.items())
        yield f"* Apart, {category}: {len(found)} ops: {text}."
    absent = sum(result["category"] == ABSENT for result in results)
    yield f"* Apart, {ABSENT}: {absent} ops: torch runs no sample of dense tensors here."
    judged = [(SHORT[verdict(result)], their[0]) for result, their in pairs if their[0] != "apart"]
    dtensor = Counter(their for _, their in judged)
    ours = Counter("right" if own not in ("refused", "wrong") else own for own, _ in judged)
    order = (op_coverage_dtensor.RIGHT, op_coverage_dtensor.RAISES, WRONG, op_coverage_dtensor.CRASH)
    yield f"\nOn the {len(judged)} ordinary ops with a tensor to shard:\n"
    yield "| | right | refused or raises | wrong | crash |"
    yield "| --- | --- | --- | --- | --- |"
    yield f"| vescale, all cases of an op | {ours['right']} | {ours['refused']} | {ours['wrong']} | 0 |"
    yield "| DTensor, one case of an op | " + " | ".join(str(dtensor[name]) for name in order) + " |"
    yield ""


def share(count: int, total: int) -> str:
    return f"{count} of {total}, {100 * count / max(total, 1):.1f} %"


def refusals(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "## Refused\n"
    yield "| ops | found |"
    yield "| --- | --- |"
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for result in results:
        for name, note in result["notes"]:
            if name == REFUSED:
                reason = note.split("found: ", 1)[-1].splitlines()[0]
                reason = re.sub(r"'tensors\.\d+'", "given", reason)
                reasons.setdefault((result["category"], reason), {})[result["name"]] = None
    for (category, reason), names in sorted(reasons.items()):
        apart = "" if category == ORDINARY else f" ({category})"
        yield f"| {', '.join(names)}{apart} | {escaped(reason)} |"
    yield ""


def without_rule(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    missing: Counter[str] = Counter()
    for result in results:
        ops = {
            found[1]
            for name, note in result["notes"]
            if name == REPLICATED and (found := re.search(r" for (?:aten|vescale)\.(\S+), which", note))
        }
        missing.update(ops)
    yield "## Without a rule\n"
    yield f"The {len(missing)} ATen ops that ran whole, and in how many ops of the database:\n"
    yield ", ".join(f"{name} {count}" for name, count in missing.most_common()) + ".\n"


def table(results: Sequence[dict[str, Any]], theirs: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "## All ops\n"
    yield "| op | vescale | free | moved | replicated | refused | wrong | DTensor |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for result, (their, note) in zip(results, theirs, strict=True):
        own = SHORT[verdict(result)] + ("" if result["category"] == ORDINARY else f", {result['category']}")
        own = own if result["category"] != ABSENT else ABSENT
        cases = Counter(result["cases"]) + Counter(result["apart"])
        counts = " | ".join(str(cases[name] or "") for name in VERDICTS)
        said = f"{their}: {escaped(note)[:90]}" if note and their != "apart" else their
        exact = " =" if result["name"].split(" ")[0] in MOVEMENT else ""
        yield f"| {result['name']}{exact} | {own} | {counts} | {said} |"
    yield "\n`=`: compared bit for bit.\n"
    faults = [(result["name"], note) for result in results for name, note in result["notes"] if name == WRONG]
    yield f"Wrong cases: {len(faults)}."
    yield from (f"* {name}: {escaped(note)}" for name, note in faults)


def escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th op")
    parser.add_argument("--offset", type=int, default=0, metavar="K", help="start with op K")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, *numbers = options.worker
        work(kind, list(map(int, numbers)))
        return
    ops = every_op()
    numbers = range(options.offset, len(ops), options.every)
    done = {"ours": 0, "dtensor": 0}

    def teller(kind: str) -> Callable[[int], None]:
        def tell(count: int) -> None:
            done[kind] = count
            if sys.stderr.isatty() or count % 50 == 0:
                line = ", ".join(f"{name} {at} of {len(numbers)}" for name, at in done.items())
                print(f"\r{line}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

        return tell

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(collect, kind, numbers, teller(kind)) for kind in done]
        ours, theirs = (job.result() for job in jobs)
    names = [name_of(ops[number]) for number in numbers]
    results = [
        answer if isinstance(answer, dict) else crashed(name, answer)
        for name, answer in zip(names, ours, strict=True)
    ]
    others = [
        (op_coverage_dtensor.CRASH, answer) if isinstance(answer, str) else tuple(answer) for answer in theirs
    ]
    lines = page(results, others)
    if options.every == 1 and options.offset == 0:
        OUT.write_text("\n".join(lines).rstrip() + "\n")
        print(f"\nwrote {OUT}")
    else:
        print("\n".join(summary(results, others)))
    wrong = [note for result in results for name, note in result["notes"] if name == WRONG]
    raise SystemExit(f"{len(wrong)} wrong, the first: {wrong[0]}" if wrong else 0)


def crashed(name: str, fault: str) -> dict[str, Any]:
    return {
        "name": name,
        "category": ORDINARY,
        "cases": {WRONG: 1},
        "notes": [(WRONG, fault)],
        "apart": {},
    }


if __name__ == "__main__":
    main()
