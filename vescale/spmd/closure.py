"""Closure: what a traced function reads besides its arguments, so that no call meets a stale program.

Modules: their training flags and attributes are part of the signature, those of every module below a
module that ran. Tensors and generators: they are read again at each call from where they were found (a
module, a closure cell, a global), so that a replaced one is the one that is used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import generator_key

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_COMPARED = (bool, int, float, str, type(None), torch.dtype, torch.device)

_READ = (Tensor, torch.Generator)

Getter = Callable[[], Any]


class Guard:
    """The state of some modules, cheap to read."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._watched: dict[nn.Module, tuple[str, ...]] = {}
        self._seen: list[Any] = []  # the objects of which the state below was made
        self._state: tuple[Any, ...] = ()
        self.watch(modules)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules too."""
        for module in modules:
            self._watched[module] = tuple(name for name in vars(module) if name not in _INTERNAL)
        self._seen = []

    def state(self) -> tuple[Any, ...]:
        """All that may change what the modules compute, but for their tensors."""
        seen: list[Any] = []
        for module, names in self._watched.items():
            attributes = vars(module)
            seen.append(len(attributes))
            seen += module._modules.values()
            seen += map(attributes.get, names)
        # What is made of the very same objects is the same: most calls end here.
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen, self._state = seen, self._read()
        return self._state

    def _read(self) -> tuple[Any, ...]:
        return tuple(
            (
                len(vars(module)),
                *map(id, module._modules.values()),  # watched modules live on, so an id is one module
                *[_mark(vars(module).get(name)) for name in names],
            )
            for module, names in self._watched.items()
        )


def _mark(value: Any) -> Any:
    """By value where a value is compared, else by identity."""
    if isinstance(value, _COMPARED):
        return value
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    return id(value)


def getters(
    fn: Callable[..., Any], modules: Iterable[nn.Module], tensors: Iterable[Tensor | torch.Generator]
) -> tuple[Getter, ...]:
    """For each closed-over tensor or generator a function that reads it anew from its place."""
    places: dict[int, Getter] = {}
    for module in modules:
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    places.setdefault(id(tensor), functools.partial(_item, store, name))
    for tensor, place in _cells(fn, set()):
        places.setdefault(_key(tensor), place)
    return tuple(places.get(_key(tensor), functools.partial(_same, tensor)) for tensor in tensors)


def _key(found: Any) -> int:
    return generator_key(found) if isinstance(found, torch.Generator) else id(found)


def closed_over(fn: Callable[..., Any]) -> Iterator[Tensor]:
    """The tensors in fn's closure and globals, and in those of the functions in them."""
    return (found for found, _ in _cells(fn, set()) if isinstance(found, Tensor))


def _item(store: Any, name: str) -> Tensor:
    return store[name]


def _same(tensor: Any) -> Any:
    return tensor


def _cells(fn: Any, seen: set[int]) -> Iterator[tuple[Any, Getter]]:
    """The tensors and generators in fn's closure and globals, and in those of the functions in them."""
    fn = getattr(fn, "__wrapped__", fn)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    code = getattr(fn, "__code__", None)
    if code is None or id(fn) in seen:
        return
    seen.add(id(fn))
    for cell in fn.__closure__ or ():
        try:
            found = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(found, _READ):
            yield found, functools.partial(getattr, cell, "cell_contents")
        else:
            yield from _cells(found, seen)
    for name in code.co_names:
        found = fn.__globals__.get(name)
        if isinstance(found, _READ):
            yield found, functools.partial(fn.__globals__.__getitem__, name)
        elif callable(found) and getattr(found, "__module__", None) == fn.__module__:
            yield from _cells(found, seen)
