"""Functional transforms that work in plain torch and inside a traced program alike.

`value_and_grad` and `grad` are torch.func's with JAX's order of results; inside a program they also
say where parameters move: to their run layout on entry, and gradients to the rest layout on exit.
`constrain` pins a value to a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from .. import _tree
from .._compat import base_tensor, generator_key, outlived
from .._errors import ArgumentError, explain
from ..rng.reuse import paused
from .dtensor import DTensor, place
from .layout import Layout
from .mesh import Mesh
from .placements import P
from .program.torch_draws import default_generator, set_torch_state, torch_state
from .program.trace import Mark, Pin, Tracing, current_trace, gradient_of
from .varying import joined

# The index points into the constraints of the trace; the op is the identity and leaves no trace at run time.
_library = torch.library.Library("vescale", "FRAGMENT")
_library.define("constrain(Tensor x, int index) -> Tensor")
_library.impl("constrain", lambda x, index: x.clone(), "CompositeExplicitAutograd")
_library.impl("constrain", lambda x, index: torch.empty_like(x), "Meta")


def _map_constrain(info: Any, in_dims: Any, x: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
    """Under vmap: each slice as the constraint says, the mapped dim last and whole.

    The gradient of one slice isn't that of the parameter, and rests nowhere.
    """
    tracing = current_trace()
    assert tracing is not None
    pin = tracing.constraints[index]
    if pin.gradient:
        return x, in_dims[0]
    tracing.constraints.append(Pin(pin.spec.spec if isinstance(pin.spec, Layout) else pin.spec, pin.cause))
    moved = x.movedim(in_dims[0], -1)
    return torch.ops.vescale.constrain(moved, len(tracing.constraints) - 1), moved.dim() - 1


torch.library.register_vmap("vescale::constrain", _map_constrain, lib=_library)


class _Constrain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: int, backward_index: int) -> torch.Tensor:
        return torch.ops.vescale.constrain(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, _, ctx.backward_index = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        if ctx.backward_index >= 0:
            gradient = _Constrain.apply(gradient, ctx.backward_index, ctx.backward_index)
        return gradient, None, None


def constrain(x: torch.Tensor, spec: P) -> torch.Tensor:
    """Pin `x` to placements inside a program: identity in value; its gradient is pinned alike.

    (x: T[...], spec) -> T[...]. Axes that `spec` doesn't mention are Replicate. In plain torch, outside
    a program, it returns `x`. Raises ArgumentError when `spec` is not a `P`.

    >>> import torch
    >>> constrain(torch.ones(2), P("dp")).shape
    torch.Size([2])
    """
    if not isinstance(spec, P):
        raise ArgumentError(
            explain(
                f"constrain(x, {spec!r})",
                rule="the constraint is a P of placements by axis name",
                remedy="for example vs.constrain(x, vs.P(dp=vs.Shard(0)))",
            )
        )
    tracing = current_trace()
    return x if tracing is None else _pin(tracing, x, Pin(spec), transpose=True)


def constrain_tree(tree: Any, spec: P) -> Any:
    """`constrain` for every floating-point tensor of a tree."""
    return _tree.tree_map(
        lambda leaf: (
            constrain(leaf, spec) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        ),
        tree,
    )


def pinned(x: torch.Tensor, layout: Layout, cause: str) -> torch.Tensor:
    """`constrain` to a layout, for what needs no gradient; `cause` says in the program why it moves."""
    tracing = current_trace()
    return x if tracing is None else _pin(tracing, x, Pin(layout, cause), transpose=False)


def _pin(tracing: Tracing, x: torch.Tensor, pin: Pin, transpose: bool) -> torch.Tensor:
    """The traced constraint; with `transpose` the gradient is pinned alike."""
    if tracing.mesh is not None:
        return _pin_now(tracing.mesh, x, pin.spec, transpose)
    tracing.constraints.append(pin)
    index = len(tracing.constraints) - 1
    return _Constrain.apply(x, index, index if transpose else -1)  # type: ignore[return-value]


def _pin_now(mesh: Mesh, x: torch.Tensor, spec: P | Layout, transpose: bool) -> torch.Tensor:
    """The constraint on a real value."""
    layout = spec if isinstance(spec, Layout) else Layout(mesh.abstract, spec, tuple(x.shape))
    if isinstance(base_tensor(x), DTensor):
        x = DTensor.redistribute(x, layout.spec)  # type: ignore[arg-type] - x may be a wrapper of torch.func
    else:
        x = place(x, mesh, layout)
    return _PinGradient.apply(x, layout.spec) if transpose else x  # type: ignore[return-value]


class _PinGradient(torch.autograd.Function):
    """Identity, whose gradient is moved to a layout."""

    @staticmethod
    def forward(x: DTensor, spec: P) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, ctx.spec = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_ours = isinstance(base_tensor(gradient), DTensor)
        return DTensor.redistribute(gradient, ctx.spec) if is_ours else gradient, None


def marks_of(leaves: Sequence[Any]) -> list[Mark | None]:
    """Which of the leaves are parameters of the running trace, as the plan has them."""
    tracing = current_trace()
    return [None if tracing is None else tracing.marks.get(id(leaf)) for leaf in leaves]


def in_use(leaves: Sequence[Any], marks: Sequence[Mark | None]) -> list[Any]:
    """The leaves, parameters in their run layouts."""
    tracing = current_trace()

    def use(leaf: torch.Tensor, mark: Mark) -> torch.Tensor:
        assert tracing is not None
        # Cast first: fewer bytes move.
        cast = leaf if mark.run_dtype is None else leaf.to(mark.run_dtype)
        return _pin(tracing, cast, Pin(mark.run, mark.name), transpose=False)

    return [leaf if mark is None else use(leaf, mark) for leaf, mark in zip(leaves, marks, strict=True)]


def _used(tree: Any) -> Any:
    """A tree with the parameters in it in their run layouts."""
    leaves, spec = _tree.flatten(tree)
    marks = marks_of(leaves)
    return _tree.unflatten(spec, in_use(leaves, marks)) if any(marks) else tree


def at_rest(gradients: Sequence[Any], marks: Sequence[Mark | None]) -> list[Any]:
    """Gradients of the leaves, those of parameters in their layouts at rest and the parameter's dtype."""
    tracing = current_trace()

    def rest(gradient: torch.Tensor, mark: Mark) -> torch.Tensor:
        assert tracing is not None
        sent = gradient.to(mark.reduce_dtype or mark.dtype or gradient.dtype)
        there = _pin(tracing, sent, Pin(mark.rest, gradient_of(mark.name), True), transpose=False)
        return there.to(mark.dtype or gradient.dtype)

    return [g if mark is None else rest(g, mark) for g, mark in zip(gradients, marks, strict=True)]


