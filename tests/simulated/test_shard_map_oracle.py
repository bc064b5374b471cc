"""Sampled mapped functions against the loop-only reference: values, and gradients by plain autograd.

A sample is a mesh, an argument in a drawn layout, and a chain of steps that fit the local shapes. Inputs are
whole numbers. Several samples make one test, named by their first seed.
"""

import itertools
import math
import random

import pytest
import torch

import vescale as vs
from tests.shard_map_reference import lockstep, shard_map, split
from vescale.spmd.placements import P, Partial, RaggedShard, Shard

AXES = ("dp", "tp", "pp")
SHAPES = [shape for count in (1, 2, 3) for shape in itertools.product((1, 2, 3, 4), repeat=count)]
DTYPES = (torch.float64, torch.float64, torch.float32, torch.int64)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.int64: 0}


class Sample:
    """A mapped function in the making, on a mesh of `most` ranks at most.

    `x` is what each rank has by now, and `varies` the axes over which it does.
    """

    def __init__(self, seed, most):
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice(DTYPES)
        axes = draw.sample(AXES, 3)
        self.sizes = dict(zip(axes, draw.choice([shape for shape in SHAPES if math.prod(shape) <= most])))
        self.inputs, self.specs, self.steps, self.said = [], [], [], []
        self.varies = set()
        self.add_input([draw.choice((1, 2, 3, 4, 6, 8, 12)) for _ in range(draw.randint(1, 3))])
        self.x = split(self.inputs[0], self.specs[0], self.sizes)
        self.varies |= set(self.specs[0])
        wanted = draw.randint(1, 5)
        for step in draw.choices(STEPS, k=40):
            if len(self.steps) < wanted:
                step(self)
        self.finish()

    # Inputs.

    def whole(self, shape):
        return torch.randint(-2, 3, shape, generator=self.generator).to(self.dtype)

    def add_input(self, shape, spec=None):
        self.inputs.append(self.whole(shape))
        self.specs.append(self.spec(shape) if spec is None else spec)
        return len(self.inputs) - 1

    def spec(self, shape):
        """Shard, uneven ones too, one RaggedShard at most, which comes last."""
        draw, items, ragged = self.draw, [], None
        for axis in draw.sample(list(self.sizes), len(self.sizes)):
            kind = draw.choice(("shard", "shard", "ragged", "replicate"))
            if kind == "shard":
                items.append((axis, Shard(draw.randrange(len(shape)))))
            elif kind == "ragged" and ragged is None:
                ragged = axis
        pieces = split(torch.empty(shape), P.of(items), self.sizes)
        if ragged is not None and len({piece.shape for piece in pieces}) == 1:
            dims = tuple(range(draw.randint(1, len(shape))))
            rows = math.prod(pieces[0].shape[: len(dims)])
            if rows:
                cuts = sorted(draw.randint(0, rows) for _ in range(self.sizes[ragged] - 1))
                units = [b - a for a, b in zip([0, *cuts], [*cuts, rows])]
                items.append((ragged, RaggedShard(dims, units)))
        return P.of(items)

    # What steps ask.

    def axis(self, several=True):
        """An axis or several, and the groups of ranks along it, as indices."""
        count = min(self.draw.choice((1, 1, 2)), len(self.sizes)) if several else 1
        axes = self.draw.sample(list(self.sizes), count)
        places = [dict(zip(self.sizes, at)) for at in itertools.product(*map(range, self.sizes.values()))]
        groups = {}
        for rank, place in enumerate(places):
            rest = tuple((axis, at) for axis, at in place.items() if axis not in axes)
            groups.setdefault(rest, []).append(rank)
        return (axes[0] if len(axes) == 1 else tuple(axes)), [*groups.values()]

    def shapes(self, group):
        return {tuple(self.x[rank].shape) for rank in group}

    def alike(self, groups):
        return all(len(self.shapes(group)) == 1 for group in groups)

    def one_shape(self):
        return len(self.shapes(range(len(self.x)))) == 1

    def size(self, dim):
        """The size of a dim, None where ranks differ in it."""
        sizes = {x.shape[dim] for x in self.x}
        return sizes.pop() if len(sizes) == 1 else None

    def dims(self):
        return self.x[0].dim()

    def do(self, text, fn, adds=(), removes=(), inputs=()):
        """Append a step: fn(collectives, x, *extra inputs)."""
        names = lambda axes: {axes} if isinstance(axes, str) else set(axes)  # noqa: E731
        pieces = [split(self.inputs[index], self.specs[index], self.sizes) for index in inputs]
        self.x = lockstep(fn, self.sizes, [*zip(self.x, *pieces)])
        self.steps.append((fn, inputs))
        self.said.append(text)
        self.varies |= {axis for index in inputs for axis in self.specs[index]}
        self.varies = (self.varies | names(adds)) - names(removes)

    def fn(self, c, *locals):
        x = locals[0]
        for step, inputs in self.steps:
            x = step(c, x, *(locals[index] for index in inputs))
        return x

    # The result's spec.

    def finish(self):
        """Choose a spec that fits; what can't be said in one is reduced first."""
        draw, varying = self.draw, [axis for axis in self.sizes if axis in self.varies]
        if draw.random() < 0.3 and varying:
            axes, varying = tuple(varying), []
            self.do("sum, psum", lambda c, x: c.psum(x.sum(), axes), removes=axes)
        uneven = None
        if not self.one_shape():
            uneven = self.rows_differ_along()
            if uneven is None:
                self.do("sum", lambda c, x: x.sum())
        if varying and not self.dims():
            self.do("reshape", lambda c, x: x.reshape(1))
        shape, items = list(self.x[0].shape), []
        for axis in varying:
            if axis == uneven:
                continue
            first = 1 if uneven else 0
            kinds = ["shard"] * 3 * (len(shape) > first) + ["partial"] * (uneven is None or len(shape) <= 1)
            if draw.choice(kinds) == "shard":
                dim = draw.randrange(first, len(shape))
                items.append((axis, Shard(dim)))
                shape[dim] *= self.sizes[axis]
            else:
                items.append((axis, Partial()))
        if uneven:
            sizes = self.rows_of(uneven)
            items.append((uneven, RaggedShard((0,), sizes)))
            shape[0] = sum(sizes)
        self.out_spec, self.out_shape = P.of(items), tuple(shape)

    def rows_of(self, axis):
        places = [dict(zip(self.sizes, at)) for at in itertools.product(*map(range, self.sizes.values()))]
        found = [{x.shape[0] for x, place in zip(self.x, places) if place[axis] == i}
                 for i in range(self.sizes[axis])]  # fmt: skip
        return [sizes.pop() for sizes in found] if all(len(sizes) == 1 for sizes in found) else None

    def rows_differ_along(self):
        """The one axis along which ranks differ, and in dim 0 only."""
        if not self.dims() or len({x.shape[1:] for x in self.x}) > 1:
            return None
        found = [axis for axis in self.sizes if (rows := self.rows_of(axis)) and sum(rows)]
        return found[0] if found and found[0] in self.varies else None

    def __str__(self):
        return (
            f"{self.sizes} {[tuple(i.shape) for i in self.inputs]} {self.specs} {self.said} {self.out_spec}"
        )


