"""`vs.estimate`: what a program would hold and send on a mesh that doesn't exist here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from .layout import AbstractMesh
from .parallelize import Parallelized, parallelize
from .plan import Plan
from .program.cost import CostAnalysis, Traffic
from .program.memory import MemoryAnalysis


@dataclass(frozen=True)
class BucketEstimate:
    """A bucket on one rank: bytes of its shard, of the gathered buffer, and of what pads the shard."""

    name: str
    parameters: int
    shard: int
    gathered: int
    padding: int


@dataclass(frozen=True)
class Estimate:
    """What one rank of a mesh would hold and send in a call; bytes. Prints as a table.

    `memory` and `cost` are the analyses that it is made of, and say what they leave out. Gathered and
    gradient buffers are counted with their padding, arguments without: what pads them is `padding`.
    """

    mesh: AbstractMesh
    rank: int
    memory: MemoryAnalysis
    cost: CostAnalysis
    buckets: tuple[BucketEstimate, ...]

    @property
    def peak(self) -> int:
        """The most bytes held at once, the padding of parameters at rest included."""
        return self.memory.peak + self.padding

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What is held at the peak, by the kinds of `MemoryAnalysis`, and the padding at rest."""
        return {**self.memory.peak_by_kind, "padding": self.padding}

    @property
    def padding(self) -> int:
        """Bytes of a rank's shards that no parameter fills, of an average rank."""
        return sum(bucket.padding for bucket in self.buckets)

    @property
    def received(self) -> int:
        """Bytes that the rank takes off the wire."""
        return self.cost.total.received

    @property
    def sent(self) -> int:
        """Bytes that the rank puts on the wire."""
        return self.cost.total.sent

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives by kind and axis."""
        return self.cost.traffic

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.mesh}", f"  {'peak':<20}{self.peak:>18,} B"]
        lines += [f"    {kind:<18}{count:>18,} B" for kind, count in self.peak_by_kind.items() if count]
        lines += [f"  {name:<20}{getattr(self, name):>18,} B" for name in ("received", "sent")]
        lines += [
            f"    {f'{t.kind} {t.axis} x{t.count}':<34}{t.received:>18,} B received" for t in self.traffic
        ]
        lines += [
            f"  bucket {b.name or '(the rest)'}: {b.parameters} parameters, shard {b.shard:,} B, "
            f"gathered {b.gathered:,} B, padding {b.padding:,} B"
            for b in self.buckets
        ]
        return "\n".join(lines)


def estimate(
    fn: Callable[..., Any],
    plan: Plan,
    args: Sequence[Any],
    mesh: Mapping[str, int],
    *,
    donate: Sequence[str] = (),
    rank: int = 0,
) -> Estimate:
    """What `vs.parallelize(fn, plan, donate=donate)(*args)` would hold and send on another mesh.

    `mesh` gives the axes and their sizes; the plan's rules hold for it, its own mesh counts for nothing. Of
    tensors among `args` shapes and dtypes count: they may be on the meta device, or DTensors of the mesh
    at hand. Nothing runs and nothing is allocated; the time doesn't grow with the mesh. With uneven layouts
    ranks differ: `rank` says whose figures these are.

    Raises ArgumentError for a mesh or a rank that can't be, and PlanError or LayoutError where the rules
    don't fit the mesh.

    >>> import torch, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"dp": 2}), inputs={"x": vs.P(dp=vs.Shard(0))}, fsdp=vs.FSDP("dp"))
    >>> params = {"w": torch.empty(4096, 1024, device="meta")}
    >>> loss = lambda params, x: (x @ params["w"]).square().mean()
    >>> x = torch.empty(8192, 4096, device="meta")
    >>> found = vs.estimate(vs.value_and_grad(loss), plan, (params, x), mesh={"dp": 1024})
    >>> found.padding, found.buckets[0].gathered, found.peak_by_kind["gradients"] > 2**24
    (0, 16777216, True)
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(
            explain(
                f"estimate(fn, {plan!r}, ...)",
                rule="the second argument is a vs.Plan",
                remedy="pass the plan",
            )
        )
    sizes = dict(mesh) if isinstance(mesh, Mapping) else {}
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise ArgumentError(
            explain(
                f"mesh={mesh!r}",
                where="estimate",
                rule="the mesh is a dict of axis names and sizes of 1 or more",
                remedy='mesh={"dp": 1024}',
            )
        )
    abstract = AbstractMesh(tuple(sizes), tuple(sizes.values()))
    if not 0 <= rank < abstract.size:
        raise ArgumentError(
            explain(f"rank={rank}", where="estimate", rule=f"ranks of {abstract} are below {abstract.size}")
        )
    if isinstance(fn, Parallelized):
        fn = fn.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    there = plan.on(abstract)
    lowered = parallelize(fn, there, donate=donate).lower(*_tree.tree_map(_shape_of, tuple(args)))
    buckets = tuple(
        BucketEstimate(
            bucket.name, len(bucket.names), bucket.shard_nbytes, bucket.gathered_nbytes, bucket.padding_nbytes
        )
        for bucket in lowered.buckets
    )
    return Estimate(abstract, rank, lowered.memory_analysis(rank), lowered.cost_analysis(rank), buckets)


def _shape_of(leaf: Any) -> Any:
    """A tensor without values, for a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")


__all__ = ["BucketEstimate", "Estimate", "estimate"]
