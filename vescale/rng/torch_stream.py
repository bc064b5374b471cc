"""Torch's own stream on cpu: the elements of a draw that are wanted, and the generator as the draw leaves it.

A cpu draw reads the generator's one sequence (mt19937) element after element, in the order in which the
tensor lies in memory. So the draw of a large tensor is followed by drawing small ones into a buffer, with
torch's own kernels, and keeping what is wanted: all numbers are made, memory is that of what is kept and of
one chunk. What has to be known of the kernels:

* **normal** numbers of a contiguous tensor of 16 elements or more are made in blocks of 16, of 16 uniform
  numbers each. When the size is no multiple of 16, the uniform numbers of the rest are drawn and dropped, and
  the *last* 16 elements are drawn again, over elements that had numbers already
* other normal numbers come in pairs; the generator keeps the second one for the next draw, a buffer or not
* all other kinds (uniform, bernoulli, random, exponential, geometric, cauchy, log_normal) make one element
  after the other of one or two words

A build of torch may have another kernel for a kind (with MKL on Intel processors bernoulli and exponential
numbers are those of a stream of MKL's own). It is not asked which: a probe compares 75 numbers, and a kind
that can't be followed is drawn whole, and cut.

>>> stream = Stream("normal_", (0.0, 1.0), (5, 7), (7, 1), torch.float32)
>>> _ = torch.manual_seed(0)
>>> out = torch.empty(10)
>>> draw(stream, [(out, torch.tensor([[2, 2, 7, 5]]))])  # columns 2 and 3
>>> after = torch.rand(1)
>>> _ = torch.manual_seed(0)
>>> torch.equal(out.view(5, 2), torch.randn(5, 7)[:, 2:4]), torch.equal(after, torch.rand(1))
(True, True)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # elements that the kernel of normal numbers makes at a time
CHUNK = 1 << 15  # elements: large against the cost of a call, small against a cache


@dataclass(frozen=True)
class Stream:
    """What is drawn: `torch.empty_strided(shape, stride, dtype=dtype).kind(*numbers)`, `kind` in place."""

    kind: str
    numbers: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims as the stream goes through them, the outermost first: those of memory."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in memory row by row."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def in_blocks(self) -> bool:
        """Whether the numbers are made 16 at a time."""
        return self.kind == "normal_" and self.numel >= BLOCK and self.is_contiguous

    def fill(self, out: Tensor, generator: torch.Generator | None) -> Tensor:
        """The draw, into `out`."""
        return getattr(out, self.kind)(*self.numbers, generator=generator)

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        look = f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"
        return f"{self.kind}({numbers}) of {look}{'' if self.is_contiguous else f' strided {self.stride}'}"


def draw(
    stream: Stream,
    wanted: Sequence[tuple[Tensor, Tensor | Runs]],
    generator: torch.Generator | None = None,
    chunk: int = CHUNK,
) -> None:
    """Makes the draw, and writes what is wanted of it: (flat tensor to fill, runs of indices) each.

    Indices count in the order of the stream, `stream.order`; runs are those of `numbers.compressed`,
    or `Runs` made of them.
    """
    parts = [_Part(out, runs) for out, runs in wanted]
    if not stream.numel:
        return
    if stream.device != "cpu" or not (chunk < CHUNK or can_follow(_probe_of(stream))):
        take(whole(stream, generator), wanted)
        return
    for start, numbers, owner in _chunks(stream, generator, parts, chunk):
        for part in parts:
            if part is not owner:
                part.take(numbers, start)


def take(numbers: Tensor, wanted: Sequence[tuple[Tensor, Tensor | Runs]]) -> None:
    """Writes what is wanted of flat numbers: see `draw`."""
    for out, runs in wanted:
        _Part(out, runs).take(numbers, 0)


def whole(stream: Stream, generator: torch.Generator | None = None) -> Tensor:
    """The draw as torch makes it, flat and in the order of the stream."""
    made = torch.empty_strided(stream.shape, stream.stride, dtype=stream.dtype, device=stream.device)
    return stream.fill(made, generator).permute(stream.order).reshape(-1)


def _chunks(
    stream: Stream, generator: torch.Generator | None, parts: Sequence[_Part], chunk: int
) -> Iterator[tuple[int, Tensor, _Part | None]]:
    """(start, numbers from there on, who has them) of chunks that are wanted; others are only drawn."""
    numel, blocks = stream.numel, stream.in_blocks
    memory = torch.empty(min(numel, chunk) * (1 if stream.is_contiguous else 2), dtype=stream.dtype)
    # Normal numbers in pairs, for tensors that are not contiguous, have the buffer not contiguous either.
    buffer = memory if stream.is_contiguous else memory[::2]
    rest = numel % BLOCK if blocks else 0
    for start in range(0, numel - rest, chunk):
        size = min(chunk, numel - rest - start)
        wanting = [part for part in parts if part.wants(start, start + size)]
        if wanting:
            slot = wanting[0].slot(start, start + size) if stream.is_contiguous else None
            owner = None if slot is None else wanting[0]  # it is drawn where it belongs
            yield start, stream.fill(buffer[:size] if slot is None else slot, generator), owner
        elif blocks:
            buffer[:size].uniform_(generator=generator)  # as many words, and no logarithms
        else:
            stream.fill(buffer[:size], generator)
    if rest:
        if stream.dtype.itemsize > 2:
            buffer[:rest].uniform_(generator=generator)
        yield numel - BLOCK, stream.fill(buffer[:BLOCK], generator), None


@lru_cache(maxsize=1024)
def can_follow(stream: Stream) -> bool:
    """Whether chunks give the numbers of the draw here: found by trying, on generators of its own."""
    one, other = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    skipped = 2 * BLOCK  # one chunk: its numbers aren't wanted
    expected = whole(stream, one)[skipped:]
    found = torch.empty_like(expected)
    draw(stream, [(found, torch.tensor([[skipped, len(found), 0, 1]]))], other, chunk=skipped)
    return torch.equal(found, expected) and torch.equal(one.get_state(), other.get_state())


def _probe_of(stream: Stream) -> Stream:
    """75 elements of the same kind, contiguous or not as the stream is."""
    return replace(stream, shape=(75,), stride=(1 if stream.is_contiguous else 2,))


class Runs:
    """The runs of `numbers.compressed`, sorted: worth keeping where the same ones are drawn for again."""

    def __init__(self, runs: Tensor) -> None:
        rows = runs.tolist()
        places = [0, *accumulate(length * count for _, length, _, count in rows)]
        # One interval may have any stride: it is not used.
        self.rows = sorted((row[0], row[1], row[2] or 1, row[3], at) for row, at in zip(rows, places))
        ends = (start + (count - 1) * stride + length for start, length, stride, count, _ in self.rows)
        self.ends = list(accumulate(ends, max))


class _Part:
    """Where some of the numbers go: runs of indices -> consecutive elements of a flat tensor."""

    def __init__(self, out: Tensor, runs: Tensor | Runs) -> None:
        found = runs if isinstance(runs, Runs) else Runs(runs)
        self.out, self.runs, self.ends = out, found.rows, found.ends

    def wants(self, start: int, stop: int) -> bool:
        """Whether one of the indices in [start, stop) may be wanted."""
        first = bisect_right(self.ends, start)
        return first < len(self.runs) and self.runs[first][0] < stop

    def slot(self, start: int, stop: int) -> Tensor | None:
        """Where the numbers [start, stop) belong, if that is one place."""
        first = bisect_right(self.ends, start)
        begin, length, _, count, at = self.runs[first]
        if count > 1 or start < begin or stop > begin + length:
            return None
        return self.out[at + start - begin : at + stop - begin]

    def take(self, numbers: Tensor, begin: int) -> None:
        """Keep what is wanted of `numbers`, which are those from index `begin` on."""
        end = begin + len(numbers)
        for index in range(bisect_right(self.ends, begin), len(self.runs)):
            start, length, stride, count, at = self.runs[index]
            if start >= end:
                return
            # The rows first .. last have elements here; the outermost two may stick out.
            first = max(-(-(begin - start - length + 1) // stride), 0)
            last = min((end - 1 - start) // stride, count - 1)
            while first <= last and start + first * stride < begin:
                self._row(numbers, begin, start + first * stride, length, at + first * length)
                first += 1
            while first <= last and start + last * stride + length > end:
                self._row(numbers, begin, start + last * stride, length, at + last * length)
                last -= 1
            if first <= last:
                rows, step = last - first + 1, numbers.stride(0)
                offset = numbers.storage_offset() + (start + first * stride - begin) * step
                found = numbers.as_strided((rows, length), (stride * step, step), offset)
                self.out[at + first * length : at + (last + 1) * length].view(rows, length).copy_(found)

    def _row(self, numbers: Tensor, begin: int, start: int, length: int, at: int) -> None:
        low, high = max(start, begin), min(start + length, begin + len(numbers))
        self.out[at + low - start : at + high - start] = numbers[low - begin : high - begin]


__all__ = ["Runs", "Stream", "can_follow", "draw", "take", "whole"]
