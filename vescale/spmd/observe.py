"""Observe: a call of a parallelized function, step by step, and the same call as one device would make it.

    observe(step, args, kwargs, watch)          watch(Observation) after each step of the program
    observe_plainly(step, args, kwargs, watch)  watch(PlainNode) after each node of what was traced

Both are of the graph that `step` traces for these arguments: node k of one is node k of the other, and
`Value.source` is the key of `PlainNode.results`.

>>> import torch, vescale as vs
>>> mesh = vs.make_mesh({"dp": 2}, backend="simulated")
>>> step = vs.parallelize(lambda x: (2 * x).sum(), vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}))
>>> here, there = {}, {}
>>> def watch(seen):
...     here.update({value.source: value.whole() for value in seen.results})
>>> total = observe(step, (torch.arange(4.0),), {}, watch)
>>> _ = observe_plainly(step, (torch.arange(4.0),), {}, lambda node: there.update(node.results))
>>> all(torch.equal(here[value], there[value]) for value in there), total.full_tensor()
(True, tensor(12.))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from .boundary import own
from .dtensor import DTensor
from .dynamic import Dynamic
from .mesh import Mesh
from .parallelize import Entry, Parallelized, drawing
from .program.plain import PlainNode, run_plainly
from .program.stepwise import Observation, Stepwise, Value, Watch, same_bits

__all__ = [
    "Observation",
    "Observed",
    "PlainNode",
    "Value",
    "entered",
    "observe",
    "observe_plainly",
    "prepare",
    "ranks_of",
    "same_bits",
]


def prepare(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Entry, list[Any], list[Tensor]]:
    """What `step` would run for these arguments: its entry, the leaves, and the tensors that it closes over.

    On a miss the program is traced, and ranks compare it, as in a call. Raises ArgumentError for anything but
    a function of `vs.parallelize` in static mode.
    """
    if not isinstance(step, Parallelized) or isinstance(step, Dynamic):
        raise ArgumentError(
            explain(
                f"{type(step).__name__} {getattr(step, '__name__', '')}".rstrip(),
                rule="what is observed is a program: a function given to vs.parallelize, with static=True",
                remedy="wrap it: vs.parallelize(fn, plan); of a module, vs.functional(module)'s fn",
            )
        )
    return step.entry(*args, **kwargs)


def ranks_of(step: Parallelized) -> Mesh:
    """The mesh whose ranks the program of `step` speaks of: that of lanes, where a rank hosts several."""
    return step._plan.hosted(step._name)


def entered(step: Parallelized, entry: Entry, leaves: list[Any], hidden: list[Tensor]) -> list[list[Tensor]]:
    """The local inputs of each of these ranks."""
    known = [layout for layout in entry.decision.layouts if layout is not None]
    return step._boundary.each(step._enter(entry.decision, leaves, hidden), known)


class Observed:
    """A parallelized function whose calls are run step by step; the programs that it runs are kept."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self._kept: dict[int, tuple[Entry, Stepwise]] = {}

    def call(
        self,
        prepared: tuple[Entry, list[Any], list[Tensor]],
        watch: Watch,
        *,
        donate: bool = False,
    ) -> Any:
        """Run what `prepare` returned for some arguments: see `observe`."""
        entry, leaves, hidden = prepared
        decision, boundary = entry.decision, self.step._boundary
        inputs = entered(self.step, entry, leaves, hidden)
        with drawing(entry, leaves):
            results = boundary.kept(self._stepwise(entry)(inputs, watch), decision.out_layouts)
        results = own(results, decision.aliases)
        outputs = boundary.leave(results, decision.out_layouts, decision.out_kinds)
        if donate:
            for index in decision.donated:
                if isinstance(leaves[index], DTensor):
                    call = f"an observed call of {self.step._name}"
                    leaves[index].donate(decision.paths[index], call)
        return _tree.unflatten(decision.out_spec, outputs)

    def _stepwise(self, entry: Entry) -> Stepwise:
        if id(entry) not in self._kept:
            if len(self._kept) >= 16:
                self._kept.pop(next(iter(self._kept)))
            decision = entry.decision
            made = Stepwise(decision.partitioned, ranks_of(self.step), decision.graph)
            self._kept[id(entry)] = entry, made
        return self._kept[id(entry)][1]


def observe(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    watch: Watch,
    *,
    donate: bool = False,
) -> Any:
    """`step(*args, **kwargs)`, step by step; `watch` is told of the arguments first, then after each step.

    The results are those of the call, bit for bit, and generators move as in it. Arguments are left as they
    are unless `donate`: then those that `step` donates can't be used any more. In processes every rank
    makes this call.
    """
    return Observed(step).call(prepare(step, args, kwargs), watch, donate=donate)


def observe_plainly(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    watch: Callable[[PlainNode], None] = lambda node: None,
) -> Any:
    """The same call on global values, as one device would make it; `watch` is told of each node of the graph.

    Results are plain tensors. Generators of torch's are moved: set their state again for a second run. In
    processes every rank makes this call, and gathers the arguments.
    """
    entry, leaves, hidden = prepare(step, args, kwargs)
    decision = entry.decision
    inputs = [
        leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        for leaf, layout in zip(leaves, decision.layouts, strict=True)
        if layout is not None
    ]
    with drawing(entry, leaves):
        outputs = run_plainly(
            decision.graph, [tensor.detach() for tensor in inputs], [t.detach() for t in hidden], watch
        )
    return _tree.unflatten(decision.out_spec, outputs)
