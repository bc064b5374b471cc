"""A plan whose axes have lanes: decided over lanes, at rest on the mesh of their hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._errors import PlanError, explain
from .lanes import LaneMesh, grouped, lane_axes, widths
from .layout import Layout
from .mesh import Mesh
from .placements import P, RaggedShard
from .plan import Plan, Resolved, ResolvedParameter, Staged


class LanePlan(Plan):
    """`plan` with lanes: what `vs.parallelize(fn, plan, lanes=...).plan` is.

    `over_lanes` is the same plan on the mesh of lanes, for which programs are decided. Parameters rest in the
    layouts that group what the lanes of each rank hold: the buffers of `vs.FSDP` are planned for lanes, and
    their cuts don't depend on the mesh. Units of a RaggedShard are for lanes, or for ranks, whose pieces are
    cut evenly then.
    """

    def __init__(self, plan: Plan, lanes: Mapping[str, int]) -> None:
        super().__init__(
            plan.mesh,
            plan.params,
            plan.inputs,
            plan.outputs,
            plan.activations,
            fsdp=plan.fsdp,
            params_arg=plan.params_arg,
        )
        self.lanes = dict(lanes)
        mesh = plan.mesh
        self._wide = widths(lane_axes(mesh.abstract, lanes), mesh.abstract)
        self.over_lanes = Plan(
            LaneMesh(mesh, lanes) if isinstance(mesh, Mesh) else lane_axes(mesh, lanes),
            {rule: self._finer(entry) for rule, entry in plan.params.items()},
            {path: self._finer(entry) for path, entry in plan.inputs.items()},
            {path: self._finer(entry) for path, entry in plan.outputs.items()},
            {rule: self._finer(entry) for rule, entry in plan.activations.items()},
            fsdp=plan.fsdp,
            params_arg=plan.params_arg,
        )

    def __or__(self, other: Plan) -> Plan:
        return LanePlan(super().__or__(other), self.lanes)

    def __repr__(self) -> str:
        return f"{super().__repr__().removesuffix(')')}, lanes={self.lanes})"

    def resolve_leaves(self, paths: Sequence[str], leaves: Sequence[torch.Tensor]) -> Resolved:
        """`Plan.resolve_leaves`, in layouts on the mesh of the hosts."""
        resolved = self.over_lanes.resolve_leaves(paths, leaves)
        problems: list[str] = []
        entries = [self._entry(entry, problems) for entry in resolved]
        if problems:
            raise PlanError(
                explain(
                    "; ".join(problems),
                    where=f"lanes={self.lanes}",
                    rule="a parameter rests in a layout that some placement on the mesh of its ranks says",
                    remedy="a dim that divides by the lanes, or another dim",
                )
            )
        table = Resolved(entries)
        if self.fsdp is not None and resolved.buckets:
            # The lanes of a rank have a buffer each. They lie end to end in that of the rank where they are
            # lanes of the bucket's axis only; else the rank keeps its pieces one by one.
            joined = [bucket for bucket in resolved.buckets if not self._apart(bucket.axis, bucket.run)]
            table.buckets = self.fsdp.grouped(joined, self.mesh.abstract, self._outside)
        return table

    def _apart(self, axis: str, layouts: Sequence[Layout]) -> bool:
        """Whether another axis than this one splits some of these between lanes of a rank."""
        return any(other in self._wide for layout in layouts for other in layout.spec if other != axis)

    def _entry(self, entry: ResolvedParameter, problems: list[str]) -> ResolvedParameter:
        rest = grouped(entry.rest, self.mesh.abstract)
        if rest is None:
            problems.append(f"{entry.path} of shape {entry.rest.shape}, {entry.rest.spec} over lanes")
        return replace(entry, rest=rest or entry.rest, run=self._outside(entry.run))

    def _outside(self, layout: Layout) -> Layout:
        """The layout on the hosts; that over lanes where placements on the hosts don't say it."""
        return grouped(layout, self.mesh.abstract) or layout

    def _finer(self, entry: Any) -> Any:
        if isinstance(entry, Staged):
            return Staged(self._finer(entry.init), self._finer(entry.run))
        return P.of((axis, self._units(axis, placement)) for axis, placement in entry.items())

    def _units(self, axis: str, placement: Any) -> Any:
        each = self._wide.get(axis, 1)
        if isinstance(placement, RaggedShard) and placement.size * each == self._lanes_on(axis):
            return RaggedShard.from_runs(placement.dims, [(u, count * each) for u, count in placement.runs])
        return placement

    def _lanes_on(self, axis: str) -> int:
        return self.mesh.abstract.axis_size(axis) * self._wide.get(axis, 1)


def with_lanes(plan: Plan, lanes: Mapping[str, int] | None) -> Plan:
    """The plan with these lanes; the plan itself where every rank has one. Raises ArgumentError."""
    if lanes is None or not widths(lane_axes(plan.mesh.abstract, lanes), plan.mesh.abstract):
        return plan
    return LanePlan(plan, lanes)


__all__ = ["LanePlan", "with_lanes"]
