"""The same bits on any mesh: sums are taken in a tree over 8 lanes, however many ranks host them.

    python examples/07_same_bits.py

Claim: every loss, gradient and parameter of each step is bitwise the same on 1, 2, 4 and 8 ranks, with
dropout, and with Muon. Without lanes it isn't: sums are reordered.
"""

import torch
from train_gpt import train

import vescale as vs

RANKS, STEPS = (1, 2, 4, 8), 3


def hashes(**options) -> dict[int, str]:
    options = {"steps": STEPS, "compare": False, "hash": True, **options}
    return {n: train(vs.make_mesh({"dp": n}), **options).hash for n in RANKS}


def main() -> None:
    torch.set_num_threads(1)  # a matmul's bits depend on it
    runs = {"AdamW, dropout": {"dropout": 0.1}, "Muon": {"optimizer": "muon"}}
    for name, options in runs.items():
        (alike,) = set(hashes(lanes=8, **options).values())
        print(f"{name}, lanes=8, on {', '.join(map(str, RANKS))} ranks: {alike}")
    apart = set(hashes().values())
    assert len(apart) > 1, apart
    print(f"without lanes: {len(apart)} different hashes")


if __name__ == "__main__":
    main()
