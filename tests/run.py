"""The tests, in two halves at once: python -m tests.run [pytest options]. One core each, on two cores."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SIMULATED = sorted(map(str, Path("tests/simulated").glob("test_*.py")))
BORDER = "tests/simulated/test_rules_m"  # halves of about the same length
HALVES = (
    [path for path in SIMULATED if path < BORDER],
    ["tests/pure", "tests/processes", "tests/gpu", *(path for path in SIMULATED if path > BORDER)],
)


def main() -> int:
    # One thread each: small tensors gain nothing from more, and the halves don't disturb each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as log:
        shown, other = (
            subprocess.Popen([*command, *half], env=environment, stdout=out, stderr=out)
            for half, out in zip(HALVES, (None, log), strict=True)
        )
        codes = [shown.wait(), other.wait()]
        log.seek(0)
        print(log.read())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
