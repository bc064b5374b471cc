"""DTensor on simulated ranks: making, moving, reading; autograd, torch.func and checkpoints accept it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as st
from torch.distributed import tensor as torch_tensor

from tests.layouts import layouts, meshes, shapes
from vescale._errors import ArgumentError, LayoutError
from vescale.spmd.agree import digest
from vescale.spmd.chunks import chunks
from vescale.spmd.dtensor import DTensor, distribute_tensor, from_local
from vescale.spmd.layout import Layout
from vescale.spmd.mesh import make_mesh
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Replicate, Shard

MESH = make_mesh({"dp": 2, "tp": 2}, backend="simulated")
VALUE = torch.arange(48.0).view(8, 6)
SPECS = [
    P(),
    P(dp=Shard(0)),
    P(dp=Shard(0), tp=Shard(1)),
    P(tp=Shard(1), dp=RaggedShard((0,), (3, 5))),
    P(dp=RaggedShard((0, 1), (11, 37))),
    P(tp=RaggedShard.on_rank(1, 2)),
    P(tp=InterleavedShard(1, 3)),
    P(tp=Shard(0), dp=Shard(0)),
]


@pytest.mark.parametrize("spec", [*SPECS, P(dp=Partial()), P(dp=Partial("max"))], ids=str)
def test_distribute_and_read_back(spec):
    x = distribute_tensor(VALUE, MESH, spec)
    assert (x.shape, x.dtype, x.device) == (VALUE.shape, VALUE.dtype, VALUE.device)
    assert x.layout is Layout(MESH.abstract, spec, (8, 6))
    assert [tuple(piece.shape) for piece in x.locals] == [x.layout.local_shape(r) for r in range(4)]
    assert torch.equal(x.full_tensor(), VALUE)
    assert type(x.full_tensor()) is torch.Tensor


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pieces_are_memory_of_their_own(spec):
    value = VALUE.clone()
    x = distribute_tensor(value, MESH, spec)
    for piece in x.locals:
        piece.zero_()
        assert torch.equal(value, VALUE)
    assert len({p.untyped_storage().data_ptr() for p in x.locals if p.numel()}) == sum(
        p.numel() > 0 for p in x.locals
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_from_local_is_the_inverse_of_to_local(data):
    abstract = data.draw(meshes())
    layout = data.draw(layouts(abstract, data.draw(shapes()), partial=False))
    mesh = make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    value = torch.randn(layout.shape)
    pieces = distribute_tensor(value, mesh, layout.spec).locals
    x = from_local(pieces, mesh, layout.spec, layout.shape)
    assert x.layout is layout
    assert torch.equal(x.full_tensor(), value)


def test_from_local_adds_up_uneven_pieces():
    mesh = make_mesh({"dp": 3}, backend="simulated")
    x = from_local([torch.ones(2, 3), torch.ones(2, 3), torch.ones(1, 3)], mesh, P(dp=Shard(0)))
    assert x.shape == (5, 3)
    ragged = P(dp=RaggedShard((0,), (1, 4, 2)))
    x = from_local([torch.ones(n, 3) for n in (1, 4, 2)], mesh, ragged)
    assert x.shape == (7, 3)
    assert from_local(torch.ones(2, 3), mesh, P()).shape == (2, 3)
    assert from_local([torch.ones(())] * 3, mesh, P(dp=Partial())).full_tensor().item() == 3


@pytest.mark.parametrize(
    ("pieces", "spec", "says"),
    [
        ([torch.ones(2, 3), torch.ones(4, 3)], P(dp=Shard(0)), r"rank 0 has \(2, 3\)"),
        ([torch.ones(2, 3), torch.ones(2, 4)], P(), r"rank 1 has \(2, 4\)"),
        ([torch.ones(2), torch.ones(2).double()], P(dp=Shard(0)), "float64 on rank 1"),
        ([torch.ones(2)] * 3, P(), "3 pieces for 2 ranks"),
        ([torch.ones(2), torch.ones(2, 1)], P(), "shape="),
        ([torch.ones(2), torch.ones(4)], P(dp=RaggedShard((0, 1), (1, 2))), "shape="),
        ([torch.ones(2, requires_grad=True)] * 2, P(), "detach"),
    ],
)
def test_pieces_that_do_not_fit(pieces, spec, says):
    with pytest.raises(ArgumentError, match=says):
        from_local(pieces, make_mesh({"dp": 2}, backend="simulated"), spec)


def test_a_local_tensor_is_asked_for_by_rank():
    x = distribute_tensor(VALUE, MESH, P(dp=Shard(0)))
    assert torch.equal(x.to_local(rank=3), VALUE[4:])
    with pytest.raises(ArgumentError, match=r"to_local\(rank=0\)"):
        x.to_local()
    with pytest.raises(ArgumentError, match="hosts rank"):
        x.to_local(rank=4)
    with pytest.raises(ArgumentError, match="detach"):
        x.requires_grad_().to_local(rank=0)


def test_a_dtensor_is_not_distributed_twice():
    with pytest.raises(ArgumentError, match="redistribute"):
        distribute_tensor(distribute_tensor(VALUE, MESH, P()), MESH, P())


def test_both_ways_to_say_a_layout():
    x = distribute_tensor(VALUE, MESH, P())
    ours = x.redistribute(P(tp=Shard(1)))
    assert x.redistribute(MESH, [Replicate(), Shard(1)]).layout is ours.layout
    theirs = [torch_tensor.Replicate(), torch_tensor.Shard(1)]
    assert x.redistribute(None, theirs).layout is ours.layout
    assert x.redistribute(theirs).layout is ours.layout
    with pytest.raises(ArgumentError, match=r"vs\.P"):
        x.redistribute("tp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="one placement an axis"):
        x.redistribute(None, [Replicate()])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_placements_in_the_order_of_the_mesh(data):
    abstract = data.draw(meshes())
    layout = data.draw(layouts(abstract, data.draw(shapes()), partial=True))
    mesh = make_mesh(dict(zip(abstract.axis_names, abstract.shape)), backend="simulated")
    x = distribute_tensor(torch.zeros(layout.shape), mesh, layout.spec)
    try:
        placements = x.placements
    except LayoutError:
        return  # said to have no spelling in that order
    assert x.redistribute(mesh, placements).layout is layout


def test_the_second_axis_outermost_has_a_spelling_too():
    x = distribute_tensor(torch.zeros(8), MESH, P(tp=Shard(0), dp=Shard(0)))
    assert x.placements == (InterleavedShard(0, 2), Shard(0))


def test_repr_says_layout_and_no_values():
    x = distribute_tensor(VALUE, MESH, P(dp=Partial()))
    assert repr(x) == (
        "DTensor(shape=(8, 6), dtype=float32, P(dp=Partial('sum')) on Mesh(dp=2 x tp=2, simulated on cpu))"
    )


@pytest.mark.parametrize("spec", [*SPECS, P(dp=Partial())], ids=str)
def test_ops_on_pieces(spec):
    x = distribute_tensor(VALUE, MESH, spec)
    for y in (x.detach(), x.clone(), torch.zeros_like(x), x.view_as(x)):
        assert type(y) is DTensor
        assert y.shape == x.shape
    assert torch.equal(x.clone().full_tensor(), VALUE)
    assert not torch.zeros_like(x).full_tensor().any()
    assert x.clone().locals[0].data_ptr() != x.locals[0].data_ptr() or not x.locals[0].numel()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_through_redistribute_and_full_tensor(spec):
    """The gradient is that of the identity, and comes back in the layout of the input."""
    x = distribute_tensor(VALUE.clone().requires_grad_(), MESH, spec)
    assert x.is_leaf
    assert x.requires_grad
    full = x.redistribute(P(dp=Shard(1))).full_tensor()
    (full * full).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert x.grad.layout is x.layout
    assert torch.equal(x.grad.full_tensor(), 2 * VALUE)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_backward_and_torch_func_go_through_ops(spec):
    x = distribute_tensor(VALUE, MESH, spec)
    leaf = x.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert isinstance(leaf.grad, DTensor)
    assert torch.equal(leaf.grad.full_tensor(), 2 * VALUE)
    found = torch.func.grad(lambda w: (w * w).sum())(x)
    assert isinstance(found, DTensor)
    assert torch.equal(found.full_tensor(), 2 * VALUE)


def test_a_hand_written_redistribution_under_torch_func():
    """Not a DTensor method in there: torch.func hides the class, so ops are all that works."""
    x = distribute_tensor(VALUE, MESH, P(dp=Shard(0)))
    value = torch.func.grad(lambda w: (w.t() @ w).sum())(x)
    expected = torch.func.grad(lambda w: (w.t() @ w).sum())(VALUE)
    assert torch.equal(value.full_tensor(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("loaded_as", SPECS, ids=str)
def test_checkpoints_save_and_reshard(tmp_path, loaded_as):
    assert not dist.is_initialized()
    values = {str(n): VALUE + n for n in range(len(SPECS))}
    saved = {name: distribute_tensor(v, MESH, s) for (name, v), s in zip(values.items(), SPECS)}
    scalar = distribute_tensor(torch.tensor(3.0), MESH, P())
    dcp.save({**saved, "scalar": scalar, "plain": VALUE}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {name: distribute_tensor(0 * v, MESH, loaded_as) for name, v in values.items()}
    loaded["scalar"] = distribute_tensor(torch.tensor(0.0), MESH, P())
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, value in values.items():
        # Every simulated rank, replicas too.
        expected = distribute_tensor(value, MESH, loaded_as).locals
        assert all(torch.equal(a, b) for a, b in zip(loaded[name].locals, expected))
    assert all(piece.item() == 3 for piece in loaded["scalar"].locals)


def test_contributions_are_not_saved():
    with pytest.raises(LayoutError, match="pending"):
        distribute_tensor(VALUE, MESH, P(dp=Partial())).__create_chunk_list__()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_chunks_are_the_local_elements(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    layout = data.draw(layouts(mesh, shape, partial=False))
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    x = distribute_tensor(
        value, make_mesh(dict(zip(mesh.axis_names, mesh.shape)), backend="simulated"), layout.spec
    )
    for rank, piece in enumerate(x.locals):
        seen = []
        for chunk in chunks(layout, rank):
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))
            assert torch.equal(chunk.of(piece), value[box])
            seen += value[box].flatten().tolist()
        assert sorted(seen) == piece.flatten().tolist()


def test_digests_tell_dtype_shape_and_bits_apart():
    zeros = torch.zeros(4)
    others = [-zeros, zeros.view(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(3)]
    assert len({digest(t) for t in [zeros, *others]}) == 5
    assert digest(torch.zeros(2, 2).t()) == digest(torch.zeros(2, 2))
    digest(torch.zeros(0, dtype=torch.bfloat16))