# Steps. Each looks whether it fits, and appends itself if so.


def matmul(s):
    if s.dims() and s.size(-1):
        width = s.draw.choice((1, 2, 3))
        s.do("matmul", lambda c, x, w: x @ w, inputs=[s.add_input((s.size(-1), width), P())])


def scale(s):
    if s.dims() and s.size(-1) is not None:
        s.do("scale", lambda c, x, w: x * w + 1, inputs=[s.add_input((s.size(-1),), P())])


def mix(s):
    """With another argument in a layout of its own, where its local shapes fit."""
    shape = s.x[0].shape
    if s.one_shape() and len(shape):
        axis = s.axis(several=False)[0]
        dim = s.draw.randrange(len(shape))
        whole = [size * (s.sizes[axis] if d == dim else 1) for d, size in enumerate(shape)]
        s.do("mix", lambda c, x, y: x + y, inputs=[s.add_input(whole, P.of([(axis, Shard(dim))]))])


def pointwise(s):
    fn = s.draw.choice((torch.relu, torch.neg, torch.square, lambda x: x.clamp(-3, 3), lambda x: 2 * x - 1))
    s.do("pointwise", lambda c, x: fn(x))


def smooth(s):
    if s.dtype.is_floating_point:
        fn = s.draw.choice((torch.tanh, torch.sin, lambda x: x / 3))
        s.do("smooth", lambda c, x: fn(x))


