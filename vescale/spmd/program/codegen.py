"""Codegen: instructions to straight-line Python over bound functions.

    def program(inputs):
        (v0, v1, v2) = inputs; inputs.clear()
        v3 = mm_0(v0, v1)  # blocks.0.fc1 train.py:12 in forward
        del v0
        v4 = (yield 0, v3).pop()   # all_reduce over tp
        ...

Each value is dropped after its last use. A collective is a `yield` of its number and its input: the world
that hosts the rank runs it, over all the ranks that it hosts, and sends the result back; one that is started
early yields twice, for a ticket and for the results. A draw from a generator of torch's is a `yield`
too: the ranks hosted together share it. Without collectives the program is a plain function.
"""

from __future__ import annotations

import linecache
import math
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ..._compat import FakeTensorMode, OpOverload, TorchDispatchMode
from .emit import Call, DrawExchange, Exchange, Instruction, Looks, StartExchange, WaitExchange
from .ir import Origin, Ref, map_args
from .last_use import last_uses

_names = count()


@dataclass(frozen=True, slots=True)
class Generated:
    """A compiled program, its source, and which instruction each of its lines belongs to."""

    run: Callable[[list[Any]], Any]
    source: str
    filename: str
    origins: Mapping[int, Origin]  # by line number


def generate(
    instructions: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int | None], looks: Looks
) -> Generated:
    """The compiled program. It takes a list of local tensors, which it empties.

    `looks` tells the local shape and dtype of a value by number.
    """
    writer = _Writer(looks)
    last_use = last_uses(instructions, outputs)
    lines = ["def program(inputs):"]
    lines += (
        [f"    ({''.join(f'v{value}, ' for value in inputs)}) = inputs; inputs.clear()"] if inputs else []
    )
    dead = [f"v{value}" for value in dict.fromkeys(inputs) if value not in last_use]
    lines += [f"    del {', '.join(dead)}"] if dead else []
    exchanges = 0
    origins: dict[int, Origin] = {}
    for index, instruction in enumerate(instructions):
        comment = f"  # {instruction.origin}" if str(instruction.origin) else ""
        if isinstance(instruction, Exchange):
            source, target = writer.variable(instruction.source), writer.variable(instruction.target)
            lines.append(f"    {target} = (yield {exchanges}, {source}).pop(){comment}")
            exchanges += 1
            kept = set()
        elif isinstance(instruction, StartExchange):
            sources = "".join(f"{writer.variable(value)}, " for value in instruction.sources)
            lines.append(f"    t{instruction.ticket} = (yield {exchanges}, ({sources})).pop(){comment}")
            exchanges += 1
            kept = set()
        elif isinstance(instruction, DrawExchange):
            sources = "".join(f"{writer.variable(value)}, " for value in instruction.sources)
            targets = "".join("_, " if value is None else f"v{value}, " for value in instruction.targets)
            drawn = f"(yield {exchanges}, ({sources})).pop()"
            lines.append(f"    {targets and f'{targets}= '}{drawn}{comment}")
            exchanges += 1
            kept = set()
        elif isinstance(instruction, WaitExchange):
            targets = "".join(f"v{value}, " for value in instruction.targets)
            lines.append(f"    {targets}= (yield {exchanges}, t{instruction.ticket}).pop(){comment}")
            lines.append(f"    del t{instruction.ticket}")
            exchanges += 1
            kept = set()
        else:
            lines.append(f"    {writer.call(instruction)}{comment}")
            kept = set(instruction.overwrites)  # the variable has a new value
        origins[len(lines)] = instruction.origin
        used = dict.fromkeys([*sorted(set(instruction.reads())), *instruction.makes()])
        gone = [writer.variable(value) for value in used if last_use[value] == index and value not in kept]
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    results = ", ".join("None" if value is None else writer.variable(value) for value in outputs)
    lines += [f"    return [{results}]", ""]
    source = "\n".join(lines)
    filename = f"<vescale program {next(_names)}>"
    # Tracebacks show the failing instruction with the user's line behind it.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(writer.bound)
    exec(compile(source, filename, "exec"), scope)
    run = scope.pop("program")
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return Generated(run, source, filename, origins)


