"""Closure: what a traced function reads besides its arguments, so that no call meets a stale program.

Modules: their training flags and attributes are part of the signature, those of every module below a
module that ran. Tensors and generators: they are read again at each call from where they were found (a
module, a closure cell, a global, what a container or an object there holds), so that a replaced one is used.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import generator_key
from .program.ir import TensorMeta

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
    """For each closed-over tensor or generator a function that reads it anew. Call them with `read`."""
    tensors = tuple(tensors)
    places: dict[int, list[Getter]] = {_key(tensor): [] for tensor in tensors}
    modules = tuple(modules)
    stores = (store for module in modules for store in (module._parameters, module._buffers))
    ran = (
        (tensor, functools.partial(_item, store, name)) for store in stores for name, tensor in store.items()
    )
    held = _held(fn, functools.partial(_same, fn), set(map(id, modules)), deep=True)
    for tensor, place in itertools.chain(ran, held) if places else ():
        if _key(tensor) in places:
            places[_key(tensor)].append(place)
    return tuple(_anywhere(tensor, places[_key(tensor)]) for tensor in tensors)


def _key(found: Any) -> int:
    return generator_key(found) if isinstance(found, torch.Generator) else id(found)


def read(places: Iterable[Getter], metas: Iterable[TensorMeta]) -> list[Tensor] | None:
    """The closed-over tensors as they are now; None when one is gone, or not what it was traced as."""
    try:
        tensors = [place() for place in places]
    except (LookupError, AttributeError, TypeError, ValueError):
        return None
    same = all(
        isinstance(tensor, Tensor) and TensorMeta.of(tensor) == meta for tensor, meta in zip(tensors, metas)
    )
    return tensors if same else None


def closed_over(fn: Callable[..., Any]) -> Iterator[Tensor]:
    """The tensors in fn's closure and globals, and in those of the functions in them."""
    found = (value for value, _ in _cells(fn, set(), deep=False))
    return (value for value in found if isinstance(value, Tensor))


def _anywhere(tensor: Any, places: list[Getter]) -> Getter:
    """Reads a tensor that was found in all of these places."""
    if not places:
        return functools.partial(_same, tensor)
    return places[0] if len(places) == 1 else functools.partial(_agreed, places)


def _agreed(places: list[Getter]) -> Any:
    """What all of the places hold. A LookupError when one was replaced: which one fn reads is not known."""
    first, *others = [place() for place in places]
    if any(_key(other) != _key(first) for other in others):
        raise LookupError
    return first


def _item(store: Any, name: str) -> Tensor:
    return store[name]


def _same(value: Any) -> Any:
    return value


def _cells(fn: Any, seen: set[int], deep: bool) -> Iterator[tuple[Any, Getter]]:
    """The tensors and generators in fn's closure and globals, and in its functions'; `deep`: see `_held`."""
    fn = getattr(fn, "__wrapped__", fn)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    code = getattr(fn, "__code__", None)
    if code is None or id(fn) in seen:
        return
    seen.add(id(fn))
    owner = getattr(fn, "__self__", None)  # of a bound method
    if owner is not None:
        yield from _held(owner, functools.partial(_same, owner), seen, deep)
    for cell in fn.__closure__ or ():
        try:
            found = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield from _held(found, functools.partial(getattr, cell, "cell_contents"), seen, deep)
    for name in dict.fromkeys(_names(code)):
        found = fn.__globals__.get(name)
        foreign = callable(found) and getattr(found, "__module__", None) != fn.__module__
        if not foreign or isinstance(found, nn.Module):
            yield from _held(found, functools.partial(fn.__globals__.__getitem__, name), seen, deep)


def _names(code: CodeType) -> Iterator[str]:
    """The global names that the code and the functions inside it read, and attributes' names with them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _held(value: Any, place: Callable[[], Any], seen: set[int], deep: bool) -> Iterator[tuple[Any, Getter]]:
    """The tensor that a value is; what a function closes over; if `deep`, what items and attributes are."""
    if isinstance(value, _READ):
        yield value, place
        return
    if hasattr(value, "__code__") or hasattr(value, "__wrapped__") or isinstance(value, functools.partial):
        yield from _cells(value, seen, deep)
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        place, items = functools.partial(_attributes, place), vars(value).items()
    else:
        return
    if deep and id(value) not in seen:
        seen.add(id(value))
        for key, item in list(items):
            if not isinstance(item, _COMPARED):
                yield from _held(item, functools.partial(_part, place, key), seen, deep)


def _attributes(place: Callable[[], Any]) -> dict[str, Any]:
    return vars(place())


def _part(place: Callable[[], Any], key: Any) -> Any:
    return place()[key]
