"""Varying or invariant: over which mesh axes the values of a mapped function differ between ranks.

Every traced value has a set of axes over which it *varies*; over the others it is *invariant*, equal on
all ranks. An op's result varies over what any operand varies over; collectives say what they do. Where
values that vary over different axes meet, `pvary` is put in before the op: the identity, whose transpose
is psum, so that the gradient of an invariant value is the full sum without anyone asking.

Ranks whose local shapes differ are traced together, in step: at a collective each needs the sizes of
the others. Ranks with the same shapes share a trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._compat import OpOverload, base_tensor, inside_functorch
from .._errors import ArgumentError, TraceError, VescaleError, explain
from .collective_ops import OPS, pvary, varying_after
from .layout import AbstractMesh
from .program.trace import is_recording

T = TypeVar("T")


@dataclass
class Mapped:
    """The trace of a mapped function for one class of ranks: see `current_map`."""

    mesh: AbstractMesh
    axes: tuple[str, ...]  # those that are mapped
    place: Mapping[str, int]  # coordinates that tell this class from the others
    lockstep: Lockstep
    varying: dict[int, frozenset[str]] = field(default_factory=dict)  # by id of the traced tensor
    line: Callable[[], str] = lambda: ""
    given: Sequence[frozenset[str]] = ()  # what the inputs vary over

    def inputs(self, tensors: Sequence[Tensor]) -> None:
        """The trace begins, with these inputs."""
        self.varying = {id(tensor): axes for tensor, axes in zip(tensors, self.given, strict=True)}

    def call(self, op: OpOverload, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """A traced op: its results vary over what its operands do, and a collective over what it says."""
        found: list[Tensor] = []
        _tensors(operands, found)
        axes = frozenset[str]().union(*(self.varying.get(id(tensor), frozenset()) for tensor in found))
        name = op.overloadpacket.__name__
        if op.namespace == "vescale" and name in OPS:
            axes = varying_after(name, axes, operands[1])
        self.varying.update((id(result), axes) for result in results if isinstance(result, Tensor))

    def over(self, tensor: Tensor) -> frozenset[str]:
        """The axes over which a tensor varies."""
        return self.varying.get(id(base_tensor(tensor)), frozenset())

    def check_axes(self, axis: str | Sequence[str], call: str) -> tuple[str, ...]:
        """The axes that a collective names, as a tuple; an error when one is not mapped."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in axes:
            if name not in self.axes:
                raise ArgumentError(
                    explain(
                        f"{call} over axis {name!r}",
                        where=self.line(),
                        rule=f"collectives name axes that are mapped here: {', '.join(self.axes) or 'none'}",
                        remedy="name one of these, or map the axis with axis_names=",
                    )
                )
        if len(set(axes)) != len(axes) or not axes:
            raise ArgumentError(
                explain(
                    f"{call} over {axes}",
                    where=self.line(),
                    rule="each axis is named once, and there is one at least",
                    remedy="drop the repeated name",
                )
            )
        return axes

    def size(self, axes: Sequence[str]) -> int:
        """How many ranks the axes have together."""
        size = 1
        for axis in axes:
            size *= self.mesh.axis_size(axis)
        return size

    def own(self, axes: Sequence[str], values: Sequence[T]) -> T:
        """This rank's of one value a member; where members of this class differ in it, they must part."""
        if all(value == values[0] for value in values):
            return values[0]
        apart = [axis for axis in axes if axis not in self.place]
        if apart:
            raise Apart(tuple(apart))
        index = 0
        for axis in axes:
            index = index * self.mesh.axis_size(axis) + self.place[axis]
        return values[index]

    def meet(self, axes: Sequence[str], what: str, value: T) -> list[T]:
        """`value` of each member of this rank's group over `axes`, row-major in the order named.

        `what` says what all classes of ranks must have in common: the collective and its parameters.
        """
        values = self.lockstep.meet(self.place, f"{what} over {', '.join(axes)}", value, self.line())
        members: list[dict[str, int]] = [{}]
        for axis in axes:
            members = [
                {**member, axis: index} for member in members for index in range(self.mesh.axis_size(axis))
            ]
        return [
            values[tuple({**self.place, **{a: i for a, i in member.items() if a in self.place}}.items())]
            for member in members
        ]


_current: ContextVar[Mapped | None] = ContextVar("vescale_map", default=None)


def current_map(call: str) -> Mapped:
    """The mapped function that is being traced; an error that names `call` outside of one."""
    mapped = _current.get()
    if mapped is None:
        raise TraceError(
            explain(
                f"{call} outside a mapped function",
                rule="collectives are called by functions that vs.shard_map runs",
                remedy="call it inside the function given to vs.shard_map",
            )
        )
    return mapped


def is_mapped() -> bool:
    """Whether a mapped function is running, on real values or to be traced, in this context."""
    return _current.get() is not None


def within(mapped: Mapped, call: Callable[[], T]) -> T:
    """`call()` as part of the mapped function, with joins put in."""
    token = _current.set(mapped)
    try:
        with _Join(mapped):
            return call()
    finally:
        _current.reset(token)


def joined(call: Callable[[], T]) -> T:
    """`call()` with joins put in, where a backward runs it: torch turns the mode off around autograd."""
    mapped = _current.get()
    if mapped is None:
        return call()
    with _Join(mapped):
        return call()


