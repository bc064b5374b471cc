"""Every pair of placements: the layouts, the moves between them, and what each rank must then hold.

A layout is made of one *kind* an axis, in the order of the mesh. Global values are noisy floats. What must
come out is computed from the global contributions alone: slices of them, or sums of them in the tree of the
ranks of the group that a plan's reduction is over.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import torch
from torch import Tensor

from vescale._errors import LayoutError
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.mesh import Mesh, group_ranks, make_mesh
from vescale.spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)
from vescale.spmd.redistribute import plan, redistribute

KINDS = (
    "Replicate",
    "Shard(0)",
    "Shard(1)",
    "InterleavedShard",
    "RaggedShard a",  # rows, nothing on rank 0
    "RaggedShard b",  # elements, nothing on the last rank
    "RaggedShard ()",  # whole, on one rank
    "StridedRaggedShard",
    *(f"Partial({op})" for op in ("sum", "avg", "max", "min")),
)
MESHES = {1: {"dp": 4}, 2: {"dp": 2, "tp": 3}, 3: {"dp": 2, "tp": 2, "pp": 2}}
SHAPES = {
    "even": {1: (8, 4), 2: (12, 12), 3: (8, 8)},
    "uneven": {1: (7, 5), 2: (7, 5), 3: (7, 5)},
    "empty rank": {1: (1, 3), 2: (1, 2), 3: (1, 2)},
    "0-d": {1: (), 2: (), 3: ()},
    "zero-size": {1: (0, 4), 2: (0, 12), 3: (0, 8)},
}
Kinds = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A move between two layouts, each given by its kinds."""

    src: Kinds
    dst: Kinds
    size: str  # of SHAPES

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return layout(self.src, self.size), layout(self.dst, self.size)


@cache
def layout(kinds: Kinds, size: str) -> Layout:
    """The layout of these kinds; LayoutError where there is none."""
    count = len(kinds)
    mesh, shape = AbstractMesh(tuple(MESHES[count]), tuple(MESHES[count].values())), SHAPES[size][count]
    ragged = {axis for axis, kind in zip(mesh.axis_names, kinds) if "Ragged" in kind}
    if not ragged:
        return Layout(mesh, _spec(mesh, kinds, ()), shape)
    others = tuple("Replicate" if "Ragged" in kind else kind for kind in kinds)
    piece = Layout(mesh, _spec(mesh, others, ()), shape).piece_shape(0)
    return Layout(mesh, _spec(mesh, kinds, piece), shape)


def refusal(kinds: Kinds, size: str) -> str | None:
    """Why there is no such layout: the whole message."""
    try:
        layout(kinds, size)
    except LayoutError as error:
        return str(error)
    return None


def _spec(mesh: AbstractMesh, kinds: Kinds, piece: tuple[int, ...]) -> P:
    return P.of(
        (axis, _placement(kind, mesh.axis_size(axis), piece, mesh, kinds))
        for axis, kind in zip(mesh.axis_names, kinds)
    )


def _placement(kind: str, size: int, piece: tuple[int, ...], mesh: AbstractMesh, kinds: Kinds) -> Placement:
    if kind == "Replicate":
        return Replicate()
    if kind.startswith("Shard"):
        return Shard(int(kind[6]))
    if kind == "InterleavedShard":
        return InterleavedShard(0, 2)
    if kind.startswith("Partial"):
        return Partial(kind[8:-1])
    if kind == "RaggedShard ()":
        return RaggedShard.on_rank(size - 1, size)
    if kind == "RaggedShard b":
        dims = tuple(range(max(len(piece), 1)))
        return RaggedShard(dims, _sizes(math.prod(piece), size)[::-1])
    units = _sizes(math.prod(piece[:1]), size)
    if kind == "RaggedShard a":
        return RaggedShard((0,), units)
    others = (n for n, k in zip(mesh.shape, kinds) if "Shard" in k and "Ragged" not in k)
    return StridedRaggedShard((0,), [*units[1:], units[0]], math.prod(others))


