"""Why a plan pads, and `check_padding`, which refuses a plan that pads too much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .._errors import PlanError, explain
from .buffer_plan import BufferPlan
from .planner import plan_buckets
from .spec import TensorSpec

# Other numbers of shards that a refusal tries, as multiples of the one that was asked for, nearest first.
NEARBY = (7 / 8, 9 / 8, 3 / 4, 5 / 4, 5 / 8, 3 / 2, 1 / 2, 3 / 8, 1 / 4, 1 / 8)


class Binding(NamedTuple):
    """The tensor whose blocks decide the shard size of a plan, None where all elements do, and why."""

    name: str | None
    reason: str


def binding(plan: BufferPlan) -> Binding:
    """What keeps the shard from being smaller.

    >>> from vescale.fsdp import plan_buffer
    >>> import torch
    >>> wide = TensorSpec("wide", (640, 300), torch.bfloat16, block=2400)
    >>> narrow = TensorSpec("narrow", (4096, 64), torch.bfloat16, block=512)
    >>> print(binding(plan_buffer([wide, narrow], num_shards=8)).reason)
    wide (block 2400) and narrow (block 512) are cut by several boundaries: the shard is a multiple of 38400
    """
    shard, floor = plan.shard_size, plan.floor
    if shard == floor.size and not floor.block:
        return Binding(None, "all elements")
    if shard == floor.size:
        name = next(spec.name for spec in plan.specs if min(spec.block, spec.elements) == floor.block)
        return Binding(
            name, f"{name}: a shard holds {floor.size // floor.block} of its blocks of {floor.block}"
        )
    cut: dict[int, TensorSpec] = {}  # of each stride the largest tensor with two boundaries in it
    for spec, start in zip(plan.specs, plan.starts):
        if spec.elements and start + spec.elements > (start // shard + 2) * shard:
            stride = spec.cuts.period or spec.cuts.block
            if stride not in cut or cut[stride].elements < spec.elements:
                cut[stride] = spec
    if not cut:
        name = max(plan.specs, key=lambda spec: spec.cuts.block).name
        return Binding(name, f"{name}: no tighter packing was found")
    whole = math.lcm(*cut)
    # The tensor without which the shard would be a multiple of least, and the one that clashes with it most.
    strides = sorted(
        cut, key=lambda stride: (math.lcm(*(other for other in cut if other != stride)), -stride)
    )
    first = strides[0]
    others = sorted(strides[1:], key=lambda stride: -math.lcm(first, stride))
    if not others or whole == first:
        unit = "its matrices" if cut[first].cuts.period else "its block"
        text = f"{_text(cut[first])} is cut by several boundaries: the shard is a multiple of {unit}"
        return Binding(cut[first].name, text)
    pair = f"{_text(cut[first])} and {_text(cut[others[0]])} are cut by several boundaries"
    return Binding(cut[first].name, f"{pair}: the shard is a multiple of {whole}")


def check_padding(plans: BufferPlan | Sequence[BufferPlan], max_padding: float) -> None:
    """Refuse the plan of a bucket whose padding is more than this part of its elements.

    Of one plan or of the plans that a bucket was split into. The error names the tensor whose blocks bind,
    the nearest number of shards that would do, and HSDP: shards within smaller groups, replicas across them.

    Raises PlanError.
    """
    plans = (plans,) if isinstance(plans, BufferPlan) else tuple(plans)
    elements = sum(plan.elements for plan in plans)
    padding = sum(plan.padding for plan in plans)
    if padding <= max_padding * elements:
        return
    worst = max(plans, key=lambda plan: plan.padding)
    shards = worst.num_shards
    name, reason = binding(worst)
    specs = [spec for plan in plans for spec in plan.specs]
    fits = [m for m in _nearby(shards) if _overhead(specs, m, worst.unit) <= max_padding]
    remedies = [f"shard over {fits[0]} ranks"] if fits else []
    divisors = [m for m in fits if shards % m == 0]
    replicas = f"{shards // max(divisors)} replicas of {max(divisors)} shards" if divisors else "fewer shards"
    remedies.append(f"use HSDP, axis=(replica, shard), with {replicas}")
    for spec in specs:
        if spec.name == name and spec.cuts.period:
            remedies.append(
                f"give {name} blocks of rows that divide the height {spec.shape[-2]} of its matrices"
            )
    raise PlanError(
        explain(
            found=f"{padding} elements of padding, {padding / elements:.1%} of all, on {shards} shards",
            where=name or worst.specs[0].name,
            rule=f"at most {max_padding:.1%} (max_padding); what binds: {reason}",
            remedy="; or ".join([*remedies, "declare smaller blocks, or raise max_padding"]),
        )
    )


def _nearby(shards: int) -> list[int]:
    return [m for part in NEARBY if (m := round(shards * part)) and m != shards]


def _overhead(specs: Sequence[TensorSpec], num_shards: int, unit: int) -> float:
    plans = plan_buckets(specs, num_shards, unit)
    return sum(plan.padding for plan in plans) / sum(plan.elements for plan in plans)


def _text(spec: TensorSpec) -> str:
    block = f"block {spec.block}" + (f" in matrices of {spec.period}" if spec.cuts.period else "")
    return f"{spec.name} ({block})"
