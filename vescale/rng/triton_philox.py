"""The words of `virtual_threads.py` on cuda: a Triton kernel that makes a rank's own elements.

Nothing imports this but code that has a GPU; without Triton it can be imported and not called. The kernels
take global indices and write what torch's own kernels would write at those: `words` and, by the same
float operations as cuRAND's, `randn`. Everything else is `words` and exact ops of torch.

Simple on purpose: one index, one engine call. Three words of four are thrown away where a rank's
elements don't share calls, which they only do T elements apart.
"""

# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportArgumentType=false, reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError, explain

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]
except ImportError:  # no GPU build of torch: there's nothing to launch either
    triton = tl = libdevice = None

jit: Any = (lambda function: function) if triton is None else triton.jit
_BLOCK = 1024


@jit
def _engine(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@jit
def _call(thread, offset, key0, key1):
    """The four words of the engine call that holds word number `offset` of `thread`."""
    block = offset // 4
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = (thread & 0xFFFFFFFF).to(tl.uint32)
    c3 = (thread >> 32).to(tl.uint32)
    # Keys come as int64, which has room for every 32-bit word.
    k0 = key0.to(tl.uint32) + tl.zeros_like(c0)
    k1 = key1.to(tl.uint32) + tl.zeros_like(c0)
    return _engine(c0, c1, c2, c3, k0, k1)


@jit
def _words_kernel(thread_at, offset_at, out_at, n, key0, key1, BLOCK: "tl.constexpr"):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    thread = tl.load(thread_at + place, inside, 0)
    offset = tl.load(offset_at + place, inside, 0)
    w0, w1, w2, w3 = _call(thread, offset, key0, key1)
    lane = offset % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    tl.store(out_at + place, word.to(tl.int64), inside)


@jit
def _randn_kernel(thread_at, offset_at, out_at, n, key0, key1, BLOCK: "tl.constexpr"):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    thread = tl.load(thread_at + place, inside, 0)
    offset = tl.load(offset_at + place, inside, 0)
    w0, w1, w2, w3 = _call(thread, offset, key0, key1)
    lane = offset % 4
    first = tl.where(lane < 2, w0, w2).to(tl.float32)
    second = tl.where(lane < 2, w1, w3).to(tl.float32)
    u = first * 2.3283064365386963e-10 + 1.1641532182693481e-10
    angle = second * 1.4629180792671596e-09 + 7.314590396335798e-10
    length = libdevice.sqrt_rn(-2.0 * libdevice.log(u))
    turned = tl.where(lane % 2 == 0, libdevice.fast_sinf(angle), libdevice.fast_cosf(angle))
    tl.store(out_at + place, length * turned, inside)


def _launch(kernel: Any, thread: Tensor, offset: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    if triton is None or thread.device.type != "cuda":
        raise ArgumentError(
            explain(
                f"indices on {thread.device}, {'no Triton' if triton is None else 'Triton'}",
                where="triton_philox",
                rule="its kernels run on cuda, through Triton",
                remedy="virtual_threads.Words.read computes the same on cpu",
            )
        )
    thread, offset = thread.contiguous(), offset.contiguous()
    out = torch.empty(thread.shape, dtype=dtype, device=thread.device)
    n = thread.numel()
    if n:
        with torch.cuda.device(thread.device):
            kernel[(triton.cdiv(n, _BLOCK),)](
                thread, offset, out, n, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, BLOCK=_BLOCK
            )
    return out


def words(thread: Tensor, offset: Tensor, seed: int) -> Tensor:
    """int64 cuda tensors -> int64: word number `offset` of subsequence `thread`.

    The fields of a `virtual_threads.Words`, moved to the device. Raises ArgumentError elsewhere.
    """
    return _launch(_words_kernel, thread, offset, seed, torch.int64)


def randn(thread: Tensor, offset: Tensor, seed: int) -> Tensor:
    """int64 cuda tensors -> float32: the normal number whose lane of its pair is word `offset`."""
    return _launch(_randn_kernel, thread, offset, seed, torch.float32)
