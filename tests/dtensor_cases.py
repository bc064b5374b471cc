"""Cases of DTensors outside programs, each on a mesh of either world: name -> function(mesh)."""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from vescale.spmd.placements import P, Partial, RaggedShard, Shard

MESH_AXES = (("dp", 2), ("tp", 2))
G = torch.Generator().manual_seed(1)
X, Y = (torch.randint(-4, 5, (8, 6), generator=G).double() for _ in range(2))
SMALL = torch.randn(4, 6, generator=G).double()
CASES = {}


def close(ours, theirs):
    """Equal but for the order of a sum."""
    scale = theirs.abs().max() if theirs.numel() else 1
    return torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13 * float(scale), equal_nan=True)


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def run_case(name, mesh):
    """Run a case; what it returns must be plain torch's. The local pieces are returned, for their bits."""
    pieces = []
    for ours, theirs in CASES[name](mesh):
        if isinstance(ours, vs.DTensor):
            pieces.extend(zip(mesh.local_ranks, [piece.clone() for piece in ours.locals], strict=True))
            ours = ours.full_tensor()
        assert close(torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()), name
    return pieces


def contributions(mesh, *values):
    """Over dp, one value a rank."""
    found = [values[mesh.abstract.coordinate(rank)["dp"]] for rank in mesh.local_ranks]
    return vs.from_local(found, mesh, P(dp=Partial()))


RAGGED = P(dp=RaggedShard((0,), (3, 5)))
WHOLE_ON_ONE = P(tp=RaggedShard.on_rank(1, 2))
ELEMENTS = P(tp=RaggedShard((0, 1), (11, 37)))
ZERO = P(dp=RaggedShard((0,), (0, 1)), tp=Shard(1))


@case
def norm_of_a_pending_sum(mesh):
    s = contributions(mesh, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]))
    return [(s.norm(), 5.0), (torch.linalg.vector_norm(s, torch.inf), 4.0), (s.norm().item(), 5.0)]


@case
def inf_norm_with_empty_ranks(mesh):
    found = []
    for value in (X, -X.abs() - 1):
        for spec in (ZERO, WHOLE_ON_ONE, P(dp=Shard(0), tp=Shard(0))):
            x = vs.distribute_tensor(value[:3], mesh, spec)
            for order in (torch.inf, -torch.inf):
                norm = x.norm(order)
                assert norm.layout.spec == P()
                found.append((norm, value[:3].norm(order)))
    return found


@case
def a_number_and_a_tensor_added_to_a_pending_sum(mesh):
    ten, outs = torch.tensor(10.0), []
    for order in ((0, 1), (1, 0), (0, 1, 0, 1), (1, 1, 0)):
        s = contributions(mesh, torch.tensor(55.0), torch.tensor(-10.0))
        outs += [(s + 10, 55.0) if which == 0 else (s + ten, 55.0) for which in order]
    s = contributions(mesh, torch.tensor(55.0), torch.tensor(-10.0))
    return [*outs, (s * 10, 450.0), (s * ten, 450.0), (10 - s, -35.0), (ten - s, -35.0), (s.square(), 2025.0)]


