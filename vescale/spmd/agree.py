"""Do all ranks say the same? Small records compared through the process group's store.

The store, not a collective: a rank that doesn't come leaves an error that names it, where a
collective would hang. A simulated mesh has one process, which agrees with itself.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .._compat import base_tensor, outside_functorch
from .._errors import ConsistencyError, PeerError, explain
from . import watch, world
from .bits import in_a_row
from .mesh import Mesh
from .records import Missing, gather

# How often each mesh has been asked, so that every exchange has keys of its own. Equal meshes share
# one count: every rank asks in the same order, whichever of them it asks.
_asked: Counter[str] = Counter()


def exchange(mesh: Mesh, what: str, record: Any) -> list[Any]:
    """The records of all ranks of a mesh of processes, in order of rank; JSON values.

    Raises PeerError when a rank dies, or says nothing within `VESCALE_TIMEOUT` (else the store's
    timeout), and ConsistencyError when one is asked about something else than `what`.
    """
    watch.begin()
    key, call = _next(mesh)
    store, keys = mesh.store, [key(call, rank) for rank in range(mesh.size)]
    write = keys[mesh.rank], json.dumps([what, record])
    try:
        found = gather(store, keys, mesh.world_ranks, world.store_timeout(store), write=write)
    except (Missing, RuntimeError) as error:
        raise no_word(what, error) from None
    answers = [json.loads(answer) for answer in found]
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
        mesh.store.delete_key(key(call - 2, mesh.rank))
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
        key, call = _next(mesh)
        record = json.dumps([None, f"{type(error).__name__}: {error}"])
        with suppress(Exception):  # an error is under way already
            watch.begin()
            watch.ask(lambda: mesh.store.set(key(call, mesh.rank), record), ())


def no_word(where: str, why: Exception, *, in_step: bool = True) -> PeerError:
    """The error for records that `gather` did not get, with what the heartbeats of the ranks say.

    With `in_step` no collective follows one that was waited for in vain: the peers may go on with it.
    """
    missing = why.ranks if isinstance(why, Missing) else ()
    if missing:
        said = f"no word from rank {', '.join(map(str, missing))}"
    else:
        said = f"no answer from the process group's store: {' '.join(str(why).split())[:200] or 'it hangs'}"
    if in_step and isinstance(why, Missing):
        watch.give_up(said)
    others, ranks = watch.others()
    error = PeerError(
        explain(
            "\n  ".join(part for part in (said, others) if part),
            where=where,
            rule="every rank of the mesh makes the same calls in the same order, and none dies",
            remedy="look for a rank that has failed, or a branch that depends on the rank",
        )
    )
    error.ranks = missing or ranks
    return error


def _next(mesh: Mesh) -> tuple[Callable[[int, int], str], int]:
    """The keys of records, and the number of the next exchange."""
    name = f"{mesh.abstract}@{','.join(map(str, mesh.world_ranks))}"
    if len(name) > 100:
        name = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    call = _asked[name]
    _asked[name] += 1
    return lambda call, rank: f"vescale/agree/{name}/{call}/{rank}", call


def digest(tensor: Tensor) -> str:
    """A checksum of dtype, shape and bits.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
    (True, False)
    """
    with outside_functorch():
        flat = in_a_row(base_tensor(tensor)).cpu()
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
