"""Philox4x32-10, the counter-based engine under every keyed draw, in torch ops and on Python ints.

The engine maps a 128-bit counter (four 32-bit words) and a 64-bit key (two words) to four random
words. One round is

    (c0, c1, c2, c3) -> (hi(M1*c2) ^ c1 ^ k0, lo(M1*c2), hi(M0*c0) ^ c3 ^ k1, lo(M0*c0))

and after it k0 += W0, k1 += W1 (mod 2^32); there are ten. Source: Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011); tests check the known-answer vectors that
Random123 publishes.

The counter of a draw is (block low, block high, 0, DRAW); DRAW, SPLIT, FOLD_IN and MORE in the
last word keep numbers and derived keys apart. Block b holds the elements 4b .. 4b+3 of 32 bits, or 2b, 2b+1
of 64:

    element i, width 32:  word i%4 of block i//4
    element i, width 64:  word 2(i%2) of block i//2, plus 2^32 times the word after it

so an element depends on the key and its own row-major index only, whatever is drawn around it.

Words are kept in int64, torch's only integer type that is wide enough and has every operator. These
ops are `torch.library` ops, one node each in a traced program:

    vescale::random_bits_at(Tensor key, Tensor index, int width) -> Tensor
    vescale::derive_keys(Tensor key, Tensor data, int domain) -> Tensor

>>> [hex(word) for word in philox4x32_ints((0, 0, 0, 0), (0, 0))]
['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
>>> [hex(word) for word in random_bits_at(torch.tensor([0, 0]), torch.arange(4), 32).tolist()]
['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

# The last counter word says what the block is for.
DRAW, SPLIT, FOLD_IN, MORE = 0, 1, 2, 3

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32_ints(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block on Python ints: the definition, and the quick way to derive a few keys."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor) -> Words:
    """Many blocks of one key: counter words int64 (any one shape), key int64 (2,) -> four words.

    The low 64 bits of a product are the same for signed and unsigned factors, so the wrapped int64
    product *is* the 64-bit product of two 32-bit words; an arithmetic shift and a mask take its
    high word. The low word is only ever xor-ed into something that is masked, or returned: it stays
    in its dirty product. Hence **the results' bits above 32 are undefined**; mask them.
    """
    rounds = torch.arange(ROUNDS, device=key.device)
    k0s = (rounds * W0 + key[0]).bitwise_and_(MASK).unbind()
    k1s = (rounds * W1 + key[1]).bitwise_and_(MASK).unbind()
    for k0, k1 in zip(k0s, k1s):
        p0, p1 = c0 * M0, c2 * M1
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3 = p1, p0
    return c0, c1, c2, c3


def _per_block(width: int) -> int:
    if width not in (32, 64):
        raise ValueError(f"width is 32 or 64, not {width}")
    return 128 // width


def _chunk(device: torch.device) -> int:
    """Blocks computed at a time. It bounds the temporaries and has no effect on the bits.

    On cpu 2^15 blocks a thread: fewer, and the calls cost more than the work (14 ns a number at
    2^13, 8 at 2^16); torch also uses one thread for each 2^15 elements.
    """
    return max(2, torch.get_num_threads()) << 15 if device.type == "cpu" else 1 << 22


def _words(key: Tensor, number: Tensor, domain: int) -> Words:
    """The words, dirty above 32 bits, of the blocks (number low, number high, 0, domain)."""
    if number.device.type == "cpu" and number.numel() <= 16:
        # Ten rounds are a hundred torch calls, 185 us; on ints a block takes 4 us.
        k0, k1 = key.tolist()
        blocks = [philox4x32_ints((n & MASK, n >> 32 & MASK, 0, domain), (k0, k1)) for n in number.tolist()]
        c0, c1, c2, c3 = torch.tensor(blocks, dtype=torch.int64).view(-1, 4).unbind(1)
        return c0, c1, c2, c3
    high = (number >> 32).bitwise_and_(MASK)
    zero = torch.zeros_like(number)
    return philox4x32(number & MASK, high, zero, torch.full_like(number, domain), key)


def _fill(out: Tensor, key: Tensor, block: Tensor, width: int) -> None:
    """out (blocks, 128 // width) := the elements of the blocks whose numbers are given."""
    words = _words(key, block, DRAW)
    if width == 32:
        for lane, word in enumerate(words):
            torch.bitwise_and(word, MASK, out=out[:, lane])
    else:
        for lane, (low, high) in enumerate((words[:2], words[2:])):
            torch.bitwise_or(low & MASK, high << 32, out=out[:, lane])


def element_bits(key: Tensor, index: Tensor | tuple[int, int], width: int) -> Tensor:
    """The bits, int64, of the elements of a flat `index`: a tensor, or the interval (start, stop)."""
    per = _per_block(width)
    if isinstance(index, Tensor):
        out = torch.empty_like(index)
        step = _chunk(key.device)
        for start in range(0, index.numel(), step):
            _fill_at(out[start : start + step], key, index[start : start + step], width, per)
        return out
    start, stop = index
    first, last = start // per, -(-stop // per)
    blocks = torch.empty((last - first, per), dtype=torch.int64, device=key.device)
    step = _chunk(key.device)
    for begin in range(first, last, step):
        numbers = torch.arange(begin, min(begin + step, last), device=key.device)
        _fill(blocks[begin - first : begin - first + step], key, numbers, width)
    return blocks.view(-1)[start - first * per : stop - first * per]


def _random_bits_at(key: Tensor, index: Tensor, width: int) -> Tensor:
    return element_bits(key, index.reshape(-1), width).view(index.shape)


def _fill_at(out: Tensor, key: Tensor, index: Tensor, width: int, per: int) -> None:
    block, lane = index >> (per >> 1), index & (per - 1)  # per is 4 or 2
    if block.device.type == "cpu":
        # A rank's elements come in runs, and neighbours share a block: compute it once.
        block, owner = torch.unique_consecutive(block, return_inverse=True)
    else:
        # The number of distinct blocks would have to come back from the device: not worth a stop.
        owner = torch.arange(block.numel(), device=block.device)
    elements = torch.empty((block.numel(), per), dtype=torch.int64, device=block.device)
    _fill(elements, key, block, width)
    torch.index_select(elements.view(-1), 0, owner.mul_(per).add_(lane), out=out)


def _derive_keys(key: Tensor, data: Tensor, domain: int) -> Tensor:
    words = _words(key, data.reshape(-1), domain)
    return torch.stack(words[:2], dim=-1).bitwise_and_(MASK).view(*data.shape, 2)


# Library.define and .impl rather than custom_op: 4.5 us a call against 12.5.
library = torch.library.Library("vescale", "FRAGMENT")
for _schema, _implementation in (
    ("random_bits_at(Tensor key, Tensor index, int width) -> Tensor", _random_bits_at),
    ("derive_keys(Tensor key, Tensor data, int domain) -> Tensor", _derive_keys),
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_schema.partition("(")[0], _implementation, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::random_bits_at", lib=library)
def _(key: Tensor, index: Tensor, width: int) -> Tensor:
    return index.new_empty(index.shape)


@torch.library.register_fake("vescale::derive_keys", lib=library)
def _(key: Tensor, data: Tensor, domain: int) -> Tensor:
    return data.new_empty((*data.shape, 2))


def each_key(op, key: Tensor, key_dim: int | None, arg, arg_dim: int | None, last: int | str):
    """vmap: one call for all values of `arg`, one call a key where the keys are mapped."""
    if key_dim is None:
        return op(key, arg.movedim(arg_dim, 0), last), 0
    keys = key.movedim(key_dim, 0).unbind()
    args = [arg] * len(keys) if arg_dim is None else arg.movedim(arg_dim, 0).unbind()
    return torch.stack([op(one, its, last) for one, its in zip(keys, args)]), 0


def _map_random_bits_at(info, in_dims, key: Tensor, index: Tensor, width: int):
    return each_key(random_bits_at, key, in_dims[0], index, in_dims[1], width)


def _map_derive_keys(info, in_dims, key: Tensor, data: Tensor, domain: int):
    return each_key(derive_keys, key, in_dims[0], data, in_dims[1], domain)


torch.library.register_vmap("vescale::random_bits_at", _map_random_bits_at, lib=library)
torch.library.register_vmap("vescale::derive_keys", _map_derive_keys, lib=library)


def random_bits_at(key: Tensor, index: Tensor, width: int) -> Tensor:
    """int64 (2,), int64 row-major global indices of any shape -> int64 of that shape.

    Unsigned 32-bit values, or 64-bit patterns (two's complement): the definition of `bits`, one
    element at a time.

    >>> key = torch.tensor([7, 0])
    >>> whole = random_bits_at(key, torch.arange(100), 32)
    >>> index = torch.tensor([[99, 3], [3, 50]])
    >>> torch.equal(random_bits_at(key, index, 32), whole[index])
    True
    """
    return torch.ops.vescale.random_bits_at.default(key, index, width)


def derive_keys(key: Tensor, data: Tensor, domain: int) -> Tensor:
    """int64 (2,), int64 `data` of any shape -> int64 (*data.shape, 2): one child key a datum.

    The child is the first two words of the block with counter (datum low, datum high, 0, domain).

    >>> derive_keys(torch.tensor([7, 0]), torch.arange(3), SPLIT).shape
    torch.Size([3, 2])
    """
    return torch.ops.vescale.derive_keys.default(key, data, domain)
