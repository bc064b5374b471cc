"""Heartbeats: every process says in the store that it lives and where it is, and can ask that of the others.

One thread a process, on a connection to the store of its own, sets one small key every `period` seconds. It
reads those of the others only when this process waits for them: a counter of alarms, one key, each
period; all ranks, when the counter has moved or a collective has failed; and those whose records are awaited
(see `records`). No other thread of the process uses this connection, and what the thread has read is a dict
in memory. A store that hangs, because the process that hosts it is gone or stopped, therefore hangs nobody
else.

A process that is killed, stopped or gone stops beating. One that ends in order says that it has left, and
one whose collective failed says so, and both raise the alarm.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from .world import seconds_asked

# So many periods without a beat, while we listen, are a heartbeat that has stopped.
SILENCE = 4

# How long the store may take to answer before it counts as gone; seconds.
_ANSWER = 10.0

# A connection that is gone: torch's client does not make it again, and prints a warning at every try.
_LOST = re.compile("Broken pipe|Connection reset|got 0 bytes")

State = Literal["alive", "failed", "left"]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a rank said last, and since when, by our clock, it has said nothing new; seconds ago.

    `at` is where it was; `clock` the time of day of the beat, by its own clock.
    """

    rank: int
    state: State
    at: str
    why: str
    clock: float
    quiet: float


class Heartbeat:
    """The heartbeat of this process, rank `rank` of the world, in `store`; `where` tells what it is doing.

    `members` are the ranks that it hears: those of its meshes.
    """

    def __init__(
        self, store: Any, rank: int, members: Iterable[int], where: Callable[[], str], period: float = 1.0
    ) -> None:
        self.rank, self.members, self.period = rank, frozenset(members), period
        self._where = where
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER))
        self._state: State = "alive"
        self._why = self._at = ""
        self._beats = self._raised = self._answered_to = 0
        # What each said, when that was new, and how often it has said nothing new since.
        self._heard: dict[int, tuple[dict[str, Any], float, int]] = {}
        self._waiting = False
        self._listeners: dict[object, frozenset[int]] = {}
        self._hearing = threading.Lock()  # listeners are on several threads
        self._answered = time.monotonic()
        self._fault = ""
        self._ended, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale heartbeat", daemon=True)
        self._thread.start()

    def wait_for_others(self, waiting: bool) -> None:
        """Whether this process waits for the others: then it hears of alarms."""
        self._waiting = waiting

    def listen(self, listener: object, ranks: Iterable[int]) -> None:
        """Hear these ranks each period, for `listener`, on whatever thread it is; none: no more."""
        with self._hearing:
            before = self._listened_to()
            self._listeners.pop(listener, None)
            if wanted := frozenset(ranks) - {self.rank}:
                self._listeners[listener] = wanted
            new = wanted - before
            for rank in new:
                self._heard.pop(rank, None)  # how long it is quiet is counted from now on
        if new:
            self._wake.set()

    def _listened_to(self) -> frozenset[int]:
        return frozenset().union(*self._listeners.values())

    def fail(self, why: str) -> None:
        """Tell the others that a collective failed here."""
        self._change("failed", why)

    def end(self, why: str) -> None:
        """Tell the others that this process leaves, and stop."""
        if self._state == "alive":
            self._change("left", why)
        self._ended.set()
        self._wake.set()
        self._thread.join(2 * self.period + 1)

    def heard(self) -> list[Heard]:
        """What the other ranks said last, of those that ever said something."""
        now = time.monotonic()
        return [
            Heard(rank, said["state"], said["at"], said["why"], said["clock"], now - since)
            for rank, (said, since, _) in sorted(self._heard.copy().items())
        ]

    def gone(self) -> set[int]:
        """The ranks that won't come to a collective any more: they have left, or failed in one."""
        return {rank for rank, (said, *_) in self._heard.copy().items() if said["state"] != "alive"}

    def silent(self, seconds: float) -> set[int]:
        """The ranks that we listen to and that neither beat for so long nor said that they leave.

        Counted in our own beats: while we, or the whole machine, stood still nobody else was silent.
        """
        return {
            rank
            for rank, (said, _, missed) in self._heard.copy().items()
            if said["state"] == "alive" and missed * self.period >= seconds
        }

    @property
    def store_fault(self) -> str:
        """Why the store can't be asked: empty when it answers."""
        if self._fault:
            return self._fault
        quiet = time.monotonic() - self._answered
        return f"no answer for {quiet:.0f} s" if quiet > _ANSWER + 2 * self.period else ""

    def _change(self, state: State, why: str) -> None:
        self._why, self._at, self._state = why, self._where(), state
        self._raised += 1
        self._wake.set()

    def _run(self) -> None:
        told = 0
        while True:
            ending, raised = self._ended.is_set(), self._raised
            try:
                self._beat()
                if raised > told:
                    told = raised
                    self._store.add("vescale/heart/alarms", 1)
                if not ending:
                    with self._hearing:
                        wanted = self._listened_to()
                    # Who was gone may be back: with new meshes in the same world.
                    if self._waiting and (self._alarmed() or self.gone()):
                        wanted |= self.members
                    self._hear(wanted - {self.rank})
                self._answered, self._fault = time.monotonic(), ""
            except Exception as error:  # whatever ails the store is for those who ask to word
                self._fault = " ".join(str(error).split())[:200] or type(error).__name__
                if _LOST.search(self._fault):
                    return
            if ending:
                return
            self._wake.wait(self.period)
            self._wake.clear()

    def _beat(self) -> None:
        self._beats += 1
        said = {
            "beat": self._beats,
            "state": self._state,
            "why": self._why,
            "at": self._at or self._where(),
            "clock": time.time(),
        }
        self._store.set(_key(self.rank), json.dumps(said))

    def _alarmed(self) -> bool:
        key = "vescale/heart/alarms"
        alarms = int(self._store.get(key)) if self._store.check([key]) else 0
        before, self._answered_to = self._answered_to, alarms
        return alarms != before

    def _hear(self, ranks: Iterable[int]) -> None:
        for rank in sorted(ranks):
            if not self._store.check([_key(rank)]):
                continue
            said = json.loads(self._store.get(_key(rank)))
            with self._hearing:
                before, since, missed = self._heard.get(rank, ({}, 0.0, 0))
                new = before != said
                self._heard[rank] = (said, time.monotonic(), 0) if new else (said, since, missed + 1)


