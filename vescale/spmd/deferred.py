"""Deferred: run a constructor without memory; make what it leaves behind later, one tensor at a time.

The constructor runs on fake tensors, and every ATen call that makes or writes values is written down. The
value of a tensor is then made by running again the calls that it depends on, and no others. Random draws are
really drawn while the constructor runs, into memory that is dropped at once, so that the generator is always
where plain torch would have it; the state before each draw is kept, and the draw is repeated from it. Python
that needs a value (`if x.any()`, `.item()`) gets the real one, made in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    data_dependent_errors,
    forget_fakes,
    no_modes,
    storage_key,
    written_tensors,
)
from .._errors import TraceError, explain
from .program.trace import user_line

aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a part of some memory: the memory by number, and where in it."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The real tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Draw:
    """The generator of a random call, and its state before."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """An ATen call that makes or writes memory; tensors in its arguments are Views."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[View | None, ...]
    reads: frozenset[int]  # memory whose earlier content matters
    default_dtype: torch.dtype
    draw: Draw | None


# In-place ops that don't read what they write, when they write all of it.
_OVERWRITING = frozenset(
    (
        aten.bernoulli_.Tensor,
        aten.bernoulli_.float,
        aten.cauchy_.default,
        aten.copy_.default,
        aten.exponential_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.uniform_.default,
        aten.zero_.default,
    )
)
_REFUSED = frozenset(("set_", "resize_", "resize_as_"))  # memory changes hands, or its size


