"""Tools to look into a run: where two of them part, where NaNs begin, values at a line, time.

Loaded when it is first used: `vs.debug`.
"""

from .breakpoint import breakpoint
from .diff import Diff, Divergence, diff
from .nonfinite import NonFinite, find_nonfinite
from .record import Recorded, record
from .timeline import Span, Timeline, timeline

__all__ = [
    "Diff",
    "Divergence",
    "NonFinite",
    "Recorded",
    "Span",
    "Timeline",
    "breakpoint",
    "diff",
    "find_nonfinite",
    "record",
    "timeline",
]
