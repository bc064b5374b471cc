"""Tools for tests of sharded code: `vs.testing`, loaded when it is asked for.

`assert_consistent` compares a function on meshes with plain torch; `count_collectives`, `assert_max_traces`
and `assert_no_copy` say what must not happen; `RankPool` runs real ranks; `strategies` draws meshes, layouts,
plans and programs for hypothesis.
"""

import importlib
from typing import TYPE_CHECKING

from .consistency import Consistency, Inconsistent, assert_consistent
from .counts import Count, assert_max_traces, assert_no_copy, count_collectives, max_traces
from .pool import RankError, RankPool

if TYPE_CHECKING:
    from . import strategies

__all__ = [
    "Consistency",
    "Count",
    "Inconsistent",
    "RankError",
    "RankPool",
    "assert_consistent",
    "assert_max_traces",
    "assert_no_copy",
    "count_collectives",
    "max_traces",
    "strategies",
]


def __getattr__(name: str) -> object:
    if name == "strategies":  # they need hypothesis
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
