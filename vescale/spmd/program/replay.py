"""Replay: the instructions of one rank on fake tensors, to see what they compute, touch and keep.

Nothing is guessed from names: every instruction is called, local closures too, and the ATen calls that come
out of it are seen with their local shapes. Which values share memory is read off their storages, so a
view costs nothing and keeps its base alive, and what an instruction writes in place is no new memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import flop_counter

from ..._compat import FakeTensorMode, OpOverload, TorchDispatchMode, is_mutable, written_arguments
from ..rules.softmax import cross_entropy_backward
from .codegen import Looks
from .emit import Call, DrawExchange, Exchange, Instruction, StartExchange, WaitExchange
from .ir import Origin, map_args, refs_of
from .last_use import last_uses
from .wire import Wire, together

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Event:
    """What one instruction does. Bytes and floating-point operations are those of the rank.

    `scratch` is the most memory that it holds while it runs, beside its operands and its results.
    """

    name: str
    origin: Origin
    region: str
    flops: int
    bytes_read: int
    bytes_written: int
    scratch: int
    wire: Wire | None = None  # of a collective

    @property
    def bytes_accessed(self) -> int:
        """Bytes read and written; none for a view."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of memory: what is in it, and from which instruction to which it is held.

    `born` is -1 for memory of an argument; `dies` is the number of instructions for what outlives them.
    """

    nbytes: int
    born: int
    dies: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The events of a rank in order, and its memory."""

    events: tuple[Event, ...]
    buffers: tuple[Buffer, ...]


def replay(
    instructions: Sequence[Instruction],
    inputs: Sequence[int],
    outputs: Sequence[int | None],
    looks: Looks,
    wires: Sequence[Wire],
    *,
    held: Iterable[int] = (),
    device: torch.device | None = None,
) -> Replay:
    """What happens when a rank runs `instructions`.

    `wires` are the collectives among them, in order; `held` the inputs that the caller keeps. Every other
    value goes when it was last used, as in the generated program.
    """
    where = device or torch.device("cpu")
    values: dict[int, torch.Tensor] = {}
    memory: dict[int, tuple[torch.UntypedStorage, int, list[int]]] = {}  # by storage: born, values
    events: list[Event] = []
    remaining = iter(wires)
    started: dict[int, int] = {}  # by ticket, the instruction
    regions = _regions(instructions)

    def blank(number: int) -> torch.Tensor:
        shape, dtype = looks(number)
        return torch.empty(shape, dtype=dtype, device=where)

    def keep(number: int, tensor: torch.Tensor, at: int) -> None:
        values[number] = tensor
        storage = tensor.untyped_storage()
        memory.setdefault(id(storage), (storage, at, []))[2].append(number)

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        for number in inputs:
            keep(number, blank(number), -1)
        for at, (instruction, region) in enumerate(zip(instructions, regions, strict=True)):
            if isinstance(instruction, Exchange):
                wire = next(remaining)
                source, target = values[instruction.source], blank(instruction.target)
                keep(instruction.target, target, at)
                name, moved = f"{wire.kind} over {wire.axis}", (source.nbytes, target.nbytes)
                events.append(Event(name, instruction.origin, region, 0, *moved, wire.buffers, wire))
                continue
            if isinstance(instruction, StartExchange):
                wire = together([next(remaining) for _ in instruction.sources])
                started[instruction.ticket] = at
                name, moved = (
                    f"{wire.kind} over {wire.axis}",
                    sum(values[n].nbytes for n in instruction.sources),
                )
                events.append(Event(name, instruction.origin, region, 0, moved, moved, wire.buffers, wire))
                continue
            if isinstance(instruction, WaitExchange):  # what arrives has memory from the start on
                for number in instruction.targets:
                    keep(number, blank(number), started[instruction.ticket])
                events.append(Event("wait", instruction.origin, region, 0, 0, 0, 0))
                continue
            if isinstance(instruction, DrawExchange):
                for number in instruction.makes():
                    keep(number, blank(number), at)
                written = sum(values[number].nbytes for number in instruction.makes())
                events.append(Event(instruction.name, instruction.origin, region, 0, 0, written, 0))
                continue
            watch, made = _call(instruction, values)
            for out, tensor in zip(instruction.outs, made):
                if out is not None:
                    keep(out, tensor, at)
            scratch = watch.peak - watch.held(made)
            counts = watch.flops, watch.bytes_read, watch.bytes_written, max(scratch, 0)
            events.append(Event(name_of(instruction.fn), instruction.origin, region, *counts))
    last = last_uses(instructions, (*held, *outputs))
    buffers = tuple(
        Buffer(storage.nbytes(), born, max(last.get(number, born) for number in numbers), tuple(numbers))
        for storage, born, numbers in memory.values()
    )
    return Replay(tuple(events), buffers)


