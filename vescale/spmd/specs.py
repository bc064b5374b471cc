"""Specs: the placements of a mapped function's arguments and results, as given or as annotated."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from .. import _tree
from .._errors import ArgumentError, explain
from .layout import AbstractMesh
from .placements import P, RaggedShard, Replicate
from .signature import Arguments, Signature

UNSAID = object()


class Specs:
    """`in_specs` and `out_specs` of one function, checked; those that are left out are its annotations."""

    def __init__(
        self,
        arguments: Arguments,
        name: str,
        mesh: AbstractMesh,
        axes: Sequence[str],
        in_specs: Any,
        out_specs: Any,
    ) -> None:
        self.name, self._mesh, self._axes, self._arguments = name, mesh, axes, arguments
        hints = _annotated(arguments.fn) if in_specs is UNSAID or out_specs is UNSAID else {}
        self._in_specs = self._from_hints(hints) if in_specs is UNSAID else in_specs
        self._out_specs = self._out_hint(hints) if out_specs is UNSAID else out_specs
        self._check()

    def of_leaves(self, signature: Signature) -> list[P]:
        """One spec a leaf."""
        specs = self._argument_specs(signature)
        args = _tree.unflatten(signature.spec, signature.leaves)
        return [
            spec
            for name, arg in zip(signature.names, args, strict=True)
            for spec in _tree.broadcast_prefix(
                specs[name], arg, _is_spec, where=f"in_specs of {name!r}, shard_map of {self.name}"
            )
        ]

    def of_results(self, tree: Any) -> list[P]:
        """One spec a leaf of the result."""
        return _tree.broadcast_prefix(
            self._out_specs, tree, _is_spec, where=f"out_specs, shard_map of {self.name}"
        )

    def _from_hints(self, hints: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in self._arguments.names if name not in hints]
        if missing:
            raise ArgumentError(
                explain(
                    f"no spec for {', '.join(missing)}",
                    where=f"annotations of {self.name}",
                    rule="without in_specs each argument is annotated with its placements",
                    remedy=f"{missing[0]}: Annotated[Tensor, vs.P(...)], or pass in_specs=",
                )
            )
        return {name: hints[name] for name in self._arguments.names}

    def _out_hint(self, hints: dict[str, Any]) -> Any:
        if "return" not in hints:
            raise ArgumentError(
                explain(
                    "no spec for the result",
                    where=f"annotations of {self.name}",
                    rule="without out_specs the result is annotated with its placements",
                    remedy="-> Annotated[Tensor, vs.P(...)], or pass out_specs=",
                )
            )
        return hints["return"]

    def _check(self) -> None:
        for where, specs in (("in_specs", self._in_specs), ("out_specs", self._out_specs)):
            for path, spec in zip(*_tree.flatten_with_path(specs, _is_spec)[:2], strict=True):
                if not isinstance(spec, P):
                    raise ArgumentError(
                        explain(
                            f"{where}{f'.{path}' if path else ''} = {spec!r}",
                            where=f"shard_map of {self.name}",
                            rule="a spec is a P of placements by axis name",
                            remedy="vs.P() for a value that is whole on every rank",
                        )
                    )
                for axis in spec:
                    self._mesh.check_axis(axis, where=f"{where} of shard_map({self.name})")
                    if axis not in self._axes and not isinstance(spec[axis], Replicate):
                        raise ArgumentError(
                            explain(
                                f"{where} mentions axis {axis!r}",
                                where=f"shard_map of {self.name}",
                                rule=f"specs speak of the mapped axes: {', '.join(self._axes)}",
                                remedy=f"add {axis!r} to axis_names, or leave it out of the spec",
                            )
                        )

    def _argument_specs(self, signature: Signature) -> dict[str, Any]:
        """The spec of each argument by name; a tuple of specs is bound as a tuple of arguments would be."""
        specs = self._in_specs
        if isinstance(specs, dict) and set(specs) == set(self._arguments.names):
            return specs
        if isinstance(specs, P):
            return dict.fromkeys(signature.names, specs)
        try:
            found = dict(self._arguments.parameters.bind_partial(*specs).arguments)
        except TypeError:
            found = {}
        if set(signature.names) - set(found):
            raise ArgumentError(
                explain(
                    f"{len(specs)} in_specs for the arguments {', '.join(signature.names)}",
                    where=f"shard_map of {self.name}",
                    rule="there is one entry an argument",
                    remedy="vs.P() for an argument that is whole on every rank; arguments that are "
                    "passed by keyword only have theirs in a dict by name",
                )
            )
        return found


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def global_shape(mesh: AbstractMesh, spec: P, local: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    """What the parts add up to, dim by dim, over the ranks along the axes that split it."""
    shape = list(local(0))
    ragged = [placement for _, placement in spec.items() if isinstance(placement, RaggedShard)]
    if any(len(placement.dims) > 1 for placement in ragged):
        raise ArgumentError(
            explain(
                f"a result in {spec}",
                rule="from its parts the shape of a tensor that is ragged over several dims can't be told",
                remedy="use RaggedShard((0,), ...) on a result",
            )
        )
    for dim in range(len(shape)):
        along = [
            axis
            for axis, placement in spec.items()
            if getattr(placement, "dim", None) == dim or (dim == 0 and isinstance(placement, RaggedShard))
        ]
        if along:
            total = 0
            for rank in range(mesh.size):
                if all(index == 0 for axis, index in mesh.coordinate(rank).items() if axis not in along):
                    total += local(rank)[dim]
            shape[dim] = total
    return tuple(shape)


def _annotated(fn: Callable[..., Any]) -> dict[str, Any]:
    """The specs in fn's annotations, by argument name and "return"."""
    names = dict(getattr(fn, "__globals__", {}))
    closure = getattr(fn, "__closure__", None) or ()
    code = getattr(fn, "__code__", None)
    if code is not None:
        names |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure)}
    raw = inspect.get_annotations(fn)
    # A bare `x: P(...)` is no type: typing refuses it, we don't.
    texts = {name: value for name, value in raw.items() if isinstance(value, str)}
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name in texts:
            try:
                value = eval(value, names)
            except Exception as error:
                raise ArgumentError(
                    explain(
                        f"the annotation {value!r} of {name!r} can't be resolved: {error}",
                        where=getattr(fn, "__qualname__", fn),
                        rule="postponed annotations are resolved with the function's globals and closure",
                        remedy="pass in_specs= and out_specs=",
                    )
                ) from None
        spec = _spec_of(value)
        if spec is not None:
            found[name] = spec
    return found


def _spec_of(hint: Any) -> Any:
    if isinstance(hint, P):
        return hint
    if typing.get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, P)), None)
    if typing.get_origin(hint) is tuple:
        parts = [_spec_of(part) for part in typing.get_args(hint)]
        return tuple(parts) if all(part is not None for part in parts) else None
    return None