class _Join(TorchFunctionMode):
    """Makes the operands of every torch function vary over the same axes."""

    def __init__(self, mapped: Mapped) -> None:
        super().__init__()
        self.mapped = mapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found: list[Tensor] = []
        # torch.autograd.grad is a torch function too, and asks about the very tensors that it is given.
        if getattr(func, "__module__", None) != "torch.autograd":
            _tensors((args, kwargs), found)
        if len(found) > 1:
            sets = [self.mapped.over(tensor) for tensor in found]
            union = frozenset().union(*sets)
            if any(axes != union for axes in sets):
                self.check_in_place(func, args, kwargs, union)
                args, kwargs = self.join(args, union), self.join(kwargs, union)
        return func(*args, **kwargs)

    def join(self, value: Any, union: frozenset[str]) -> Any:
        if isinstance(value, Tensor):
            missing = [
                axis for axis in self.mapped.mesh.axis_names if axis in union - self.mapped.over(value)
            ]
            # Whole numbers have no gradient, and so nothing to transpose.
            return (
                pvary(value, missing)
                if missing and (value.is_floating_point() or value.is_complex())
                else value
            )
        if isinstance(value, (tuple, list)):
            joined = [self.join(item, union) for item in value]
            return type(value)(*joined) if hasattr(value, "_fields") else type(value)(joined)
        if isinstance(value, dict):
            return {name: self.join(item, union) for name, item in value.items()}
        return value

    def check_in_place(self, func: Any, args: Any, kwargs: Any, union: frozenset[str]) -> None:
        name = getattr(func, "__name__", "")
        target = kwargs.get("out") if isinstance(kwargs.get("out"), Tensor) else args[0] if args else None
        in_place = (
            name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        )
        if in_place and isinstance(target, Tensor) and self.mapped.over(target) != union:
            axes = sorted(union - self.mapped.over(target))
            raise TraceError(
                explain(
                    f"{name} writes a value that varies over {', '.join(axes)} into one that does not",
                    where=self.mapped.line(),
                    rule="a value keeps the axes over which it varies: a carry starts as varying as it ends",
                    remedy=f"start from vs.pvary(x, {tuple(axes) if len(axes) > 1 else axes[0]!r})",
                )
            )


def _tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found)


class Lockstep:
    """Runs one function a class of ranks, each on a thread of its own, one at a time, in step.

    They meet at collectives. Ranks that come to different ones, or leave early, are an error for all.
    """

    def __init__(self, places: Sequence[Mapping[str, int]]) -> None:
        self.places = [tuple(place.items()) for place in places]
        self._baton = threading.Lock()
        self._changed = threading.Condition(self._baton)
        self._waiting: dict[tuple, tuple[str, Any, str]] = {}
        self._round = 0
        self._values: dict[tuple, Any] = {}
        self._finished: set[tuple] = set()
        self._error: BaseException | None = None

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results, in order; the first error, if one raises."""
        if len(calls) == 1 and not inside_functorch() and not is_recording():
            return [calls[0]()]
        # Transforms and traces that the caller is inside of don't reach another thread; autocast must.
        casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        results: list[Any] = [None] * len(calls)

        def work(index: int) -> None:
            with self._baton, ExitStack() as stack:
                for kind, enabled, dtype in casts:
                    if enabled:
                        stack.enter_context(torch.autocast(kind, dtype))
                try:
                    results[index] = calls[index]()
                except BaseException as error:
                    if not isinstance(error, _Abandoned):
                        self._error = self._error or error
                finally:
                    self._finished.add(self.places[index])
                    self._advance()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def meet(self, place: Mapping[str, int], what: str, value: Any, line: str) -> Mapping[tuple, Any]:
        """The values of all classes, by place; called with the baton held (or with one class)."""
        me = tuple(place.items())
        if len(self.places) == 1:
            return {me: value}
        self._waiting[me] = (what, value, line)
        here = self._round
        self._advance()
        self._changed.wait_for(lambda: self._round > here or self._error is not None)
        if self._round == here:
            raise _Abandoned
        return self._values

    def _advance(self) -> None:
        """Let everyone go on once all that still run have come to the same collective."""
        if (
            self._error is None
            and self._waiting
            and self._finished | self._waiting.keys() == set(self.places)
        ):
            calls = {(what, line) for what, _, line in self._waiting.values()}
            if self._finished or len({what for what, _ in calls}) > 1:
                self._error = self._disagreement()
            else:
                self._values = {place: value for place, (_, value, _) in self._waiting.items()}
                self._waiting = {}
                self._round += 1
        if self._error is not None or self._round:
            self._changed.notify_all()

    def _disagreement(self) -> VescaleError:
        calls = {dict_text(place): f"{what} at {line}" for place, (what, _, line) in self._waiting.items()}
        calls |= {dict_text(place): "no further collective" for place in self._finished}
        return TraceError(
            explain(
                "ranks that run different collectives: "
                + "; ".join(f"{place}: {call}" for place, call in calls.items()),
                rule="all ranks run the same collectives in the same order",
                remedy="don't branch on local shapes around a collective, nor choose its arguments by them",
            )
        )


class Apart(BaseException):
    """Ranks along these axes turned out to need shapes of their own: trace again, with them apart."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        super().__init__(axes)
        self.axes = axes


class _Abandoned(BaseException):
    """Ends the trace of a class after another one failed; never seen outside."""


def dict_text(place: tuple) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in place)
