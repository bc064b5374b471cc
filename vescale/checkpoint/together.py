"""How the ranks of a save or a load agree: through the process group's store, never by a collective.

So it can happen on a thread while programs run, and a rank that doesn't come leaves an error that names it.
What fails on one rank is the same error on all of them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import _errors
from .._errors import ArgumentError, CheckpointError, ConsistencyError, VescaleError, explain
from ..spmd import world
from ..spmd.dtensor import DTensor
from ..spmd.layout import AbstractMesh
from ..spmd.mesh import Mesh

T = TypeVar("T")

# How many saves and loads each set of ranks has begun: all of them begin the same ones in the same order.
_begun: Counter[str] = Counter()


class Together:
    """The ranks that save or load together; `call` is what they do, as errors call it.

    Made where every rank makes the same calls in the same order; `all` may then run on any thread.
    """

    def __init__(self, mesh: Mesh | None, call: str) -> None:
        self.call = call
        self.mesh = mesh if mesh is not None and not mesh.is_simulated else None
        if self.mesh is None:
            self.rank, self.size = 0, 1
            return
        self.rank, self.size = self.mesh.rank, self.mesh.size
        name = f"vescale/checkpoint/{','.join(map(str, self.mesh.world_ranks))}"
        self._key = f"{name}/{_begun[name]}"
        self._phases = 0
        _begun[name] += 1

    def all(self, phase: str, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank (JSON values); an exception on any of them is raised on all."""
        value, failed = None, None
        try:
            value = work()
        except Exception as error:
            failed = error
        told = None if failed is None else self._told(failed)
        record = [self.call, told, None if told else value]
        answers = [record] if self.mesh is None else self._exchanged(phase, record)
        self._check(answers, failed)
        return [answer[2] for answer in answers]

    def _told(self, error: Exception) -> list[str]:
        """An exception as a class and a text; what is no error of ours becomes one."""
        if isinstance(error, VescaleError):
            return [type(error).__name__, str(error)]
        text = " ".join(str(error).split())
        where = self.call if self.mesh is None else f"{self.call}, on rank {self.rank}"
        return ["CheckpointError", explain(f"{type(error).__name__}: {text}", where=where)]

    def _check(self, answers: list[Any], mine: Exception | None) -> None:
        calls = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0] != answers[0][0]}
        if calls:
            rank, other = next(iter(calls.items()))
            raise ConsistencyError(
                explain(
                    f"rank 0 called {answers[0][0]}, rank {rank} {other}",
                    where="checkpoint",
                    rule="every rank of the mesh makes the same calls in the same order",
                    remedy="look for a branch or a path that depends on the rank",
                )
            )
        told = next((answer[1] for answer in answers if answer[1] is not None), None)
        if told is not None:
            if isinstance(mine, VescaleError) and str(mine) == told[1]:
                raise mine
            raise getattr(_errors, told[0], CheckpointError)(told[1]) from mine

    def _exchanged(self, phase: str, record: list[Any]) -> list[Any]:
        try:
            return self._exchange(phase, record)
        except VescaleError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise ConsistencyError(
                explain(
                    f"no answer from the process group's store: {' '.join(str(error).split())[:200]}",
                    where=f"{self.call} ({phase}), on rank {self.rank}",
                    rule="ranks agree through it, so its process lives as long as they do",
                    remedy="look at the process that hosts the store, rank 0 or the launcher",
                )
            ) from error

    def _exchange(self, phase: str, record: list[Any]) -> list[Any]:
        assert self.mesh is not None
        store, number = self.mesh.store, self._phases
        self._phases += 1
        # By number: ranks whose calls differ have other phases, and hear of that in the first one.
        keys = [f"{self._key}/{number}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(record))
        limit = min(store.timeout.total_seconds(), world.timeout())
        end, pause = time.monotonic() + limit, 0.001
        # Not a blocking get: it would keep the store from the thread on which programs run.
        while not store.check(keys):
            if time.monotonic() > end:
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise ConsistencyError(
                    explain(
                        f"no word from rank {', '.join(missing)}",
                        where=f"{self.call} ({phase})",
                        rule=f"every rank of the mesh takes part, within the timeout of {limit:g} s",
                        remedy="look for a rank that has failed, or a branch that depends on the rank",
                    )
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        answers = [json.loads(store.get(key)) for key in keys]
        # Who has told this phase has read all of the one before.
        if number:
            store.delete_key(f"{self._key}/{number - 1}/{self.rank}")
        return answers


def mesh_of(leaves: Iterable[Any], mesh: Mesh | None) -> Mesh | None:
    """The mesh whose ranks save or load: that of the DTensors, or all processes where there are none.

    Raises ArgumentError for DTensors on several meshes.
    """
    found = {id(leaf.mesh): leaf.mesh for leaf in leaves if isinstance(leaf, DTensor)}
    if mesh is not None:
        found[id(mesh)] = mesh
    ranks = {(one.backend, one.world_ranks) for one in found.values()}
    if len(ranks) > 1:
        raise ArgumentError(
            explain(
                f"DTensors on {', '.join(map(str, found.values()))}",
                where="checkpoint",
                rule="a tree is saved and loaded by the ranks of one mesh",
                remedy="redistribute them to one mesh, or save them apart",
            )
        )
    if found:
        return next(iter(found.values()))
    if not dist.is_initialized():
        return None
    size = dist.get_world_size()
    return Mesh(AbstractMesh(("rank",), (size,)), torch.device("cpu"), range(size))
