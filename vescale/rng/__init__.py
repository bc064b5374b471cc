"""Random numbers that depend on a key and an index, never on where they are drawn.

Read in this order: `keys` (what a draw depends on), `reuse` (a checker for them), `draws` and `discrete`
(the draws), `numbers` (the op under them all), `philox` (the engine), `inversion`, `logarithm` and
`ranges` (how bits become numbers), `native` (the same in C). Two are about other streams, torch's own:
`torch_stream` on cpu, `virtual_threads` on cuda.
This package knows index ranges, not layouts.
"""

from .discrete import bernoulli, categorical, choice, dropout, permutation, randint
from .draws import bits, exponential, gumbel, normal, truncated_normal, uniform
from .keys import Key, clone, fold_in, key, split
from .native import kernel_status
from .reuse import KeyReuseError, check_key_reuse

__all__ = [
    "Key",
    "key",
    "split",
    "fold_in",
    "clone",
    "check_key_reuse",
    "KeyReuseError",
    "bits",
    "uniform",
    "normal",
    "truncated_normal",
    "exponential",
    "gumbel",
    "bernoulli",
    "randint",
    "categorical",
    "permutation",
    "choice",
    "dropout",
    "kernel_status",
]
