"""Hypothesis strategies: meshes, shapes, and layouts of every kind that is legal."""

import math

from hypothesis import assume, strategies as st

import vescale.spmd.layout as L
from vescale._errors import LayoutError
from vescale.spmd.placements import (
    InterleavedShard,
    P,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedRaggedShard,
)

AXES = ("dp", "tp", "pp")


@st.composite
def meshes(draw, axes=(1, 2)):
    """Abstract meshes of `axes[0]` to `axes[1]` axes."""
    count = draw(st.integers(*axes))
    shape = tuple(draw(st.sampled_from((2, 3, 4, 2, 1))) for _ in range(count))
    return L.AbstractMesh(AXES[:count], shape)


# Lengths that divide by small axes come up often, so that digits nest; zero and primes do too.
LENGTHS = st.sampled_from((4, 8, 12, 6, 5, 3, 2, 1, 0))


@st.composite
def shapes(draw, dims=(0, 3)):
    return tuple(draw(LENGTHS) for _ in range(draw(st.integers(*dims))))


@st.composite
def layouts(draw, mesh, shape, partial=True):
    """A layout of `shape` on `mesh`; a ragged split is cut at any of the rows that are left."""
    kinds = ["shard", "ragged"] + ["partial"] * partial + ["interleaved", "replicate"]
    op = draw(st.sampled_from(("sum", "sum", "avg", "max", "min")))
    items, ragged = [], None
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
        layout = L.Layout(mesh, P.of(items), shape)
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
            layout = L.Layout(mesh, P.of(items), shape)
    except LayoutError:
        assume(False)
    return layout
