"""Passes: pure functions from program data to program data, in one ordered list for each of two kinds.

* `DECISIONS`: `Partitioned -> Partitioned`. The same on every rank, so all that concerns collectives is
  here: merging, bucketing, starting them early.
* `LISTING`: `Listing -> Listing`. What one rank does with its own memory: fusion, updates in place.

`register` adds a pass, also from other packages. Between passes `verify` checks the result when
`VESCALE_VERIFY=1`, as our tests have it, or inside `verifying()`. `without(name)` leaves passes out.
Values are released at their last use by the code generator, from what the passes leave.
"""

from .common_collectives import common_collectives
from .consume_early import consume_early
from .dead_code import dead_code
from .foreach import fuse_foreach
from .in_place import in_place
from .join_addcdiv import join_addcdiv
from .owner_waves import owner_waves
from .registry import DECISIONS, LISTING, Pass, apply, names, register, verifying, without
from .start_early import start_early
from .verify import InvalidProgram, verify

register(Pass("common_collectives", DECISIONS, common_collectives, merges=True))
register(Pass("owner_waves", DECISIONS, owner_waves, rewrites=True))
register(Pass("dead_code", LISTING, dead_code))
register(Pass("join_addcdiv", LISTING, join_addcdiv))
register(Pass("consume_early", LISTING, consume_early))
register(Pass("fuse_foreach", LISTING, fuse_foreach))
register(Pass("in_place", LISTING, in_place))

__all__ = [
    "DECISIONS",
    "LISTING",
    "InvalidProgram",
    "Pass",
    "apply",
    "names",
    "register",
    "start_early",
    "verify",
    "verifying",
    "without",
]
