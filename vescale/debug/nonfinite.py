"""Where NaNs and infinities come from: the first instruction that makes one of operands that are finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..spmd.agree import exchange
from ..spmd.locals import flat_indices
from ..spmd.mesh import Mesh
from ..spmd.observe import Observation, Observed, Value, prepare
from ..spmd.program.partition import Compute, Map


@dataclass(frozen=True)
class Origin:
    """A NaN or an infinity where there was none before: `kind` is "nan" or "inf".

    `op`, of `line` in `module`, made `value`, in which `counts` elements of each rank are of that kind; the
    first of them is at `index` of the global value (of the local one inside shard_map), on `rank`. `operands`
    are what it was made of, each with its range.
    """

    kind: str
    instruction: tuple[int, int]  # the step, and which instruction of a mapped function
    op: str
    value: str
    look: str
    line: str
    module: str
    region: str
    rank: int
    index: tuple[int, ...]
    counts: dict[int, int]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        where = " ".join(part for part in (self.region, self.module, self.line) if part)
        who = ", ".join(f"{count:,} on rank {rank}" for rank, count in self.counts.items())
        rows = [
            f"{self.kind} in {self.value}, made by {self.op}",
            *([f"  at        {where}"] if where else []),
            f"  is        {self.look}",
            f"  elements  {who}; the first at {list(self.index)} on rank {self.rank}",
            *(f"  operand   {operand}" for operand in self.operands),
        ]
        return "\n".join(rows)


@dataclass(frozen=True)
class NonFinite:
    """What `find_nonfinite` found: true when there is an origin. Prints as a report.

    `origins` are all of them in order: the results of what they feed are not listed. `intended` counts
    instructions that were given an infinity as a number, such as a mask of -inf: these are no origins.
    """

    origins: tuple[Origin, ...]
    instructions: int
    intended: int

    @property
    def first(self) -> Origin | None:
        """The first origin."""
        return self.origins[0] if self.origins else None

    def __bool__(self) -> bool:
        return bool(self.origins)

    def __str__(self) -> str:
        if not self.origins:
            return f"all results of {self.instructions:,} instructions are finite, or infinite as asked"
        more = len(self.origins) - 1
        tail = [f"and {more} more that don't follow from it: see .origins"] if more else []
        return "\n".join([str(self.origins[0]), *tail])


def find_nonfinite(step: Any, *args: Any, **kwargs: Any) -> NonFinite:
    """Run `step(*args, **kwargs)` instruction by instruction, and tell where NaNs and infinities begin.

    An origin of NaNs makes them of operands without NaNs, an origin of infinities of operands that are finite
    altogether; an argument that has some is one too. An infinity that the function asks for (`masked_fill`
    with -inf) is none. Nothing is donated, and the results are dropped; generators move as in a call. In
    processes every rank makes this call, and all get the same report.

    Raises ArgumentError for a step that is no program: a module, or `static=False`.

    >>> import torch, vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> step = vs.parallelize(lambda x: x.log().sum(), vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}))
    >>> found = find_nonfinite(step, torch.tensor([1.0, 2.0, 3.0, -4.0]))
    >>> found.first.kind, found.first.op, found.first.rank, found.first.index
    ('nan', 'aten.log.default', 1, (3,))
    """
    search = _Search()
    prepared = prepare(step, args, kwargs)
    mesh: Mesh = step._mesh
    Observed(step).call(prepared, search)
    origins = [origin for origin, _ in search.origins]
    if not mesh.is_simulated and mesh.local_ranks:
        origins = _agreed(mesh, search)
    return NonFinite(tuple(origins), search.instructions, search.intended)


class _Search:
    """Watches for values that aren't finite and whose operands were."""

    def __init__(self) -> None:
        self.origins: list[tuple[Origin, list[int]]] = []  # with the numbers of their operands
        self.instructions = self.intended = 0
        # What each value has, by rank: its numbers are used once in a program.
        self.kinds: dict[int, dict[int, str]] = {}

    def __call__(self, seen: Observation) -> None:
        whole = isinstance(seen.step, Map) and seen.inner is None  # its instructions were seen one by one
        self.instructions += seen.index >= 0 and not whole
        asked = _asks_for_infinity(seen)
        self.intended += asked
        for value in seen.results:
            counts = {rank: _counts(tensor) for rank, tensor in value.locals.items()}
            self.kinds[value.number] = {rank: _kind(*count) for rank, count in counts.items()}
            if value.is_filling or _is_memory(seen):
                self.kinds[value.number] = dict.fromkeys(counts, "")
                continue
            for kind in ("nan", "inf"):
                which = kind == "inf"
                found = {rank: count[which] for rank, count in counts.items() if count[which]}
                fed = any(
                    feeds(self.kinds.get(operand.number, {}).values(), kind) for operand in seen.operands
                )
                if found and not (fed or whole or (asked and kind == "inf")):
                    numbers = [operand.number for operand in seen.operands]
                    self.origins.append((self._origin(seen, value, kind, found), numbers))
                    break

    def _origin(self, seen: Observation, value: Value, kind: str, counts: dict[int, int]) -> Origin:
        rank = next(iter(counts))
        layout = "" if value.layout is None else f" {value.layout.spec}"
        name = value.name or (f"v{value.number}" if seen.index >= 0 else "a closed-over tensor")
        return Origin(
            kind,
            (seen.index, -1 if seen.inner is None else seen.inner),
            seen.name if seen.index >= 0 else "the caller",
            name,
            f"{value.meta}{layout}",
            seen.origin.line,
            seen.origin.module,
            seen.origin.region,
            rank,
            _index(value, rank, kind),
            counts,
            tuple(_described(seen, operand) for operand in seen.operands),
        )