@case
def numbers_that_are_equal_but_not_the_same(mesh):
    x = vs.distribute_tensor(torch.arange(4), mesh, P(dp=Shard(0)))
    results = [x + 1, x + 1.0, x + True, x * 0.0, x * -0.0]
    assert [r.dtype for r in results[:3]] == [torch.int64, torch.float32, torch.int64]
    signs = [torch.signbit(r.full_tensor()).all().item() for r in results[3:]]
    assert signs == [False, True]
    torch.set_default_dtype(torch.float64)
    try:
        assert (x + 1.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    return [(results[0], torch.arange(4) + 1)]


@case
def mean_of_uneven_shards(mesh):
    x = vs.distribute_tensor(SMALL, mesh, P(dp=RaggedShard((0,), (3, 1))))
    y = vs.distribute_tensor(SMALL[:3], mesh, P(dp=Shard(0), tp=Shard(0)))
    return [(x.mean(), SMALL.mean()), (y.mean(), SMALL[:3].mean()), (y.mean(0), SMALL[:3].mean(0))]


@case
def mean_and_var_of_ragged(mesh):
    found = []
    for spec in (RAGGED, WHOLE_ON_ONE, ELEMENTS, ZERO):
        x = vs.distribute_tensor(X, mesh, spec)
        for args in ((), (0,), (1,)):
            found += [
                (x.mean(*args), X.mean(*args)),
                (x.var(*args), X.var(*args)),
                (x.std(*args), X.std(*args)),
            ]
        found.append((x.var(1, keepdim=True, unbiased=False), X.var(1, keepdim=True, unbiased=False)))
        found += list(zip(torch.var_mean(x, 0), torch.var_mean(X, 0)))
    return found


@case
def transposed_softmax_cat_and_linear_of_ragged(mesh):
    found = []
    for spec in (RAGGED, WHOLE_ON_ONE, ELEMENTS, ZERO):
        x, y = vs.distribute_tensor(X, mesh, spec), vs.distribute_tensor(Y, mesh, P(dp=Shard(0)))
        found += [(x.t(), X.t()), (x.t() @ y, X.t() @ Y), (F.linear(y, x), F.linear(Y, X))]
        found += [(x.softmax(dim), X.softmax(dim)) for dim in (0, 1)]
        found += [(x.log_softmax(dim), X.log_softmax(dim)) for dim in (0, 1)]
        found += [(torch.cat([x, y], dim), torch.cat([X, Y], dim)) for dim in (0, 1)]
        found += [(torch.stack([x, y], dim), torch.stack([X, Y], dim)) for dim in (0, 1, 2)]
        found += [(x[1:7], X[1:7]), (x[:, 2:5], X[:, 2:5]), (x[3], X[3]), (x[..., -1], X[..., -1])]
        found += [(x[::2], X[::2]), (x.flatten(), X.flatten()), (x.view(4, 2, 6), X.view(4, 2, 6))]
        found += [
            (x.chunk(3)[1], X.chunk(3)[1]),
            (x.unsqueeze(0), X.unsqueeze(0)),
            (x.cumsum(0), X.cumsum(0)),
        ]
    return found


@case
def broadcasts_and_sums_of_ragged(mesh):
    found = []
    row, column, one = X[:1], X[:, :1], X[:1, :1]
    for spec in (RAGGED, WHOLE_ON_ONE, ELEMENTS, ZERO):
        x = vs.distribute_tensor(X, mesh, spec)
        for small in (row, column, one, row[0], one[0, 0]):
            there = vs.distribute_tensor(small, mesh, P())
            found += [(x + there, X + small), (there * x, small * X), (x - small, X - small)]
        cut = vs.distribute_tensor(column, mesh, RAGGED)
        found += [(x * cut, X * column), (cut + vs.distribute_tensor(row, mesh, P()), column + row)]
        for dim in (0, 1):
            for keep in (False, True):
                found.append((x.sum(dim, keep), X.sum(dim, keep)))
                for order in (1, 2, torch.inf):
                    found.append((x.norm(order, dim, keep), X.norm(order, dim, keep)))
        found.append((x / (x.norm(dim=1, keepdim=True) + 1), X / (X.norm(dim=1, keepdim=True) + 1)))
        found.append((x.sum(), X.sum()))
    return found


@case
def clip_by_the_norm_over_two_meshes_and_plain_tensors(mesh):
    other = mesh["dp"] if mesh.is_simulated else vs.make_mesh({"all": 4})
    axis = other.axis_names[0]
    values = [X.clone(), Y.clone(), SMALL.clone()]
    grads = [
        vs.distribute_tensor(values[0], mesh, P(tp=RaggedShard((0,), (1, 3)))),
        vs.distribute_tensor(values[1], other, P.of([(axis, Shard(0))])),
        values[2].clone(),
    ]

    def clip(tensors, most):
        norms = [torch.linalg.vector_norm(t) for t in tensors]
        norms = [n.full_tensor() if isinstance(n, vs.DTensor) else n for n in norms]
        total = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(tensors, (most / total).clamp(max=1.0))
        return total

    found = [(clip(grads, 2.0), clip(values, 2.0))]
    whole = [g.full_tensor() if isinstance(g, vs.DTensor) else g for g in grads]
    return [*found, *zip(whole, values)]


@case
def in_place_on_every_layout(mesh):
    found = []
    for spec in (P(), P(dp=Shard(0)), RAGGED, WHOLE_ON_ONE, ELEMENTS, ZERO, P(dp=Partial())):
        p, plain = vs.distribute_tensor(X, mesh, spec), X.clone()
        g = vs.distribute_tensor(Y, mesh, P(tp=Shard(1)))
        for tensor, by in ((p, g), (plain, Y)):
            tensor.mul_(0.5).add_(by, alpha=-0.25).addcmul_(by, by, value=0.5).lerp_(by, 0.25).clamp_(min=-3)
        assert p.layout is vs.Layout(mesh.abstract, spec, (8, 6))
        found.append((p, plain))
    return found


@case
def answers_in_python(mesh):
    x = vs.distribute_tensor(X, mesh, RAGGED)
    y = vs.distribute_tensor(X, mesh, P(tp=Shard(1)))
    return [
        (torch.equal(x, y), True),
        (torch.equal(x, y + 1), False),
        (torch.allclose(x, y), True),
        (x.sum().item(), X.sum().item()),
        (bool((x == y).all()), True),
        ((x > 100).any(), False),
        (x.amax(0), X.amax(0)),
        (x.argmax(1), X.argmax(1)),
    ]


@case
def a_wrong_claim_of_columns_is_refused(mesh):
    widths = (2, 3, 4, 5)
    line = vs.make_mesh({"c": 4}, backend=mesh.backend) if mesh.is_simulated else vs.make_mesh({"c": 4})
    whole = torch.arange(28.0).view(2, 14)
    at = [sum(widths[:rank]) for rank in line.local_ranks]
    pieces = [whole[:, a : a + widths[r]].t().contiguous() for a, r in zip(at, line.local_ranks)]
    x = vs.from_local(pieces, line, P(c=RaggedShard.from_sizes((0,), widths)))
    assert x.shape == (14, 2)
    with pytest.raises(vs.VescaleError, match=r"rank 0 has \(2, 2\)"):
        vs.from_local([piece.t().contiguous() for piece in pieces], line, P(c=Shard(1)))
    return [(x.t(), whole), (x.sum(0), whole.sum(1))]
