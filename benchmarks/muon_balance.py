"""How even Muon's owners are loaded, and how few bytes move, for the parameters of real models:

    python benchmarks/muon_balance.py [--check]

Parameters rest as `vs.FSDP` shards them, a layer a bucket, on 64 and 256 ranks, and have owners as `vs.optim.muon`
gives them; embeddings, heads and vectors are left to another optimizer. Nothing runs: layouts and owners are
pure functions.

    busiest   operations of the busiest owner's Newton-Schulz iterations over the mean
    bound     no assignment of whole matrices has less
    moved     bytes in bfloat16 that go to owners (as many come back), of all ranks together
    least     of these, what would go if each matrix went where most of it is, however busy that rank
    seconds   to decide all owners

Rows: matrices cut anywhere between rows (`Rows(1)`, the default), and the stacks of experts cut between
experts, so that they don't move. `--check` fails when the busiest owner has more than 1.05 of the mean where the
bound allows that, or more than 1.05 of the bound elsewhere.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


SHAPES = ROOT / "tests" / "data" / "param_shapes.json"
MODELS = ["llama3-70b", "qwen3-235b-a22b", "deepseek-v3-671b", "deepseek-v3-671b(fused)"]
RANKS = [64, 256]
NEAR = 1.05
OTHERS = ("embed", "lm_head", "norm")


def parameters(model: str) -> dict[str, torch.Tensor]:
    """Abstract matrices of a model, by path: a bucket is the first part of it."""
    found = {}
    for number, bucket in enumerate(json.loads(SHAPES.read_text())[model]):
        for layer in range(bucket["repeat"]):
            for name, shape, _ in bucket["params"]:
                path = f"layers.{number}x{layer}.{name}"
                other = any(word in f"{bucket['bucket']}.{name}" for word in OTHERS if word != "norm")
                if len(shape) >= 2 and not other:
                    found[path] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail when an owner is busier than it need be")
    check = parser.parse_args().check
    print(f"{'model':24} {'experts':8} {'ranks':>5} {'matrices':>8} {'busiest':>8} {'bound':>6} ", end="")
    print(f"{'moved':>9} {'least':>9} {'ratio':>6} {'seconds':>8}")
    late = []
    for model in MODELS:
        params = parameters(model)
        for blocks in ("rows", "whole"):
            stacks = [path for path, p in params.items() if p.dim() == 3]
            if blocks == "whole" and not stacks:
                continue
            for ranks in RANKS:
                block = {}
                if blocks == "whole":
                    sizes = {math.prod(params[path].shape[1:]) for path in stacks}
                late += row(model, blocks, ranks, params, block) if blocks == "rows" else []
    for text in late:
        print(text)
    if check and late:
        sys.exit(1)


if __name__ == "__main__":
    main()