def feeds(kinds: Collection[str], kind: str) -> bool:
    """Whether an operand that has these may be why a result has `kind`."""
    return "nan" in kinds or (kind == "inf" and "inf" in kinds)


def _counts(tensor: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0, 0
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # 8-bit floats have no comparisons
    if bool(torch.isfinite(wide).all()):
        return 0, 0
    nans = torch.isnan(wide)
    return int(nans.sum()), int((~torch.isfinite(wide) & ~nans).sum())


def _kind(nans: int, infinities: int) -> str:
    return "nan" if nans else "inf" if infinities else ""


def _index(value: Value, rank: int, kind: str) -> tuple[int, ...]:
    """The index of the first element of a kind, of the global value where there is one."""
    local = value.locals[rank]
    wide = local if local.dtype.itemsize > 1 else local.float()
    places = torch.isnan(wide) if kind == "nan" else torch.isinf(wide)
    at = int(places.reshape(-1).nonzero()[0])
    shape = tuple(local.shape)
    if value.layout is not None:
        at, shape = int(flat_indices(value.layout, rank).reshape(-1)[at]), value.layout.shape
    index = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        index.insert(0, place)
    return tuple(index)


def _described(seen: Observation, operand: Value) -> str:
    """An operand with the range of its elements on the ranks that are hosted here."""
    name = operand.name or f"v{operand.number}"
    look = f"{name}: {operand.meta}"
    if seen.overwrites and operand is seen.operands[0]:
        return f"{look}, overwritten"
    parts = [tensor for tensor in operand.locals.values() if tensor.numel()]
    if not parts or parts[0].is_complex() or parts[0].dtype == torch.bool:
        return look
    wide = [part.to(torch.float64) for part in parts]
    low, high = min(float(part.amin()) for part in wide), max(float(part.amax()) for part in wide)
    return f"{look}, from {low:.6g} to {high:.6g}"


def _is_memory(seen: Observation) -> bool:
    """Whether the step makes memory that nothing was written to."""
    step = seen.step
    name = step.node.op.overloadpacket.__name__ if isinstance(step, Compute) else seen.name
    return name in _EMPTY or any(f"aten.{empty}." in name for empty in _EMPTY)


_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")


def _asks_for_infinity(seen: Observation) -> bool:
    """Whether a number among the arguments of the op is not finite."""
    if not isinstance(seen.step, Compute):
        return False
    node = seen.step.node
    return any(_is_odd(arg) for arg in (*node.args, *node.kwargs.values()))


def _is_odd(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_odd, value))
    return isinstance(value, float) and not math.isfinite(value)


def _agreed(mesh: Mesh, search: _Search) -> list[Origin]:
    """The origins of all ranks, each once, in the order of the program.

    A rank sees only its own part of an operand: what came from another rank's NaN begins there.
    """
    own = {number: kind for number, found in search.kinds.items() for kind in found.values() if kind}
    mine = [[asdict(origin), numbers] for origin, numbers in search.origins]
    told = exchange(mesh, "vs.debug.find_nonfinite", [mine, list(own.items())])
    kinds: dict[int, set[str]] = {}
    for _, found in told:
        for number, kind in found:
            kinds.setdefault(number, set()).add(kind)
    merged: dict[tuple, Origin] = {}
    for record, _ in told:
        for fields, numbers in record:
            origin = _loaded(fields)
            if any(feeds(kinds.get(number, ()), origin.kind) for number in numbers):
                continue
            key = origin.instruction, origin.value, origin.kind
            merged.setdefault(key, origin).counts.update(origin.counts)
    return sorted(merged.values(), key=lambda origin: origin.instruction)


def _loaded(fields: Mapping[str, Any]) -> Origin:
    told: dict[str, Any] = dict(fields)
    for name in ("instruction", "index", "operands"):
        told[name] = tuple(told[name])
    told["counts"] = {int(rank): count for rank, count in told["counts"].items()}
    return Origin(**told)


__all__ = ["NonFinite", "Origin", "find_nonfinite"]
