"""Torch's own random ops in a trace: each becomes one draw, an effect, and ordinary ops of what it makes.

    noise = aten.empty_like(x)                       v1 = empty_like(v0)
    aten.bernoulli_.float(noise, 0.9)           ->   v2, = torch_draw(bernoulli_(0.9) of float32[8,6])
                                                     v3 = overwrite(v1, v2)

A draw is at the global shape, and fills a tensor in the order of memory: where that isn't row by row the
result of `torch_draw` has its dims in the order of the stream, and a permute follows. Ops with tensors for
parameters draw from the bare distribution, and apply the parameters as torch does. What has no form here
(randperm, multinomial, poisson, ..: how much they draw depends on values) runs whole, once.

A draw reads the generator when the program runs, never when it is traced. Of a generator that the function
was given or closes over a program keeps only which one it is: see `Source` and `using`.

    vescale::torch_draw() -> Tensor                        its node has (Stream, Source) for arguments
    vescale::overwrite(Tensor(a!) self, Tensor source) -> Tensor(a!)
    vescale::torch_state(Generator generator) -> Tensor   the generator's state
    vescale::set_torch_state(Tensor state, Generator generator) -> ()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._compat import OpOverload, bound_arguments
from ..._errors import TraceError, explain
from ...rng.torch_stream import Stream
from ..rules.notation import find_rule
from .ir import Node

aten = torch.ops.aten

_library = torch.library.Library("vescale", "FRAGMENT")
_RANDOM = (torch.Tag.nondeterministic_seeded,)
_library.define("torch_draw() -> Tensor", tags=_RANDOM)
_library.define("overwrite(Tensor(a!) self, Tensor source) -> Tensor(a!)")
_library.define("torch_state(Generator generator) -> Tensor", tags=_RANDOM)
_library.define("set_torch_state(Tensor state, Generator generator) -> ()", tags=_RANDOM)

torch_draw = torch.ops.vescale.torch_draw.default
overwrite = torch.ops.vescale.overwrite.default
torch_state = torch.ops.vescale.torch_state.default
set_torch_state = torch.ops.vescale.set_torch_state.default


def _get(generator: torch.Generator) -> Tensor:
    return generator.get_state()


def _set(state: Tensor, generator: torch.Generator) -> None:
    generator.set_state(state)


def _state_like(generator: torch.Generator) -> Tensor:
    return torch.empty(generator.get_state().numel(), dtype=torch.uint8)


_library.impl("torch_state", _get, "CompositeExplicitAutograd")
_library.impl("set_torch_state", _set, "CompositeExplicitAutograd")
torch.library.register_fake("vescale::torch_state", lib=_library)(_state_like)
torch.library.register_fake("vescale::set_torch_state", lib=_library)(lambda state, generator: None)


# Generators.


@dataclass(frozen=True, slots=True)
class Source:
    """Whose numbers: the default generator's of a device, that of an argument, or a closed-over one's."""

    device: str
    argument: int | None = None  # which leaf of the arguments
    closed: int | None = None  # which of the generators that the function closes over

    def __str__(self) -> str:
        if self.argument is not None:
            return f"the generator in argument {self.argument}"
        return f"closed-over generator {self.closed}" if self.closed is not None else "the default generator"

    def find(self) -> torch.Generator:
        """The generator itself, in a call that is running."""
        arguments, closed = _given.get()
        if self.argument is not None:
            return arguments[self.argument]
        if self.closed is not None:
            return closed[self.closed]
        return default_generator(self.device)


def default_generator(device: str) -> torch.Generator:
    """That of the device of this type which is in use."""
    return (
        torch.default_generator
        if device == "cpu"
        else torch.cuda.default_generators[torch.cuda.current_device()]
    )


_given: ContextVar[tuple[Sequence[Any], Sequence[Any]]] = ContextVar("vescale_generators", default=((), ()))


@contextmanager
def using(arguments: Sequence[Any], closed: Sequence[torch.Generator]) -> Iterator[None]:
    """Inside, programs find the generators among the leaves of their arguments and the closed-over ones."""
    token = _given.set((arguments, closed))
    try:
        yield
    finally:
        _given.reset(token)


# What an op draws, with one kernel of torch.

_LIKE_UNIFORM = ("rand", "rand_like")
_LIKE_NORMAL = ("randn", "randn_like")
# In-place kind -> the names of its numbers.
_KINDS = {
    "uniform_": ("from", "to"),
    "normal_": ("mean", "std"),
    "exponential_": ("lambd",),
    "geometric_": ("p",),
    "cauchy_": ("median", "sigma"),
    "log_normal_": ("mean", "std"),
}


def stream_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Stream | None:
    """The draw of a call that made `result`, or wrote it; None when it isn't one kernel's."""
    found = _numbers(op, bound_arguments(op, args, kwargs))
    if found is None:
        return None
    kind, numbers = found
    look = (tuple(result.shape), tuple(result.stride()), result.dtype, result.device.type)
    if not result.dtype.is_complex:
        return Stream(kind, numbers, *look)
    if kind == "normal_":  # half of the variance each
        numbers = (0.0, numbers[1] / math.sqrt(2))
    shape, stride, dtype, device = look
    return Stream(kind, numbers, (*shape, 2), (*(2 * step for step in stride), 1), dtype.to_real(), device)


def _numbers(op: OpOverload, given: dict[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    name = op.overloadpacket.__name__.removesuffix("_functional").removesuffix("_")
    if name in _LIKE_UNIFORM:
        return "uniform_", (0.0, 1.0)
    if name in _LIKE_NORMAL:
        return "normal_", (0.0, 1.0)
    if name in ("randint", "randint_like", "random"):
        bounds = (given.get("low", given.get("from")), given.get("high", given.get("to")))
        return "random_", tuple(bound for bound in bounds if bound is not None)
    if name == "bernoulli":
        return ("bernoulli_", (given["p"],)) if isinstance(given.get("p"), (int, float)) else None
    names = _KINDS.get(f"{name}_", ())
    if not names or any(isinstance(given[number], Tensor) for number in names):
        return None
    return f"{name}_", tuple(given[number] for number in names)


# Ops that are others: by what torch's kernels do.


def _bernoulli(p: Tensor, generator: Any = None) -> Tensor:
    return _bernoulli_(torch.empty_like(p, memory_format=torch.contiguous_format), p, generator)


def _bernoulli_(self: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    wide = torch.float64 if p.dtype is torch.float64 else torch.float32
    uniform = torch.empty_like(self, dtype=wide).uniform_(generator=generator)
    return self.copy_(uniform < p)


def _normal_of_mean(mean: Tensor, std: float = 1.0, generator: Any = None) -> Tensor:
    return _contiguous(mean).normal_(0, std, generator=generator).add_(mean)


def _normal_of_std(mean: float, std: Tensor, generator: Any = None) -> Tensor:
    return _contiguous(std).normal_(generator=generator).mul_(std).add_(torch.full((), mean, dtype=std.dtype))


def _normal_of_both(mean: Tensor, std: Tensor, generator: Any = None) -> Tensor:
    like = mean.expand(torch.broadcast_shapes(mean.shape, std.shape))
    return _contiguous(like).normal_(generator=generator).mul_(std).add_(mean)


def _contiguous(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x, torch.empty_like(x)
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _rrelu(self: Tensor, noise: Tensor, *rest: Any, **options: Any) -> Tensor:
    out, made = aten.rrelu_with_noise_functional.default(self, noise, *rest, **options)
    noise.copy_(made)
    return out


DECOMPOSED: dict[OpOverload, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.bernoulli.Tensor: lambda self, p, generator=None: _bernoulli_(torch.empty_like(self), p, generator),
    aten.normal.Tensor_float: _normal_of_mean,
    aten.normal.float_Tensor: _normal_of_std,
    aten.normal.Tensor_Tensor: _normal_of_both,
    aten.rrelu_with_noise.default: _rrelu,
}
_ON_CPU: dict[OpOverload, Callable[..., Any]] = {aten.native_dropout.default: _native_dropout}


def decomposition(op: OpOverload, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to run in the place of a random op: None to leave it as it is."""
    if op in _ON_CPU and args[0].device.type == "cpu":
        return _ON_CPU[op]
    found = DECOMPOSED.get(op)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    same = len({tensor.dtype for tensor in tensors}) <= 1 and all(t.device.type == "cpu" for t in tensors)
    # Of a mean and a deviation of two dtypes torch keeps one: such a call runs whole.
    return found if same or op.overloadpacket is not aten.normal else None


