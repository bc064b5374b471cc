"""Sharding rules, one family a file, in factor notation (see `notation`). Importing registers them."""

from . import (
    attention,
    elementwise,
    embedding,
    factories,
    linalg,
    losses,
    matmul,
    norms,
    random,
    rearrange,
    reductions,
    softmax,
    views,
)
from .notation import Pattern, find_rule, rule

__all__ = [
    "Pattern",
    "attention",
    "elementwise",
    "embedding",
    "factories",
    "find_rule",
    "linalg",
    "losses",
    "matmul",
    "norms",
    "random",
    "rearrange",
    "reductions",
    "rule",
    "softmax",
    "views",
]
