"""Sharding rules, one family a file, in factor notation (see `notation`). Importing registers them."""

from . import (
    attention,
    batch_norms,
    convolution,
    elementwise,
    embedding,
    factories,
    indexing,
    matmul,
    norms,
    pooling,
    random,
    reductions,
    scans,
    softmax,
    views,
)
from .notation import Pattern, find_rule, rule

__all__ = [
    "Pattern",
    "attention",
    "batch_norms",
    "convolution",
    "elementwise",
    "embedding",
    "factories",
    "find_rule",
    "indexing",
    "matmul",
    "norms",
    "pooling",
    "random",
    "reductions",
    "rule",
    "scans",
    "softmax",
    "views",
]
