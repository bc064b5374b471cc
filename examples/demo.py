"""Check what the README claims, on the GPT of train_gpt.py; PASS or FAIL with a figure for each.

    python examples/demo.py        # or `make demo`; it starts torchrun with 4 processes by itself

Claims: one rank gives plain torch's bits; simulated ranks give the bits of real processes; a sharded run
follows plain torch; one program serves the whole run, with the collectives of a hand-written one.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gpt
import torch
import train_gpt
from torch import Tensor

import vescale as vs

BITWISE_STEPS, LONG_STEPS, BATCH, SEED = 20, 100, 8, 0
MESHES = {"dp=2,tp=2": {"dp": 2, "tp": 2}, "dp=4": {"dp": 4}}
OUT = Path("out")
failures: list[str] = []


def check(claim: str, passed: bool, figure: object) -> None:
    print(f"{'PASS' if passed else 'FAIL'}  {claim}: {figure}", flush=True)
    if not passed:
        failures.append(claim)


# ---- bits: a digest of every output of every step


def digest(tensor: Tensor) -> str:
    if isinstance(tensor, vs.DTensor):
        tensor = tensor.full_tensor()
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digests(params: dict, opt_state: dict, loss: Tensor) -> dict[str, str]:
    """The digest of each output of a train step, by path."""
    outputs = {"loss": loss, "step": opt_state["step"]} | {f"params.{n}": t for n, t in params.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        outputs |= {f"{moment}.{n}": t for n, t in opt_state[moment].items()}
    return {name: digest(tensor) for name, tensor in outputs.items()}


def rows_of_steps() -> tuple[Tensor, Tensor]:
    text, _ = gpt.read_text()
    return text, gpt.row_starts(text, BITWISE_STEPS, BATCH, SEED)


def record_plain() -> Iterator[dict[str, str]]:
    """The train step called as it is, on plain tensors; and the usual torch training loop must agree."""
    torch.manual_seed(SEED)
    model = gpt.GPT()
    train_step, _, init = train_gpt.functional_step(model)
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt_state, usual = init(params), train_gpt.plain_step(model)
    text, starts = rows_of_steps()
    for start in starts:
        rows = gpt.read_rows(text, start)
        params, opt_state, loss = train_step(params, opt_state, rows)
        usual_loss = usual(rows)
        assert loss.item() == usual_loss, "the functional step differs from the usual loop"
        assert all(torch.equal(params[n], p) for n, p in model.named_parameters())
        yield digests(params, opt_state, loss)


def record_sharded(mesh: vs.Mesh) -> Iterator[dict[str, str]]:
    torch.manual_seed(SEED)
    model = gpt.GPT()
    train_step, _, init = train_gpt.functional_step(model)
    plan = gpt.make_plan(mesh)
    step = vs.parallelize(train_step, plan, donate=("params", "opt_state"))
    params = vs.distribute({n: p.detach().clone() for n, p in model.named_parameters()}, plan)
    opt_state = init(params)
    text, starts = rows_of_steps()
    for start in starts:
        params, opt_state, loss = step(params, opt_state, gpt.feed(text, start, mesh))
        yield digests(params, opt_state, loss)


def compare(claim: str, ours: list[dict], theirs: list[dict]) -> None:
    pairs = [(i, n) for i, (a, b) in enumerate(zip(ours, theirs)) for n in b if a.get(n) != b[n]]
    count = sum(map(len, theirs))
    figure = f"{count - len(pairs)} of {count} outputs of {len(theirs)} steps bitwise equal"
    if pairs:
        figure += f"; first difference in step {pairs[0][0]}: {pairs[0][1]}"
    check(claim, not pairs and len(ours) == len(theirs) > 0, figure)


def worker(folder: Path) -> None:
    """One of the processes that torchrun starts."""
    meshes = {name: vs.make_mesh(axes) for name, axes in MESHES.items()}
    for name, mesh in meshes.items():
        result = list(record_sharded(mesh))
        (folder / f"{name} {os.environ['RANK']}.json").write_text(json.dumps(result))
    for mesh in reversed(meshes.values()):
        mesh.close()


def run_processes(folder: Path) -> dict[str, list[list[dict]]]:
    """What each of 4 ranks saw, for each mesh."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, str(folder)], check=True, timeout=180, env=environment)
    return {n: [json.loads((folder / f"{n} {r}.json").read_text()) for r in range(4)] for n in MESHES}


def bits() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits of a matmul depend on it, and torchrun gives each process one
    one = vs.make_mesh({"dp": 1, "tp": 1})
    compare("one rank, against plain torch", list(record_sharded(one)), list(record_plain()))
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes = run_processes(Path(folder))
        except subprocess.SubprocessError as error:
            check("torchrun with 4 processes", False, error)
            processes = {}
    for name, ranks in processes.items():
        simulated = list(record_sharded(vs.make_mesh(MESHES[name])))
        claim = f"{name} ragged at rest, simulated against 4 processes"
        compare(claim, [step for _ in ranks for step in simulated], [step for rank in ranks for step in rank])
    torch.set_num_threads(threads)


# ---- training: against plain torch, and what it communicates


def training() -> None:
    mesh = vs.make_mesh(MESHES["dp=2,tp=2"])
    for dtype, bound in {"float64": 1e-10, "float32": 1e-4}.items():
        seen = train_gpt.train(mesh, LONG_STEPS, BATCH, SEED, dtype)
        figure = f"largest relative loss difference {seen.gap:.1e} (at most {bound:.0e})"
        check(f"{dtype}, {LONG_STEPS} steps against plain torch", seen.gap <= bound, figure)
        validation = list(seen.curves["held-out files"].values())
        figure = f"{validation[0]:.3f} -> {validation[-1]:.3f} nats a byte"
        check(f"{dtype}, validation loss goes down", validation[-1] < validation[0] - 1, figure)
    train_gpt.report(seen, "GPT on dp=2,tp=2, simulated, float32", OUT / "train_gpt.png")

    cache = seen.step.cache_info()
    check("one program for the whole run", cache.misses == 1, cache)
    counts = Counter((c.kind, c.axis) for c in seen.collectives)
    total = Counter()
    for c in seen.collectives:
        total[c.kind, c.axis] += c.bytes
    for (kind, axis), count in sorted(counts.items()):
        print(f"      {count:3} {kind} over {axis}, {total[kind, axis]:,} bytes a step")
    (OUT / "collectives.txt").write_text(str(seen.collectives) + "\n")
    print(f"      each with its cause and source line: {OUT / 'collectives.txt'}; the first of them:")
    print("\n".join(f"      {line}" for line in str(seen.collectives).splitlines()[:6]))

    blocks, params = 4, sum(1 for _ in gpt.GPT().parameters())
    wanted = {
        ("all_reduce", "tp"): 4 * blocks,
        ("all_gather", "dp"): params,
        ("reduce_scatter", "dp"): params,
    }
    scalars = sum(n for key, n in counts.items() if key not in wanted)
    figure = f"tp all-reduces {counts['all_reduce', 'tp']}, dp gathers {counts['all_gather', 'dp']}, "
    figure += f"dp reduce-scatters {counts['reduce_scatter', 'dp']}, others {scalars} (at most 2)"
    passed = all(counts[key] == n for key, n in wanted.items()) and scalars <= 2
    check("the collectives of a hand-written implementation", passed, figure)


def main() -> None:
    if len(sys.argv) == 2:
        worker(Path(sys.argv[1]))
        return
    start = time.perf_counter()
    OUT.mkdir(exist_ok=True)
    bits()
    training()
    print(f"{time.perf_counter() - start:.0f} s; {len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
