"""Which op of a run op by op is the first whose result differs from the same op on one device.

Each op on DTensors is made again on the global values of what it was given, from the same state of torch's
generator: an op is judged by what it read, whatever came before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._compat import OpOverload, TorchDispatchMode
from ..spmd.dtensor import DTensor
from ..spmd.parallelize import Parallelized
from ..spmd.program.trace import user_line
from .compare import difference, wording
from .divergence import Divergence
from .promises import ROUNDING, excuse, size_of
from .running import Step, own_generators, replicas, whole

aten = torch.ops.aten
_NO_WORK = (aten.detach.default, aten.alias.default, aten.clone.default)
READS = "its operands are those of plain torch"
OTHER_OP = "torch makes the function of other ops for a DTensor; bits of the two need not be equal"


STRIDES = "the op's kernel goes by the strides of its operands, which are others; bits need not be equal"


def first_op(on_mesh: Parallelized, plain: Step) -> Divergence | None:
    """The first op at fault in a call like the step `plain`, else the first whose bits differ as they may."""
    watch = _OpByOp()
    with watch:
        on_mesh(*own_generators(plain.args))
    return watch.fault or watch.first or _beside_plain(on_mesh, plain)


def _beside_plain(on_mesh: Parallelized, plain: Step) -> Divergence | None:
    """The first op that plain torch doesn't make, or makes other bits of: every op here does what it says."""
    ours, theirs = _Ops(True), _Ops(False)
    for ops, fn in ((ours, on_mesh), (theirs, on_mesh._fn)):
        torch.set_rng_state(plain.before)
        with ops:
            fn(*own_generators(plain.args))
    remaining = iter(theirs.made)  # more than ours, where fn makes tensors of nothing
    for op, line, results in ours.made:
        expected = next((made for other, _, made in remaining if other is op), None)
        if expected is None:
            return Divergence(str(op), line, "", "plain torch has another op in its place", OTHER_OP)
        for a, b in zip(expected, results):
            apart = difference(a, b) if wording(a, b) is None and isinstance(a, Tensor) else None
            if apart is not None:
                rounding = apart.error <= ROUNDING
                why, excused = (READS, STRIDES) if rounding else (f"{READS}, its numbers are not", "")
                return Divergence(str(op), line, "", why, excused, apart)
    return None


class _Ops(TorchDispatchMode):
    """Notes the ops on DTensors (`on_mesh`) or those on plain tensors, their source lines and results."""

    def __init__(self, on_mesh: bool) -> None:
        super().__init__()
        self._on_mesh = on_mesh
        self.made: list[tuple[OpOverload, str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = _tree.leaves(result)
        mapped = any(isinstance(leaf, DTensor) for leaf in leaves)
        if func not in _NO_WORK and (mapped or not self._on_mesh):
            self.made.append((func, user_line(), [_kept(leaf) for leaf in leaves]))
        return result


def _kept(leaf: Any) -> Any:
    return whole(leaf).clone() if isinstance(leaf, Tensor) else leaf


class _OpByOp(TorchDispatchMode):
    """Every op on DTensors beside the same op on the global values of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Divergence | None = None
        self.fault: Divergence | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, spec = _tree.flatten((list(args), kwargs))
        if self.fault is not None or not any(isinstance(leaf, DTensor) for leaf in given):
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        wholes = own_generators([whole(leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in given])
        result = func(*args, **kwargs)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        plain_args, plain_kwargs = _tree.unflatten(spec, wholes)
        expected = func(*plain_args, **plain_kwargs)
        torch.set_rng_state(after)

        def again() -> list[Any]:
            sized, named = _tree.unflatten(spec, [size_of(leaf) for leaf in wholes])
            return _tree.leaves(func(*sized, **named))

        for a, b in zip(_tree.leaves(expected), _tree.leaves(result)):
            if isinstance(b, DTensor) and wording(a, value := whole(b)) is None:
                self.compare(func, given, again, a, value, b)
        return result

    def compare(
        self,
        func: OpOverload,
        given: list[Any],
        again: Callable[[], list[Any]],
        expected: Tensor,
        ours: Tensor,
        result: DTensor,
    ) -> None:
        apart = difference(expected, ours)
        why, excused = "", ""
        if apart is None:
            unlike = replicas(ours, result.layout, dict(enumerate(result.locals)))
            if unlike is not None:
                rank, apart = unlike
                why = f"rank {rank} has not what the layout says: replicas differ"
        elif apart is not None:
            split = any(isinstance(leaf, DTensor) and bool(leaf.layout.spec.items()) for leaf in given)
            excused = excuse(func, again, ours, expected, split)
            why = READS
        if apart is None:
            return
        layouts = ", ".join(str(leaf.layout.spec) for leaf in given if isinstance(leaf, DTensor))
        text = f"{func}({layouts}) -> {result.layout.spec}"
        found = Divergence(str(func), user_line(), text, why, excused, apart)
        self.first = self.first or found
        if not excused:
            self.fault = found
