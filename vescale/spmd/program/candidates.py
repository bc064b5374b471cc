"""Candidates: what a node may do over one mesh axis, and what that asks of its operands.

A candidate answers two questions, both in terms of the node's pattern: in which state must an operand be
over the axis, and in which state is a result then. A state is a `Digit`, a `Partial`, a `RaggedShard`, or
None for Replicate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..layout import AbstractMesh, Digit, Layout
from ..placements import InterleavedShard, Partial, Placement, RaggedShard, Replicate, Shard
from ..rules.notation import Dim, Dims, Pattern

State = Digit | Partial | Placement | None


@dataclass(frozen=True, slots=True)
class Deferred:
    """The state of a draw or a constant that is not made yet: it is made in the state that is asked for."""


ANY = Deferred()

SMALL = 1024  # bytes: a whole value this small may become Partial
REFUSED = 1e15  # more bytes than any tensor has: a refused move is taken only when every candidate is


class Impossible(Exception):
    """The candidate can't be taken by this node."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Run on whole values."""

    def operand(self, pattern: Pattern, index: int) -> State:
        return None

    def result(self, pattern: Pattern, place: int) -> State:
        return None


@dataclass(frozen=True, slots=True)
class Factor:
    """Shard one factor: operands and results that have it are sharded; other results are Partial or alike."""

    name: str

    def operand(self, pattern: Pattern, index: int) -> State:
        return digit_of(self.name, pattern.operands[index], pattern)

    def result(self, pattern: Pattern, place: int) -> State:
        if place in pattern.alike.get(self.name, ()):
            return None
        return digit_of(self.name, pattern.results[place], pattern) or Partial(pattern.reduction)


@dataclass(frozen=True, slots=True)
class Pass:
    """Let a Partial through the `group` of operands in which the op is linear, or takes the same extreme."""

    partial: Partial
    group: frozenset[int]

    def operand(self, pattern: Pattern, index: int) -> State:
        return self.partial if index in self.group else None

    def result(self, pattern: Pattern, place: int) -> State:
        return self.partial


@dataclass(frozen=True, slots=True)
class Cut:
    """Let a ragged cut through: `rows` are the factors that it cuts, flattened, outermost first.

    Tensors that have them have them first, and are cut alike; operands without them are whole, results
    without them Partial.
    """

    ragged: RaggedShard
    rows: Dim

    def operand(self, pattern: Pattern, index: int) -> State:
        dims, like = pattern.operands[index], len(self.ragged.dims)
        if pattern.pointwise:  # pieces (rows, *rest) are broadcast: all merge as many dims
            like = max(self._merged(pattern.results[0], pattern.ragged, like), 1)
            if like > 1 and dims and not self._cuts(dims) and len(dims) > len(pattern.results[0]) - like:
                raise Impossible("this has dims in the place of the rows")
        return self._state(dims, pattern.ragged, like)

    def result(self, pattern: Pattern, place: int) -> State:
        dims = pattern.results[place]
        return self._state(dims, pattern.ragged, len(self.ragged.dims)) or Partial(pattern.reduction)

    def has_results(self, pattern: Pattern) -> bool:
        """Whether there is a state for every result."""
        try:
            for place in range(len(pattern.results)):
                self.result(pattern, place)
        except Impossible:
            return False
        return True

    def _cuts(self, dims: Dims) -> bool:
        return any(name in self.rows for dim in dims for name in dim)

    def _state(self, dims: Dims, limit: int, like: int) -> RaggedShard | None:
        if not self._cuts(dims):
            return None
        count = self._merged(dims, limit, like)
        whole_on_one = not self.ragged.dims  # and so here too
        return RaggedShard.from_runs(() if whole_on_one else tuple(range(count)), self.ragged.runs)

    def _merged(self, dims: Dims, limit: int, like: int) -> int:
        """How many leading dims are the rows: `like`, or about so many."""
        counts = [n for n in range(1, min(limit, len(dims)) + 1) if leading(dims, n) == self.rows]
        if not counts:
            raise Impossible("these elements don't follow the rows that are cut")
        return min(counts, key=lambda count: abs(count - like))


Candidate = Whole | Factor | Pass | Cut


def split_by(candidate: Candidate) -> Dim:
    """The factors that the candidate splits."""
    if isinstance(candidate, Factor):
        return (candidate.name,)
    return candidate.rows if isinstance(candidate, Cut) else ()


