"""What is kept for each matrix: as many on each rank as the rank has matrices, whatever holds these."""

import math

import pytest
from hypothesis import given, strategies as st

from vescale.optim.at_owners import decide
from vescale.optim.beside import beside, is_whole, kept_shape
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.matrices import Matrices
from vescale.spmd.placements import InterleavedShard, P, RaggedShard, Shard

TEXTS = {
    "r c -> r c": (6, 4),
    "b r c -> b r c": (6, 2, 4),
    "a b r c -> a b r c": (2, 4, 3, 2),
    "(h d=3) k -> h d k": (12, 4),
    "r (h d=3) -> h r d": (4, 12),
    "(g=2 h d=2) k -> g h d k": (16, 3),
    "(g=2 r) (h c=3) -> g h r c": (8, 12),
}


@st.composite
def layouts(draw, shape):
    """Any cut over dp, raggedly or not, below one over tp."""
    mesh = AbstractMesh(("dp", "tp"), (4, 2))
    splits = {}
    dims = [dim for dim, size in enumerate(shape) if size % 2 == 0]
    if draw(st.booleans()):
        splits["tp"] = Shard(draw(st.sampled_from(dims)))
    if draw(st.booleans()):
        merged = draw(st.integers(0, len(shape)))
        rows = math.prod(Layout(mesh, P(**splits), shape).local_shape(0)[: max(merged, 1)]) if merged else 1
        cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=3, max_size=3)))
        units = [b - a for a, b in zip([0, *cuts], [*cuts, rows])]
        splits["dp"] = RaggedShard(tuple(range(merged)), units)
    else:
        splits["dp"] = Shard(draw(st.integers(0, len(shape) - 1)))
    return Layout(mesh, P(**splits), shape)


def check(layout, matrices):
    number, rows, columns = matrices.grid(layout.shape)
    found = beside(layout, matrices, 5, 7)
    assert found.shape == kept_shape(matrices, layout.shape, 5, 7)
    assert math.prod(found.shape) == number * 35
    for rank in range(layout.mesh.size):
        held = math.prod(layout.local_shape(rank))
        assert math.prod(found.local_shape(rank)) * rows * columns == held * 35


@given(st.data())
def test_beside_owners(data):
    """Of several values at once, so that owners differ: those that are cut, and those that stay."""
    texts = data.draw(st.lists(st.sampled_from(list(TEXTS)), min_size=1, max_size=4))
    matrices = [Matrices.of(text) for text in texts]
    rest = [data.draw(layouts(TEXTS[text])) for text in texts]
    where = decide(rest, matrices, lambda rows, columns: rows * columns)
    for layout, there, how in zip(rest, where, matrices, strict=True):
        assert is_whole(there or layout, how)
        check(there or layout, how)


@pytest.mark.parametrize(
    ("text", "spec", "expected"),
    [
        ("b r c -> b r c", P(dp=Shard(0)), P(dp=Shard(0))),
        ("(h d=3) k -> h d k", P(tp=Shard(0)), P(tp=Shard(0))),
        ("r (h d=3) -> h r d", P(dp=Shard(1)), P(dp=Shard(0))),
        ("a b r c -> a b r c", P(tp=Shard(0), dp=Shard(1)), P(tp=Shard(0), dp=Shard(1))),
        ("(g=2 h d=2) k -> g h d k", P(dp=InterleavedShard(0, 2)), P(dp=InterleavedShard(0, 2))),
        ("r c -> r c", P(dp=RaggedShard.on_rank(1, 4)), P(dp=RaggedShard.on_rank(1, 4))),
        ("(h d=3) k -> h d k", P(dp=RaggedShard((0,), (3, 0, 6, 3))), P(dp=RaggedShard((0,), (1, 0, 2, 1)))),
    ],
)
def test_placements(text, spec, expected):
    matrices = Matrices.of(text)
    layout = Layout(AbstractMesh(("dp", "tp"), (4, 2)), spec, TEXTS[text])
    assert beside(layout, matrices, 5, 7).spec == expected
    check(layout, matrices)