class _Writer:
    """Writes calls, and collects what they name."""

    def __init__(self, looks: Looks) -> None:
        self.looks = looks
        self.bound: dict[str, Any] = {}
        self.seen: dict[Any, str] = {}
        self.variables: dict[int, int] = {}  # value -> the value whose variable it has taken over

    def variable(self, value: int) -> str:
        return f"v{self.variables.get(value, value)}"

    def call(self, call: Call) -> str:
        fn = (
            binding(call.fn, call.args, call.kwargs, self.looks)
            if isinstance(call.fn, OpOverload)
            else call.fn
        )
        named = [f"{name}={self.text(value)}" for name, value in call.kwargs.items()]
        arguments = ", ".join([*map(self.text, call.args), *named])
        text = f"{self.name(fn, getattr(fn, '__name__', 'call'))}({arguments})"
        if call.overwrites:  # the operand's variable is the result from here on
            for out, operand in zip(call.outs, call.overwrites, strict=True):
                if out is not None:
                    self.variables[out] = self.variables.get(operand, operand)
            return text
        outs = [f"v{out}" if out is not None else "_" for out in call.outs]
        if call.unpack:
            return f"{', '.join(outs)}{',' if len(outs) == 1 else ''} = {text}"
        return f"{outs[0]} = {text}"

    def text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.variable(value.id)
        if (
            value is None
            or isinstance(value, (bool, int, str))
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(self.text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        return self.name(value, "k")

    def name(self, value: Any, stem: str) -> str:
        key = (type(value), id(value))
        if key not in self.seen:
            stem = "".join(letter if letter.isalnum() else "_" for letter in stem)
            self.seen[key] = f"{stem}_{len(self.seen)}"
            self.bound[self.seen[key]] = value
        return self.seen[key]


# Bindings. Calling an overload through torch.ops costs twice what torch's own binding costs (1.9 against
# 1.1 us for an add), so we look for a function of torch that makes the very same ATen call, and check it.

_bindings: dict[Any, Callable[..., Any]] = {}


def binding(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], looks: Looks
) -> Callable[..., Any]:
    """The fastest callable that does what `op` does for arguments of these types."""
    key = (op, _kinds(args), tuple((name, _kinds(value)) for name, value in kwargs.items()))
    if key not in _bindings:
        _bindings[key] = next((fn for fn in _candidates(op) if _same_call(fn, op, args, kwargs, looks)), op)
    return _bindings[key]


def _kinds(value: Any) -> Any:
    return tuple(map(_kinds, value)) if isinstance(value, (tuple, list)) else type(value)


def _candidates(op: OpOverload) -> list[Callable[..., Any]]:
    if op.namespace != "aten":
        return []
    name = op.overloadpacket.__name__
    found = [
        getattr(torch, name, None),
        getattr(torch.nn.functional, name, None),
        getattr(torch.Tensor, name, None),
    ]
    builtin = (types.BuiltinFunctionType, types.MethodDescriptorType)
    return [fn for fn in found if isinstance(fn, builtin)]


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _same_call(
    fn: Callable[..., Any], op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], looks: Looks
) -> bool:
    """Whether `fn` makes the one ATen call that `op` makes, with the same arguments.

    Tried on fake tensors like those of the call; what a binding dispatches to depends on types alone.
    """
    made = []
    for attempt in (op, fn):
        with FakeTensorMode(), _Listener() as listener:
            tensors: dict[int, torch.Tensor] = {}

            def fill(ref: Ref, tensors: dict[int, torch.Tensor] = tensors) -> torch.Tensor:
                if ref.id not in tensors:
                    shape, dtype = looks(ref.id)
                    tensors[ref.id] = torch.empty(shape, dtype=dtype)
                return tensors[ref.id]

            filled, named = (
                map_args(args, fill),
                {name: map_args(value, fill) for name, value in kwargs.items()},
            )
            listener.calls.clear()
            try:
                attempt(*filled, **named)
            except Exception:
                return False
            numbers = {id(tensor): f"v{number}" for number, tensor in tensors.items()}
            made.append(
                [
                    (
                        func,
                        _normal(taken, numbers),
                        {name: _normal(value, numbers) for name, value in extra.items() if value is not None},
                    )
                    for func, taken, extra in listener.calls
                    if func.namespace != "prim"
                ]
            )
    return made[0] == made[1] and len(made[0]) == 1


def _normal(value: Any, numbers: dict[int, str]) -> Any:
    if isinstance(value, torch.Tensor):
        return numbers.get(id(value), "?")
    if isinstance(value, (tuple, list)):
        return tuple(_normal(item, numbers) for item in value)
    return value
