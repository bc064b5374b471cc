"""Torch's own stream on cuda, by virtual threads: which random word is which element, on integers.

A kernel of torch that draws for N elements starts T = 256 grid threads,

    grid = min(multiprocessors * (threads of a multiprocessor // 256), ceil(N / 256))

and thread t reads the words of cuRAND's Philox4x32-10 with key = seed, subsequence t, from the generator's
offset on. Word number o of subsequence t is word o % 4 of the block with counter (o // 4, t), 64 bits each.
Element j is made by thread (j // w) % T of its words from number w ((j // w) // T) + j % w on, for a kernel
that handles w neighbours at a time: 1 in all but dropout. Then the generator's offset grows, the same for
each thread, by 4 times the number of engine calls. So what a rank holds follows from the *global* size and
its own indices, on any machine and without a GPU.

What surprises, each of it in a test:

* one engine call serves four elements, T apart; one offset step is four words, used or not
* float64 and integers of a large range take two words an element, so an engine call serves two
* when N is more than the largest grid, an element's word comes from a later word of the same thread:
  so **the numbers of a large draw depend on the number of multiprocessors** (a parameter here)
* a tensor of more than 2 GB is drawn in halves, one after the other, and before the first one the offset
  grows once for the whole tensor: those words are skipped
* dropout reads 2, 4 or 8 neighbours at a time where size and memory allow; for 2 it uses two words of each
  engine call, and drops the others
* bernoulli of a tensor of probabilities is a kernel of its own: thread j // 4, whatever T

**Exact** are the words, uniform numbers, dropout's and bernoulli's masks, and integers. Normal numbers are
not: cuRAND's Box-Muller uses the GPU's fast sine and cosine, which differ from others by some ulps (absolute
error about 1e-6). Sources: the device API of cuRAND; DistributionTemplates.h and Dropout.cu of torch (2025).

Functions take the seed, the generator's offset before the draw (0 after torch.manual_seed), the global
number of elements, the indices wanted (all, unless given), and return the numbers and the offset after it.

>>> numbers, offset = rand(0, 0, 10)  # torch.manual_seed(0); torch.rand(10, device="cuda")
>>> numbers[:4]
tensor([0.3990, 0.5167, 0.0249, 0.9401])
>>> rand(0, offset, 10, index=torch.tensor([1, 0]))[0]  # elements 1 and 0 of the next torch.rand
tensor([0.7910, 0.9722])
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .philox import MASK, philox4x32

BLOCK = 256  # threads
ENGINE = 4  # words of an engine call, and the step of the generator's offset
WIDE_RANGE = 2**28  # from here on randint takes 64 bits
_MOST = 2**31 - 1  # bytes or elements that 32-bit indices reach


@dataclass(frozen=True)
class Processor:
    """What of a GPU the numbers depend on. The default is an H100 or H200 (SXM)."""

    multiprocessors: int = 132
    threads: int = 2048  # of a multiprocessor, at most

    @staticmethod
    def of(device: torch.device | str | int) -> "Processor":
        """That of a cuda device."""
        found = torch.cuda.get_device_properties(device)
        return Processor(found.multi_processor_count, found.max_threads_per_multi_processor)

    def virtual_threads(self, numel: int) -> int:
        """How many threads a kernel for `numel` elements starts.

        >>> Processor(80).virtual_threads(1000), Processor(80).virtual_threads(10**9)
        (1024, 163840)
        """
        return BLOCK * min(self.multiprocessors * (self.threads // BLOCK), -(-numel // BLOCK))

    def advance(self, numel: int, per_call: int = ENGINE) -> int:
        """By how much the generator's offset grows, for kernels that get `per_call` elements a call.

        >>> Processor(80).advance(1000), Processor(80).advance(163840 * 4 + 1)
        (4, 8)
        """
        if not numel:
            return 0
        return ((numel - 1) // (self.virtual_threads(numel) * per_call) + 1) * ENGINE


H100 = Processor()


@dataclass(frozen=True)
class Words:
    """Where elements find their words: of thread `thread`, from number `offset` on (int64 tensors)."""

    thread: Tensor
    offset: Tensor

    def read(self, seed: int, number: int = 0) -> Tensor:
        """Word `number` of each element: 32 bits, as int64."""
        offset = self.offset + number
        block, lane = offset // ENGINE, offset % ENGINE
        key = torch.tensor([seed & MASK, seed >> 32 & MASK])
        counter = (block & MASK, block >> 32, self.thread & MASK, self.thread >> 32)
        words = torch.stack(philox4x32(*counter, key)) & MASK
        return words.gather(0, lane.unsqueeze(0)).squeeze(0)


def launches(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the kernels that draw a tensor: one, or one for each part of 2 GB or less.

    >>> list(launches(2**29, 4)), list(launches(2**29 + 2, 4))
    ([(0, 536870912)], [(0, 268435457), (268435457, 268435457)])
    """
    waiting = [(0, numel)]
    while waiting:
        start, size = waiting.pop()
        if size <= _MOST and (size - 1) * itemsize + 1 <= _MOST:
            yield start, size
        else:
            half = size // 2
            waiting += [(start + half, size - half), (start, half)]


