"""Random numbers that depend on a key and an index, never on where they are drawn.

Read in this order: `keys` (what a draw depends on), `draws` (the numbers), `philox` (the engine),
`inversion` (how bits become normals). This package knows index ranges, not layouts.
"""

from .draws import bits, normal, uniform
from .keys import Key, fold_in, key, split

__all__ = ["Key", "key", "split", "fold_in", "bits", "uniform", "normal"]
