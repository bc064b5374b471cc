"""`vs.parallelize(fn, plan, static=False)`: fn run op by op on real values.

The plan places what goes in, pins activations, and lays results as a program would. Between, every op of
fn is an op on DTensors, decided by itself. Nothing is traced: prints, breakpoints, `.item()` and control flow
on values work.

Results have the bits of static mode where both decide alike. An op here finishes the sum that it leaves; a
program may carry it through linear ops, or take a value in another layout because of what comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import TraceError, explain
from .agree import digest, same_on_all
from .dtensor import DTensor, place
from .layout import Layout, replicated
from .parallelize import Parallelized
from .plan import Plan
from .program.partition import without_partials
from .program.trace import Mark, Tracing, within
from .signature import Signature
from .watch import here

_DEFAULT = "the default generator"


@dataclass(frozen=True)
class _Placed:
    """What the plan says of the arguments of a signature."""

    paths: list[str]
    layouts: list[Layout | None]
    marks: list[Mark | None]
    unequal: str = ""  # the generators that differ between ranks, on the call that placed the arguments


class Dynamic(Parallelized):
    """A function on a mesh, run op by op: see `parallelize`. `lower` shows the program of static mode.

    With `tape`, gradients are recorded as torch does outside; else arguments are values.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        donate: tuple[str, ...] = (),
        strict: bool = False,
        tape: bool = False,
    ) -> None:
        super().__init__(fn, plan, donate, strict)
        self._tape = tape
        self._placed: dict[tuple[Any, ...], _Placed] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        outside = here.enter(self._name, self._calls)
        try:
            return self._call(args, kwargs)
        finally:
            here.leave(outside)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._arguments.bind(args, kwargs)
        known = self._placed.get(signature.key)
        placed = known or self._place(signature)
        mesh, tensors = self._mesh, signature.tensors()
        leaves = [self._enter_one(signature.leaves[index], placed.layouts[index]) for index in tensors]
        versions = [_version(leaf) for leaf in leaves]
        tracing = Tracing(activations=self._plan.activation_rules(), mesh=mesh)
        tracing.unequal = placed.unequal if known is None else ""
        tracing.marks = {
            id(leaf): mark
            for leaf, index in zip(leaves, tensors, strict=True)
            if (mark := placed.marks[index]) is not None
        }
        with within(tracing):
            results, spec = _tree.flatten(self._arguments.call(signature, leaves))
        self._check_activations(tracing)
        for leaf, version, index in zip(leaves, versions, tensors, strict=True):
            if _version(leaf) != version:
                raise TraceError(
                    explain(
                        f"an in-place update of the argument {placed.paths[index]!r}",
                        where=self._name,
                        rule="a function doesn't mutate its arguments: its results are what it returns",
                        remedy="compute the new value out of place and return it",
                    )
                )
        outputs = self._leave_all(results, spec, signature, placed.layouts)
        for index in tensors:
            leaf, path = signature.leaves[index], placed.paths[index]
            if isinstance(leaf, DTensor) and path.partition(".")[0] in self._donate:
                leaf.donate(path, f"call {self._calls} of {self._name}")
        return _tree.unflatten(spec, outputs)

    def _place(self, signature: Signature) -> _Placed:
        paths = signature.paths()
        layouts, marks, _ = self._layouts(signature, paths)
        unequal: list[str] = []
        if not self._mesh.is_simulated:
            plain = {
                path: digest(leaf)
                for path, leaf in zip(paths, signature.leaves, strict=True)
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
            }
            plain[_DEFAULT] = digest(torch.get_rng_state())
            unequal = same_on_all(self._mesh, f"{self._name}, op by op", plain, told=(_DEFAULT,))
        if len(self._placed) > 256:
            self._placed.clear()
        placed = self._placed[signature.key] = _Placed(paths, layouts, marks, "; ".join(unequal))
        return placed

    def _enter_one(self, leaf: Tensor, layout: Layout | None) -> Tensor:
        assert layout is not None
        if not self._tape:
            leaf = leaf.detach()
        if not isinstance(leaf, DTensor):
            return place(leaf, self._mesh, layout)
        return leaf if leaf.layout is layout else leaf.redistribute(layout.spec)  # 0-d ones have one key

    def _leave_all(
        self, results: list[Any], spec: _tree.TreeSpec, signature: Signature, layouts: list[Layout | None]
    ) -> list[Any]:
        mesh = self._mesh
        paths = _tree.paths(_tree.unflatten(spec, range(len(results))))
        shapes = [tuple(result.shape) if isinstance(result, Tensor) else None for result in results]
        wishes = self._wishes(spec, paths, shapes, signature, layouts)
        for index, (result, wanted) in enumerate(zip(results, wishes, strict=True)):
            if not isinstance(result, Tensor):
                continue
            if isinstance(result, DTensor):
                wanted = wanted or without_partials(result.layout)
                results[index] = result if result.layout is wanted else result.redistribute(wanted.spec)
            else:  # made inside, of no argument: a global value
                results[index] = place(result, mesh, wanted or replicated(mesh.abstract, tuple(result.shape)))
        return results


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


__all__ = ["Dynamic"]
