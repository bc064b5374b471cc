"""A pool of real ranks: gloo processes that are started once and then run one job after another.

Starting processes takes seconds, a job some tens of milliseconds. A job is a function that can be
imported, with arguments that can be pickled; every rank runs it, and what they return comes back as a list.
A rank that doesn't answer in time is a failure that names it, and so is one that dies, and an exception
on any rank.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LAST_WORDS = 10.0  # seconds that the others have for their answers when a rank has died


class RankError(Exception):
    """A job failed on some ranks, or they did not answer.

    `answers` has what the others returned, by rank; `died` the exit codes of those whose process ended.
    """

    def __init__(
        self, text: str, answers: Mapping[int, Any] | None = None, died: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(text)
        self.answers, self.died = dict(answers or {}), dict(died or {})


class RankPool:
    """`size` processes in one gloo group, each with one thread.

        RankPool.run : (fn, *args) -> [fn(*args) on rank 0, .., on the last rank]

    A failure ends the pool's processes; the next run starts new ones. Use as a context manager, or
    call `close`.
    """

    def __init__(self, size: int, timeout: float = 20) -> None:
        self.size, self.timeout = size, timeout
        self._ranks: list[tuple[Any, Connection]] = []
        self._directory: Path | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """fn(*args) on every rank; raises RankError naming the ranks that fail or don't answer."""
        job = pickle.dumps((fn, args))
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send_bytes(job)
        answers = self._collect(self.timeout)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        missing = [rank for rank in range(self.size) if rank not in answers]
        if not failed and not missing:
            return [answers[rank][1] for rank in range(self.size)]
        died = self._died(missing)
        silent = [rank for rank in missing if rank not in died]
        # Their group may be in the middle of something: nothing sensible can follow.
        self.close()
        lines = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
        lines += [f"rank {rank} died, with exit code {code}" for rank, code in died.items()]
        if silent:
            lines.append(f"no answer within {self.timeout:g} s from rank {', '.join(map(str, silent))}")
        text = "\n".join([f"{fn.__module__}.{fn.__qualname__}", *lines])
        raise RankError(text, {rank: answer for rank, (ok, answer) in answers.items() if ok}, died)

    @property
    def pids(self) -> list[int]:
        """The process of each rank; they are started if there are none."""
        if not self._ranks:
            self._start()
        return [process.pid for process, _ in self._ranks]

    def close(self) -> None:
        """End the processes."""
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            pipe.close()  # a rank that waits for a job sees this and leaves
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # A server that has torch imported forks the ranks: four starts cost one import.
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "vescale"])
        self._directory = Path(tempfile.mkdtemp(prefix="vescale-pool-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, str(self._directory / "store"), self.timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        ready = self._collect(120)  # importing torch on a busy machine takes its time
        late = [rank for rank in range(self.size) if not ready.get(rank, (False,))[0]]
        if late:
            self.close()
            raise RankError(f"rank {', '.join(map(str, late))} did not start: {ready}")

    def _died(self, ranks: list[int]) -> dict[int, int]:
        """The exit codes of those of `ranks` whose process has ended."""
        for rank in ranks:
            self._ranks[rank][0].join(0.2)  # its pipe is closed a moment before
        codes = {rank: self._ranks[rank][0].exitcode for rank in ranks}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _collect(self, seconds: float) -> dict[int, tuple[bool, Any]]:
        """What each rank answers, by rank; those that are silent or gone are left out."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        end = time.monotonic() + seconds
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # it died, and the others will not be long
                    end = min(end, time.monotonic() + _LAST_WORDS)
        return answers


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    """The life of a rank: join the group, then jobs until the pipe is closed."""
    torch.set_num_threads(1)
    os.environ.setdefault("VESCALE_HEARTBEAT", "0.25")  # what became of the others is told sooner, too
    # Shorter than the pool's patience, so that a hung collective, or a rank that nobody hears from, is
    # told by its own error.
    patience = timedelta(seconds=timeout * 0.8)
    meeting = dist.FileStore(store, size)  # pyright: ignore[reportPrivateImportUsage]
    meeting.set_timeout(patience)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=patience)
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, fn(*args)))
        except BaseException:  # whatever it is, the test wants to know
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except BrokenPipeError:  # nobody waits for it any more
            return
