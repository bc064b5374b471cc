"""The program cache: bounded, locked, and its misses are explained."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Hits and misses so far, how many programs are kept, and for each miss what was new about it."""

    hits: int
    misses: int
    size: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        reasons = "; ".join(self.reasons)
        return (
            f"{self.hits} hits, {self.misses} misses, {self.size} programs kept ({reasons})"
            if self.misses
            else "not called yet"
        )


ADVICE = " (Python numbers are static: pass a 0-d tensor for one that changes often)"


def _is_number(key: Any) -> bool:
    """Whether a leaf's key is a number's: (type, number), or the text of a float."""
    return isinstance(key, str) or (isinstance(key, tuple) and len(key) == 2 and key[0] is int)


class ProgramCache(Generic[T]):
    """Least recently used programs by signature. A signature is a tuple of parts, `names` their names.

    >>> cache = ProgramCache[str](("structure", "mode"), bound=2)
    >>> cache.get(("a", 1)), cache.put(("a", 1), "program"), cache.get(("a", 1))
    (None, None, 'program')
    >>> cache.put(("a", 2), "other"), cache.info().reasons
    (None, ('first call', 'mode: 1 -> 2'))
    """

    def __init__(self, names: tuple[str, ...], bound: int = 64) -> None:
        self._names, self._bound = names, bound
        self._programs: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        self._reasons: list[str] = []
        self._last: tuple[Any, ...] | None = None

    def get(self, key: tuple[Any, ...]) -> T | None:
        """The program of a signature, None on a miss."""
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                self._hits += 1
                self._programs.move_to_end(key)
            return program

    def put(self, key: tuple[Any, ...], program: T) -> None:
        """Keep the program of a signature that missed; the least recently used one goes past the bound."""
        with self._lock:
            self._misses += 1
            self._reasons.append(self._explain(key))
            del self._reasons[: -self._bound]
            self._last = key
            self._programs[key] = program
            if len(self._programs) > self._bound:
                self._programs.popitem(last=False)

    def last(self) -> T:
        """The program that was kept or used last."""
        with self._lock:
            return self._programs[next(reversed(self._programs))]

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._programs), tuple(self._reasons))

    def _explain(self, key: tuple[Any, ...]) -> str:
        if self._last is None:
            return "first call"
        changed = []
        for name, old, new in zip(self._names, self._last, key, strict=True):
            if old == new:
                continue
            if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
                places = [index for index, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
                index = places[0]
                more = f" and {len(places) - 1} more" if len(places) > 1 else ""
                advice = ADVICE if any(_is_number(old[at]) and _is_number(new[at]) for at in places) else ""
                changed.append(f"{name} {index}: {old[index]} -> {new[index]}{more}{advice}")
            else:
                changed.append(f"{name}: {old} -> {new}")
        return ", ".join(changed) or "dropped from the cache before"
