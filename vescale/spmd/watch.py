"""Watch: waiting for other ranks, never longer than the timeout, and what to say when they don't come.

Every collective of processes waits here, in slices of a second. Between two slices it looks at what the
heartbeats told: a rank that has left or failed won't come, so nobody waits for it until the timeout. When
a collective fails, or the timeout is over, the error is worded from the store: whose heartbeat stopped,
who left and why, where each rank is, and where we are.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .. import _compat
from .._errors import PeerError, explain
from . import heartbeat, world
from .heartbeat import SILENCE, Heard

T = TypeVar("T")

_SLICE = 1.0
_TIMEDELTA = timedelta(seconds=_SLICE)

# A rank that has left may have sent all that a collective needs: so long it may still complete.
GRACE = 3.0

_SHOWN = 8  # ranks that an error tells of


class Here:
    """Where this process is: the call that it is in, and the last collective that it came to."""

    def __init__(self) -> None:
        self.call: tuple[str, int] | None = None
        self.before: tuple[str, int] | None = None  # the one that was over last
        self.collective: tuple[Sequence[str], int] | Callable[[], str] | None = None

    def enter(self, name: str, number: int) -> tuple[str, int] | None:
        """A call begins: returns the one around it, for `leave`."""
        outside, self.call, self.collective = self.call, (name, number), None
        return outside

    def leave(self, outside: tuple[str, int] | None) -> None:
        """The call is over."""
        self.before, self.call, self.collective = self.call, outside, None

    def __str__(self) -> str:
        call, collective = self.call or self.before, self.collective
        parts = [f"{'in' if self.call else 'after'} call {call[1]} of {call[0]}"] if call is not None else []
        if callable(collective):
            parts.append(f"at {collective()}")
        elif collective is not None:
            labels, number = collective
            parts.append(f"at collective {number}: {labels[number]}")
        return ", ".join(parts) or "before its first collective"


here = Here()
_broken = ""


def begin() -> None:
    """Before a collective: none follows one that failed, whose messages may still be under way."""
    if _broken:
        raise PeerError(
            explain(
                f"a collective after one that failed ({_broken})",
                where=here,
                rule="ranks that failed a collective are no longer in step",
                remedy="end the processes and start them anew, from the last checkpoint",
            )
        )


def start(members: Sequence[int]) -> None:
    """Let this process's heart beat in the store of the world, for the processes of a mesh."""
    if len(members) > 1:
        world_group, me = dist.group.WORLD, dist.get_rank()
        heartbeat.start(_compat.default_store(), world_group, me, members, here.__str__)


def stop(why: str | None = None) -> None:
    """End the heartbeat and forget failures; the others are told `why`, by default how the process ends."""
    global _broken
    _broken = ""
    heartbeat.end(why)


def finish(work: Any, group: dist.ProcessGroup) -> None:
    """Wait for a collective that was begun. Raises PeerError when it fails, or isn't over in time."""
    if work is None:
        return
    try:
        heart = heartbeat.current()
        if heart is None:
            work.wait()
            return
        try:
            work.wait(_TIMEDELTA)  # most are over in less
            return
        except RuntimeError:
            if work.is_completed():
                raise
        _wait(lambda: _over(work), heart, dist.get_process_group_ranks(group))
    except PeerError:
        _leave_running(group)
        raise
    except RuntimeError as error:
        raise failure(error) from error


