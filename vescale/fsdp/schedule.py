"""Schedule: a decided program whose parameters move one by one -> one whose buckets move.

Pure, and independent of the rank. Of each bucket the gathers become one, of the whole buffer,
right before the first use; one more before the backward, where the buffer was freed in between; and started
ahead of time. The reductions of its gradients become one too, as soon as the last is there:

    before                                 after
    w1' = all_gather(w1)                   shard = shard of bucket (w1, w2)
    w2' = all_gather(w2)                   whole = all_gather(shard)
    y = mm(x, w1')                         w1', w2' = views of bucket (whole)
    ...                                    y = mm(x, w1')
    g1 = mm(..)                            b0 = gradients of bucket
    g2 = mm(..)                            g1 = mm(..);  b1 = write w1 (b0, g1)
    r1 = reduce_scatter(g1)                g2 = mm(..);  b2 = write w2 (b1, g2)
    r2 = reduce_scatter(g2)                r1, r2 = views of bucket (reduce_scatter(b2))

Source: veScale-FSDP's DBuffer and FSDP2's schedule; deciding it on the traced program is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from ..spmd.layout import Layout
from ..spmd.program.cause import Cause
from ..spmd.program.ir import Origin, TensorMeta
from ..spmd.program.partition import (
    AnyStep,
    Compute,
    Local,
    LocalValue,
    Move,
    Partitioned,
    Start,
    Wait,
    live,
    operands,
    results,
)
from ..spmd.program.trace import gradient_of
from ..spmd.redistribute_plan import plan
from .bucket import Bucket, in_shard, in_whole
from .memory import Write, empty_gradients, shard_of, views

aten = torch.ops.aten


def schedule(partitioned: Partitioned) -> Partitioned:
    """The program with bucketed moves, as its facts say which parameters belong together.

    Moves that don't belong to a bucket as a whole stay what they were: a parameter that is used at rest, a
    gradient that another op reads before the bucket's last is there.
    """
    buckets = partitioned.facts.notes.get("buckets", ())
    if not buckets:
        return partitioned
    parameters = partitioned.facts.notes["parameters"]
    program = _Program(partitioned)
    for bucket in buckets:
        _bucket_reductions(program, bucket)
    _bucket_gathers(program, buckets, parameters)
    return program.finished()


class _Program:
    """A program under change: steps by position, what to put before and after each, and what to drop."""

    def __init__(self, partitioned: Partitioned) -> None:
        self.old = partitioned
        self.steps: list[AnyStep] = list(partitioned.steps)
        self.values = list(partitioned.values)
        self.tickets = count()

    def ticket(self) -> int:
        """A number for a collective that is started."""
        return next(self.tickets)

    def new(self, shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> int:
        device = self.values[0].meta.device
        self.values.append(LocalValue(TensorMeta(tuple(shape), dtype, device), layout))
        return len(self.values) - 1

    def copy(self, number: int) -> int:
        """A new value that looks like another."""
        self.values.append(self.values[number])
        return len(self.values) - 1

    def made_at(self) -> dict[int, int]:
        """Which step makes each value."""
        return {number: index for index, step in enumerate(self.steps) for number in results(step)}

    def users(self) -> dict[int, list[int]]:
        """The steps that read each value, in order."""
        found: dict[int, list[int]] = {}
        for index, step in enumerate(self.steps):
            for number in dict.fromkeys(operands(step)):
                found.setdefault(number, []).append(index)
        return found

    def edit(
        self,
        before: Mapping[int, Sequence[AnyStep]],
        after: Mapping[int, Sequence[AnyStep]],
        dropped: Iterable[int],
    ) -> None:
        """Put steps before and after those at some positions, and drop others."""
        gone, steps = set(dropped), []
        for index, step in enumerate(self.steps):
            steps += before.get(index, ())
            steps += () if index in gone else (step,)
            steps += after.get(index, ())
        self.steps = steps

    def finished(self) -> Partitioned:
        steps = live(self.steps, self.old.outputs)
        return replace(self.old, steps=steps, values=tuple(self.values))


def renamed(step: AnyStep, names: Mapping[int, int], made: bool = False) -> AnyStep:
    """The step reading other values, and making others with `made`."""
    at = lambda number: names.get(number, number)  # noqa: E731
    if isinstance(step, Move):
        return replace(step, source=at(step.source), target=at(step.target) if made else step.target)
    assert not isinstance(step, (Start, Wait)), step  # none before this pass
    changed = replace(step, operands=tuple(map(at, step.operands)))
    if made:
        changed = replace(changed, results=tuple(None if n is None else at(n) for n in step.results))
    return changed


def origin_of(step: AnyStep) -> Origin:
    """Where a step came from."""
    if isinstance(step, Wait):
        return step.start.origin
    return step.node.origin if isinstance(step, Compute) else step.origin


def _is_cast(step: AnyStep) -> bool:
    return isinstance(step, Compute) and step.node.op == aten._to_copy.default and len(step.operands) == 1


def is_view(step: AnyStep) -> bool:
    """Whether a step takes a view of one value."""
    return isinstance(step, Compute) and step.pattern.view


# Gathers.


@dataclass
class _Gather:
    """One gather of a bucket: who uses it, and under which names."""

    bucket: Bucket
    members: dict[int, int]  # value in use -> which parameter
    views: list[int]  # positions of the views that users take of them
    users: list[int]  # positions
    names: dict[int, int] = field(default_factory=dict)  # what users call the values, where that is new


def _bucket_gathers(program: _Program, buckets: Sequence[Bucket], parameters: Mapping[str, int]) -> None:
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
        first = number if gather.bucket.prefetch else None
        at = (
            gathers[max(number - gather.bucket.prefetch, 0)].users[0]
            if first is not None
            else gather.users[0]
        )
        before.setdefault(at, []).extend(starts[number][0])
    for number, gather in enumerate(gathers):
        before.setdefault(gather.users[0], []).extend(starts[number][1])
        before[gather.users[0]] += [renamed(program.steps[at], gather.names, True) for at in gather.views]
        dropped += gather.views
        for at in gather.users:
            program.steps[at] = renamed(program.steps[at], gather.names)
    program.edit(before, {}, dropped)


def _members(
    program: _Program, bucket: Bucket, parameters: Mapping[str, int]
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
            if _is_cast(step) and program.values[results(step)[0]].meta.dtype == bucket.gather_dtype:
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


def _split(program: _Program, gather: _Gather, others: Sequence[_Gather]) -> list[_Gather]:
    """The gather, or two: for the forward, and for the backward when other buckets are used in between."""
    backward = [at for at in gather.users if origin_of(program.steps[at]).region == "backward"]
    forward = [at for at in gather.users if at not in set(backward)]
    last = max((at for at in forward if not backward or at < backward[0]), default=-1)
    busy = (
        any(last < at < backward[0] for other in others if other is not gather for at in other.users)
        if backward and last >= 0
        else False
    )
    if not (gather.bucket.reshard_after_forward and busy):
        return [_only(program, gather, gather.users, fresh=False)]
    late = [at for at in gather.users if at >= backward[0]]
    early = [at for at in gather.users if at < backward[0]]
    return [_only(program, gather, early, fresh=False), _only(program, gather, late, fresh=True)]


def _only(program: _Program, gather: _Gather, users: list[int], fresh: bool) -> _Gather:
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
    program: _Program, gather: _Gather, parameters: Mapping[str, int]
) -> tuple[list[AnyStep], list[AnyStep]]:
    """The steps that start to gather a bucket, and those that end it and take views of the buffer."""
    bucket, mesh = gather.bucket, gather.bucket.rest[0].mesh
    origin = replace(origin_of(program.steps[gather.users[0]]), module=bucket.name)
    shard_layout, whole_layout = bucket.flat(mesh, "shard"), bucket.flat(mesh, "whole")
    shard = program.new(bucket.shape, bucket.dtype, shard_layout)
    pieces = tuple(parameters[name] for name in bucket.names)
    steps: list[AnyStep] = [
        Local(f"shard of {bucket.label}", _bind(shard_of, bucket), pieces, (shard,), origin, shares=True)
    ]
    if bucket.gather_dtype != bucket.dtype:
        low = program.new(bucket.shape, bucket.gather_dtype, shard_layout)
        cast = lambda rank: lambda flat: [flat.to(bucket.gather_dtype)]  # noqa: E731
        steps.append(Local(f"cast to {bucket.gather_dtype}", cast, (shard,), (low,), origin))
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
    end.append(Local(f"parameters of {bucket.label}", take, (whole,), named, origin, shares=True))
    return steps, end


# Reductions.


def _bucket_reductions(program: _Program, bucket: Bucket) -> None:
    """One reduction for the gradients of a bucket."""
    users, makers = program.users(), program.made_at()
    mesh, outputs = bucket.rest[0].mesh, set(program.old.outputs)
    causes = {gradient_of(name): index for index, name in enumerate(bucket.names)}
    firsts: dict[int, int] = {}  # which parameter -> the position of its reduce-scatter
    seconds: dict[int, int] = {}  # and of the reduction over replicas of what that leaves
    for at, step in enumerate(program.steps):
        if not isinstance(step, Move) or step.cause.by != "plan" or step.cause.text not in causes:
            continue
        index = causes[step.cause.text]
        if (step.step.kind, step.step.axes) == ("reduce_scatter", (bucket.axis,)):
            if step.step.src.partials.get(bucket.axis) == "sum" and step.source in makers:
                firsts[index] = at
        elif (
            (step.step.kind, step.step.axes) == ("all_reduce", bucket.replicas)
            and index in firsts
            and step.source == results(program.steps[firsts[index]])[0]
        ):
            seconds[index] = at
    dtypes = {program.values[operands(program.steps[at])[0]].meta.dtype for at in firsts.values()}
    if not firsts or len(dtypes) > 1:
        return
    (dtype,) = dtypes
    # Over replicas the whole shard is reduced at once, when that is all that is left to do.
    together = bool(bucket.replicas) and seconds.keys() == firsts.keys()
    dropped = [*firsts.values(), *(seconds.values() if together else ())]
    lasts = seconds if together else firsts
    sources: dict[int, int] = {}
    for index, at in firsts.items():
        source = operands(program.steps[at])[0]
        maker = program.steps[makers[source]]
        if _is_cast(maker) and users[source] == [at] and source not in outputs:
            dropped.append(makers[source])
            source = operands(maker)[0]
        sources[index] = source
    if any(source not in makers for source in sources.values()):
        return
    end = max(makers[source] for source in sources.values())
    final = {index: results(program.steps[at])[0] for index, at in lasts.items()}
    if any(at <= end for number in final.values() for at in users.get(number, ())):
        return  # somebody reads a gradient before the last one is there
    if together and any(users.get(results(program.steps[at])[0]) != [seconds[i]] for i, at in firsts.items()):
        return

    there = tuple(sorted(sources, key=lambda index: makers[sources[index]]))
    origin = replace(origin_of(program.steps[end]), module=bucket.name)
    partial = bucket.flat(mesh, "partial" if together else "pending")
    buffer = program.new(bucket.shape, dtype, partial)
    make = lambda rank: _listed(empty_gradients(bucket, rank, dtype, there))  # noqa: E731
    first, like = makers[sources[there[0]]], program.old.inputs[0]  # any: it says on which device
    after: dict[int, list[AnyStep]] = {
        first: [Local(f"gradients of {bucket.label}", make, (like,), (buffer,), origin)]
    }
    for index in there:
        grown = program.copy(buffer)
        at = makers[sources[index]]
        into = lambda rank, index=index: Write(in_whole(bucket, rank)[index])  # noqa: E731
        name = f"write the gradient of {bucket.names[index]}"
        after.setdefault(at, []).append(
            Local(name, into, (buffer, sources[index]), (grown,), origin_of(program.steps[at]), writes=True)
        )
        buffer = grown
    shard_layout = bucket.flat(mesh, "shard")
    for step in plan(partial, shard_layout):
        reduced = program.new(bucket.shape, dtype, step.dst)
        cause = Cause(f"gradients of {bucket.label}, {len(there)} of {len(bucket.names)}", "plan")
        after[end].append(Move(step, buffer, reduced, cause, origin))
        buffer = reduced
    take = lambda rank: views([in_shard(bucket, rank)[index] for index in there])  # noqa: E731
    after[end].append(
        Local(
            f"gradients at rest of {bucket.label}",
            take,
            (buffer,),
            tuple(final[index] for index in there),
            origin,
            shares=True,
        )
    )
    program.edit({}, after, dropped)


def _bind(make: Callable[..., Any], bucket: Bucket) -> Callable[[int], Callable[..., list[Any]]]:
    return lambda rank: _listed(make(bucket, rank))


def _listed(run: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function, with its one result in a list."""
    return lambda *operands: [run(*operands)]
