"""Ops on a tensor and on its slices: whether an element's bits depend on what lies beside it.

Elementwise ops of ATen on any slices; others on slices along a dim over which they add up nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale.testing.compare import difference
from vescale.testing.promises import ELEMENTWISE, ROUNDED

aten = torch.ops.aten
LENGTH = 2053
SLICES = [
    (start, size) for start in (0, 1, 5, 64, 777) for size in (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 100)
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SCALARS = {"lerp": 0.3, "clamp": -0.5, "round": 0, "bitwise_and": 5, "bitwise_or": 5, "bitwise_xor": 5}


@dataclass(frozen=True)
class Measured:
    """The largest differences of an op on slices: `ulps`, and `error` in eps of the tensor's largest value.

    None for a dtype that the op doesn't take.
    """

    name: str
    ulps: dict[torch.dtype, int | None]
    error: dict[torch.dtype, float | None]

    @property
    def is_exact(self) -> bool:
        return not any(self.ulps.values())


def names() -> list[str]:
    """The ops that are measured."""
    return sorted(ELEMENTWISE | ROUNDED)


def measure(name: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Measured:
    """The op on values around zero and on positive ones, whole and in slices of many lengths and starts."""
    return _measured(name, dtypes, lambda dtype: _elementwise(name, dtype))


def measure_rows(name: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Measured:
    """The same of a function of `ALONG`, in slices along its first dim."""
    return _measured(name, dtypes, lambda dtype: _rows(ALONG[name], dtype))


def _measured(
    name: str,
    dtypes: tuple[torch.dtype, ...],
    differences: Callable[[torch.dtype], Iterator[tuple[int, float]]],
) -> Measured:
    ulps: dict[torch.dtype, int | None] = {}
    errors: dict[torch.dtype, float | None] = {}
    for dtype in dtypes:
        found = list(differences(dtype))
        ulps[dtype] = max((ulp for ulp, _ in found), default=None)
        errors[dtype] = max((error for _, error in found), default=None)
    return Measured(name, ulps, errors)


def _elementwise(name: str, dtype: torch.dtype) -> Iterator[tuple[int, float]]:
    packet = getattr(aten, name)
    generator = torch.Generator().manual_seed(0)
    for overload in packet.overloads():
        op = getattr(packet, overload)
        for scale, positive in ((2.0, False), (1.0, True), (30.0, False)):
            tensors = [
                torch.randn(LENGTH, generator=generator, dtype=torch.float64) * scale for _ in range(3)
            ]
            tensors = [(t.abs().clamp(1e-3) if positive else t).to(dtype) for t in tensors]
            if "bitwise" in name:
                tensors = [t.to(torch.int32) for t in tensors]
            made = _call(op, tensors)
            if made is None:
                break
            for start, size in SLICES:
                part = _call(op, [t[start : start + size].clone() for t in tensors])
                assert part is not None
                yield _apart(made, part, start)


def _apart(made: Tensor, part: Tensor, start: int) -> tuple[int, float]:
    """(ulps, eps of the largest value of the whole) of a slice computed on its own."""
    if difference(made[start : start + len(part)], part) is None:
        return 0, 0.0
    again = made.clone()
    again[start : start + len(part)] = part
    apart = difference(made, again)
    assert apart is not None
    return apart.ulps or 1, apart.error


# What adds up along other dims than the one that is cut: (first dim cut, the rest) -> (first dim, ...).

ROWS, WIDTH = 96, 80


def _weight(x: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype)


def _attend(x: Tensor) -> Tensor:
    q, k, v = x.view(len(x), 5, 16)[:, :, None], x.flip(1).view(len(x), 5, 16)[:, :, None], x.view(-1, 5, 16)
    return F.scaled_dot_product_attention(q, k, v[:, :, None])


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of each row": lambda x: F.softmax(x, -1),
    "log_softmax of each row": lambda x: F.log_softmax(x, -1),
    "layer_norm of each row": lambda x: F.layer_norm(x, (WIDTH,), _weight(x, WIDTH), _weight(x, WIDTH)),
    "rms_norm of each row": lambda x: F.rms_norm(x, (WIDTH,), _weight(x, WIDTH)),
    "sum of each row": lambda x: x.sum(-1),
    "mean of each row": lambda x: x.mean(-1),
    "amax of each row": lambda x: x.amax(-1),
    "cumsum of each row": lambda x: x.cumsum(-1),
    "sum of each column": lambda x: x.t().contiguous().sum(0),
    "x @ w, by rows of x": lambda x: x @ _weight(x, WIDTH, 48),
    "w @ x, by columns of x": lambda x: (_weight(x, 48, WIDTH) @ x.t().contiguous()).t(),
    "bmm, by batch": lambda x: x.view(-1, 8, 10) @ x.view(-1, 10, 8),
    "conv2d, by batch": lambda x: F.conv2d(x.view(-1, 5, 4, 4), _weight(x, 6, 5, 3, 3)),
    "attention, by batch": _attend,
}


def _rows(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Iterator[tuple[int, float]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    made = fn(x)
    for start, size in ((0, 1), (0, 2), (3, 5), (0, 48), (48, 48), (24, 24), (17, 31), (95, 1)):
        yield _apart(made, fn(x[start : start + size].clone()), start)


def _call(op: Any, tensors: list[Tensor]) -> Tensor | None:
    """op of as many of the tensors as it takes; None where it isn't elementwise over them."""
    schema, given = op._schema, iter(tensors)
    if schema.is_mutable or len(schema.returns) != 1 or torch.Tag.pointwise not in op.tags:
        return None
    args: list[Any] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind == "Tensor" or (kind == "Optional[Tensor]" and op.name() == "aten::clamp.Tensor"):
            args.append(next(given))
        elif argument.has_default_value() and argument.name not in ("min", "max"):
            break
        else:
            args.append(SCALARS.get(op.overloadpacket.__name__, 0.7))
    if op.overloadpacket is aten.where:
        args[0] = args[0] > 0
    if op.overloadpacket is aten.masked_fill:
        args[1] = args[1] > 0
    try:
        result = op(*args)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return result if isinstance(result, Tensor) and result.shape == tensors[0].shape else None