def carry(s):
    """An invariant start of a loop, joined as it goes."""

    def fn(c, x):
        total = torch.zeros(x.shape, dtype=x.dtype)
        for _ in range(2):
            total = total + x
        return total

    s.do("carry", fn)


def reduce(s):
    if s.dims():
        dim, keep = s.draw.randrange(s.dims()), s.draw.random() < 0.5
        s.do("sum", lambda c, x: x.sum(dim, keepdim=keep))


def transpose(s):
    if s.dims() > 1:
        s.do("transpose", lambda c, x: x.transpose(0, -1))


def psum(s):
    axis, groups = s.axis()
    if s.alike(groups):
        name = s.draw.choice(("psum", "pmean") if s.dtype.is_floating_point else ("psum",))
        s.do(f"{name} {axis}", lambda c, x: getattr(c, name)(x, axis), removes=axis)


def shift(s):
    axis, groups = s.axis()
    if s.alike(groups):
        name = s.draw.choice(("pmax", "pmin"))
        s.do(f"{name} {axis}", lambda c, x: x - getattr(c, name)(x.detach(), axis))


def gatherable(s, groups, dim):
    """Members differ in `dim` at most."""
    return all(len({sh[:dim] + sh[dim + 1 :] for sh in s.shapes(group)}) == 1 for group in groups)


def all_gather(s):
    axis, groups = s.axis()
    to = s.draw.choice(("varying", "invariant"))
    effect = {"adds": axis} if to == "varying" else {"removes": axis}
    if s.alike(groups) and s.draw.random() < 0.3:
        dim = s.draw.randint(0, s.dims())
        s.do(f"stack {axis} {to}", lambda c, x: c.all_gather(x, axis, dim=dim, tiled=False, to=to), **effect)
    elif s.dims():
        dim = s.draw.randrange(s.dims())
        if gatherable(s, groups, dim) and s.x[0].numel() < 200:
            s.do(
                f"all_gather {axis} {dim} {to}", lambda c, x: c.all_gather(x, axis, dim=dim, to=to), **effect
            )


def psum_scatter(s):
    axis, groups = s.axis()
    if not s.dims() or not s.alike(groups):
        return
    dim, count = s.draw.randrange(s.dims()), len(groups[0])
    size = s.size(dim)
    if size is None:
        return
    if s.draw.random() < 0.3:

        def untiled(c, x):
            stacked = torch.stack([x * (i + 1) for i in range(count)], dim)
            return c.psum_scatter(stacked, axis, dim=dim, tiled=False)

        s.do(f"psum_scatter {axis} {dim} untiled", untiled, adds=axis)
        return
    sizes = None
    if s.draw.random() < 0.4:
        cuts = sorted(s.draw.randint(0, size) for _ in range(count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size])]
    s.do(f"psum_scatter {axis} {dim} {sizes}",
         lambda c, x: c.psum_scatter(x, axis, dim=dim, sizes=sizes), adds=axis)  # fmt: skip


