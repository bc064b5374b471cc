"""Hypothesis strategies: meshes, shapes, placements, layouts, plans, and programs whose bits are promised.

    @given(st.data())
    def test_mine(data):
        mesh = data.draw(vs.testing.strategies.meshes())
        program = data.draw(vs.testing.strategies.programs())
        plan = data.draw(vs.testing.strategies.plans(mesh, inputs=program.shapes))
        vs.testing.assert_consistent(program, program.args, plan)

Small lengths that divide by the axes come up often, so that splits nest; primes, ones and zeros do too.
Simple things are drawn first, and what fails shrinks to them: fewer steps, smaller meshes, replicated
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import ArgumentError, LayoutError, explain
from ..spmd.layout import AbstractMesh, Layout
from ..spmd.mesh import Mesh, make_mesh
from ..spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)
from ..spmd.plan import Plan
from ..spmd.transforms import constrain, value_and_grad

try:
    from hypothesis import assume, strategies as st
except ImportError as error:
    raise ArgumentError(
        explain(
            "vs.testing.strategies without hypothesis",
            rule="the strategies are those of the package hypothesis",
            remedy="pip install hypothesis",
        )
    ) from error

AXES = ("dp", "tp", "pp")
LENGTHS = st.sampled_from((4, 8, 12, 6, 5, 3, 2, 1, 0))
Draw = Callable[[Any], Any]
Shape = tuple[int, ...]


@st.composite
def meshes(draw: Draw, axes: tuple[int, int] = (1, 2), abstract: bool = False) -> Any:
    """Simulated meshes, or AbstractMeshes, of `axes[0]` to `axes[1]` axes of 1 to 4 ranks."""
    count = draw(st.integers(*axes))
    sizes = [draw(st.sampled_from((2, 3, 4, 2, 1))) for _ in range(count)]
    names = AXES[:count]
    return (
        AbstractMesh(names, tuple(sizes))
        if abstract
        else make_mesh(dict(zip(names, sizes)), backend="simulated")
    )


@st.composite
def shapes(draw: Draw, dims: tuple[int, int] = (0, 3)) -> Shape:
    """Shapes of `dims[0]` to `dims[1]` dims."""
    return tuple(draw(LENGTHS) for _ in range(draw(st.integers(*dims))))


@st.composite
def placements(draw: Draw, shape: Shape, size: int, partial: bool = True) -> Placement:
    """A placement of a tensor of `shape` on one axis of `size` ranks."""
    mesh = AbstractMesh(AXES[:1], (size,))
    return draw(layouts(mesh, shape, partial)).placement(AXES[0])


@st.composite
def layouts(draw: Draw, mesh: Mesh | AbstractMesh, shape: Shape, partial: bool = True) -> Layout:
    """A layout of `shape` on `mesh`; a ragged split is cut at any of the rows that are left."""
    mesh = mesh.abstract
    kinds = ["shard", "ragged"] + ["partial"] * partial + ["interleaved", "replicate"]
    op = draw(st.sampled_from(("sum", "sum", "avg", "max", "min")))
    items: list[tuple[str, Placement]] = []
    ragged = None
    for axis in draw(st.permutations(mesh.axis_names)):
        kind = draw(st.sampled_from(kinds))
        if kind == "partial":
            items.append((axis, Partial(op)))
        elif kind == "ragged" and shape and ragged is None:
            ragged = axis
        elif kind in ("shard", "interleaved") and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            if kind == "shard":
                items.append((axis, Shard(dim)))
            else:
                sections = draw(st.sampled_from((2, 3, (1, 3), (2, 1, 1), (4, 2, 2))))
                items.append((axis, InterleavedShard(dim, sections)))
        else:
            items.append((axis, Replicate()))
    try:
        layout = Layout(mesh, P.of(items), shape)
        if ragged is not None:
            dims = tuple(range(draw(st.integers(0, len(shape)))))
            rows = math.prod(layout.piece_shape(0)[: len(dims)])
            size = mesh.axis_size(ragged)
            cuts = sorted(draw(st.integers(0, rows)) for _ in range(size - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, rows])]
            if not rows:
                sizes = [draw(st.integers(0, 2)) for _ in range(size - 1)] + [1]
            if draw(st.booleans()):
                items.append((ragged, RaggedShard(dims, sizes)))
            else:  # the same, spelled as in a list by axis
                others = (mesh.axis_size(a) for a, p in items if isinstance(p, Shard | InterleavedShard))
                items.insert(0, (ragged, StridedRaggedShard(dims, sizes, math.prod(others))))
            layout = Layout(mesh, P.of(items), shape)
    except LayoutError:
        assume(False)
    return layout


@st.composite
def plans(
    draw: Draw,
    mesh: Mesh | AbstractMesh,
    params: Mapping[str, Shape] | None = None,
    inputs: Mapping[str, Shape] | None = None,
) -> Plan:
    """A plan with a layout for each parameter and input, given their shapes by path."""
    specs = [
        {key: draw(layouts(mesh, tuple(shape), partial=False)).spec for key, shape in (group or {}).items()}
        for group in (params, inputs)
    ]
    return Plan(mesh, {re.escape(path): spec for path, spec in specs[0].items()}, specs[1])


# Programs. A step is drawn for the shape that x has: what it does as text, the shape of a second tensor if it
# takes one, and the function of both.

Made = tuple[str, Shape | None, Callable[[Tensor, Any], Tensor]]


@dataclass(frozen=True, repr=False)
class Program:
    """A function of a list of tensors, and these tensors: `program(*program.args)`. It prints as its source.

    Values are small whole numbers in float64 while steps add or multiply them, so that every sum is exact in
    any order; what leaves the whole numbers is elementwise, or along dims that no rank splits. So all bits
    are promised.
    """

    steps: tuple[tuple[str, Callable[[Tensor, Any], Tensor], int | None], ...]
    tensors: tuple[Tensor, ...]
    differentiated: bool

    @property
    def args(self) -> list[Any]:
        """The arguments: one list of tensors."""
        return [list(self.tensors)]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors, by path: what `plans(inputs=)` takes."""
        return {f"tensors.{number}": tuple(tensor.shape) for number, tensor in enumerate(self.tensors)}

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if not self.differentiated:
            return self.apply(tensors)
        return value_and_grad(lambda tensors: (self.apply(tensors) * 3).sum())(list(tensors))

    def apply(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chain of the steps."""
        x = tensors[0]
        for _, fn, index in self.steps:
            x = fn(x, None if index is None else tensors[index])
        return x

    def __repr__(self) -> str:
        x = f"t0{list(self.tensors[0].shape)}"
        for text, _, index in self.steps:
            y = "" if index is None else f"t{index}{list(self.tensors[index].shape)}"
            x = text.format(x=x, y=y)
        return f"grad of {x}" if self.differentiated else x


def _reshape(draw: Draw, shape: Shape) -> Made:
    dims = len(shape)
    if dims > 1 and draw(st.booleans()):
        at = draw(st.integers(0, dims - 2))
        return f"{{x}}.flatten({at}, {at + 1})", None, lambda x, _: x.flatten(at, at + 1)
    at = draw(st.integers(0, dims - 1))
    length = shape[at]
    outer = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
    sizes = outer, length // outer
    return f"{{x}}.unflatten({at}, {sizes})", None, lambda x, _: x.unflatten(at, sizes)


def _transpose(draw: Draw, shape: Shape) -> Made:
    a, b = (draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    return f"{{x}}.transpose({a}, {b})", None, lambda x, _: x.transpose(a, b)


def _matmul(draw: Draw, shape: Shape) -> Made:
    return "({x} @ {y})", (shape[-1], draw(_WIDTHS)), lambda x, w: x @ w


def _linear(draw: Draw, shape: Shape) -> Made:
    return "linear({x}, {y})", (draw(_WIDTHS), shape[-1]), lambda x, w: F.linear(x, w, w.sum(1))


def _broadcast(draw: Draw, shape: Shape) -> Made:
    start = draw(st.integers(0, len(shape)))
    other = tuple(draw(st.sampled_from((1, size))) for size in shape[start:])
    op = draw(st.sampled_from((torch.add, torch.sub, torch.mul, torch.maximum)))
    return f"{op.__name__}({{x}}, {{y}})", other, lambda x, y: op(x, y)


def _sum(draw: Draw, shape: Shape) -> Made:
    dim, keep = draw(st.integers(0, len(shape) - 1)), draw(st.booleans()) or len(shape) == 1
    return f"{{x}}.sum({dim}, keepdim={keep})", None, lambda x, _: x.sum(dim, keepdim=keep)


def _largest(draw: Draw, shape: Shape) -> Made:
    dim = draw(st.integers(0, len(shape) - 1))
    return f"less_largest({{x}}, {dim})", None, lambda x, _: x - x.amax(dim, keepdim=True)


def _join(draw: Draw, shape: Shape) -> Made:
    dim = draw(st.integers(0, len(shape) - 1))
    size = draw(st.integers(1, shape[dim]))
    return (
        f"cat({{x}}.split({size}, {dim})[::-1])",
        None,
        lambda x, _: torch.cat(x.split(size, dim)[::-1], dim),
    )


def _slice(draw: Draw, shape: Shape) -> Made:
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim] - 1))
    size = shape[dim] - start
    return f"{{x}}.narrow({dim}, {start}, {size})", None, lambda x, _: x.narrow(dim, start, size)


def _pointwise(draw: Draw, shape: Shape) -> Made:
    fn = draw(st.sampled_from((torch.relu, torch.neg, torch.abs, torch.square)))
    return f"{fn.__name__}({{x}})", None, lambda x, _: fn(x)


def _choose(draw: Draw, shape: Shape) -> Made:
    return "where({x} > {y})", shape, lambda x, y: torch.where(x > y, x, y * 2)


def _smooth(draw: Draw, shape: Shape) -> Made:
    fn = draw(st.sampled_from((torch.tanh, torch.exp, torch.sin, torch.erf, torch.log1p)))
    return f"{fn.__name__}({{x}} / 64)", None, lambda x, _: fn(x.clamp(-256, 256).abs() / 64)


def _rowwise(draw: Draw, shape: Shape) -> Made:
    """Along the last dim, which no rank splits here."""
    if draw(st.booleans()):
        return "softmax({x})", None, lambda x, _: F.softmax(constrain(x, P()) / 64, -1)
    return (
        "layer_norm({x})",
        (shape[-1],),
        lambda x, w: F.layer_norm(constrain(x, P()), (shape[-1],), w, eps=1.0),
    )


_WIDTHS = st.sampled_from((4, 2, 6, 3, 1, 8))
_WHOLE = (_reshape, _transpose, _matmul, _linear, _broadcast, _sum, _join, _slice, _pointwise, _choose)
_LAST = (_smooth, _rowwise, _largest)


@st.composite
def programs(draw: Draw, steps: int = 4) -> Program:
    """Programs of up to `steps` steps: matmuls, sums, views, slices, elementwise ops, softmax and layer norm
    at the end; or the value and gradients of one of whole numbers."""
    shape = tuple(draw(_WIDTHS) for _ in range(draw(st.integers(1, 3))))
    differentiated = draw(st.booleans())
    chain: list[tuple[str, Callable[[Tensor, Any], Tensor], int | None]] = []
    tensors, at = [_whole_numbers(shape, 0)], shape
    for number in range(draw(st.integers(1, steps))):
        choice = draw(st.sampled_from(_WHOLE))
        at = _add(draw, choice, chain, tensors, at, number)
    if not differentiated and draw(st.booleans()):
        _add(draw, draw(st.sampled_from(_LAST)), chain, tensors, at, steps)
    return Program(tuple(chain), tuple(tensors), differentiated)


def _add(draw: Draw, choice: Any, chain: list[Any], tensors: list[Tensor], at: Shape, number: int) -> Shape:
    text, other, fn = choice(draw, at)
    chain.append((text, fn, None if other is None else len(tensors)))
    second = None if other is None else torch.empty(other, device="meta", dtype=torch.float64)
    if other is not None:
        tensors.append(_whole_numbers(other, number + 1))
    return tuple(fn(torch.empty(at, device="meta", dtype=torch.float64), second).shape)


def _whole_numbers(shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


__all__ = ["Program", "layouts", "meshes", "placements", "plans", "programs", "shapes"]
