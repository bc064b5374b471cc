"""Gathers: one of a bucket's buffer in the place of those of its parameters, for each phase that uses it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..spmd.program.cause import Cause
from ..spmd.program.partition import AnyStep, Move, Start, Wait, operands, results
from ..spmd.redistribute_plan import plan
from .bucket import Bucket, in_whole
from .editing import Program, is_cast, is_view, listed, local, origin_of, renamed
from .memory import shard_of, views


@dataclass
class _Gather:
    """One gather of a bucket: who uses it, and under which names."""

    bucket: Bucket
    members: dict[int, int]  # value in use -> which parameter
    views: list[int]  # positions of the views that users take of them
    users: list[int]  # positions
    names: dict[int, int] = field(default_factory=dict)  # what users call the values, where that is new


def bucket_gathers(program: Program, buckets: Sequence[Bucket], parameters: Mapping[str, int]) -> None:
    dropped: list[int] = []
    found: list[_Gather] = []
    for bucket in buckets:
        gather, gone = _members(program, bucket, parameters)
        if gather is not None:
            found.append(gather)
            dropped += gone
    gathers = [part for gather in found for part in _split(program, gather, found)]
    gathers.sort(key=lambda gather: gather.users[0])
    before: dict[int, list[AnyStep]] = {}
    starts = [_start(program, gather, parameters) for gather in gathers]
    for number, gather in enumerate(gathers):
        ahead = gathers[max(number - gather.bucket.prefetch, 0)]
        before.setdefault(ahead.users[0], []).extend(starts[number][0])
    for number, gather in enumerate(gathers):
        before.setdefault(gather.users[0], []).extend(starts[number][1])
        before[gather.users[0]] += [renamed(program.steps[at], gather.names, True) for at in gather.views]
        dropped += gather.views
        for at in gather.users:
            program.steps[at] = renamed(program.steps[at], gather.names)
    program.edit(before, {}, dropped)


def _members(
    program: Program, bucket: Bucket, parameters: Mapping[str, int]
) -> tuple[_Gather | None, list[int]]:
    """The gathers of a bucket's parameters as one, and the positions of the steps that it replaces."""
    users, outputs = program.users(), set(program.old.outputs)
    members: dict[int, int] = {}
    gone: list[int] = []
    for index, name in enumerate(bucket.names):
        number = parameters.get(name)
        if number is None:
            continue
        sources = [number]
        for at in users.get(number, ()):
            step = program.steps[at]
            if is_cast(step) and program.values[results(step)[0]].meta.dtype == bucket.gather_dtype:
                sources.append(results(step)[0])
        for source in sources:
            if program.values[source].meta.dtype != bucket.gather_dtype:
                continue
            for at in users.get(source, ()):
                step = program.steps[at]
                if (
                    isinstance(step, Move)
                    and (step.step.kind, step.step.axes) == ("all_gather", (bucket.axis,))
                    and step.step.dst is bucket.run[index]
                ):
                    members[step.target] = index
                    gone.append(at)
    if not members or outputs & set(members):
        return None, []
    reach, chain, using = set(members), [], []
    for at, step in enumerate(program.steps):
        if not reach.intersection(operands(step)):
            continue
        if is_view(step):
            chain.append(at)
            reach.update(results(step))
        else:
            using.append(at)
    if reach & outputs or not using:
        return None, []
    return _Gather(bucket, members, chain, using), gone


def _split(program: Program, gather: _Gather, others: Sequence[_Gather]) -> list[_Gather]:
    """The gather, or one for each phase: forwards and backwards between which other buckets are used."""
    if not gather.bucket.reshard_after_forward:
        return [gather]
    busy = sorted(at for other in others if other is not gather for at in other.users)
    phases: list[list[int]] = []
    for at in gather.users:
        if phases:
            last = phases[-1][-1]
            same = _is_backward(program, last) == _is_backward(program, at)
            if same or bisect(busy, last) == bisect(busy, at):
                phases[-1].append(at)
                continue
        phases.append([at])
    return [_only(program, gather, users, fresh=number > 0) for number, users in enumerate(phases)]


def _is_backward(program: Program, at: int) -> bool:
    return origin_of(program.steps[at]).region == "backward"


def _only(program: Program, gather: _Gather, users: list[int], fresh: bool) -> _Gather:
    """What of a gather these users need, under new names if `fresh`."""
    needed = {number for at in users for number in operands(program.steps[at])}
    chain: list[int] = []
    for at in reversed(gather.views):
        if needed.intersection(results(program.steps[at])):
            chain.insert(0, at)
            needed.update(operands(program.steps[at]))
    members = {value: index for value, index in gather.members.items() if value in needed}
    names: dict[int, int] = {}
    if fresh:
        remade = [*members, *(number for at in chain for number in results(program.steps[at]))]
        names = {number: program.copy(number) for number in remade}
    return _Gather(gather.bucket, members, chain, users, names)


def _start(
    program: Program, gather: _Gather, parameters: Mapping[str, int]
) -> tuple[list[AnyStep], list[AnyStep]]:
    """The steps that start to gather a bucket, and those that end it and take views of the buffer."""
    bucket, mesh = gather.bucket, gather.bucket.rest[0].mesh
    origin = replace(origin_of(program.steps[gather.users[0]]), module=bucket.name)
    shard_layout, whole_layout = bucket.flat(mesh, "shard"), bucket.flat(mesh, "whole")
    shard = program.new(bucket.shape, bucket.dtype, shard_layout)
    pieces = tuple(parameters[name] for name in bucket.names)
    steps: list[AnyStep] = [
        local(
            f"shard of {bucket.label}",
            lambda rank: listed(shard_of(bucket, rank)),
            pieces,
            (shard,),
            origin,
            shares=True,
        )
    ]
    if bucket.gather_dtype != bucket.dtype:
        low = program.new(bucket.shape, bucket.gather_dtype, shard_layout)
        cast = lambda rank: lambda flat: [flat.to(bucket.gather_dtype)]  # noqa: E731
        steps.append(local(f"cast to {bucket.gather_dtype}", cast, (shard,), (low,), origin))
        shard = low
    (step,) = plan(shard_layout, whole_layout)
    whole = program.new(bucket.shape, bucket.gather_dtype, whole_layout)
    cause = Cause(f"{bucket.label}, {len(bucket.names)} parameters", "plan")
    move, end = Move(step, shard, whole, cause, origin), list[AnyStep]()
    if bucket.prefetch:
        start = Start((move,), program.ticket())
        steps.append(start)
        end.append(Wait(start))
    else:
        steps.append(move)
    there = tuple(gather.members.values())
    named = tuple(gather.names.get(value, value) for value in gather.members)
    take = lambda rank: views([in_whole(bucket, rank)[index] for index in there])  # noqa: E731
    end.append(local(f"parameters of {bucket.label}", take, (whole,), named, origin, shares=True))
    return steps, end
