"""Write docs/consistency.md: which bits vescale promises, and what was measured on this CPU.

    python -m docs.make_consistency

Takes a minute. Exits with an error, and writes nothing, when an op that is promised is not bit-equal here.
"""

import platform
import sys
import textwrap
from pathlib import Path

import torch

from tests.elementwise import ALONG, DTYPES, LENGTH, ROWS, Measured, measure, measure_rows, names
from vescale.testing.promises import ELEMENTWISE

OUT = Path(__file__).with_name("consistency.md")

HEAD = """# Consistency: which bits are promised

Which bits of a sharded function are those of one device, and how far the others are off. Made by
`make consistency` (`docs/make_consistency.py`) with torch {version} on {cpu}; don't edit.

*One device* is plain torch on the global values, with as many threads as a rank has.
`vs.testing.assert_consistent` checks a function of yours against it: see [testing](testing.md).
Bits that don't depend on the number of ranks are those of [lanes](lanes.md).

| what | bits |
| --- | --- |
| layout changes: slices, gathers, exchanges | those of one device, on any mesh |
| draws, of `vs.rng` and of torch's generators | those of one device, on any mesh |
| elementwise ops of the list below | those of one device, on any mesh |
| sums that are exact, as of whole numbers | those of one device; a zero may have the other sign |
| the sum of what ranks hold, a pending reduction | one binary tree over the ranks of the axis |
| one mesh, simulated or real (ordered reductions) | the same |
| other sums over a dim that is split | made in another order than on one device: close |
| other kernels on pieces: see the two tables | close |

Close is an error of some eps times the size of what is added up. Ordered reductions are the default on a
cpu; on cuda the backend has an order of its own. After a draw torch's generators are where one device would
have left them. Where two runs differ, `assert_consistent` names the first instruction that does, and says
whether it may, as in the last two rows, or is a fault.

## Elementwise: a tensor and its slices

Each op on {length:,} values around zero, on positive ones and on large ones, whole and in slices of 1 to 100
elements at 5 starts. Bit-equal in float32, float64 and bfloat16, on slices of any length:

{exact}

On slices that are not whole vectors of the kernel the others differ by at most so many ulps (numbers of the
dtype in between) and so many eps of the tensor's largest value. Where the value itself is near zero, many
ulps are a small error.

| op | {heads} |
| --- | {rules} |
{rounded}

## Kernels that add up along other dims

Functions of a matrix of {rows} rows, whole and in slices of 1 to 48 rows: as on ranks that have some of the
rows each. "=" is bit-equal here. It is not promised: which kernel a library takes may depend on the shape.

| op | {heads} |
| --- | {rules} |
{along}
"""


def row(found: Measured) -> str:
    cells = []
    for dtype in DTYPES:
        ulps, error = found.ulps[dtype], found.error[dtype]
        cells.append("-" if ulps is None else "=" if not ulps else f"{ulps:,} ulps, {error:.2g} eps")
    return f"| {found.name} | {' | '.join(cells)} |"


def main() -> int:
    torch.set_num_threads(1)
    found = [measure(name) for name in names()]
    broken = [one for one in found if one.name in ELEMENTWISE and not one.is_exact]
    if broken:
        print("promised, and not bit-equal on slices:", *map(row, broken), sep="\n")
        return 1
    exact = ", ".join(one.name for one in found if one.name in ELEMENTWISE)
    text = HEAD.format(
        version=torch.__version__.split("+")[0],
        cpu=f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()})",
        length=LENGTH,
        rows=ROWS,
        exact="\n".join(textwrap.wrap(exact, 110)),
        heads=" | ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
        rules=" | ".join("---" for _ in DTYPES),
        rounded="\n".join(row(one) for one in found if one.name not in ELEMENTWISE),
        along="\n".join(row(measure_rows(name)) for name in ALONG),
    )
    OUT.write_text(text)
    print(f"{OUT}: {len(found)} elementwise ops, {len(ALONG)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
