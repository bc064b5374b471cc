"""The collectives as torch ops: what tracing records, how gradients and vmap go through them.

Every op carries the static facts that its shape needs (axes, sizes of all members), so that a traced
program needs nobody else's shapes. Transposes:

    psum          <->  pvary                 all_gather (varying)    <->  psum_scatter
    all_to_all    <->  all_to_all reversed   all_gather (invariant)  <->  own_slice
    ppermute      <->  ppermute reversed     broadcast               <->  psum, kept by the root

The ops themselves are only ever traced: `program/mapped.py` turns them into exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import TraceError, explain

_library = torch.library.Library("vescale", "FRAGMENT")

# op: (arguments after the tensor, shape of the result, effect on the axes over which a value varies)
Shape = Callable[..., Sequence[int]]


def _same(x: Tensor, *_: Any) -> Sequence[int]:
    return x.shape


def _with(x: Tensor, changes: dict[int, int]) -> list[int]:
    return [changes.get(dim, size) for dim, size in enumerate(x.shape)]


ADDS, KEEPS, REMOVES = "adds", "keeps", "removes"

OPS: dict[str, tuple[str, Shape, str]] = {
    "pvary": ("str[] axes", _same, ADDS),
    "psum": ("str[] axes", _same, REMOVES),
    "pmax": ("str[] axes", _same, REMOVES),
    "pmin": ("str[] axes", _same, REMOVES),
    "broadcast": ("str[] axes, int root", _same, REMOVES),
    # Only the root has the value, the others zeros: what a broadcast's gradient is.
    "root_only": ("str[] axes, int root", _same, ADDS),
    "all_gather": (
        "str[] axes, int dim, int[] sizes",
        lambda x, axes, dim, sizes: _with(x, {dim: sum(sizes)}),
        ADDS,
    ),
    "all_gather_invariant": (
        "str[] axes, int dim, int[] sizes",
        lambda x, axes, dim, sizes: _with(x, {dim: sum(sizes)}),
        REMOVES,
    ),
    # The size of the own part is in the op too: members differ in it.
    "own_slice": (
        "str[] axes, int dim, int[] sizes, int own",
        lambda x, axes, dim, sizes, own: _with(x, {dim: own}),
        ADDS,
    ),
    "psum_scatter": (
        "str[] axes, int dim, int[] sizes, int own",
        lambda x, axes, dim, sizes, own: _with(x, {dim: own}),
        ADDS,
    ),
    "all_to_all": (
        "str[] axes, int split_dim, int concat_dim, int[] split_sizes, int[] concat_sizes, int own",
        lambda x, axes, split_dim, concat_dim, split_sizes, concat_sizes, own: _exchanged(
            x, split_dim, concat_dim, concat_sizes, own
        ),
        ADDS,
    ),
    # Of a 0-d tensor whose value doesn't matter: ops without a tensor can't be traced fake.
    "axis_index": ("str[] axes", _same, ADDS),
    "ppermute": ("str[] axes, int[] sources, int[] shape", lambda x, axes, sources, shape: shape, ADDS),
}


def _exchanged(
    x: Tensor, split_dim: int, concat_dim: int, concat_sizes: Sequence[int], own: int
) -> list[int]:
    if split_dim == concat_dim:
        return _with(x, {split_dim: own * len(concat_sizes)})
    return _with(x, {split_dim: own, concat_dim: sum(concat_sizes)})


def _refuse(name: str) -> Callable[..., Tensor]:
    def call(*_: Any) -> Tensor:
        raise TraceError(
            explain(
                f"{name} outside a mapped function",
                rule="collectives are called by functions that vs.shard_map runs",
                remedy="call it inside the function given to vs.shard_map",
            )
        )

    return call


def _meta(shape: Shape) -> Callable[..., Tensor]:
    return lambda x, *rest: x.new_empty(shape(x, *rest))


for _name, (_arguments, _shape, _) in OPS.items():
    _library.define(f"{_name}(Tensor x, {_arguments}) -> Tensor")
    _library.impl(_name, _refuse(_name), "CompositeExplicitAutograd")
    _library.impl(_name, _meta(_shape), "Meta")
ops = torch.ops.vescale


def varying_after(name: str, before: frozenset[str], axes: Sequence[str]) -> frozenset[str]:
    """The axes over which the result of the collective `name` varies; `before` are its operand's."""
    effect = OPS[name][2]
    return before - frozenset(axes) if effect is REMOVES else before | frozenset(axes)