def _sizes(rows: int, size: int) -> list[int]:
    """Rows of each rank: none on the first, then more and more."""
    cuts = [rows * i * i // (size - 1) ** 2 for i in range(size)]
    sizes = [0, *(b - a for a, b in pairwise(cuts))]
    return sizes if rows else [0] * (size - 1) + [1]


def legal(count: int, size: str) -> list[Kinds]:
    """All kinds of layouts on so many axes that there are."""
    return [kinds for kinds in product(KINDS, repeat=count) if refusal(kinds, size) is None]


def every_pair(count: int, size: str) -> Iterator[Case]:
    """All moves between legal layouts on `count` axes."""
    found = legal(count, size)
    return (Case(src, dst, size) for src, dst in product(found, repeat=2))


def sampled(count: int, size: str, contexts: int, seed: int = 0) -> Iterator[Case]:
    """On each axis every pair of kinds, so often, with whatever is legal on the other axes."""
    draw, found = random.Random(f"{seed} {count} {size}"), legal(count, size)
    for axis in range(count):
        by_kind: dict[str, list[Kinds]] = {}
        for kinds in found:
            by_kind.setdefault(kinds[axis], []).append(kinds)
        for sources, targets in product(by_kind.values(), repeat=2):
            for _ in range(contexts):
                yield Case(draw.choice(sources), draw.choice(targets), size)


# What must come out.

Coordinate = tuple[int, ...]  # along the axes with a pending reduction, in the order of the mesh


def contribution(case: Case, coordinate: Coordinate) -> Tensor:
    """The global contribution of the ranks at one coordinate."""
    shape = SHAPES[case.size][len(case.src)]
    seed = torch.Generator().manual_seed(sum((i + 1) * 7**n for n, i in enumerate(coordinate)))
    return torch.randn(shape, generator=seed) * 100


def local(case: Case, rank: int) -> Tensor:
    """What `rank` starts with."""
    src, _ = case.layouts
    return local_slice(contribution(case, _at(src, rank, _pending(src))), whole(src), rank).clone()


def check(case: Case, after: Sequence[Tensor]) -> None:
    """Whether all ranks hold what they must: bit for bit."""
    src, dst = case.layouts
    axes = _pending(src)
    values = {at: contribution(case, at) for at in product(*(range(src.mesh.axis_size(a)) for a in axes))}
    for step in plan(src, dst):
        if step.kind in ("reduce_scatter", "all_reduce"):
            ops = dict(step.reductions)
            kept = [n for n, axis in enumerate(axes) if axis not in ops]
            groups: dict[Coordinate, list[Tensor]] = {}
            for at in sorted(values):  # row-major: the order of the ranks in the group
                groups.setdefault(tuple(at[n] for n in kept), []).append(values[at])
            divisor = math.prod(src.mesh.axis_size(axis) for axis, op in ops.items() if op == "avg")
            values = {at: _tree(group, next(iter(ops.values()))) / divisor for at, group in groups.items()}
            axes = tuple(axes[n] for n in kept)
    made = {axis: op for axis, op in dst.partials.items() if axis not in axes}
    summed = tuple(axis for axis, op in made.items() if op == "sum")
    for rank, tensor in enumerate(after):
        assert tuple(tensor.shape) == dst.local_shape(rank), (case, rank)
        # One contribution to a sum that was made is the value, in parts or whole; the others are zeros.
        parts = [after[member] for member in group_ranks(dst.mesh, summed, rank)]
        expected = local_slice(values[_at(dst, rank, axes)], whole(dst), rank)
        assert same_bits(_tree(parts, "sum"), expected), (case, rank)


def _tree(parts: Sequence[Tensor], op: str) -> Tensor:
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    if len(parts) == 1:
        return parts[0]
    pairs = [combine(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return _tree(pairs + list(parts[len(pairs) * 2 :]), op)


@cache
def whole(layout: Layout) -> Layout:
    """The layout without its pending reductions."""
    spec = [(axis, p) for axis, p in layout.spec.items() if not isinstance(p, Partial)]
    return Layout(layout.mesh, P.of(spec), layout.shape)


def _pending(layout: Layout) -> tuple[str, ...]:
    return tuple(axis for axis in layout.mesh.axis_names if axis in layout.partials)


def _at(layout: Layout, rank: int, axes: tuple[str, ...]) -> Coordinate:
    return tuple(layout.mesh.coordinate(rank)[axis] for axis in axes)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# Doing it, in one process or in many.


@cache
def simulated(count: int) -> Mesh:
    return make_mesh(MESHES[count], backend="simulated")


@cache
def processes(count: int) -> Mesh:
    return make_mesh(MESHES[count])


def move(case: Case) -> list[Tensor]:
    """What the simulated ranks then hold."""
    src, dst = case.layouts
    before = [local(case, rank) for rank in range(src.mesh.size)]
    kept = [tensor.clone() for tensor in before]
    after = redistribute(before, src, dst, simulated(len(case.src)))
    assert all(map(same_bits, before, kept)), f"{case}: an input was modified"
    return after


def move_here(cases: Sequence[Case]) -> list[str]:
    """In a process: a digest of what its rank holds after each move; none in a process without a rank."""
    found = []
    for case in cases:
        mesh, (src, dst) = processes(len(case.src)), case.layouts
        if mesh.local_ranks:
            found.append(digest(redistribute([local(case, mesh.rank)], src, dst, mesh)[0]))
    return found


def digest(tensor: Tensor) -> str:
    data = bytes(_bits(tensor).tolist())
    return f"{tuple(tensor.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
