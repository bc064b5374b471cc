"""What the tests of rules share: calls of ops, with the placements for which their rule promises silence."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from vescale import _tree
from vescale.spmd.locals import local_slice
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard

AXES = ("dp", "tp")


@dataclass(frozen=True, repr=False)
class Case:
    """A call, and words for the placements that cost nothing: a letter for each tensor among its arguments.

    A digit is the dim that is sharded, `.` a whole tensor, `P` a pending sum. `even` are words that hold
    where the ranks divide the dim; `free` hold for any number of ranks. `ulps` of the largest value bound
    the difference from plain torch, 0 meaning the same bits.
    """

    op: Any
    args: tuple
    free: str = ""
    even: str = ""
    kwargs: dict = field(default_factory=dict)
    ulps: float = 0
    bitwise: bool = True  # whether contributions may be chosen at random: else Partial isn't tried

    @property
    def __name__(self):
        return self.op.__name__

    def __repr__(self):
        return f"{self.op.__name__}{tuple(map(tuple, (tensor.shape for tensor in self.tensors())))}"

    def tensors(self):
        return [leaf for leaf in _tree.leaves([self.args, self.kwargs]) if isinstance(leaf, torch.Tensor)]

    def call(self, *tensors):
        leaves, spec = _tree.flatten([self.args, self.kwargs])
        taken = iter(tensors)
        filled = [next(taken) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = _tree.unflatten(spec, filled)
        return self.op(*args, **kwargs)


def names(cases):
    """Test ids: the op and the number of the case."""
    return [f"{case.op.__name__}-{number}" for number, case in enumerate(cases)]


def whole(*shape, low=-4, high=5, seed=0):
    """Whole numbers in float64, of which sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).double()


def normal(*shape, seed=0):
    """Any numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).double()


def mesh_of(*sizes):
    return vs.make_mesh(dict(zip(AXES, sizes)), backend="simulated")


def placed(tensor, spec, mesh):
    """The tensor in a layout; a pending sum is one of contributions that are all different."""
    if not any(isinstance(placement, Partial) for _, placement in spec.items()):
        return vs.distribute_tensor(tensor, mesh, spec)
    parts = [whole(*tensor.shape, seed=seed).to(tensor.dtype) for seed in range(mesh.size - 1)]
    return vs.from_local([*parts, tensor - sum(parts)], mesh, spec)


def exact(tensor):
    """Whether random contributions sum to the tensor exactly."""
    return tensor.is_floating_point() and torch.equal(tensor, tensor.round())


def ways(tensor, size, pending=True):
    """Placements of every kind over one axis of `size` ranks."""
    for dim, length in enumerate(tensor.shape):
        yield P(dp=Shard(dim))
        if length % 2 == 0:
            yield P(dp=InterleavedShard(dim, 2))
    if tensor.dim() and tensor.shape[0]:
        rows = tensor.shape[0]
        yield P(dp=RaggedShard((0,), (rows - rows // 2, *[0] * (size - 2), rows // 2)))
    if pending and exact(tensor):
        yield P(dp=Partial())


def spelled(word):
    """The placements of a word, by tensor."""
    return [P() if c == "." else P(dp=Partial()) if c == "P" else P(dp=Shard(int(c))) for c in word]


def check(case, specs, mesh):
    """Run the case with its tensors so placed, and compare with plain torch; the table of collectives."""
    tensors = case.tensors()
    run = vs.parallelize(case.call, vs.Plan(mesh))
    operands = [placed(tensor, spec, mesh) for tensor, spec in zip(tensors, specs, strict=True)]
    found = [x for x in _tree.leaves(run(*operands)) if isinstance(x, vs.DTensor)]
    expected = [x for x in _tree.leaves(case.call(*tensors)) if isinstance(x, torch.Tensor)]
    for result, theirs in zip(found, expected, strict=True):
        ours = result.full_tensor()
        for rank, piece in enumerate(result.locals):  # also where it is whole: copies don't differ
            part = local_slice(ours, result.layout, rank)
            assert torch.equal(torch.nan_to_num(piece), torch.nan_to_num(part)), (specs, rank)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs)):
            continue
        error = (ours - theirs).abs().max() / theirs.abs().max() / torch.finfo(theirs.dtype).eps
        assert error <= case.ulps, f"{error.item()} ulps for {specs}"
    return run.lower(*operands).collectives()


def check_all(case, mesh):
    """Each tensor in turn in each way, the others whole; then all that can be placed alike."""
    tensors = case.tensors()
    for at, tensor in enumerate(tensors):
        for spec in ways(tensor, mesh.size, case.bitwise):
            check(case, [spec if other == at else P() for other in range(len(tensors))], mesh)
    if len(tensors) > 1:
        for spec in ways(tensors[0], mesh.size, case.bitwise):
            check(
                case,
                [spec if spec in list(ways(tensor, mesh.size, case.bitwise)) else P() for tensor in tensors],
                mesh,
            )


def check_free(case, size):
    """The promised placements need nothing but, where a result is pending, the sum of that."""
    mesh = mesh_of(size)
    words = case.free.split()
    words += [
        word
        for word in case.even.split()
        if all(tensor.shape[int(c)] % size == 0 for tensor, c in zip(case.tensors(), word) if c.isdigit())
    ]
    for word in words:
        moves = check(case, spelled(word), mesh)
        assert all(move.cause.startswith("result") for move in moves), f"{word}: {moves}"


@st.composite
def on_two_axes(draw, cases):
    """A case, and a placement of its tensors over two axes."""
    case = cases[draw(st.integers(0, len(cases) - 1))]
    specs = []
    for tensor in case.tensors():
        placements = {}
        for axis in AXES:
            dim = draw(st.integers(-1, tensor.dim() - 1))
            if dim >= 0:
                placements[axis] = Shard(dim)
        specs.append(P(**placements))
    return case, specs


def family(cases, ranks=(3,), free=(2, 3), examples=40):
    """The tests of a family: the values of all placements, the silence promised, placements on two axes."""

    @pytest.mark.parametrize("case", cases, ids=names(cases))
    def test_values(case):
        for size in ranks:
            check_all(case, mesh_of(size))

    @pytest.mark.parametrize("case", cases, ids=names(cases))
    def test_promises(case):
        for size in free:
            check_free(case, size)

    @settings(max_examples=examples)
    @given(on_two_axes(cases))
    def test_two_axes(drawn):
        check(*drawn, mesh_of(2, 2))

    return test_values, test_promises, test_two_axes
