"""Helpers for tests of sharded code: a pool of real ranks."""

from .pool import RankError, RankPool

__all__ = ["RankError", "RankPool"]