def refuse_in_shard_map(op: OpOverload, where: str) -> TraceError:
    """The error for a random op of torch inside shard_map."""
    return TraceError(
        explain(
            f"{op}, a random op of torch, inside shard_map",
            where=where,
            rule="torch's generator makes the numbers of global tensors; those of a shard_map body are local",
            remedy="draw with a key: vs.rng.normal(vs.rng.fold_in(key, vs.axis_index(axis)), shape), "
            "or draw outside and pass the numbers",
        )
    )


def is_effect(op: OpOverload) -> bool:
    """Whether the op reads or moves a generator of torch's. Keyed draws and attention have rules."""
    return torch.Tag.nondeterministic_seeded in op.tags and find_rule(op) is None


def draws_from_nothing(node: Node) -> bool:
    """Whether a node makes one value, whole, of a generator's numbers only."""
    return is_effect(node.op) and node.op is not torch_state and len(node.outs) == 1 and not list(node.refs())


def replaced(op: OpOverload, args: Any, kwargs: dict[str, Any], source: Source) -> tuple[Any, dict[str, Any]]:
    """Arguments with the generator among them replaced by which one it is."""
    if op in (torch_state, set_torch_state):
        return (*args[:-1], source), kwargs
    swap: Callable[[Any], Any] = lambda value: source if isinstance(value, torch.Generator) else value  # noqa: E731
    return tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}


__all__ = [
    "Source",
    "Stream",
    "decomposition",
    "default_generator",
    "draws_from_nothing",
    "is_effect",
    "overwrite",
    "refuse_in_shard_map",
    "replaced",
    "set_torch_state",
    "stream_of",
    "torch_draw",
    "torch_state",
    "using",
]
