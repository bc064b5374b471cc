"""Errors that a user's mistake raises, and the words for them.

Every one is a `VescaleError`, raised before any communication, and says what was found, where, the
rule it breaks and a remedy. The mechanism raises bare facts; the API layer words them with
`explain`. `assert` is for invariants of ours only.

>>> print(
...     explain(
...         "Shard(2)",
...         where="params.wte",
...         rule="a 2-d tensor has dims 0 and 1",
...         remedy="use Shard(0) or Shard(1)",
...     )
... )
found: Shard(2)
where: params.wte
rule: a 2-d tensor has dims 0 and 1
remedy: use Shard(0) or Shard(1)
"""

import difflib
from collections.abc import Iterable


class VescaleError(Exception):
    """The parent of every error that a user's mistake raises."""


class ArgumentError(VescaleError, ValueError):
    """An argument is not one that this function takes."""


class LayoutError(VescaleError, ValueError):
    """A placement or layout is not legal for this mesh and shape."""


class PlanError(VescaleError, ValueError):
    """A plan doesn't fit the tree that it is applied to."""


class TraceError(VescaleError, RuntimeError):
    """The function can't be traced: it needs a value, or mutates what it was given."""


class ShardingError(VescaleError, RuntimeError):
    """An op can't be sharded as the plan asks."""


class ConsistencyError(VescaleError, RuntimeError):
    """Ranks disagree: other code, other calls, or other values where they must be equal."""


class CheckpointError(VescaleError, RuntimeError):
    """A checkpoint is damaged or incomplete, can't be written, or has other tensors than were asked for."""


class PeerError(ConsistencyError):
    """A collective did not complete: a rank died, stalled, left, or runs something else.

    `ranks` are the likely cause, as torch.distributed numbers them: those that died, stalled or left, else
    those that are alive and elsewhere.
    """

    ranks: tuple[int, ...] = ()


def explain(found: object, *, where: object = None, rule: object = None, remedy: object = None) -> str:
    """The text of an error: one line each, those that are None left out."""
    parts = {"found": found, "where": where, "rule": rule, "remedy": remedy}
    return "\n".join(f"{name}: {part}" for name, part in parts.items() if part is not None)


def near_misses(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Those of `candidates` that `name` may have been meant to be, closest first.

    The cutoff is low on purpose: a plan's rules are regexes, which share fewer characters with
    the path that was meant than a misspelt path does.

    >>> near_misses("block.0.fc1", ["blocks.0.fc1", "blocks.0.fc2", "head"], limit=1)
    ['blocks.0.fc1']
    """
    return difflib.get_close_matches(name, sorted(set(candidates)), n=limit, cutoff=0.4)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The near misses of `name` as a remedy; where there are none, what there is instead.

    >>> nearest("block.0.fc1", ["blocks.0.fc1", "head"])
    'near: blocks.0.fc1'
    >>> nearest("zzz", ["blocks.0.fc1", "head"])
    'there are blocks.0.fc1, head'
    """
    names = list(dict.fromkeys(candidates))
    if near := near_misses(name, names):
        return f"near: {', '.join(near)}"
    return f"there are {', '.join(names[:8]) or 'none'}{', ...' if len(names) > 8 else ''}"