def value_and_grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """A function that returns fn's value and its gradient with respect to the argument `argnums`.

    fn: (*args) -> scalar, or (scalar, aux) with `has_aux`. The result is `(value, gradient)`, or
    `((value, aux), gradient)`: JAX's order. The gradient has the structure of the argument (of the tuple
    of arguments when `argnums` is one); parts that fn doesn't use get zeros. Inside a program
    parameters are used in their run layout, and gradients come back in the layout at rest.

    >>> import torch
    >>> value_and_grad(lambda w, x: (w["a"] * x).sum())({"a": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    (tensor(7.), {'a': tensor([3., 4.])})
    """

    @wraps(fn)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        leaves, spec = _tree.flatten(tuple(args[position] for position in positions))
        tracing = current_trace()
        marks = marks_of(leaves)

        def inner(leaves: list[torch.Tensor]) -> Any:
            chosen = _tree.unflatten(spec, leaves)
            filled = list(args)
            for position, value in zip(positions, chosen, strict=True):
                filled[position] = value
            result = fn(*filled, **kwargs)
            if tracing is not None:
                tracing.region = "backward"
            if not has_aux:
                return result
            # torch.func takes tensors for aux; what else there is goes around it.
            loss, extra = result
            parts, aux_spec[0] = _tree.flatten(extra)
            statics[:] = [None if isinstance(part, torch.Tensor) else part for part in parts]
            return loss, [part for part in parts if isinstance(part, torch.Tensor)]

        aux_spec: list[Any] = [None]
        statics: list[Any] = []
        outer_region = tracing.region if tracing else ""
        if tracing is not None:
            leaves = in_use(leaves, marks)
            # Parameters that no gradient is taken of are used like the others.
            args = tuple(arg if at in positions else _used(arg) for at, arg in enumerate(args))
            kwargs = {name: _used(arg) for name, arg in kwargs.items()}
            tracing.region = "forward"
        try:
            gradients, value = torch.func.grad_and_value(inner, has_aux=has_aux)(leaves)
        finally:
            if tracing is not None:
                tracing.region = outer_region
        gradients = at_rest(gradients, marks)
        gradient = _tree.unflatten(spec, gradients)
        if has_aux:
            loss, tensors = value
            taken = iter(tensors)
            value = (
                loss,
                _tree.unflatten(aux_spec[0], [next(taken) if part is None else part for part in statics]),
            )
        return value, gradient[0] if isinstance(argnums, int) else gradient

    return transformed


def grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """`value_and_grad` without the value: the gradient, or `(gradient, aux)` with `has_aux`.

    >>> import torch
    >>> grad(lambda x: (x * x).sum())(torch.tensor([3.0]))
    tensor([6.])
    """
    both = value_and_grad(fn, argnums, has_aux)

    @wraps(fn)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return transformed


def vmap(
    fn: Callable,
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable:
    """fn over the slices of its arguments along a dim: torch.func.vmap for our trees.

    `in_dims` is a dim, None for an argument that is not mapped, or one of these for each argument.
    Collectives inside a mapped function work under it.

    >>> import torch
    >>> vmap(lambda x, y: (x * y["w"]).sum(), in_dims=(0, None))(torch.ones(3, 2), {"w": torch.ones(2)})
    tensor([2., 2., 2.])
    """

    @wraps(fn)
    def transformed(*args: Any) -> Any:
        leaves, spec = _tree.flatten(args)
        dims = [in_dims] * len(args) if in_dims is None or isinstance(in_dims, int) else list(in_dims)
        each = [dim for dim, arg in zip(dims, args, strict=True) for _ in _tree.leaves(arg)]
        out_spec: list[_tree.TreeSpec] = []

        def flat(*values: Any) -> Any:
            results, made = _tree.flatten(fn(*_tree.unflatten(spec, values)))
            out_spec[:] = [made]
            return tuple(results)

        results = torch.func.vmap(flat, tuple(each), out_dims, randomness=randomness, chunk_size=chunk_size)(
            *leaves
        )
        return _tree.unflatten(out_spec[0], results)

    return transformed


class _Repeatable:
    """A function that can be run again with the numbers that it drew from torch's generators before."""

    def __init__(self, run: Callable, generators: Sequence[torch.Generator]) -> None:
        self.run, self.generators = run, generators
        self.states: list[torch.Tensor] = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self.states = [torch_state(generator) for generator in self.generators]
        return self.run(*tensors)

    def again(self, *tensors: torch.Tensor) -> Any:
        now = [torch_state(generator) for generator in self.generators]
        for generator, state in zip(self.generators, self.states, strict=True):
            set_torch_state(outlived(state), generator)
        tracing = current_trace()
        outer = tracing.repeated if tracing else None
        if tracing is not None:
            tracing.repeated = {generator_key(generator) for generator in self.generators}
        try:
            return self.run(*tensors)
        finally:
            if tracing is not None:
                tracing.repeated = outer
            for generator, state in zip(self.generators, now, strict=True):
                set_torch_state(state, generator)


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(run: _Repeatable, *tensors: torch.Tensor) -> Any:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = [outlived(tensor) for tensor in ctx.saved_tensors]  # of a remat inside a remat
        chosen = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]

        def some(*values: torch.Tensor) -> Any:
            filled = list(tensors)
            for index, value in zip(chosen, values, strict=True):
                filled[index] = value
            return ctx.run.again(*filled)

        with paused():  # draws are repeated here, and that is meant
            both: Any = joined(lambda: torch.func.vjp(some, *(tensors[index] for index in chosen)))
        outputs, vjp = both
        given = tuple(
            torch.zeros_like(output) if gradient is None else gradient
            for output, gradient in zip(outputs, gradients, strict=True)
        )
        found = dict(zip(chosen, vjp(given), strict=True))
        return (None, *(found.get(index) for index in range(len(tensors))))


def remat(fn: Callable) -> Callable:
    """fn, whose gradient keeps the arguments only and computes the rest again (JAX's remat).

    Values and gradients are those of fn. Draws inside are the same the second time: keyed ones by
    construction, torch's own because the states of the default generator and of those among the arguments
    are kept. Results are tensors; what fn closes over gets no gradient, so pass it.

    >>> import torch
    >>> grad(remat(lambda x: x.sin().sum()))(torch.zeros(2))
    tensor([1., 1.])
    """

    @wraps(fn)
    def transformed(*args: Any) -> Any:
        leaves, spec = _tree.flatten(args)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        out_spec: list[_tree.TreeSpec] = []

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(leaves)
            for index, value in zip(places, tensors, strict=True):
                filled[index] = value
            results, made = _tree.flatten(fn(*_tree.unflatten(spec, filled)))
            out_spec[:] = [made]
            return tuple(results)

        devices = dict.fromkeys(("cpu", *(leaves[index].device.type for index in places)))
        generators = [default_generator(device) for device in devices if device in ("cpu", "cuda")]
        generators += [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        results = _Remat.apply(_Repeatable(run, generators), *(leaves[index] for index in places))
        return _tree.unflatten(out_spec[0], results)  # pyright: ignore[reportArgumentType]

    return transformed
