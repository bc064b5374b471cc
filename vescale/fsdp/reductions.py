"""Reductions: one of a buffer of gradients in the place of those of its parameters.

A bucket has one for each gradient that is taken of its parameters: one, or several where `value_and_grad` is
called several times and the results are not added up (see `accumulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..spmd.program.cause import Cause
from ..spmd.program.partition import AnyStep, Move, operands
from ..spmd.redistribute_plan import plan
from .bucket import Bucket, in_shard, in_whole
from .chains import Chain, chains, pending, sums
from .editing import Program, is_cast, listed, local, origin_of
from .memory import Write, empty_gradients, views


def bucket_reductions(program: Program, buckets: Sequence[Bucket]) -> None:
    """Each bucket's gradients reduced together, where that is possible."""
    for bucket in buckets:
        taken: dict[str, list[int]] = {}  # the gradients of each parameter, in order
        for chain in chains(program.steps, bucket.names, program.old.outputs):
            if sums(program.values, chain.source, (bucket.axis,)):
                taken.setdefault(chain.name, []).append(chain.target)
        for number in range(max(map(len, taken.values()), default=0)):
            targets = {found[number] for found in taken.values() if number < len(found)}
            now = chains(program.steps, bucket.names, program.old.outputs)
            group = [chain for chain in now if chain.target in targets]
            dtypes = {program.values[chain.source].meta.dtype for chain in group}
            if len(dtypes) == 1:
                _reduce(program, bucket, group)


def _reduce(program: Program, bucket: Bucket, group: Sequence[Chain]) -> None:
    """One reduction for gradients of a bucket, if nobody reads one before the last is there."""
    users, makers = program.users(), program.made_at()
    mesh, outputs, index_of = bucket.rest[0].mesh, set(program.old.outputs), bucket.index
    # Over replicas the whole shard is reduced at once, when that is pending for all.
    over = [sums(program.values, chain.source, bucket.replicas) for chain in group]
    if any(over) != all(over):
        return
    together = bool(bucket.replicas) and all(over)
    axes = (*(bucket.replicas if together else ()), bucket.axis)
    dropped = [at for chain in group for at in chain.at]
    sources: dict[int, int] = {}
    for chain in group:
        index, source = index_of[chain.name], chain.source
        if program.values[chain.target].layout is not bucket.rest[index] or source not in makers:
            return
        maker = program.steps[makers[source]]
        plain = program.values[source].layout is pending(bucket.run[index], axes)
        if plain and is_cast(maker) and users[source] == [chain.at[0]] and source not in outputs:
            cast_from = operands(maker)[0]
            if cast_from in makers:
                dropped.append(makers[source])
                source = cast_from
        sources[index] = source
    end = max(makers[source] for source in sources.values())
    final = {index_of[chain.name]: chain.target for chain in group}
    if any(at <= end for number in final.values() for at in users.get(number, ())):
        return

    dtype = program.values[group[0].source].meta.dtype
    there = tuple(sorted(sources, key=lambda index: makers[sources[index]]))
    origin = replace(origin_of(program.steps[end]), module=bucket.name)
    partial = bucket.flat(mesh, "partial" if together else "pending")
    buffer = program.new(bucket.shape, dtype, partial)
    make = lambda rank: listed(empty_gradients(bucket, rank, dtype, there))  # noqa: E731
    first, like = makers[sources[there[0]]], program.old.inputs[0]  # any: it says on which device
    after: dict[int, list[AnyStep]] = {
        first: [local(f"gradients of {bucket.label}", make, (like,), (buffer,), origin)]
    }
    for index in there:
        at, source = makers[sources[index]], sources[index]
        here = origin_of(program.steps[at])
        steps = after.setdefault(at, [])
        # To the layout in use first: over other axes than the bucket's.
        for step in plan(program.values[source].layout, pending(bucket.run[index], axes)):
            moved = program.like(source, step.dst)
            steps.append(Move(step, source, moved, Cause(f"gradient of {bucket.names[index]}", "plan"), here))
            source = moved
        grown = program.copy(buffer)
        into = lambda rank, index=index: Write(in_whole(bucket, rank)[index])  # noqa: E731
        name = f"write the gradient of {bucket.names[index]}"
        steps.append(local(name, into, (buffer, source), (grown,), here, writes=True))
        buffer = grown
    for step in plan(partial, bucket.flat(mesh, "shard")):
        reduced = program.new(bucket.shape, dtype, step.dst)
        cause = Cause(f"gradients of {bucket.label}, {len(there)} of {len(bucket.names)}", "plan")
        after[end].append(Move(step, buffer, reduced, cause, origin))
        program.gradients |= {buffer, reduced}
        buffer = reduced
    take = lambda rank: views([in_shard(bucket, rank)[index] for index in there])  # noqa: E731
    targets = tuple(final[index] for index in there)
    name = f"gradients at rest of {bucket.label}"
    after[end].append(local(name, take, (buffer,), targets, origin, shares=True))
    program.edit({}, after, dropped)