@dataclass
class Deferred:
    """What a constructor did: see `deferred`."""

    calls: list[Call] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # of a memory: the calls, in order
    sizes: dict[int, int] = field(default_factory=dict)  # bytes
    given: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # memory that was real before
    alive: list[Tensor] = field(default_factory=list)  # one tensor a memory: numbers are not given again

    def view(self, tensor: Tensor) -> View:
        """Where a fake tensor is."""
        key = storage_key(tensor)
        if key not in self.sizes:
            self.sizes[key] = tensor.untyped_storage().nbytes()
            self.alive.append(tensor)
        if tensor.is_complex() and tensor.is_conj():
            raise _refused("a conjugate that is a view")
        offset = int(tensor.storage_offset())
        return View(key, tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype, tensor.device)

    def real(self, tensor: Tensor) -> Tensor:
        """The value of a fake tensor as it is now, in memory that nobody else has."""
        view = self.view(tensor)
        return self.values([view])[0]

    def values(self, views: list[View]) -> list[Tensor]:
        """The values of tensors as they are now. Generators are left as they are."""
        needed, end = set[int](), len(self.calls)
        pending = [(view.memory, end) for view in views]
        while pending:
            memory, before = pending.pop()
            writers = self.writers.get(memory, [])
            at = bisect_left(writers, before) - 1
            if at < 0 or writers[at] in needed:
                continue
            needed.add(writers[at])
            pending += [(read, writers[at]) for read in self.calls[writers[at]].reads]
        order = sorted(needed)
        last = {memory: index for index in order for memory in self._touched(self.calls[index])}
        kept = {view.memory for view in views}
        storages: dict[int, torch.UntypedStorage] = {}
        generators: dict[torch.Generator, Tensor] = {}
        with no_modes(), torch.no_grad(), _restored(generators):
            for index in order:
                call = self.calls[index]
                self._run(call, storages, generators)
                for memory in self._touched(call):
                    if last[memory] == index and memory not in kept:
                        storages.pop(memory, None)
            return [view.of(self._storage(view, storages)) for view in views]

    def _touched(self, call: Call) -> Iterator[int]:
        yield from call.reads
        yield from (out.memory for out in call.outs if out is not None)
        yield from (view.memory for view in _views((call.args, tuple(call.kwargs.values()))))

    def _run(
        self,
        call: Call,
        storages: dict[int, torch.UntypedStorage],
        generators: dict[torch.Generator, Tensor],
    ) -> None:
        args = _mapped(call.args, View, lambda view: view.of(self._storage(view, storages)))
        kwargs = {
            name: _mapped(value, View, lambda view: view.of(self._storage(view, storages)))
            for name, value in call.kwargs.items()
        }
        if call.draw is not None:
            generators.setdefault(call.draw.generator, call.draw.generator.get_state())
            call.draw.generator.set_state(call.draw.state)
        with _default_dtype(call.default_dtype):
            result = call.op(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for value, out in zip(results, call.outs, strict=True):
            if out is None or out.memory in storages:
                continue
            if value.stride() != out.stride or value.storage_offset() != out.offset:
                made = torch.empty_strided(out.size, out.stride, dtype=out.dtype, device=out.device)
                value = made.copy_(value)
            storages[out.memory] = value.untyped_storage()

    def _storage(self, view: View, storages: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        memory = view.memory
        if memory not in storages:
            given = self.given.get(memory)
            storages[memory] = (
                torch.UntypedStorage(self.sizes[memory], device=view.device)
                if given is None
                else given.clone()
            )
        return storages[memory]


def deferred(make: Callable[[], T]) -> tuple[T, Deferred]:
    """What `make()` returns, its tensors fake, and how to make them real.

    Generators advance as if make ran plainly. Raises TraceError for calls that can't be run later: a write to
    a tensor that existed before, memory that is resized, a numpy array of a tensor, a lazy parameter.
    """
    record, mode = Deferred(), FakeTensorMode()
    try:
        with mode, _Recorder(record, mode):
            return make(), record
    except RuntimeError as error:
        if "subclass" in str(error):  # torch's words for what fake tensors can't do: numpy(), lazy parameters
            raise _refused(str(error).splitlines()[0]) from error
        raise


class _Recorder(TorchDispatchMode):
    """Writes down each call that makes or writes memory."""

    def __init__(self, record: Deferred, fake_mode: Any) -> None:
        super().__init__()
        self.record, self.fake_mode = record, fake_mode
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # of real tensors, by id: themselves and a fake
        self.scratch: torch.UntypedStorage | None = None
        self.fresh: set[int] = set()  # memory of real tensors that only the constructor knows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        is_fresh = func is aten.lift_fresh.default
        lift: Callable[[Tensor], Tensor] = lambda tensor: self.twin(tensor, is_fresh)  # noqa: E731
        args = _mapped(tuple(args), Tensor, lift)
        kwargs = {name: _mapped(value, Tensor, lift) for name, value in kwargs.items()}
        if func.overloadpacket.__name__ in _REFUSED:
            raise _refused(f"{func}, which changes what memory a tensor has")
        written = written_tensors(func, args, kwargs)
        given = self.record.given
        if any(storage_key(t) in given and storage_key(t) not in self.fresh for t in written):
            raise _refused("a write to a tensor that existed before")
        operands = _tensors((args, tuple(kwargs.values())))
        # Before the call: it may write, resize or free what they are.
        views = {id(tensor): self.record.view(tensor) for tensor in operands}
        seen: Callable[[Tensor], View] = lambda tensor: views[id(tensor)]  # noqa: E731
        call = Call(
            func,
            _mapped(args, Tensor, seen),
            {name: _mapped(value, Tensor, seen) for name, value in kwargs.items()},
            (),
            self.reads(func, operands, written),
            torch.get_default_dtype(),
            None,
        )
        if torch.Tag.nondeterministic_seeded in func.tags and not any(t.is_meta for t in operands):
            call = self.draw(call, operands, written)
        try:
            result = func(*args, **kwargs)
        except data_dependent_errors():
            result = self.ask(call)
        forget_fakes(self.fake_mode)
        self.write_down(call, result, written)
        return result

    def twin(self, tensor: Tensor, is_fresh: bool) -> Tensor:
        """A fake tensor for a real one, whose memory is known."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self.twins:
            with no_modes():  # a copy: its own memory may be written before it is read
                value = tensor.detach().clone()
            fake = self.fake(value)
            self.twins[id(tensor)] = tensor, fake
            self.record.given[self.record.view(fake).memory] = value.untyped_storage()
        fake = self.twins[id(tensor)][1]
        if is_fresh:
            self.fresh.add(storage_key(fake))
        return fake

    def fake(self, real: Tensor) -> Tensor:
        """A fake tensor of the looks of a real one."""
        with self.fake_mode:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)

    def reads(self, func: OpOverload, operands: list[Tensor], written: list[Tensor]) -> frozenset[int]:
        """The memory whose content before the call matters."""
        target = written[0] if func in _OVERWRITING else None
        if target is not None and target.untyped_storage().nbytes() != target.numel() * target.itemsize:
            target = None  # it writes a part only
        if func.overloadpacket.__name__.endswith("_like"):
            return frozenset()
        return frozenset(storage_key(tensor) for tensor in operands if tensor is not target)

    def draw(self, call: Call, operands: list[Tensor], written: list[Tensor]) -> Call:
        """Draws now, and drops what is drawn: the generator moves on as it should."""
        generators = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.Generator)]
        generator = generators[0] if generators else _default_generator(call, operands)
        draw = Draw(generator, generator.get_state())
        # What the draw reads may matter to how much it draws; the target of an in-place draw doesn't.
        scratch = {self.record.view(tensor).memory for tensor in written}
        found: dict[View, Tensor] = {}
        if call.reads - scratch:
            views = list(_views((call.args, tuple(call.kwargs.values()))))
            found = dict(zip(views, self.record.values(views), strict=True))

        def real(view: View) -> Tensor:
            return found[view] if view in found else self.empty(view)

        with no_modes(), torch.no_grad():
            generator.set_state(draw.state)
            call.op(
                *_mapped(call.args, View, real),
                **{name: _mapped(value, View, real) for name, value in call.kwargs.items()},
            )
        return replace(call, draw=draw)

    def empty(self, view: View) -> Tensor:
        """Memory to draw into. It is used again: freed for each draw, it would leave holes in the heap."""
        size = self.record.sizes[view.memory]
        if self.scratch is None or self.scratch.nbytes() < size or self.scratch.device != view.device:
            self.scratch = None
            self.scratch = torch.UntypedStorage(size, device=view.device)
        return view.of(self.scratch)

    def ask(self, call: Call) -> Any:
        """The answer to a call that needs values: a Python value, or tensors whose shapes depend on them."""
        views = list(dict.fromkeys(_views((call.args, tuple(call.kwargs.values())))))
        found = dict(zip(views, self.record.values(views), strict=True))
        with no_modes(), torch.no_grad():
            result = call.op(
                *_mapped(call.args, View, found.__getitem__),
                **{n: _mapped(value, View, found.__getitem__) for n, value in call.kwargs.items()},
            )
        return _mapped(result, Tensor, self.fake)

    def write_down(self, call: Call, result: Any, written: list[Tensor]) -> None:
        operands = {view.memory for view in _views((call.args, tuple(call.kwargs.values())))}
        results = result if isinstance(result, (tuple, list)) else (result,)
        outs = tuple(self.record.view(out) if isinstance(out, Tensor) else None for out in results)
        changed = {storage_key(tensor) for tensor in written}
        changed |= {out.memory for out in outs if out is not None and out.memory not in operands}
        if changed:  # others are views, and questions
            for memory in changed:
                self.record.writers.setdefault(memory, []).append(len(self.record.calls))
            self.record.calls.append(replace(call, outs=outs))


def _default_generator(call: Call, operands: list[Tensor]) -> torch.Generator:
    device = operands[0].device if operands else torch.device(call.kwargs.get("device") or "cpu")
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise _refused(f"a draw on the device {device}")


def _refused(what: str) -> TraceError:
    return TraceError(
        explain(
            what,
            where=user_line(),
            rule="a constructor runs without memory first: it makes tensors of its own and fills them",
            remedy="build the module plainly, and pass it to vs.parallelize",
        )
    )


@contextmanager
def _restored(generators: dict[torch.Generator, Tensor]) -> Iterator[None]:
    """Afterwards the generators in the dict are in the states in it."""
    try:
        yield
    finally:
        for generator, state in generators.items():
            generator.set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _mapped(value: Any, kind: type, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return leaf(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(item, kind, leaf) for item in value])
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _views(item)


__all__ = ["Deferred", "deferred"]
