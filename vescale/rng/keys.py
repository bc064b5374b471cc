"""Keys: the values that keyed draws depend on, and the two ways to make new ones from old.

A key is 64 bits. Drawing twice from one key gives the same numbers twice; for other numbers, split
the key or fold a number (a step, a layer) into it:

>>> root = key(42)
>>> params, noise = split(root)
>>> step_3 = fold_in(noise, 3)
>>> root
Key(0x000000000000002a)

To the bit, with philox(counter, key) from `philox.py`:

    key(seed)          words (seed mod 2^32, seed >> 32)
    split(key, n)[i]   first two words of philox((i, 0, 0, 1), key); n doesn't matter
    fold_in(key, d)    first two words of philox((d mod 2^32, d >> 32, 0, 2), key)

where a negative seed or datum stands for its 64-bit two's complement.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .._tree import register
from .philox import FOLD_IN, MASK, SPLIT, derive_keys
from .reuse import consume


@register
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Key:
    """A key: two 32-bit words in one int64 tensor of shape (2,), low word first.

    Opaque: make it with `key`, `split` and `fold_in`. A pytree node with one leaf, `.data`, so a
    program takes it, returns it and stores it like any tensor (replicated over the mesh). As a
    checkpoint it is that tensor, and `Key(tensor)` the way back; pickle and torch.save keep it whole.
    """

    data: Tensor

    def __repr__(self) -> str:
        try:
            low, high = self.data.tolist()
            return f"Key(0x{high << 32 | low:016x})"
        except Exception:  # traced, mapped, or whatever else a tree_map put here
            return f"Key({self.data!r})"


# torch.load(weights_only=True) makes no object of a class that nobody named.
torch.serialization.add_safe_globals([Key])


def key_data(key: Key, where: str) -> Tensor:
    """The tensor in a key; anything that isn't a key is an ArgumentError that names `where`."""
    if not isinstance(key, Key):
        raise ArgumentError(
            explain(
                f"{type(key).__name__} {key!r}",
                where=where,
                rule="randomness comes from a vs.rng.Key",
                remedy="make one from a seed with vs.rng.key(seed)",
            )
        )
    data = key.data
    if not (isinstance(data, Tensor) and data.shape == (2,) and data.dtype == torch.int64):
        got = f"{data.dtype} {tuple(data.shape)}" if isinstance(data, Tensor) else repr(data)
        raise ArgumentError(
            explain(
                f"a Key whose data is {got}",
                where=where,
                rule="one key holds an int64 tensor of shape (2,)",
                remedy="take keys from key, split and fold_in; map over a batch of keys with vmap",
            )
        )
    return data


def consumed(key: Key, call: str) -> Tensor:
    """The tensor in a key that `call` draws from or splits: see `check_key_reuse`."""
    data = key_data(key, f"{call}(key)")
    consume(data, call)
    return data


def _integer(value: Any, where: str) -> int | Tensor:
    """A 64-bit int, or a 0-d int64 tensor (as it is, never read: it may be a traced value)."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if value.ndim == 0 and whole:
            return value.to(torch.int64)
        found = f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    else:
        try:
            number = operator.index(value)
        except TypeError:
            found = f"{type(value).__name__} {value!r}"
        else:
            if not isinstance(value, bool) and -(2**63) <= number < 2**64:
                return number
            found = repr(value)
    raise ArgumentError(
        explain(
            found,
            where=where,
            rule="an int in [-2^63, 2^64), or an integer tensor of shape ()",
            remedy="pass a step or a seed as an int, or as torch.tensor(step)",
        )
    )


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def key(seed: int | Tensor) -> Key:
    """seed -> the key whose 64 bits are the seed's.

    An int makes a key on torch's default device, a tensor on its own; every draw lives where its
    key does, with the same bits everywhere.

    Raises ArgumentError unless seed is an int in [-2^63, 2^64) or an integer tensor of shape ().

    >>> key(7)
    Key(0x0000000000000007)
    >>> key(torch.tensor(-1))
    Key(0xffffffffffffffff)
    """
    seed = _integer(seed, "vs.rng.key(seed)")
    if isinstance(seed, Tensor):
        return Key(torch.stack([seed & MASK, (seed >> 32) & MASK]))
    # full rather than tensor: a constant would have to be lifted out of a traced program.
    words = (seed & MASK, seed >> 32 & MASK)
    return Key(torch.stack([torch.full((), word, dtype=torch.int64) for word in words]))


def split(key: Key, num: int = 2) -> tuple[Key, ...]:
    """key -> num keys, independent of each other and of the numbers drawn from `key` itself.

    The first keys are the same for every num.

    Raises ArgumentError if key is not a Key or num is not a positive int.

    >>> left, right = split(key(7))
    >>> left
    Key(0x71eade72d6a62573)
    """
    data = consumed(key, "vs.rng.split")
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
        raise ArgumentError(
            explain(
                repr(num),
                where="vs.rng.split(num=)",
                rule="num is a positive int",
                remedy="for keys numbered by a traced value use fold_in(key, i)",
            )
        )
    children = derive_keys(data, torch.arange(num, device=data.device), SPLIT)
    return tuple(Key(child) for child in children.unbind())


def fold_in(key: Key, data: int | Tensor) -> Key:
    """key, number -> the key for that number; other numbers, other keys.

    `data` may be traced: fold_in(key, step) is how a compiled step gets new numbers each time.

    Raises ArgumentError if key is not a Key, or data not an int in [-2^63, 2^64) or an integer
    tensor of shape ().

    >>> fold_in(key(7), 3)
    Key(0x32b60a151867e18a)
    >>> fold_in(key(7), torch.tensor(3))
    Key(0x32b60a151867e18a)
    """
    parent = key_data(key, "vs.rng.fold_in(key)")
    number = _integer(data, "vs.rng.fold_in(data=)")
    if isinstance(number, Tensor):
        number = number.to(parent.device)
    else:
        number = torch.full((), _signed(number), dtype=torch.int64, device=parent.device)
    return Key(derive_keys(parent, number, FOLD_IN))


def clone(key: Key) -> Key:
    """key -> the same key, for the same numbers again: what `check_key_reuse` takes as intended.

    Raises ArgumentError if key is not a Key.

    >>> clone(key(7))
    Key(0x0000000000000007)
    """
    return Key(key_data(key, "vs.rng.clone(key)").clone())
