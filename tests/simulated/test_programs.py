"""Small functions under every kind of mesh and layout: the values and gradients of plain torch.

Inputs are whole numbers and most ops keep them so, which makes every sum exact in whatever order it is
made: then equality is bitwise. Functions that leave the whole numbers are compared within a bound.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests.layouts import layouts, meshes
from vescale import _tree
from vescale.spmd.placements import P

LENGTHS = st.sampled_from((4, 2, 6, 3, 1, 8))


def whole(shape, seed, low=-2, high=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).double()


# Steps: (the shape of x) -> functions of x, and of a second tensor of a shape that they ask for.


def _reshape(shape, data):
    """Flatten two neighbouring dims, or write one as two."""
    if len(shape) > 1 and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(shape) - 2))
        return None, lambda x, _: x.flatten(at, at + 1)
    at = data.draw(st.integers(0, len(shape) - 1))
    outer = data.draw(st.sampled_from([n for n in range(1, shape[at] + 1) if shape[at] % n == 0]))
    return None, lambda x, _: x.unflatten(at, (outer, shape[at] // outer))


def _transpose(shape, data):
    a, b = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    return None, lambda x, _: x.transpose(a, b)


def _matmul(shape, data):
    width = data.draw(LENGTHS)
    return (shape[-1], width), lambda x, w: x @ w


def _linear(shape, data):
    return (data.draw(LENGTHS), shape[-1]), lambda x, w: F.linear(x, w, w.sum(1))


def _broadcast(shape, data):
    other = tuple(
        data.draw(st.sampled_from((1, size))) for size in shape[data.draw(st.integers(0, len(shape))) :]
    )
    op = data.draw(st.sampled_from((torch.add, torch.sub, torch.mul, torch.maximum)))
    return other, lambda x, y: op(x, y)


def _sum(shape, data):
    dim, keep = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.booleans()) or len(shape) == 1
    return None, lambda x, _: x.sum(dim, keepdim=keep)


def _largest(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    return None, lambda x, _: x - x.amax(dim, keepdim=True)


def _split_and_join(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    size = data.draw(st.integers(1, shape[dim]))
    return None, lambda x, _: torch.cat(x.split(size, dim)[::-1], dim)


def _slice(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    return None, lambda x, _: x.narrow(dim, start, shape[dim] - start)


def _pointwise(shape, data):
    fn = data.draw(st.sampled_from((torch.relu, torch.neg, torch.abs, lambda x: x + 1, lambda x: x * 3)))
    return None, lambda x, _: fn(x)


def _select_by_value(shape, data):
    return shape, lambda x, y: torch.where(x > y, x, y * 2)


def _softmax(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    fn = data.draw(st.sampled_from((F.softmax, F.log_softmax)))
    return None, lambda x, _: fn(x / 8, dim)


def _layer_norm(shape, data):
    return (shape[-1],), lambda x, w: F.layer_norm(x / 8, (shape[-1],), w, w * 2, eps=1.0)


def _smooth(shape, data):
    fn = data.draw(st.sampled_from((torch.tanh, torch.sigmoid, F.gelu, F.silu)))
    return None, lambda x, _: fn(x / 8)


def _mean(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    return None, lambda x, _: x - x.mean(dim, keepdim=True)


EXACT = (
    _reshape, _transpose, _matmul, _linear, _broadcast, _sum, _largest, _split_and_join, _slice, _pointwise,
    _select_by_value,
)  # fmt: skip
# Their gradients stay whole too: that of the largest element is shared between equals.
SUMMED = tuple(step for step in EXACT if step is not _largest)
SMOOTH = (*EXACT, _softmax, _layer_norm, _smooth, _mean)


def build(data, steps, shape):
    """A function of tensors, and these tensors, by drawing up to four steps."""
    chain, tensors, at = [], [whole(shape, 0)], shape
    for number in range(data.draw(st.integers(1, 4))):
        other, fn = data.draw(st.sampled_from(steps))(at, data)
        chain.append((fn, None if other is None else len(tensors)))
        if other is not None:
            tensors.append(whole(other, number + 1))
        at = tuple(fn(torch.empty(at, device="meta"), None if other is None else torch.empty(other)
                      .to("meta")).shape)  # fmt: skip

    def run(*tensors):
        x = tensors[0]
        for fn, index in chain:
            x = fn(x, None if index is None else tensors[index])
        return x

    return run, tensors


def place(data, mesh, tensors):
    """The tensors in drawn layouts; a pending sum is one of contributions that all differ."""
    placed = []
    for number, tensor in enumerate(tensors):
        layout = data.draw(layouts(mesh.abstract, tuple(tensor.shape)))
        if set(layout.partials.values()) - {"sum"}:
            layout = vs.Layout(mesh.abstract, P(), tuple(tensor.shape))
        plain = vs.distribute_tensor(tensor, mesh, layout.spec)
        if layout.partials:
            noise = []
            for rank, piece in enumerate(plain.locals):
                at = mesh.abstract.coordinate(rank)  # replicas have the same
                seed = 10 * number + 3 * sum(at[axis] for axis in layout.partials)
                noise.append(whole(piece.shape, seed))
            first = vs.from_local(noise, mesh, layout.spec, layout.shape)
            gone = vs.distribute_tensor(first.full_tensor(), mesh, layout.spec)
            pieces = [x + y - z for x, y, z in zip(plain.locals, noise, gone.locals)]
            plain = vs.from_local(pieces, mesh, layout.spec, layout.shape)
        placed.append(plain)
    return placed


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True)


def drawn(data, steps):
    abstract = data.draw(meshes())
    mesh = vs.make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    shape = tuple(data.draw(LENGTHS) for _ in range(data.draw(st.integers(1, 3))))
    fn, tensors = build(data, steps, shape)
    return mesh, fn, tensors, place(data, mesh, tensors)


def assert_same(ours, theirs):
    for a, b in zip(_tree.leaves(ours), _tree.leaves(theirs), strict=True):
        a = a.full_tensor()
        assert a.shape == b.shape
        assert torch.equal(a, b), f"{a} is not {b}"


def assert_close(ours, theirs):
    """Within 1e-12 of the largest value: some hundred sums of float64 in another order."""
    for a, b in zip(_tree.leaves(ours), _tree.leaves(theirs), strict=True):
        a = a.full_tensor()
        assert a.shape == b.shape
        assert not b.numel() or (a - b).abs().max() <= 1e-12 * (1 + b.abs().max())


@examples(200)
@given(st.data())
def test_exact_functions(data):
    mesh, fn, tensors, placed = drawn(data, EXACT)
    assert_same(vs.parallelize(fn, vs.Plan(mesh))(*placed), fn(*tensors))


@examples(60)
@given(st.data())
def test_exact_gradients(data):
    mesh, fn, tensors, placed = drawn(data, SUMMED)

    def step(*tensors):
        everything = tuple(range(len(tensors)))
        return vs.value_and_grad(lambda *ts: (fn(*ts) * 3).sum(), everything)(*tensors)

    assert_same(vs.parallelize(step, vs.Plan(mesh))(*placed), step(*tensors))


@examples(100)
@given(st.data())
def test_smooth_functions_and_gradients(data):
    mesh, fn, tensors, placed = drawn(data, SMOOTH)

    def step(*tensors):
        everything = tuple(range(len(tensors)))
        return fn(*tensors), vs.value_and_grad(lambda *ts: fn(*ts).sum(), everything)(*tensors)

    assert_close(vs.parallelize(step, vs.Plan(mesh))(*placed), step(*tensors))


def embed(table, indices, target, head):
    return F.cross_entropy(F.embedding(indices, table) @ head, target, ignore_index=1)


@examples(30)
@given(st.data())
def test_embedding_to_cross_entropy(data):
    """A vocabulary split in any way, at both ends."""
    abstract = data.draw(meshes())
    mesh = vs.make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    table, head = whole((data.draw(LENGTHS), 4), 0), whole((4, data.draw(LENGTHS)), 1) / 8
    indices = torch.arange(12) % table.shape[0]
    target = torch.arange(12) * 5 % head.shape[1]
    tensors = table, indices, target, head
    placed = [
        vs.distribute_tensor(t, mesh, data.draw(layouts(abstract, tuple(t.shape), partial=False)).spec)
        for t in tensors
    ]
    step = vs.value_and_grad(embed, (0, 3))
    if head.shape[1] == 2 or not (target != 1).any():
        target = tensors[2].zero_()
        placed[2] = vs.distribute_tensor(target, mesh, placed[2].layout.spec)
    assert_close(vs.parallelize(step, vs.Plan(mesh))(*placed), step(*tensors))


@pytest.mark.parametrize("causal", [False, True])
@examples(15)
@given(st.data())
def test_attention(causal, data):
    abstract = data.draw(meshes())
    mesh = vs.make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    x, w = whole((4, 6, 8), 0) / 4, whole((8, 24), 1) / 4
    heads = data.draw(st.sampled_from((1, 2, 4)))

    def attend(x, w):
        q, k, v = ((x @ w).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return y.transpose(1, 2).flatten(2).square().sum() / math.sqrt(heads)

    placed = [
        vs.distribute_tensor(t, mesh, data.draw(layouts(abstract, tuple(t.shape), partial=False)).spec)
        for t in (x, w)
    ]
    step = vs.value_and_grad(attend, (0, 1))
    assert_close(vs.parallelize(step, vs.Plan(mesh))(*placed), step(x, w))
