"""Staging: what `vs.FSDP` means for given parameters. Pure: buckets, and the layout of each at rest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .._errors import LayoutError, PlanError, explain, nearest
from ..spmd.layout import AbstractMesh, Layout
from ..spmd.placements import P
from ..spmd.plan import Parameter, Staged, Staging
from .blocks import Block, default_block
from .bucket import Bucket
from .buffer_plan import BufferPlan
from .padding import check_padding
from .planner import plan_buckets, plan_buffer
from .spec import TensorSpec

if TYPE_CHECKING:
    from .config import FSDP

Path = str

# A bucket is split when its buffer becomes smaller by this part and by so many bytes. Each further buffer is
# a gather or two and a reduction a step, which cost what about a megabyte on the wire does.
PART_SAVED, BYTES_SAVED = 0.05, 1 << 20
# Bytes of padding a shard that are never too much: what alignment costs a few scalars is no fault of a plan.
PADDING_FREE = 4 * 1024


@lru_cache(maxsize=64)
def stage(fsdp: FSDP, mesh: AbstractMesh, parameters: tuple[Parameter, ...]) -> Staging:
    """Buckets of parameters, and where each rests.

    Parameters without elements or dims stay whole, and so do all over an axis of one rank. Raises PlanError
    for wraps and blocks that match nothing, wraps that overlap, parameters that are cut unevenly
    over other axes already, and padding above `max_padding`. The parameters of a bucket share one buffer,
    unless several are smaller by 5% and 1 MiB, or one would pad too much. Padding up to 4 KiB a shard is
    never refused.
    """
    for axis in fsdp.axes:
        try:
            mesh.check_axis(axis, where=f"FSDP(axis={axis!r})")
        except LayoutError as error:
            raise PlanError(str(error)) from None
    # The order of a plan must not be that in which somebody happens to list the parameters.
    parameters = tuple(sorted(parameters, key=lambda parameter: parameter.path))
    paths = [parameter.path for parameter in parameters]
    wraps = _wraps(fsdp, paths)
    blocks = _blocks(fsdp, parameters)
    shards = mesh.axis_size(fsdp.shard_axis)
    groups: dict[tuple[str, torch.dtype], list[Parameter]] = {}
    for parameter in parameters:
        shardable = parameter.shape and math.prod(parameter.shape) and shards > 1
        if isinstance(parameter.entry, P) and shardable:
            groups.setdefault((wraps[parameter.path], parameter.dtype), []).append(parameter)
    runs = _runs(fsdp, mesh, [parameter for group in groups.values() for parameter in group])
    buckets: list[Bucket] = []
    entries: dict[Path, Staged] = {}
    for (name, dtype), group in groups.items():
        specs = [
            TensorSpec.of(one.path, runs[one.path].local_shape(0), dtype, blocks[one.path]) for one in group
        ]
        low = fsdp.param_dtype if fsdp.param_dtype is not None and dtype.is_floating_point else dtype
        plans = _buffers(specs, shards, fsdp.max_padding)
        if _pads(plans, fsdp.max_padding):
            check_padding(plans, fsdp.max_padding)
        for plan in plans:
            names = tuple(spec.name for spec in plan.specs)
            rest = []
            for spec in plan.specs:
                run = runs[spec.name]
                ragged = plan.placement(spec.name, blocks[spec.name].dims(spec.shape))
                placed = P.of([*run.spec.items(), (fsdp.shard_axis, ragged)])
                rest.append(Layout(mesh, placed, run.shape))
                entries[spec.name] = Staged(placed, run.spec)
            buckets.append(
                Bucket(
                    name,
                    fsdp.shard_axis,
                    fsdp.axes[:-1],
                    names,
                    tuple(rest),
                    tuple(runs[name] for name in names),
                    plan,
                    low,
                    fsdp.reshard_after_forward,
                    fsdp.prefetch,
                )
            )
    return Staging(entries, tuple(buckets), fsdp.param_dtype, fsdp.reduce_dtype)


def _buffers(specs: Sequence[TensorSpec], shards: int, max_padding: float) -> tuple[BufferPlan, ...]:
    """One buffer for the tensors of a bucket, or several where it is worth it or one pads too much."""
    single, split = plan_buffer(specs, shards), plan_buckets(specs, shards)
    saved = single.shard_size - sum(plan.shard_size for plan in split)
    much = saved * shards * specs[0].dtype.itemsize > BYTES_SAVED
    worth = much and saved > single.shard_size * PART_SAVED
    return split if worth or _pads((single,), max_padding) else (single,)


def _pads(plans: Sequence[BufferPlan], max_padding: float) -> bool:
    """Whether that is more padding than allowed, and not just what alignment costs."""
    padding, elements = sum(plan.padding for plan in plans), sum(plan.elements for plan in plans)
    free = PADDING_FREE * plans[0].num_shards // plans[0].specs[0].dtype.itemsize
    return padding > max(max_padding * elements, free)


def _wraps(fsdp: FSDP, paths: Sequence[Path]) -> dict[Path, str]:
    """The wrapped module above each parameter, "" for none."""
    found: dict[Path, str] = {}
    used: set[str] = set()
    modules: set[str] = set()
    for path in paths:
        parts = path.split(".")
        above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        modules.update(above)
        matches = {module: regex for module in above for regex in fsdp.wrap if re.fullmatch(regex, module)}
        used.update(matches.values())
        if len(matches) > 1:
            raise PlanError(
                explain(
                    f"wraps of {' and '.join(matches)}",
                    where=f"FSDP, parameter {path}",
                    rule="a parameter is in one bucket: wrapped modules don't contain one another",
                    remedy="make the regexes match one level of modules",
                )
            )
        found[path] = next(iter(matches), "")
    for regex in fsdp.wrap:
        if regex not in used:
            plain = re.sub(r"\\d\+|\.\*|[\\^$()?+*\[\]]", "", regex)
            raise PlanError(
                explain(
                    f"wrap {regex!r} matches no module above a parameter",
                    where="FSDP",
                    rule="a wrap fullmatches the dotted path of a module with parameters",
                    remedy=nearest(plain, modules),
                )
            )
    return found


def _blocks(fsdp: FSDP, parameters: Sequence[Parameter]) -> dict[Path, Block]:
    """The block of each parameter."""
    unused, found = dict(fsdp.block), {}
    for parameter in parameters:
        matches = [regex for regex in fsdp.block if re.fullmatch(regex, parameter.path)]
        for regex in matches:
            unused.pop(regex, None)
        found[parameter.path] = fsdp.block[matches[0]] if matches else default_block(parameter.shape)
    if unused:
        raise PlanError(
            explain(
                f"block rules that match no parameter: {', '.join(map(repr, unused))}",
                where="FSDP",
                rule="a rule is a regex that fullmatches the dotted path of at least one parameter",
                remedy="mend the regex, or drop the rule",
            )
        )
    return found


def _runs(fsdp: FSDP, mesh: AbstractMesh, parameters: Sequence[Parameter]) -> dict[Path, Layout]:
    """The layout of each parameter in use."""
    found: dict[Path, Layout] = {}
    problems: list[str] = []
    for parameter in parameters:
        assert isinstance(parameter.entry, P)
        try:
            layout = Layout(mesh, parameter.entry, parameter.shape)
        except LayoutError as error:
            problems.append(f"{parameter.path} of shape {parameter.shape}: {error}")
            continue
        taken = [axis for axis in fsdp.axes if axis in layout.spec]
        uneven = len({layout.local_shape(rank) for rank in _corners(mesh)}) > 1
        if taken or layout.ragged or uneven:
            why = (
                f"placed over {taken[0]} already"
                if taken
                else "cut raggedly already"
                if layout.ragged
                else "cut unevenly: ranks would need buffers of different sizes"
            )
            problems.append(f"{parameter.path} of shape {parameter.shape}, {layout.spec} in use: {why}")
        else:
            found[parameter.path] = layout
    if problems:
        raise PlanError(
            explain(
                "; ".join(problems),
                where=f"FSDP over {fsdp.shard_axis}",
                rule="it shards what the params rules say over one more axis, in pieces of equal size",
                remedy="rules that leave the axis alone and divide evenly, or a vs.Staged for these",
            )
        )
    return found


def _corners(mesh: AbstractMesh) -> Sequence[int]:
    """Ranks among which an uneven split shows: the first and the last along each axis."""
    corners = [0]
    for axis, size in enumerate(mesh.shape):
        stride = math.prod(mesh.shape[axis + 1 :])
        corners += [rank + (size - 1) * stride for rank in corners] if size > 1 else []
    return corners
