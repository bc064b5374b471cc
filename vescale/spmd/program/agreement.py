"""Agreement: ranks compare what they are about to run, through the store, before the first collective.

On a miss each rank publishes a record (call number, signature, its sequence of collectives, digests of
plain inputs) and reads its peers'. No collective is involved: ranks that run other code get an
error that names the rank, the call and the first difference, instead of a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..._errors import ConsistencyError, explain
from ..agree import exchange
from ..mesh import Mesh


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank is about to run."""

    call: int
    function: str
    signature: Mapping[str, str]  # argument path -> what it is
    sequence: Sequence[str]  # collectives in order
    program: Sequence[int]  # checksums of the lines of the program, see `checksums`
    plain: Mapping[str, str]  # digests of plain tensors, by path
    generators: Mapping[str, str] = field(default_factory=dict)  # digests of the states of what it draws from


def checksums(lines: Sequence[str]) -> list[int]:
    """One number a line, short enough to be sent for a program of thousands."""
    return [zlib.crc32(line.encode()) for line in lines]


def agree(mesh: Mesh, record: Record, lines: Sequence[str]) -> None:
    """Publish the record of this rank and compare it with those of all others in the mesh.

    `lines` is the program that `record.program` has the checksums of. Raises ConsistencyError on every
    rank when two differ, or when a rank publishes none within the store's timeout: it runs something else.
    """
    if mesh.is_simulated or mesh.size == 1:
        return
    what = f"a new program of {record.function}"
    records = [Record(**answer) for answer in exchange(mesh, what, asdict(record))]
    difference = first_difference(dict(enumerate(records)))
    if difference is not None:
        raise ConsistencyError(difference)
    programs = [tuple(other.program) for other in records]
    if len(set(programs)) > 1:
        rank = next(rank for rank, program in enumerate(programs) if program != programs[0])
        pairs = enumerate(zip(programs[0], programs[rank]))
        shortest = min(len(programs[0]), len(programs[rank]))
        index = next((index for index, (mine, theirs) in pairs if mine != theirs), shortest)
        shown = exchange(mesh, what, lines[index] if index < len(lines) else "nothing")
        raise ConsistencyError(
            explain(
                f"line {index} of the program is `{shown[0]}` on rank 0 and `{shown[rank]}` on rank {rank}",
                where=f"call {record.call} of {record.function}",
                rule="all ranks run the same function",
                remedy="look for a branch on the rank, or a Python value that differs between ranks",
            )
        )


def first_difference(records: Mapping[int, Record]) -> str | None:
    """The text of the error about the first difference to rank 0's record; None when all agree."""
    first = records[0]
    for rank, record in records.items():
        where = f"ranks 0 and {rank}, call {record.call} of {record.function}"
        if record.function != first.function:
            return explain(
                f"rank 0 calls {first.function}, rank {rank} calls {record.function}",
                where=where,
                rule="all ranks call the same functions in the same order",
                remedy="look for a branch on the rank before this call",
            )
        if record.call != first.call:
            return explain(
                f"rank 0 is at call {first.call} and rank {rank} at call {record.call}",
                where=where,
                rule="all ranks make the same calls, with arguments of the same shapes and layouts",
                remedy="look for arguments whose shapes differ, or a call that only some ranks make",
            )
        for path in sorted({*first.signature, *record.signature}):
            mine, theirs = first.signature.get(path, "absent"), record.signature.get(path, "absent")
            if mine != theirs:
                return explain(
                    f"{path} is {mine} on rank 0 and {theirs} on rank {rank}",
                    where=where,
                    rule="arguments have the same shapes, dtypes, layouts and static values on all ranks",
                    remedy="give a rank's own rows as vs.from_local(rows, mesh, vs.P(dp=vs.Shard(0)))",
                )
        for index in range(max(len(first.sequence), len(record.sequence))):
            mine, theirs = (
                sequence[index] if index < len(sequence) else "nothing"
                for sequence in (first.sequence, record.sequence)
            )
            if mine != theirs:
                return explain(
                    f"collective {index} is {mine} on rank 0 and {theirs} on rank {rank}",
                    where=where,
                    rule="all ranks run the same collectives in the same order",
                    remedy="look for a branch on the rank inside the function",
                )
    where = f"call {first.call} of {first.function}"
    listed = _different({rank: record.generators for rank, record in records.items()})
    if listed:
        return unequal_states(listed, where)
    listed = _different({rank: record.plain for rank, record in records.items()})
    if listed:
        return explain(
            f"plain tensors that differ from rank 0's: {listed}",
            where=where,
            rule="a plain tensor is the global value, equal on all ranks",
            remedy="give all ranks the same, or say what each holds: "
            "vs.from_local(rows, mesh, vs.P(dp=vs.Shard(0)))",
        )
    return None


def unequal_states(listed: str, where: str) -> str:
    """The text of the error about generators that differ between ranks."""
    return explain(
        f"generators in other states than rank 0's: {listed}",
        where=where,
        rule="torch's random numbers are those of one device: all ranks start from the same state",
        remedy="call torch.manual_seed(seed) with the same seed on all ranks, or draw with vs.rng keys",
    )


def _different(digests: Mapping[int, Mapping[str, str]]) -> str:
    """What is not on all ranks as on rank 0, and on which it isn't; empty when all are alike."""
    found = {
        path: [rank for rank, theirs in digests.items() if theirs.get(path) != value]
        for path, value in digests[0].items()
    }
    return "; ".join(f"{path} on rank {', '.join(map(str, ranks))}" for path, ranks in found.items() if ranks)