def all_to_all(s):
    axis, groups = s.axis()
    if not s.dims():
        return
    cut, concat = s.draw.randrange(s.dims()), s.draw.randrange(s.dims())
    count = len(groups[0])
    fits = gatherable(s, groups, concat) and all(
        len({sh[cut] for sh in s.shapes(group)}) == 1 for group in groups
    )
    divides = all(sh[cut] % count == 0 for group in groups for sh in s.shapes(group))
    if fits and (divides or cut != concat):
        s.do(f"all_to_all {axis} {cut} {concat}", lambda c, x: c.all_to_all(x, axis, cut, concat), adds=axis)


def permute(s):
    axis, groups = s.axis()
    count = len(groups[0])
    if not s.alike(groups):
        return
    perm = s.draw.sample(range(count), count)
    if s.draw.random() < 0.5:
        s.do(f"pshuffle {axis} {perm}", lambda c, x: c.pshuffle(x, axis, perm), adds=axis)
    else:
        pairs = [pair for pair in enumerate(perm) if s.draw.random() < 0.7]
        s.do(f"ppermute {axis} {pairs}", lambda c, x: c.ppermute(x, axis, pairs), adds=axis)


def broadcast(s):
    axis, groups = s.axis()
    if s.alike(groups):
        root = s.draw.randrange(len(groups[0]))
        s.do(f"broadcast {axis} {root}", lambda c, x: c.broadcast(x, axis, root=root), removes=axis)


def index(s):
    axis, _ = s.axis()
    s.do(f"axis_index {axis}", lambda c, x: x * (c.axis_index(axis) + 1), adds=axis)


COLLECTIVES = (psum, shift, all_gather, psum_scatter, all_to_all, permute, broadcast, index)
STEPS = (matmul, scale, mix, pointwise, smooth, carry, reduce, transpose, *COLLECTIVES, *COLLECTIVES)


def agree(seed, most):
    sample = Sample(seed, most)
    mesh = vs.make_mesh(sample.sizes, backend="simulated")
    mapped = vs.shard_map(
        lambda *xs: sample.fn(vs, *xs), mesh=mesh, in_specs=tuple(sample.specs), out_specs=sample.out_spec
    )
    reference = shard_map(sample.fn, sample.sizes, sample.specs, sample.out_spec, sample.out_shape)
    floating = sample.dtype.is_floating_point
    inputs = [tensor.requires_grad_(floating) for tensor in sample.inputs]
    found, expected = mapped(*inputs), reference(*inputs)
    assert found.layout.spec == vs.Layout(mesh.abstract, sample.out_spec, sample.out_shape).spec
    compare(found.full_tensor(), expected, sample.dtype)
    if floating:
        weights = sample.whole(expected.shape)
        if expected.requires_grad:
            compare_all(
                torch.autograd.grad(found.full_tensor(), inputs, weights),
                torch.autograd.grad(expected, inputs, weights, materialize_grads=True),
                sample.dtype,
            )


def compare(found, expected, dtype):
    """Equal but for the rounding of values as large as the largest."""
    bound = TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max() if expected.numel() else 0))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def compare_all(found, expected, dtype):
    for mine, theirs in zip(found, expected, strict=True):
        compare(mine, theirs, dtype)


def batch(first, count, most):
    for seed in range(first, first + count):
        try:
            agree(seed, most)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {Sample(seed, most)}\n{error}") from error


@pytest.mark.parametrize("first", range(0, 500, 25))
def test_values_and_gradients_are_those_of_the_reference(first):
    batch(first, 25, most=8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 14_000, 100))
def test_more_of_them(first):
    batch(first, 100, most=24)


def test_the_samples_cover_every_collective():
    said = " ".join(text for seed in range(200) for text in Sample(seed, most=4).said)
    names = ("psum ", "pmean", "pmax", "pmin", "invariant", "varying", "stack", "psum_scatter", "untiled",
             "all_to_all", "ppermute", "pshuffle", "broadcast", "axis_index", "matmul", "carry")  # fmt: skip
    assert [name for name in names if name not in said] == []