def differentiable(tensor: Any) -> bool:
    """Whether a tensor (or what looks like one) of this dtype has gradients."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


# Gradients. A Function over the op, so that torch.func.grad sees it, to any order.


class Collective(torch.autograd.Function):
    """`Collective.apply(x, name, transpose, *arguments)`: the op `name`; its gradient is `transpose(g)`."""

    @staticmethod
    def forward(x: Tensor, name: str, transpose: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        return getattr(ops, name)(x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.transpose, ctx.arguments = inputs[2], len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (ctx.transpose(*gradients), *(None,) * ctx.arguments)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str, transpose: Any, *arguments: Any) -> Any:
        # The mapped dim goes last, where it moves no dim that the op speaks of.
        moved = x.movedim(in_dims[0], -1)
        if name == "ppermute":
            axes, sources, shape = arguments
            arguments = (axes, sources, [*shape, info.batch_size])
        inner = rebuild(name, arguments)
        return inner(moved), moved.dim() - 1


def rebuild(name: str, arguments: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """The collective as a function of its tensor, from the arguments of its op."""
    return lambda x: _BUILDERS[name](x, *arguments)


def pvary(x: Tensor, axes: Sequence[str]) -> Tensor:
    return Collective.apply(x, "pvary", lambda g: psum(g, axes), list(axes)) if axes else x


def psum(x: Tensor, axes: Sequence[str]) -> Tensor:
    return Collective.apply(x, "psum", lambda g: pvary(g, axes), list(axes))


def _no_gradient(name: str) -> Callable[[Tensor], Tensor]:
    def transpose(_: Tensor) -> Tensor:
        raise TraceError(
            explain(
                f"a gradient through {name}",
                rule=f"{name} has no gradient: which rank holds the extreme value is not a smooth choice",
                remedy="detach its operand, as in x - vs.pmax(x.detach(), axis)",
            )
        )

    return transpose


def pmax(x: Tensor, axes: Sequence[str]) -> Tensor:
    return Collective.apply(x, "pmax", _no_gradient("pmax"), list(axes))


def pmin(x: Tensor, axes: Sequence[str]) -> Tensor:
    return Collective.apply(x, "pmin", _no_gradient("pmin"), list(axes))


def broadcast(x: Tensor, axes: Sequence[str], root: int) -> Tensor:
    return Collective.apply(x, "broadcast", lambda g: root_only(g, axes, root), list(axes), root)


def root_only(x: Tensor, axes: Sequence[str], root: int) -> Tensor:
    return Collective.apply(x, "root_only", lambda g: broadcast(g, axes, root), list(axes), root)


def all_gather(x: Tensor, axes: Sequence[str], dim: int, sizes: Sequence[int]) -> Tensor:
    own = x.shape[dim]
    return Collective.apply(
        x, "all_gather", lambda g: psum_scatter(g, axes, dim, sizes, own), list(axes), dim, list(sizes)
    )


def all_gather_invariant(x: Tensor, axes: Sequence[str], dim: int, sizes: Sequence[int]) -> Tensor:
    own = x.shape[dim]
    return Collective.apply(
        x, "all_gather_invariant", lambda g: own_slice(g, axes, dim, sizes, own), list(axes), dim, list(sizes)
    )


def own_slice(x: Tensor, axes: Sequence[str], dim: int, sizes: Sequence[int], own: int) -> Tensor:
    return Collective.apply(
        x, "own_slice", lambda g: all_gather_invariant(g, axes, dim, sizes), list(axes), dim, list(sizes), own
    )


def psum_scatter(x: Tensor, axes: Sequence[str], dim: int, sizes: Sequence[int], own: int) -> Tensor:
    return Collective.apply(
        x, "psum_scatter", lambda g: all_gather(g, axes, dim, sizes), list(axes), dim, list(sizes), own
    )


def all_to_all(
    x: Tensor,
    axes: Sequence[str],
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int],
    concat_sizes: Sequence[int],
    own: int,
) -> Tensor:
    mine = x.shape[concat_dim] if split_dim != concat_dim else x.shape[concat_dim] // len(split_sizes)
    back = lambda g: all_to_all(g, axes, concat_dim, split_dim, concat_sizes, split_sizes, mine)  # noqa: E731
    return Collective.apply(
        x, "all_to_all", back, list(axes), split_dim, concat_dim, list(split_sizes), list(concat_sizes), own
    )


def ppermute(x: Tensor, axes: Sequence[str], sources: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`sources[i]` is the member whose value member i gets, -1 for none."""
    targets = [sources.index(member) if member in sources else -1 for member in range(len(sources))]
    mine = list(x.shape)
    return Collective.apply(
        x, "ppermute", lambda g: ppermute(g, axes, targets, mine), list(axes), list(sources), list(shape)
    )


_BUILDERS: dict[str, Callable[..., Tensor]] = {
    "pvary": pvary,
    "psum": psum,
    "pmax": pmax,
    "pmin": pmin,
    "broadcast": broadcast,
    "root_only": root_only,
    "all_gather": all_gather,
    "all_gather_invariant": all_gather_invariant,
    "own_slice": own_slice,
    "psum_scatter": psum_scatter,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
}