def _key(rank: int) -> str:
    return f"vescale/heart/{rank}"


# The heartbeat of this process. A process has one world, and so one heart.

_heart: Heartbeat | None = None
_world: Any = None
_forgotten: list[Any] = []


def start(store: Any, world: Any, rank: int, members: Iterable[int], where: Callable[[], str]) -> None:
    """Start to beat in the world's store, and to hear these ranks, and those of calls before."""
    global _heart, _world
    if _heart is not None and _world is world:
        _heart.members = _heart.members.union(members)
        return
    end("its process group was replaced")
    members = frozenset(members)
    # A store serves some thousands of keys a second: a thousand beats leave it time for the rest.
    period = max(_asked_period(), len(members) / 1000)
    _heart, _world = Heartbeat(store, rank, members, where, period), world


def _asked_period() -> float:
    return seconds_asked("VESCALE_HEARTBEAT", "the period of heartbeats", 1) or 1.0


def current() -> Heartbeat | None:
    """The heartbeat of this process, None where there are no other processes."""
    return _heart


def end(why: str | None = None) -> None:
    """Stop to beat; `why` tells the others. By default what ended the process, as far as Python knows."""
    global _heart, _world
    heart, _heart, _world = _heart, None, None
    if heart is not None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        ended = f" with {type(error).__name__}: {error}"[:300] if error is not None else ""
        heart.end(why or f"its process ended{ended}")


def _forget() -> None:
    """In a forked child: the heart is the parent's, and its thread isn't here."""
    global _heart, _world
    _forgotten.append((_heart, _world))  # kept: to drop a store would take part in its bookkeeping
    _heart, _world = None, None


with suppress(AttributeError):  # a platform without fork
    os.register_at_fork(after_in_child=_forget)
