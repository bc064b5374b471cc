"""The numbers of a draw: one op for whole draws, one for a rank's part, and their kinds.

A kind says how many bits an element has and what is made of them:

    kind                        element                                            dtype
    bits32, bits64              its bits, unsigned or as a two's complement        int64
    uniform32, uniform64        24 or 53 of them as a fraction in [0, 1)           float32, float64
    normal32, normal64          `inversion.py`                                     float32, float64
    exponential32, .. 64        `logarithm.py`                                     float32, float64
    gumbel32, gumbel64          `logarithm.py`                                     float32, float64

    vescale::draw(Tensor key, SymInt[] shape, str kind) -> Tensor
    vescale::draw_at(Tensor key, Tensor runs, SymInt[] shape, str kind) -> Tensor
    vescale::normal_from_bits(Tensor bits) -> Tensor                                 elementwise

`runs` are the indices of the elements wanted, as rows (start, length, stride, count) of an int64 cpu
tensor: those of start + i stride + [0, length) for i < count, one row after the other. `compressed`
makes them of intervals. One row describes an even shard of any dim, so a rank's part costs what its
numbers cost.

On cpu both run the C kernel of `native.py`, where there is one. The torch form here has the same bits.

>>> key = torch.tensor([7, 0])
>>> whole = draw(key, (4, 6), "normal32")
>>> torch.equal(draw_at(key, torch.tensor([[2, 3, 6, 4]]), (4, 3), "normal32"), whole[:, 2:5])
True
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .inversion import invert
from .logarithm import exponential_from_bits, gumbel_from_bits
from .native import kernel
from .philox import each_key, element_bits, library

# Elements a thread computes at least: starting one takes about 50 us, 2^17 numbers 200 us and more.
_PER_THREAD = 1 << 17
# Elements of the torch form at a time on cpu: the temporaries stay in the cache.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class Kind:
    code: int  # its place in philox.c
    width: int
    dtype: torch.dtype
    convert: Callable[[Tensor], Tensor]


def _fraction32(bits: Tensor) -> Tensor:
    return (bits >> 8).to(torch.float32).mul_(2.0**-24)


def _fraction64(bits: Tensor) -> Tensor:
    return (bits >> 11).bitwise_and_(2**53 - 1).to(torch.float64).mul_(2.0**-53)


def _kinds() -> dict[str, Kind]:
    made: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
        "bits32": (torch.int64, lambda bits: bits),
        "bits64": (torch.int64, lambda bits: bits),
        "uniform32": (torch.float32, _fraction32),
        "uniform64": (torch.float64, _fraction64),
    }
    for name, function in (
        ("normal", invert),
        ("exponential", exponential_from_bits),
        ("gumbel", gumbel_from_bits),
    ):
        for dtype, width in ((torch.float32, 32), (torch.float64, 64)):
            made[f"{name}{width}"] = (
                dtype,
                lambda bits, function=function, dtype=dtype: function(bits, dtype),
            )
    return {
        name: Kind(code, int(name[-2:]), dtype, convert)
        for code, (name, (dtype, convert)) in enumerate(made.items())
    }


KINDS = _kinds()


def compressed(intervals: Iterable[tuple[int, int]]) -> Tensor:
    """Intervals of indices -> runs: rows (start, length, stride, count).

    >>> compressed([(2, 5), (8, 11), (14, 17), (30, 31)])
    tensor([[ 2,  3,  6,  3],
            [30,  1,  0,  1]])
    """
    rows: list[list[int]] = []
    for start, stop in intervals:
        if rows and stop - start == rows[-1][1]:
            first, _, stride, count = rows[-1]
            if count == 1 or start == first + stride * count:
                rows[-1][2:] = [start - first if count == 1 else stride, count + 1]
                continue
        rows.append([start, stop - start, 0, 1])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def _indices(runs: Tensor) -> Tensor:
    parts = [
        (start + stride * torch.arange(count)).unsqueeze(1) + torch.arange(length)
        for start, length, stride, count in runs.tolist()
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, dtype=torch.int64)


def from_torch(key: Tensor, runs: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    """`draw_at` with torch ops only, on any device."""
    index = _indices(runs).to(key.device)
    made, out = KINDS[kind], torch.empty(index.shape, dtype=KINDS[kind].dtype, device=key.device)
    step = _CHUNK if key.device.type == "cpu" else max(index.numel(), 1)
    for start in range(0, index.numel(), step):
        part = index[start : start + step]
        out[start : start + step] = made.convert(element_bits(key, part, made.width))
    return out.view(tuple(shape))


def _draw(key: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    numel = math.prod(shape)
    compiled = kernel(numel) if key.device.type == "cpu" else None
    made = KINDS[kind]
    if compiled is None:
        out = torch.empty(numel, dtype=made.dtype, device=key.device)
        step = _CHUNK if key.device.type == "cpu" else max(numel, 1)
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            out[start:stop] = made.convert(element_bits(key, (start, stop), made.width))
        return out.view(tuple(shape))
    out = torch.empty(tuple(shape), dtype=made.dtype)
    pieces = min(torch.get_num_threads(), numel // _PER_THREAD)
    if pieces < 2:
        compiled.draw(made.code, key, torch.tensor([[0, numel, 0, 1]]), out)
        return out
    cuts = [numel * piece // pieces for piece in range(pieces + 1)]
    threads = [
        threading.Thread(
            target=compiled.draw,
            args=(made.code, key, torch.tensor([[start, stop - start, 0, 1]]), out.view(-1)[start:stop]),
        )
        for start, stop in pairwise(cuts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def _draw_at(key: Tensor, runs: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    compiled = kernel(math.prod(shape)) if key.device.type == "cpu" else None
    if compiled is None:
        return from_torch(key, runs, shape, kind)
    out = torch.empty(tuple(shape), dtype=KINDS[kind].dtype)
    compiled.draw(KINDS[kind].code, key, runs, out)
    return out


library.define("draw(Tensor key, SymInt[] shape, str kind) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "draw_at(Tensor key, Tensor runs, SymInt[] shape, str kind) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("draw", _draw, "CompositeExplicitAutograd")
library.impl("draw_at", _draw_at, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::draw", lib=library)
def _(key: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    return key.new_empty(shape, dtype=KINDS[kind].dtype)


@torch.library.register_fake("vescale::draw_at", lib=library)
def _(key: Tensor, runs: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    return key.new_empty(shape, dtype=KINDS[kind].dtype)


def _map_draw(info, in_dims, key: Tensor, shape: Sequence[int], kind: str):
    return each_key(draw, key, in_dims[0], shape, None, kind)


torch.library.register_vmap("vescale::draw", _map_draw, lib=library)


def _normal_from_bits(bits: Tensor) -> Tensor:
    compiled = kernel(bits.numel()) if bits.device.type == "cpu" else None
    return compiled.normal64(bits) if compiled else invert(bits, torch.float64)


library.define(
    "normal_from_bits(Tensor bits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)
library.impl("normal_from_bits", _normal_from_bits, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::normal_from_bits", lib=library)
def _(bits: Tensor) -> Tensor:
    return bits.new_empty(bits.shape, dtype=torch.float64)


def _map_normal_from_bits(info, in_dims, bits: Tensor):
    return normal_from_bits(bits), in_dims[0]


torch.library.register_vmap("vescale::normal_from_bits", _map_normal_from_bits, lib=library)


def draw(key: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    """int64 (2,) -> the numbers of `kind`, of the global shape."""
    return torch.ops.vescale.draw.default(key, shape, kind)


def draw_at(key: Tensor, runs: Tensor, shape: Sequence[int], kind: str) -> Tensor:
    """int64 (2,), runs of global row-major indices -> their elements of `draw`, as `shape`."""
    return torch.ops.vescale.draw_at.default(key, runs, shape, kind)


def normal_from_bits(bits: Tensor) -> Tensor:
    """int64 of any shape -> the float64 normals of these 64 bits.

    >>> float(normal_from_bits(torch.tensor(2**62)))  # the upper quartile
    0.6744897501960817
    """
    return torch.ops.vescale.normal_from_bits.default(bits)