def candidates(
    pattern: Pattern,
    size: int,
    states: Sequence[Iterable[State | Deferred]],
    taken: frozenset[str],
    asked: frozenset[str] = frozenset(),
) -> Iterator[Candidate]:
    """Every candidate over an axis of `size` ranks for operands found in `states`.

    `taken` are the factors that other axes shard already. A factor that only results have is proposed when
    it is `asked` for, and so is one that only operands have that are not made yet, or not with that factor
    sharded.
    """
    yield Whole()
    had = asked | {
        name
        for dims, found in zip(pattern.operands, states, strict=True)
        for dim in dims
        for name in dim
        if ANY not in found or digit_of(name, dims, pattern) in found
    }
    for name, length in pattern.sizes.items():
        if (
            name in had
            and name not in taken
            and name not in pattern.whole
            and (length % size == 0 or alone(name, pattern))
        ):
            yield Factor(name)
    for state in {state for found in states for state in found}:
        if isinstance(state, Partial):
            linear = state.op in ("sum", "avg")
            for group in pattern.linear if linear else filter(None, [pattern.extremes.get(state.op)]):
                yield Pass(state, group)
    yield from dict.fromkeys(
        Cut(state, rows)
        for dims, found in zip(pattern.operands, states, strict=True)
        for state in found
        if isinstance(state, RaggedShard) and len(state.dims) <= pattern.ragged
        if (rows := leading(dims, len(state.dims)))
        and (pattern.between is not None or not pattern.whole.intersection(rows))
        and Cut(state, rows).has_results(pattern)
    )


def leading(dims: Dims, count: int) -> Dim:
    """The factors that a ragged cut over `count` dims cuts. Over none: the first dim's."""
    return tuple(name for dim in dims[: max(count, 1)] for name in dim)


def digit_of(factor: str, dims: Dims, pattern: Pattern) -> Digit | None:
    """Where the factor stands in the dims of a tensor; None when it doesn't."""
    for index, dim in enumerate(dims):
        if factor in dim:
            return Digit(index, math.prod(pattern.sizes[name] for name in dim[: dim.index(factor)]))
    return None


def alone(factor: str, pattern: Pattern) -> bool:
    """Whether the factor is a dim of its own wherever it stands: then it may be sharded unevenly.

    Not where a result is alike on every rank: one that has nothing of the factor would have nothing of it.
    """
    return all(
        dim == (factor,) for dims in (*pattern.operands, *pattern.results) for dim in dims if factor in dim
    ) and not any(_elements(pattern, place) for place in pattern.alike.get(factor, ()))


def _elements(pattern: Pattern, place: int) -> int:
    return math.prod(pattern.sizes[name] for dim in pattern.results[place] for name in dim)


def state_of(layout: Layout, axis: str) -> State:
    """What the axis does to a value in this layout."""
    digit = layout.digits.get(axis)
    if digit is not None:
        return digit
    placement = layout.spec[axis]
    if isinstance(placement, Replicate):
        return None
    if (
        isinstance(placement, Shard)
        and sum(getattr(other, "dim", None) == placement.dim for _, other in layout.spec.items()) == 1
    ):
        return Digit(placement.dim)  # uneven, but the only split of its dim
    return placement


