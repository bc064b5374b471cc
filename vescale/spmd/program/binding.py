"""Binding: what the ranks hosted here do together at each step of a program; one walk, whoever hosts."""

from __future__ import annotations

from ..mapped_call import mapped_call
from ..mesh import Mesh
from ..overlap import bind_start
from ..redistribute import Collective, bind
from .draw import bind_draw
from .mapped import bind_all
from .partition import Draw, Map, Move, Partitioned, Start, Wait


class Binder:
    """How each kind of step is bound; here for a mesh whose ranks each have values of their own."""

    def __init__(self, partitioned: Partitioned, mesh: Mesh, reduction: str | None = None) -> None:
        self.partitioned, self.mesh, self.reduction = partitioned, mesh, reduction

    def mapped(self, run: Collective) -> Collective:
        """One exchange of a mapped function."""
        return run

    def move(self, step: Move) -> Collective:
        """A move that is a collective."""
        return bind(step.step, self.mesh, reduction=self.reduction)

    def halves(self, step: Start) -> tuple[Collective, Collective]:
        """The start and the end of one collective for several moves."""
        return bind_start(tuple(move.step for move in step.moves), self.mesh, reduction=self.reduction)

    def draw(self, step: Draw) -> Collective:
        """A draw of torch's."""
        return bind_draw(step, self.partitioned, self.mesh)

    def steps(self) -> list[list[Collective]]:
        """What is done together at each step, in order: most steps have nothing."""
        bound: list[list[Collective]] = []
        ends: dict[int, Collective] = {}
        for step in self.partitioned.steps:
            made: list[Collective] = []
            if isinstance(step, Map):
                traced = mapped_call(step.handle).traced
                made = list(map(self.mapped, bind_all(traced, self.mesh, lambda variant: variant.graph)))
            elif isinstance(step, Start):
                start, ends[step.ticket] = self.halves(step)
                made = [start]
            elif isinstance(step, Wait):
                made = [ends[step.start.ticket]]
            elif isinstance(step, Move) and step.step.is_collective:
                made = [self.move(step)]
            elif isinstance(step, Draw):
                made = [self.draw(step)]
            bound.append(made)
        return bound