def _call(call: Call, values: dict[int, torch.Tensor]) -> tuple[_Watch, list[Any]]:
    args = map_args(call.args, lambda ref: values[ref.id])
    kwargs = {name: map_args(value, lambda ref: values[ref.id]) for name, value in call.kwargs.items()}
    operands = [values[number] for number in refs_of((call.args, tuple(call.kwargs.values())))]
    fn = _BODIES.get(call.fn, call.fn)
    with _Watch(operands) as watch:
        result = fn(*args, **kwargs)
    if call.overwrites:  # the results are where the operands were
        return watch, [values[number] for number in call.overwrites]
    return watch, list(result) if call.unpack else [result]


# Ops of ours that are several ATen calls, which their fake form doesn't show.
_BODIES: dict[Any, Callable[..., Any]] = {
    torch.ops.vescale.cross_entropy_backward.default: cross_entropy_backward
}


def shown_by(op: OpOverload, body: Callable[..., Any]) -> None:
    """Registers the ATen calls that an op of ours is made of."""
    _BODIES[op] = body


def _regions(instructions: Sequence[Instruction]) -> list[str]:
    """forward, backward, and what no gradient is taken in: update behind a backward, else other."""
    named, after = [], "other"
    for instruction in instructions:
        region = instruction.origin.region
        after = "update" if region == "backward" else after
        named.append(region or after)
    return named


def name_of(fn: Callable[..., Any]) -> str:
    """What a function that an instruction calls is called."""
    return str(fn) if isinstance(fn, OpOverload) else getattr(fn, "__name__", "call").lstrip("_")


# Ops that read some rows of their first operand only: as much as they return.
_LOOKUPS = {aten.embedding, aten.index, aten.gather, aten.index_select}


class _Watch(TorchDispatchMode):
    """Adds up what the ATen calls of one instruction compute and touch, and the memory that they take."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.flops = self.bytes_read = self.bytes_written = self.peak = 0
        self.given = {id(operand.untyped_storage()) for operand in operands}
        self.made: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        read, made = list(_tensors((args, tuple(kwargs.values())))), list(_tensors(result))
        before = {id(tensor.untyped_storage()) for tensor in read}
        new = [tensor for tensor in made if id(tensor.untyped_storage()) not in before]
        writes_to = _written(func, args)
        if new or writes_to:  # otherwise it is a view
            looked_up = func.overloadpacket in _LOOKUPS
            self.bytes_read += sum(map(_touched, [*made, *read[1:]] if looked_up else read))
            self.bytes_written += sum(map(_touched, [*new, *writes_to]))
            self.flops += flops(func, args, kwargs, result)
        self.made += [(weakref.ref(t), id(t.untyped_storage()), t.untyped_storage().nbytes()) for t in made]
        self.peak = max(self.peak, self.held(made))
        return result

    def held(self, also: Sequence[Any]) -> int:
        """Bytes that are alive and no operand's, those of `also` among them."""
        alive = {key: nbytes for ref, key, nbytes in self.made if ref() is not None and key not in self.given}
        for tensor in _tensors(tuple(also)):
            storage = tensor.untyped_storage()
            if id(storage) not in self.given:
                alive[id(storage)] = storage.nbytes()
        return sum(alive.values())


def flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of an ATen call by torch's formulas: matmuls, convolutions, attention.

    The two kernels of attention on a CPU have the formulas of those on a GPU. Others count none: their time
    goes by the bytes that they touch.
    """
    packet = _LIKE.get(func.overloadpacket, func.overloadpacket)
    formula = flop_counter.flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of the elements; of an expanded tensor those that there are."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    if not is_mutable(func):
        return []
    return [t for index in written_arguments(func) if index < len(args) for t in _tensors(args[index])]
