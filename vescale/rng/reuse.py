"""A checker for keys that are used twice: the mistake that gives the same numbers twice.

A draw or a `split` consumes its key. Inside `check_key_reuse()` a second one is an error that names both
places. `fold_in` doesn't consume: one key and many numbers is what it is for. `clone` says that the same
numbers are wanted again.

A key is told from others by its data tensor, in eager code as in a trace: what is checked is the user's
code as it runs. So a program that is called twice with one key is checked when it is traced, and not in
the second call, and two keys made of one seed count as two. The second run of a rematerialised function
is no reuse.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .._compat import base_tensor
from .._errors import VescaleError, explain

_PACKAGE = __file__.rsplit("/", 2)[0]
_TORCH = torch.__file__.rsplit("/", 1)[0]

# By id of the data tensor, which is kept so that no other gets its id: where it was consumed.
_used: ContextVar[dict[int, tuple[Tensor, str]] | None] = ContextVar("vescale_used_keys", default=None)


class KeyReuseError(VescaleError, RuntimeError):
    """A key was consumed twice inside `check_key_reuse()`."""


@contextmanager
def check_key_reuse() -> Iterator[None]:
    """Inside, a key that is consumed twice by draws or `split` raises KeyReuseError.

    >>> from vescale.rng import clone, key, normal, uniform
    >>> with check_key_reuse():
    ...     one = key(7)
    ...     x = normal(one, (3,))
    ...     y = normal(clone(one), (3,))  # the same on purpose
    ...     z = uniform(one, (3,))
    Traceback (most recent call last):
    vescale.rng.reuse.KeyReuseError: found: a key that is used again: vs.rng.uniform at ...
    where: first used: vs.rng.normal at ...
    rule: a key is drawn from, or split, once: a second draw repeats the numbers of the first
    remedy: split the key, fold a number into it, or say with clone(key) that it is meant
    """
    token = _used.set({})
    try:
        yield
    finally:
        _used.reset(token)


@contextmanager
def paused() -> Iterator[None]:
    """Inside, nothing is checked: the same code runs a second time, for the same numbers."""
    token = _used.set(None)
    try:
        yield
    finally:
        _used.reset(token)


def consume(data: Tensor, call: str) -> None:
    """Notes that the key with this data tensor was consumed by `call`, if anybody checks."""
    used = _used.get()
    if used is None:
        return
    data = base_tensor(data)
    here = f"{call} at {_place()}"
    if id(data) in used:
        raise KeyReuseError(
            explain(
                f"a key that is used again: {here}",
                where=f"first used: {used[id(data)][1]}",
                rule="a key is drawn from, or split, once: a second draw repeats the numbers of the first",
                remedy="split the key, fold a number into it, or say with clone(key) that it is meant",
            )
        )
    used[id(data)] = (data, here)


def _place() -> str:
    """The line of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
