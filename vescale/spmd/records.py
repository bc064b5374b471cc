"""Records: what ranks write into the store, read when all of them have; nobody waits for a rank that died.

The store is asked in short turns: a blocking get would keep the connection from the other threads of
the process. A thread asks, so that a store that hangs hangs nobody, while the caller looks at the
heartbeats of those it waits for. Safe on any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from . import heartbeat, watch

# Seconds without a beat that are a death. More than `heartbeat.SILENCE`: here nothing else speaks for it, and
# a call into C that keeps Python's lock for long stops the heart of a rank that is well.
DEAD = 15.0

_SLICE = 1.0
_FRONT = 8  # keys that are asked for at once, and ranks that are heard: the others come, or are the next


class Missing(Exception):
    """No records from `ranks`, in the numbers of the world; without ranks it is the store that hangs."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks


def gather(
    store: Any,
    keys: Sequence[str],
    ranks: Sequence[int],
    limit: float,
    *,
    write: tuple[str, str] | None = None,
    in_step: bool = True,
) -> list[bytes]:
    """The values of `keys`, which `ranks` of the world write, one each; `write` is what this one does first.

    Raises Missing when a rank that has written nothing dies, or after `limit` seconds; with `in_step` also
    when one has left or failed a collective, which elsewhere doesn't say that it won't write. Raises what
    the store raises.
    """
    asking = _Asking(store, keys, write)
    try:
        if not asking.over.wait(_SLICE):
            _wait(asking, ranks, limit, in_step)
    finally:
        asking.enough.set()
    if asking.error is not None:
        raise asking.error
    return asking.answers


def _wait(asking: _Asking, ranks: Sequence[int], limit: float, in_step: bool) -> None:
    """Until all is there, or Missing says why not."""
    began, hopeless = time.monotonic() - _SLICE, None
    hearing: heartbeat.Heartbeat | None = None
    try:
        while not asking.over.wait(min(_SLICE, max(limit / 4, 0.01))):
            now, heart = time.monotonic(), heartbeat.current()
            if heart is not hearing:  # its meshes were closed, or made anew
                _stop_hearing(hearing, asking)
                hearing = heart
            if heart is not None:
                awaited = {ranks[index] for index in asking.awaited}
                heart.listen(asking, awaited)
                if in_step:
                    heart.wait_for_others(True)
                died = awaited & heart.silent(max(DEAD, heartbeat.SILENCE * heart.period))
                if died:
                    raise Missing(_missing(asking, ranks) or tuple(sorted(died)))
                if in_step and (heart.gone().intersection(ranks) or heart.store_fault):
                    hopeless = now if hopeless is None else hopeless
                    if now - hopeless > max(watch.GRACE, 3 * heart.period):
                        raise Missing(_missing(asking, ranks))
                else:
                    hopeless = None
            if now - began > limit:
                raise Missing(_missing(asking, ranks))
    finally:
        if in_step and hearing is not None:
            hearing.wait_for_others(False)
        _stop_hearing(hearing, asking)


def _stop_hearing(heart: heartbeat.Heartbeat | None, asking: _Asking) -> None:
    if heart is not None:
        heart.listen(asking, ())


def _missing(asking: _Asking, ranks: Sequence[int]) -> tuple[int, ...]:
    asking.enough.set()
    return tuple(ranks[index] for index in asking.pending) if asking.over.wait(_SLICE) else ()


class _Asking:
    """A thread that writes a record and asks for others until all are there, or it is told `enough`."""

    def __init__(self, store: Any, keys: Sequence[str], write: tuple[str, str] | None) -> None:
        self._store, self._keys, self._write = store, keys, write
        self.pending = list(range(len(keys)))  # the indices of keys that may not be there yet
        self.awaited: tuple[int, ...] = ()  # some that were not there a moment ago
        self.answers: list[bytes] = []
        self.error: Exception | None = None
        self.enough, self.over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="vescale store", daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:
            self.error = error
        self.over.set()

    def _ask(self) -> None:
        store, keys = self._store, list(self._keys)
        if self._write is not None:
            store.set(*self._write)
        pause, looked = 0.001, time.monotonic()
        while self.pending:
            if store.check([keys[index] for index in self.pending[:_FRONT]]):
                del self.pending[:_FRONT]
                continue
            if time.monotonic() - looked > _SLICE / 2:
                self.awaited = self._absent(self.pending[:_FRONT])
                looked = time.monotonic()
            if self.enough.wait(pause):
                self.pending = list(self._absent(self.pending))
                return
            pause = min(2 * pause, 0.05)
        # One round trip where the store can (a file store cannot).
        self.answers = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]

    def _absent(self, indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(index for index in indices if not self._store.check([self._keys[index]]))
