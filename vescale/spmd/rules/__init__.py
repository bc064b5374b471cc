"""Sharding rules, one family a file, in factor notation (see `notation`). Importing registers them."""

from . import (
    attention,
    convolution,
    elementwise,
    embedding,
    factories,
    grouped,
    indexing,
    matmul,
    norms,
    padding,
    pooling,
    random,
    reductions,
    softmax,
    views,
)
from .notation import Pattern, find_rule, rule

__all__ = [
    "Pattern",
    "attention",
    "convolution",
    "elementwise",
    "embedding",
    "factories",
    "find_rule",
    "grouped",
    "indexing",
    "matmul",
    "norms",
    "padding",
    "pooling",
    "random",
    "reductions",
    "rule",
    "softmax",
    "views",
]