def refine(pattern: Pattern, index: int, layout: Layout) -> Pattern:
    """The pattern with factors cut where the digits of operand `index` start.

    A dim (b t) with t sharded has the digit b values in; a dim that two axes shard has the second digit
    inside the first's factor, which then becomes two.
    """
    for digit in sorted(layout.digits.values(), key=lambda digit: digit.outer):
        outer = 1
        for name in pattern.operands[index][digit.dim]:
            size = pattern.sizes[name]
            if outer < digit.outer < outer * size:
                if digit.outer % outer == 0 and size % (digit.outer // outer) == 0:
                    pattern = pattern.split(name, digit.outer // outer)
                break
            outer *= size
    return pattern


def carry(
    pattern: Pattern, mesh: AbstractMesh, layout: Layout, place: int, shape: Sequence[int]
) -> Layout | None:
    """The layout of result `place` of a view of a tensor in `layout`; None when that must move first."""
    pattern = refine(pattern, 0, layout)
    placed: dict[str, State] = {}
    for axis, _ in layout.spec.items():
        state, size = state_of(layout, axis), mesh.axis_size(axis)
        fitting = [
            candidate
            for candidate in candidates(pattern, size, [[state]], frozenset())
            if _fits(candidate, pattern, state)
        ]
        if not fitting:
            return None
        placed[axis] = fitting[0].result(pattern, place)
        if isinstance(placed[axis], Partial) and not isinstance(state, Partial):
            return None
    return layout_from(mesh, shape, placed)


def _fits(candidate: Candidate, pattern: Pattern, state: State) -> bool:
    try:
        return candidate.operand(pattern, 0) == state
    except Impossible:
        return False


def viewed(
    pattern: Pattern, mesh: AbstractMesh, shape: Sequence[int], place: int, target: Layout
) -> Layout | None:
    """`carry` backwards: the layout of a tensor of `shape` of which result `place` is a view in `target`."""
    if math.prod(shape) != math.prod(target.shape) or target.partials or target.ragged:
        return None
    asked = refine(replace(pattern, operands=(pattern.results[place],), results=pattern.operands), 0, target)
    states = {axis: state_of(target, axis) for axis, _ in target.spec.items()}
    if any(uncut(asked, state, mesh.axis_size(axis)) for axis, state in states.items()):
        return None
    placed = {axis: deferred_state(asked, state, mesh.axis_size(axis), 0) for axis, state in states.items()}
    source = layout_from(mesh, shape, placed)
    return source if carry(pattern, mesh, source, place, target.shape) == target else None


def uncut(asked: Pattern, state: State, size: int) -> bool:
    """Whether no part of what is viewed gives a result in `state`, over an axis of `size` ranks.

    `asked` is the pattern reversed.
    """
    dims = asked.operands[0]
    if isinstance(state, Digit):
        return _factor_cut(asked, state, size) is None
    if isinstance(state, (Shard, InterleavedShard)):
        return dims[state.dim] not in asked.results[0] or not asked.whole.isdisjoint(dims[state.dim])
    return state is not None


def deferred_state(asked: Pattern, state: State, size: int, index: int) -> State:
    """The state of operand `index` that gives a result in `state`; `asked` is the pattern reversed."""
    dims = asked.results[index]
    if isinstance(state, RaggedShard):
        return state if any(dims) else None
    if isinstance(state, (Shard, InterleavedShard)):  # uneven: the same split of the dim that it stands for
        dim = asked.operands[0][state.dim]
        return replace(state, dim=dims.index(dim)) if dim in dims else None
    name = _factor_cut(asked, state, size) if isinstance(state, Digit) else None
    return None if name is None else digit_of(name, dims, asked)


def _factor_cut(asked: Pattern, digit: Digit, size: int) -> str | None:
    """The factor that an axis of `size` ranks cuts where `digit` stands; None when it can't.

    A dim that is split unevenly is no part of a longer one: its pieces are not those of any split of that.
    """
    fitting = (
        name
        for name, length in asked.sizes.items()
        if name not in asked.whole and (length % size == 0 or alone(name, asked))
        if digit == digit_of(name, asked.operands[0], asked)
    )
    return next(fitting, None)


def layout_from(mesh: AbstractMesh, shape: Sequence[int], states: dict[str, State]) -> Layout:
    """The layout with these states by axis."""
    return Layout.of(mesh, tuple(shape), {axis: state for axis, state in states.items() if state is not None})  # type: ignore[misc]


def charge(state: State | Deferred, need: State, nbytes: float, size: int, pinned: bool) -> tuple[float, int]:
    """(bytes, moves) to bring a value of `nbytes` over an axis of `size` ranks from one state to another.

    Slicing a whole value and scattering a Partial are charged as if the value were gathered back: the
    next op would have to. A `pinned` value, a parameter, is not gathered.
    """
    if state == need or (state is ANY and not isinstance(need, Partial)):
        return 0.0, 0
    gather = nbytes * (size - 1) / size
    if isinstance(need, RaggedShard) and not pinned:
        # Only an operand at rest brings a ragged cut here, and what meets it is then at rest too.
        return (0.0 if state is None else gather), 1
    if state is None:
        if isinstance(need, Digit):
            return gather, 1
        return (0.0 if isinstance(need, Partial) and nbytes <= SMALL else REFUSED + nbytes), 1
    if state is ANY or isinstance(need, Partial):
        return REFUSED + nbytes, 1
    if isinstance(state, Partial):
        return 2 * gather, 1 if need is None else 2
    cost = gather / size if isinstance(need, Digit) and isinstance(state, Digit) else gather
    return (REFUSED if pinned else 0.0) + cost, 1
