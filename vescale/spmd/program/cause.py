"""Cause: why a value moves, and whether the plan asked for it.

    reason      who asks for the move                                            the plan asked
    ---------   --------------------------------------------------------------   --------------
    plan        a constraint: `vs.constrain`, `activations`, a parameter's         yes
                layout in use or at rest under `vs.value_and_grad` (`Staged`)
    mapped      the specs of a `vs.shard_map` inside                               yes
    called      a collective that a mapped function calls                          yes
    result      the layout of a result: said by `outputs`, that of the argument    yes
                which it mirrors, or pending reductions done
    reduction   contributions are summed: the plan splits a dim over which an      yes
                op contracts, and something else than a sum follows
    transpose   a gradient leaves the layout in which the constraint on its value      yes
                pins it too: the reverse of how the value came there
    op          an op needs a dim whole, or its operands in one layout             no
    unruled     an op has no sharding rule, and runs whole on every rank           no

A declared layout of an argument moves nothing: DTensors must come in it, plain tensors are cut.
`strict=True` refuses the last two rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout import Layout
from ..redistribute_plan import Step
from .ir import Origin

REASONS = ("plan", "mapped", "called", "result", "reduction", "transpose", "op", "unruled")
REFUSED = ("op", "unruled")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value moves: who asks, in words and by kind; for an op, what would have asked in its place."""

    text: str
    by: str
    target: Layout | None = None  # where the op needs it
    user: Origin = field(default_factory=Origin)
    maker: Origin = field(default_factory=Origin)
    argument: str = ""  # the path of the value, where it is an argument
    at_rest: Layout | None = None  # where it is a parameter

    def reason(self, step: Step) -> str:
        """One of REASONS: the reductions that an op needs are what the plan's splits imply."""
        if self.by == "plan" or not step.reductions or self.by not in REFUSED:
            return self.by
        return "reduction" if set(step.axes) == {axis for axis, _ in step.reductions} else self.by

    @property
    def remedy(self) -> str:
        """The line that asks for the move where an op asks for it now."""
        if self.target is None:
            return ""
        spec = f"vs.{self.target.spec!r}"
        line, module = self.user.line or "the op", self.user.module
        if self.user.region == "backward":
            return (
                "pin the value whose gradient this is, in the forward pass (the gradient is pinned alike): "
                f"x = vs.constrain(x, {spec})"
            )
        if self.argument and self.at_rest is not None and self.user.region:
            path = (self.argument.partition(".")[2] or self.argument).replace(".", r"\.")
            return f'params={{r"{path}": vs.Staged(init=vs.{self.at_rest.spec!r}, run={spec})}}'
        if self.argument and self.at_rest is None:
            return f"inputs={{{self.argument!r}: {spec}}}, or x = vs.constrain(x, {spec}) before {line}"
        if module and module != self.maker.module:
            path = module.replace(".", r"\.")
            return f'activations={{r"{path}\\.input": {spec}}}, or x = vs.constrain(x, {spec}) before {line}'
        return f"x = vs.constrain(x, {spec}) before {line}"

    def __str__(self) -> str:
        return self.text