def _leave_running(group: dist.ProcessGroup) -> None:
    """Never take down a group whose collective is still under way.

    Gloo would wait for it, for as long as its own timeout, when the process ends.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _over(work: Any) -> bool:
    try:
        work.wait(_TIMEDELTA)
        return True
    except RuntimeError:
        if work.is_completed():
            raise
        return False


def ask(question: Callable[[], T], members: Sequence[int]) -> T:
    """The answer of a function that talks to the store, and may wait there for ranks among `members`.

    It runs in a thread: a store that hangs does not hang us. Raises what it raises, PeerError when it takes
    longer than the timeout.
    """
    heart = heartbeat.current()
    if heart is None:
        return question()
    answer: list[T] = []
    error: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answer.append(question())
        except BaseException as found:
            error.append(found)
        done.set()

    threading.Thread(target=run, name="vescale store", daemon=True).start()
    if not done.wait(_SLICE):
        _wait(lambda: done.wait(_SLICE), heart, members)
    if error:
        raise error[0]
    return answer[0]


def _wait(over: Callable[[], bool], heart: heartbeat.Heartbeat, members: Sequence[int]) -> None:
    """Until `over`, which takes a slice to tell, or a member won't come, or the timeout is over."""
    grace = max(GRACE, 3 * heart.period)
    began, limit = time.monotonic() - _SLICE, world.timeout()
    hopeless: float | None = None
    heart.wait_for_others(True)
    try:
        while not over():
            now = time.monotonic()
            if heart.gone().intersection(members) or heart.store_fault:
                hopeless = now if hopeless is None else hopeless
                if now - hopeless > grace:
                    raise failure("others won't come")
            else:
                hopeless = None
            if now - began > limit + _SLICE:  # a backend's own timeout comes first
                raise failure(f"not over after {limit:g} s")
    finally:
        heart.wait_for_others(False)


def failure(error: object) -> PeerError:
    """The error for a collective that failed, with what the other ranks say; this takes some seconds."""
    at, told, heart = str(here), _brief(error), heartbeat.current()
    give_up(told)
    found, ranks = others()
    made = PeerError(
        explain(
            found or "a collective did not complete",
            where=f"{'' if heart is None else f'rank {heart.rank}, '}{at}: {told}",
            rule="all ranks run the same collectives, and none dies or is late by more than the "
            f"timeout of {world.timeout():g} s",
            remedy="see what became of the ranks named first, then start all anew, from the last checkpoint",
        )
    )
    made.ranks = ranks
    return made


def give_up(why: str) -> None:
    """No collective after this, and the others are told: this process is no longer in step with them."""
    global _broken
    _broken = why
    heart = heartbeat.current()
    if heart is not None:
        heart.fail(why)


def others() -> tuple[str, tuple[int, ...]]:
    """What the other ranks say, the likely cause first, and which ranks that is; listens for some seconds."""
    heart = heartbeat.current()
    if heart is None:
        return "", ()
    listener = object()
    heart.listen(listener, heart.members)
    limit = SILENCE * heart.period
    end = time.monotonic() + limit + 2 * heart.period
    while time.monotonic() < end and not heart.store_fault:
        time.sleep(heart.period / 4)
    heart.listen(listener, ())
    heard, fault = heart.heard(), heart.store_fault
    left = [one for one in heard if one.state == "left"]
    silent = [one for one in heard if one.state == "alive" and one.quiet >= limit]
    unheard = sorted(heart.members - {heart.rank} - {one.rank for one in heard})
    found: list[str] = []
    if fault:  # then nobody could be heard
        found.append(f"the store does not answer ({fault}): its host, rank 0 or torchrun's agent, is gone")
        silent, unheard = [], []
    found += [f"rank {one.rank} died or stalled, {_last_heard(one)}" for one in silent]
    found += [f"rank {one.rank} left: {one.why}, {_last_heard(one)}" for one in left]
    found += [f"rank {rank} has no heartbeat" for rank in unheard]
    alive = [one for one in heard if one.state == "alive" and one not in silent]
    failed = [one for one in heard if one.state == "failed"]
    found += [f"rank {one.rank} is alive, {one.at}" for one in alive]
    found += [f"rank {one.rank} failed too, {one.at}: {one.why}" for one in failed]
    if len(found) > _SHOWN:
        found = [*found[:_SHOWN], f"and {len(found) - _SHOWN} ranks more"]
    ranks = (*(one.rank for one in (*silent, *left)), *unheard) or tuple(one.rank for one in alive)
    return "\n  ".join(found), (0,) if fault else ranks


def _last_heard(one: Heard) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(one.clock))
    return f"last heard of at {clock}, {one.at}"


def _brief(error: object) -> str:
    """What a backend says, without the line of its source before, and the advice behind it."""
    words = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))
    return re.split(r"\. |\n", words)[0][:200]