def grid_stride(
    offset: int, numel: int, index: Tensor, processor: Processor, itemsize: int, words: int = 1
) -> tuple[Words, int]:
    """Where a kernel that strides over the grid finds `words` words for each element, and the offset after.

    Element j of a launch of T threads: thread j % T, from word `words` (j // T) on.
    """
    parts = list(launches(numel, itemsize)) if numel else []
    if len(parts) > 1:
        offset += processor.advance(numel, ENGINE // words)
    thread, at = torch.empty_like(index), torch.empty_like(index)
    for start, size in parts:
        inside = (index >= start) & (index < start + size)
        threads, local = processor.virtual_threads(size), index[inside] - start
        thread[inside], at[inside] = local % threads, offset + words * (local // threads)
        offset += processor.advance(size, ENGINE // words)
    return Words(thread, at), offset


def vectors(offset: int, numel: int, index: Tensor, processor: Processor, width: int) -> tuple[Words, int]:
    """Where dropout finds the word of each element, when it reads `width` neighbours at a time."""
    threads, vector, place = processor.virtual_threads(numel), index // width, index % width
    # Two at a time: each engine call's words 2 and 3 are dropped.
    step = ENGINE if width == 2 else width
    at = offset + step * (vector // threads) + place
    return Words(vector % threads, at), offset + processor.advance(numel)


def dropout_width(numel: int, dtype: torch.dtype, most: int = 8) -> int:
    """How many neighbours dropout reads at a time, for contiguous memory that torch has allocated.

    16 bytes, `most` at most (8 where torch was built for cuda 12.8 or later, else 4), halved until the
    number of elements is a multiple. For a view that starts elsewhere pass what its alignment allows.

    >>> [dropout_width(n, torch.float32) for n in (16, 6, 7)], dropout_width(16, torch.bfloat16)
    ([4, 2, 1], 8)
    """
    width = min(most, 16 // dtype.itemsize)
    while width > 1 and numel % width:
        width //= 2
    return width


def _indices(numel: int, index: Tensor | None) -> Tensor:
    if index is None:
        return torch.arange(numel)
    if index.dtype != torch.int64 or (
        index.numel() and not 0 <= int(index.min()) <= int(index.max()) < numel
    ):
        raise ArgumentError(
            explain(
                f"index of {index.dtype}, shape {tuple(index.shape)}",
                where="virtual_threads(index=)",
                rule=f"int64 row-major indices of a draw of {numel}",
                remedy="the indices are global: see Layout.regions",
            )
        )
    return index.reshape(-1)


def _unit(words: Words, seed: int, dtype: torch.dtype) -> Tensor:
    """cuRAND's uniform numbers, over (0, 1]: float32 of one word, float64 of two."""
    if dtype == torch.float64:
        bits = words.read(seed) ^ (words.read(seed, 1) << 21)
        return bits.to(dtype) * 2.0**-53 + 2.0**-54
    return words.read(seed).to(torch.float32) * 2.0**-32 + 2.0**-33


def _wide(dtype: torch.dtype) -> int:
    """Words an element."""
    return 2 if dtype == torch.float64 else 1


def rand(
    seed: int,
    offset: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    index: Tensor | None = None,
    processor: Processor = H100,
) -> tuple[Tensor, int]:
    """torch.rand(numel, dtype=dtype, device="cuda"): its elements at `index`, exactly."""
    words, after = grid_stride(offset, numel, _indices(numel, index), processor, dtype.itemsize, _wide(dtype))
    value = _unit(words, seed, dtype).to(dtype)
    return torch.where(value == 1, 0.0, value), after


def randn(
    seed: int,
    offset: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    index: Tensor | None = None,
    processor: Processor = H100,
) -> tuple[Tensor, int]:
    """torch.randn(numel, dtype=dtype, device="cuda"): its elements at `index`, within about 1e-6.

    Elements in the even words of an engine call are sines, those in the odd ones cosines, of the pair:
    sqrt(-2 ln u) sin(2 pi v), sqrt(-2 ln u) cos(2 pi v).

    >>> randn(0, 0, 64)[0][:3]  # torch.manual_seed(0); torch.randn(8, 8, device="cuda")[0, :3]
    tensor([-0.9247, -0.4253, -2.6438])
    """
    wide = _wide(dtype)
    words, after = grid_stride(offset, numel, _indices(numel, index), processor, dtype.itemsize, wide)
    pair = Words(words.thread, words.offset // (2 * wide) * (2 * wide))
    other = Words(pair.thread, pair.offset + wide)
    if dtype == torch.float64:
        u, angle = _unit(pair, seed, dtype), math.pi * 2 * _unit(other, seed, dtype)
    else:
        u = _unit(pair, seed, torch.float32)
        turn = torch.tensor(2 * math.pi * 2.0**-32, dtype=torch.float32)
        angle = other.read(seed).to(torch.float32) * turn + turn / 2
    odd = (words.offset // wide % 2).bool()
    return ((-2 * u.log()).sqrt() * torch.where(odd, angle.cos(), angle.sin())).to(dtype), after


def bernoulli(
    seed: int,
    offset: int,
    numel: int,
    p: float | Tensor,
    dtype: torch.dtype = torch.float32,
    index: Tensor | None = None,
    processor: Processor = H100,
) -> tuple[Tensor, int]:
    """torch.empty(numel, dtype=dtype, device="cuda").bernoulli_(p) as booleans at `index`, exactly.

    p is a number, or a tensor of one probability for each index, as in torch.bernoulli(p).
    """
    places = _indices(numel, index)
    if not isinstance(p, Tensor):
        words, after = grid_stride(offset, numel, places, processor, dtype.itemsize, _wide(dtype))
        unit = _unit(words, seed, dtype)
        return unit < torch.tensor(p, dtype=unit.dtype), after
    words = Words(places // ENGINE, offset + places % ENGINE)
    # The kernel asks for ten words, and the generator gives engine calls.
    after = offset + 12
    given = p.reshape(-1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return _unit(words, seed, torch.float32).to(given.dtype) <= given, after


def dropout(
    seed: int,
    offset: int,
    numel: int,
    p: float,
    dtype: torch.dtype = torch.float32,
    index: Tensor | None = None,
    processor: Processor = H100,
    width: int | None = None,
) -> tuple[Tensor, int]:
    """The elements that F.dropout(x, p) keeps of a contiguous cuda x, as booleans at `index`, exactly.

    `width` is `dropout_width`'s unless given. With p = 0 or 1 torch draws nothing, and this isn't asked.
    """
    places = _indices(numel, index)
    width = dropout_width(numel, dtype) if width is None else width
    if width == 1:
        words, _ = grid_stride(offset, numel, places, processor, itemsize=0)
        after = offset + processor.advance(numel)
    else:
        words, after = vectors(offset, numel, places, processor, width)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    # The draw is float32 whatever x is; 1 - p is rounded to the dtype that x is multiplied in.
    kept = _unit(words, seed, torch.float32).to(accumulated) < torch.tensor(1 - p, dtype=accumulated)
    return kept, after


def randint(
    seed: int,
    offset: int,
    numel: int,
    low: int,
    high: int,
    dtype: torch.dtype = torch.int64,
    index: Tensor | None = None,
    processor: Processor = H100,
) -> tuple[Tensor, int]:
    """torch.randint(low, high, (numel,), dtype=dtype, device="cuda"): its elements at `index`, exactly.

    One word modulo high - low, or for 2^28 values and more two words, the first one the upper.
    """
    span, places = high - low, _indices(numel, index)
    wide = 2 if span >= WIDE_RANGE else 1
    words, after = grid_stride(offset, numel, places, processor, dtype.itemsize, wide)
    bits = words.read(seed).numpy().astype(numpy.uint64)
    if wide == 2:
        bits = bits << numpy.uint64(32) | words.read(seed, 1).numpy().astype(numpy.uint64)
    value = torch.from_numpy((bits % numpy.uint64(span)).astype(numpy.int64))
    return (value + low).to(dtype), after
