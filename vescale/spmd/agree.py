"""Do all ranks say the same? Small records compared through the process group's store.

The store, not a collective: a rank that doesn't come leaves an error that names it, where a
collective would hang. A simulated mesh has one process, which agrees with itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import base_tensor, outside_functorch
from .._errors import ConsistencyError, explain
from .mesh import Mesh

# How often each mesh has been asked, so that every exchange has keys of its own. Equal meshes share
# one count: every rank asks in the same order, whichever of them it asks.
_asked: Counter[str] = Counter()


def exchange(mesh: Mesh, what: str, record: Any) -> list[Any]:
    """The records of all ranks of a mesh of processes, in order of rank; JSON values.

    Raises ConsistencyError when a rank says nothing within the store's timeout, or is asked about
    something else than `what`.
    """
    store, key, call = _publish(mesh, [what, record])
    keys = [key(call, rank) for rank in range(mesh.size)]
    try:
        # One round trip where the store can (a file store cannot).
        many = store.has_extended_api()
        answers = store.multi_get(keys) if many else [store.get(k) for k in keys]
    except (dist.DistError, RuntimeError) as error:
        missing = [rank for rank, k in enumerate(keys) if not store.check([k])]
        raise ConsistencyError(
            explain(
                f"no word from rank {', '.join(map(str, missing))}",
                where=what,
                rule="every rank of the mesh makes the same calls in the same order",
                remedy="look for a branch that depends on the rank, or a rank that has failed",
            )
        ) from error
    answers = [json.loads(answer) for answer in answers]
    failed = {rank: answer[1] for rank, answer in enumerate(answers) if answer[0] is None}
    if failed:
        rank, error = next(iter(failed.items()))
        raise ConsistencyError(
            explain(
                f"rank {rank} failed: {error}",
                where=f"{what}, on rank {mesh.rank}",
                rule="every rank of the mesh makes the same calls in the same order",
                remedy=f"mend what failed on rank {rank}",
            )
        )
    # Who has written record `call` has read all of `call - 1`; so nobody reads the one before that.
    if call > 1:
        store.delete_key(key(call - 2, mesh.rank))
    others = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0] != what}
    if others:
        rank, call_name = next(iter(others.items()))
        raise ConsistencyError(
            explain(
                f"rank {rank} called {call_name}",
                where=f"{what}, on rank {mesh.rank}",
                rule="every rank of the mesh makes the same calls in the same order",
                remedy="look for a branch that depends on the rank",
            )
        )
    return [answer[1] for answer in answers]


def give_up(mesh: Mesh, error: BaseException) -> None:
    """Say that this rank failed where its peers may be waiting for its record: they need not wait longer."""
    if not mesh.is_simulated and mesh.local_ranks:
        _publish(mesh, [None, f"{type(error).__name__}: {error}"])


def stuck(mesh: Mesh, where: str, error: BaseException, seconds: float = 3.0) -> str:
    """The text for a collective that failed: what it was here, and where the other ranks say that they are.

    Every rank whose collective fails says so in the store, and listens for a while to the others.
    """
    store = mesh.store
    said: dict[int, str] = {}
    if store is not None:
        key = f"vescale/stuck/{mesh.abstract}@{mesh.world_ranks[0]}"
        store.set(f"{key}/{mesh.rank}", where)
        end = time.monotonic() + seconds
        while len(said) < mesh.size and time.monotonic() < end:
            time.sleep(0.05)
            missing = [
                rank for rank in range(mesh.size) if rank not in said and store.check([f"{key}/{rank}"])
            ]
            said |= {rank: store.get(f"{key}/{rank}").decode() for rank in missing}
    elsewhere = "; ".join(f"rank {rank} is at {text}" for rank, text in said.items() if text != where)
    silent = ", ".join(str(rank) for rank in range(mesh.size) if rank not in said)
    found = f"{where} did not complete on rank {mesh.rank} ({' '.join(str(error).split())[:200]})"
    return explain(
        "; ".join(
            part for part in (found, elsewhere, f"no word from rank {silent}" if silent else "") if part
        ),
        rule="all ranks run the same collectives, and none dies or is late by more than the group's timeout",
        remedy="look at what the named ranks do instead: other code, an error, a call that hit their cache",
    )


def _publish(mesh: Mesh, record: list[Any]) -> tuple[Any, Callable[[int, int], str], int]:
    """Write this rank's record of the next exchange: the store, the keys of records, its number."""
    store = mesh.store
    assert store is not None, mesh
    name = f"{mesh.abstract}@{','.join(map(str, mesh.world_ranks))}"
    if len(name) > 100:
        name = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    call = _asked[name]
    _asked[name] += 1

    def key(call: int, rank: int) -> str:
        return f"vescale/agree/{name}/{call}/{rank}"

    store.set(key(call, mesh.rank), json.dumps(record))
    return store, key, call


def digest(tensor: Tensor) -> str:
    """A checksum of dtype, shape and bits.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
    (True, False)
    """
    with outside_functorch():
        flat = base_tensor(tensor).detach().contiguous().cpu().view(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    bits = hashlib.blake2b(data, digest_size=8).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{bits}"


def same_on_all(mesh: Mesh, what: str, digests: dict[str, str], told: Sequence[str] = ()) -> list[str]:
    """Check that plain tensors, by name, are the same value on every rank.

    Of those `told` differences are no error yet: they are returned, as `name on rank 1, 2`. Raises
    ConsistencyError naming the tensor and the ranks that differ from rank 0, on every rank.
    """
    if mesh.is_simulated or not mesh.local_ranks:
        return []
    first, *others = exchange(mesh, what, digests)
    found: list[str] = []
    for name in first:
        differ = [rank for rank, other in enumerate(others, 1) if other.get(name) != first[name]]
        if differ and name in told:
            found.append(f"{name} on rank {', '.join(map(str, differ))}")
        elif differ:
            raise ConsistencyError(
                explain(
                    f"{name} on rank {', '.join(map(str, differ))} differs from rank 0",
                    where=what,
                    rule="a plain tensor is the global value, equal on all ranks",
                    remedy="if each rank has its own part, say so: vs.from_local(tensor, mesh, P(...))",
                )
            )
    return found
