"""The tests, two runs of pytest at a time, a core each: python -m tests.run [pytest options]."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SIMULATED = sorted(map(str, Path("tests/simulated").glob("test_*.py")))
PARTS = 6
# The longest first. What is simulated is dealt like cards: files that are heavy have names alike.
RUNS = [["tests/processes", "tests/gpu"], ["tests/pure"], *(SIMULATED[part::PARTS] for part in range(PARTS))]
NO_TESTS = 5  # pytest's exit status where options leave nothing to run


def run(paths: list[str]) -> int:
    # One thread each: small tensors gain nothing from more, and the runs don't disturb each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "pytest", *sys.argv[1:], *paths]
    start, rest = time.monotonic(), []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as done:
        for line in done.stdout or ():
            if line.endswith("%]\n"):  # progress is shown as it comes, and what it came to in one piece
                print(line, end="", flush=True)
            else:
                rest.append(line)
    print(*rest, f"{time.monotonic() - start:.0f} s: {' '.join(paths)}\n", sep="", flush=True)
    return 0 if done.returncode == NO_TESTS else done.returncode


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(run, RUNS))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
