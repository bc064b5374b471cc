"""Regrouping: what a reshape does to factors, and that sharding a common one commutes with it."""

import math

import torch
from hypothesis import given, settings, strategies as st

from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.program.candidates import digit_of
from vescale.spmd.rules.notation import Pattern
from vescale.spmd.rules.views import regroup


@st.composite
def grouped(draw, factors):
    """A shape whose dims are products of runs of the factors, with ones thrown in."""
    shape, at = [], 0
    while at < len(factors):
        length = draw(st.integers(0, 3))
        shape.append(math.prod(factors[at : at + length]))
        at += length
    return tuple(shape)


@st.composite
def reshapes(draw):
    factors = draw(st.lists(st.sampled_from((2, 3, 4, 5, 6, 1)), max_size=5))
    source = draw(grouped(factors))
    # In half of the cases the factors come in another order: then little is common.
    target = draw(grouped(draw(st.permutations(factors)) if draw(st.booleans()) else factors))
    return source, target


def sizes_of(dims, sizes):
    return tuple(math.prod(sizes[factor] for factor in dim) for dim in dims)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(reshapes())
def test_factors_multiply_to_the_dims_on_both_sides(shapes):
    source, target = shapes
    left, right, sizes, whole = regroup(source, target)
    assert sizes_of(left, sizes) == source
    assert sizes_of(right, sizes) == target
    sides = [[factor for dim in side for factor in dim] for side in (left, right)]
    assert all(len(set(side)) == len(side) for side in sides)
    common = [[factor for factor in side if factor not in whole] for side in sides]
    assert common[0] == common[1]  # the same factors in the same order
    assert not whole & (set(sides[0]) & set(sides[1]))  # what is on both sides can be sharded
    assert all(sizes[factor] > 1 for factor in common[0])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(reshapes())
def test_sharding_a_common_factor_commutes_with_the_reshape(shapes):
    source, target = shapes
    left, right, sizes, whole = regroup(source, target)
    pattern = Pattern((left,), (right,), sizes)
    x = torch.arange(math.prod(source)).view(source)
    for factor in sizes.keys() - whole:
        mesh = AbstractMesh(("dp",), (sizes[factor],))
        before, after = (
            Layout.of(mesh, shape, {"dp": digit_of(factor, side, pattern)})
            for shape, side in ((source, left), (target, right))
        )
        for rank in range(mesh.size):
            there = local_slice(x.view(target), after, rank)
            assert torch.equal(local_slice(x, before, rank).reshape(there.shape), there)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), max_size=4))
def test_the_same_shape_keeps_every_dim(shape):
    left, right, _, whole = regroup(shape, shape)
    assert left == right
    assert not whole
    assert all(len(dim) == (size > 1) for dim, size in zip(left, shape))


def test_flattening_and_unflattening_lose_nothing():
    assert regroup((4, 64, 192), (256, 192))[3] == set()
    assert regroup((256, 192), (4, 64, 3, 64))[3] == set()


def test_only_what_has_no_common_cut_is_whole():
    left, right, sizes, whole = regroup((12, 8), (16, 6))
    assert left[0][0] == right[0][0] not in whole
    assert sizes[left[0][0]] == 4
    assert sorted(sizes[factor] for factor in whole) == [3, 4, 6, 8]
