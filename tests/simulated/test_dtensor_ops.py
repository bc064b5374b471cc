"""What a DTensor does outside programs: what torch does to the global tensor, whatever the layout."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import vescale as vs
from tests.dtensor_cases import CASES, MESH_AXES, close, run_case
from vescale._errors import ArgumentError, ShardingError
from vescale.spmd.layout import Layout
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard

MESH = vs.make_mesh(dict(MESH_AXES), backend="simulated")
OTHER = vs.make_mesh({"ep": 3}, backend="simulated")
G = torch.Generator().manual_seed(0)
X, Y, Z = (torch.randint(-4, 5, (8, 6), generator=G).double() for _ in range(3))
CUBE = torch.randint(-4, 5, (4, 6, 5), generator=G).double()
ROW, COLUMN = X[:1].clone(), X[:, :1].clone()
RAGGED = [
    P(dp=RaggedShard((0,), (3, 5))),
    P(tp=RaggedShard((0,), (0, 1))),
    P(dp=RaggedShard((0, 1), (11, 37))),
    P(tp=Shard(1), dp=RaggedShard((0, 1), (5, 19))),
    P(tp=Shard(1), dp=RaggedShard((0,), (1, 3))),
    P(tp=Shard(0), dp=RaggedShard((0,), (1, 3))),
    P(dp=RaggedShard.on_rank(1, 2)),
]
SPLIT = [
    P(),
    P(dp=Shard(0)),
    P(dp=Shard(1), tp=Shard(0)),
    P(tp=InterleavedShard(1, 3)),
    P(tp=Shard(0), dp=Shard(0)),
    *RAGGED,
]
PENDING = [P(dp=Partial()), P(dp=Partial("avg"), tp=Shard(1)), P(tp=Partial("max"))]
ALL = [*SPLIT, *PENDING]


def put(tensor, spec=None, mesh=MESH):
    return vs.distribute_tensor(tensor, mesh, P(dp=Shard(0)) if spec is None else spec)


def assert_same(ours, theirs, exact=True):
    assert isinstance(ours, vs.DTensor)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    ours = ours.full_tensor()
    assert torch.equal(ours, theirs) if exact else close(ours, theirs)


def moves(op):
    """How many collectives an op's decision has, by kind."""
    from vescale.spmd.program import dispatch

    before = dispatch._programs.info().misses
    kinds = []
    compile_ = dispatch.compile_partitioned

    def spy(partitioned, mesh):
        kinds.extend(s.step.kind for s in partitioned.steps if hasattr(s, "step") and s.step.is_collective)
        return compile_(partitioned, mesh)

    dispatch._programs._programs.clear()
    dispatch.compile_partitioned = spy
    try:
        op()
    finally:
        dispatch.compile_partitioned = compile_
    assert dispatch._programs.info().misses > before
    return kinds


# Every case of the shared table, here on simulated ranks; a few of them also run on real ones.


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    run_case(name, MESH)


# Reductions.

ORDERS = [2, 1, 0, 3, 0.5, torch.inf, -torch.inf]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", ALL, ids=str)
def test_norms(spec, order):
    x = put(X, spec)
    assert_same(torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(X, order), exact=False)
    for dim in (0, 1, (0, 1)):
        for keepdim in (False, True):
            ours = x.norm(order, dim, keepdim)
            assert_same(ours, X.norm(order, dim, keepdim), exact=False)


CUBES = [
    P(dp=RaggedShard((0,), (3, 1))),
    P(dp=RaggedShard((0, 1), (5, 7))),
    P(dp=RaggedShard((0, 1, 2), (50, 70))),
    P(tp=Shard(2), dp=RaggedShard((0,), (3, 1))),
    P(tp=Shard(1), dp=RaggedShard((0, 1), (1, 5))),
    P(tp=Shard(0), dp=RaggedShard.on_rank(0, 2)),
    P(dp=Shard(1), tp=Shard(0)),
]
DIMS = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("spec", CUBES, ids=str)
def test_reductions_over_dims(spec, dims):
    x, along = put(CUBE, spec), list(dims)
    for keepdim in (False, True):
        assert_same(x.sum(along, keepdim), CUBE.sum(along, keepdim))
        assert_same(x.amax(along, keepdim), CUBE.amax(along, keepdim))
        assert_same(x.mean(along, keepdim), CUBE.mean(along, keepdim), exact=False)
        assert_same(x.norm(2, along or None, keepdim), CUBE.norm(2, along or None, keepdim), exact=False)
        for correction in (0, 1, 2):
            named = {"correction": correction, "keepdim": keepdim}
            assert_same(x.var(along or None, **named), CUBE.var(along or None, **named), exact=False)
            assert_same(x.std(along or None, **named), CUBE.std(along or None, **named), exact=False)


@pytest.mark.parametrize("spec", RAGGED, ids=str)
def test_a_ragged_sum_is_local_and_one_reduction(spec):
    x = put(X, spec)
    for op in (x.sum, x.mean, x.amax, x.norm, lambda: x.norm(torch.inf)):
        assert moves(op) == ["all_reduce"]
    assert moves(lambda: x * 2 + x) == []


def test_rows_that_are_cut_stay_where_they_are():
    x = put(X, P(dp=RaggedShard((0,), (3, 5))))
    row, column = put(ROW, P()), put(COLUMN, P(dp=RaggedShard((0,), (3, 5))))
    ops = [
        lambda: x + row,
        lambda: x * column,
        lambda: x.sum(1),
        lambda: x.norm(2, 1, True),
        lambda: x.softmax(1),
        lambda: x[:, 1:3],
        lambda: x.view(8, 2, 3),
        lambda: x.unsqueeze(1),
        lambda: torch.cat([x, x], 1),
    ]
    for op in ops:
        assert moves(op) == []
        assert op().layout.ragged == ("dp", RaggedShard((0,), (3, 5)))


# In place.

IN_PLACE = {
    "add_": lambda p, a, b: p.add_(a, alpha=2),
    "add_ a number": lambda p, a, b: p.add_(3),
    "sub_": lambda p, a, b: p.sub_(a),
    "mul_": lambda p, a, b: p.mul_(a),
    "mul_ a number": lambda p, a, b: p.mul_(0.5),
    "div_": lambda p, a, b: p.div_(2),
    "zero_": lambda p, a, b: p.zero_(),
    "fill_": lambda p, a, b: p.fill_(3),
    "copy_": lambda p, a, b: p.copy_(a),
    "copy_ a cast": lambda p, a, b: p.copy_(a.float()),
    "lerp_": lambda p, a, b: p.lerp_(a, 0.25),
    "addcmul_": lambda p, a, b: p.addcmul_(a, b, value=2),
    "addcdiv_": lambda p, a, b: p.addcdiv_(a, b.abs() + 1, value=2),
    "clamp_": lambda p, a, b: p.clamp_(-1, 2),
    "neg_": lambda p, a, b: p.neg_(),
    "relu_": lambda p, a, b: p.relu_(),
    "sqrt_": lambda p, a, b: p.abs_().sqrt_(),
    "masked_fill_": lambda p, a, b: p.masked_fill_(a > 0, 7),
    "+=": lambda p, a, b: p.__iadd__(a).__imul__(b),
    "itself": lambda p, a, b: p.add_(p).mul_(p),
    "a row": lambda p, a, b: p.add_(a[:1]),
    "a column": lambda p, a, b: p.mul_(a[:, :1]),
    "a plain tensor": lambda p, a, b: p.add_(Y),
}


@pytest.mark.parametrize("spec", ALL, ids=str)
@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place(op, spec):
    for other in (P(dp=Shard(0)), P(), P(tp=RaggedShard((0,), (3, 1))), P(tp=Partial())):
        p, plain = put(X, spec), X.clone()
        layout, memory = p.layout, [piece.data_ptr() for piece in p.locals]
        expected = IN_PLACE[op](plain, Y.clone(), Z.clone())
        found = IN_PLACE[op](p, put(Y, other), put(Z, spec))
        assert found is p
        assert p._version == expected._version
        assert p.layout is layout
        assert [piece.data_ptr() for piece in p.locals] == memory
        assert_same(p, plain)


def test_in_place_keeps_the_dtype_and_torchs_errors():
    half = put(X.to(torch.bfloat16))
    assert half.add_(put(Y.float())).dtype == torch.bfloat16
    assert torch.equal(half.full_tensor(), X.to(torch.bfloat16).add_(Y.float()))
    with pytest.raises(RuntimeError, match="Promotion of int"):
        put(X.long()).add_(1.5)
    with pytest.raises(RuntimeError, match="shape"):
        put(ROW, P()).add_(put(X))
    with pytest.raises(RuntimeError, match="leaf"):
        put(X).requires_grad_().add_(1)


def test_in_place_on_a_result_with_a_history():
    w, plain = put(X).requires_grad_(), X.clone().requires_grad_()
    for leaf in (w, plain):
        y = leaf * 2
        y.mul_(leaf.detach())
        y += 1
        y.square().sum().backward()
    assert_same(w.grad, plain.grad)
    z = (w * 2).exp()
    total = z.sum()
    z.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (lambda x: x.t_(), "keeps its shape"),
        (lambda x: x.unsqueeze_(0), "keeps its shape"),
        (lambda x: torch.add(x, x, out=X.clone()), "first argument"),
        (lambda x: X.clone().add_(x), "full_tensor"),
    ],
)
def test_writes_that_are_refused(op, says):
    with pytest.raises(ArgumentError, match=says):
        op(put(X))


def test_out_is_written():
    x, out = put(X), put(torch.zeros_like(X), P(dp=Shard(1)))
    layout = out.layout
    assert torch.add(x, x, out=out) is out
    assert out.layout is layout
    assert_same(out, X + X)


# Views: of the same memory where the layout survives them, and never silently a copy.


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x.t(), lambda x: x[:, 2], lambda x: x[1:3]])
@pytest.mark.parametrize("spec", SPLIT, ids=str)
def test_a_write_through_a_view(spec, view):
    x, plain = put(X, spec), X.clone()
    taken = view(x)
    if taken.is_copy:
        with pytest.raises(ArgumentError, match="write to the base"):
            taken.zero_()
        assert_same(x, X)
        assert_same(taken, view(X))  # nothing was written: still the base's values
        x.add_(1)
        for read in (lambda: taken + 1, taken.full_tensor, taken.clone):
            with pytest.raises(ArgumentError, match="take the view again"):
                read()
        assert_same(view(x), view(X + 1))
    else:
        taken.zero_()
        view(plain).zero_()
        assert_same(x, plain)
        x.add_(1)
        assert_same(taken, view(plain + 1))


def test_a_view_survives_where_the_layout_does():
    x = put(X)
    for view in (x.t(), x.view(8, 2, 3), x.unsqueeze(1), x.flatten(), x[:, 1], x.detach(), x.view_as(x)):
        assert not view.is_copy
        assert view.layout.digits
    assert x[2].is_copy
    assert not put(X, P())[2].is_copy
    base = put(X)
    row = base[2].detach()
    assert row.is_copy
    del base
    row.zero_()  # nobody can tell now: gradients come like this


def test_setting_items():
    x, plain = put(X, P(tp=Shard(1))), X.clone()
    x[2:4] = 7
    plain[2:4] = 7
    assert_same(x, plain)
    x[5] = put(ROW[0], P(tp=Shard(0)))
    plain[5] = ROW[0]
    assert_same(x, plain)


# foreach.

LAYOUTS = [P(), P(dp=Shard(0)), P(tp=RaggedShard((0,), (3, 1))), P(dp=Partial())]


def lists(specs=LAYOUTS):
    plain = [[t.clone() + n for n in range(len(specs))] for t in (X, Y, Z)]
    return plain, [[put(t, spec) for t, spec in zip(ts, specs)] for ts in plain]


FOREACH = {
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=2),
    "add a number": lambda a, b, c: torch._foreach_add(a, 1.5),
    "add numbers": lambda a, b, c: torch._foreach_add(a, [1.0, 2.0, 3.0, 4.0]),
    "sub": lambda a, b, c: torch._foreach_sub(a, b),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "mul a tensor": lambda a, b, c: torch._foreach_mul(a, torch.tensor(2.0).double()),
    "div": lambda a, b, c: torch._foreach_div(a, torch._foreach_add(torch._foreach_abs(b), 1)),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(torch._foreach_abs(a)),
    "norm": lambda a, b, c: torch._foreach_norm(a),
    "inf norm": lambda a, b, c: torch._foreach_norm(a, torch.inf, torch.float64),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.25),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, 2),
    "addcmul numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, [1.0, 2.0, 3.0, 4.0]),
    "addcmul tensor": lambda a, b, c: torch._foreach_addcmul(a, b, c, torch.arange(4.0).double()),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv(a, b, torch._foreach_add(torch._foreach_abs(c), 1), 2),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "clamp": lambda a, b, c: torch._foreach_maximum(torch._foreach_minimum(a, 2.0), -1.0),
    "pow": lambda a, b, c: torch._foreach_pow(a, 2),
    "max": lambda a, b, c: torch._foreach_max(a),
    "add_": lambda a, b, c: torch._foreach_add_(a, b, alpha=2) or a,
    "mul_": lambda a, b, c: torch._foreach_mul_(a, 0.5) or a,
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.5) or a,
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.5) or a,
    "addcdiv_": lambda a, b, c: torch._foreach_addcdiv_(a, b, [torch.ones_like(x) for x in c], 0.5) or a,
    "zero_": lambda a, b, c: torch._foreach_zero_(a) or a,
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b) or a,
}


@pytest.mark.parametrize("op", FOREACH)
def test_foreach(op):
    plain, placed = lists()
    shuffled = [placed[0], placed[1][::-1], placed[2]]
    shuffled[1] = [put(t, s) for t, s in zip(plain[1], LAYOUTS[::-1])]
    expected, found = FOREACH[op](*plain), FOREACH[op](*shuffled)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs, exact="norm" not in op)
    if op.endswith("_"):
        assert [x.layout for x in found] == [put(X, spec).layout for spec in LAYOUTS]


def test_foreach_over_meshes_and_plain_tensors_together():
    grads = [put(X), put(Y, P(ep=Shard(0)), OTHER), Z.clone()]
    torch._foreach_mul_(grads, 2.0)
    norms = torch._foreach_norm(grads, torch.inf)
    assert [float(norm) for norm in norms] == [float((2 * t).abs().max()) for t in (X, Y, Z)]
    with pytest.raises(RuntimeError, match="same number"):
        torch._foreach_add([put(X)], [put(X), put(Y)])


# Questions, copies, casts.


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_equal_and_allclose(spec):
    x = put(X, spec)
    assert torch.equal(x, put(X, P(tp=Shard(0))))
    assert torch.equal(x, X)
    assert not torch.equal(x, put(Y, spec))
    assert not torch.equal(x, put(ROW, P()))
    assert torch.allclose(x, x + 1e-12)
    assert not torch.allclose(x, put(Y, spec))
    assert bool((x == X).all())
    assert not (x != x).any()


@pytest.mark.parametrize("spec", SPLIT, ids=str)
def test_copies_and_casts_stay_where_they_are(spec):
    x = put(X, spec)
    likes = [torch.ones_like(x), torch.full_like(x, 3), torch.empty_like(x), torch.zeros_like(x)]
    for y in (*likes, x.clone(), x.to(torch.float32), x.float(), x.to("cpu"), x.detach(), copy.deepcopy(x)):
        assert y.layout is x.layout
    assert x.to(torch.float64) is x
    assert copy.deepcopy(x).locals[0].data_ptr() != x.locals[0].data_ptr() or not x.locals[0].numel()
    with pytest.raises(ArgumentError, match="full_tensor"):
        x.to("meta")


TWIN = vs.make_mesh(dict(MESH_AXES), backend="simulated")


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_pickling(spec):
    put(X, P(), TWIN)  # a mesh of the same shape is not taken for this one
    file = io.BytesIO()
    x = put(X, spec).requires_grad_()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file)["x"]
    assert loaded.layout is x.layout
    assert loaded.mesh is x.mesh
    assert loaded.requires_grad
    assert all(map(torch.equal, loaded.locals, x.locals))
    assert_same(loaded + x, X + X)
    assert isinstance(pickle.loads(pickle.dumps(nn.Parameter(x.detach()))), nn.Parameter)


@pytest.mark.parametrize("target", ALL, ids=str)
@pytest.mark.parametrize("spec", ALL, ids=str)
def test_a_write_to_another_layout_or_to_the_global_value_leaves_the_source_alone(spec, target):
    x = put(X, spec)
    full, moved = x.full_tensor(), x.redistribute(target)
    full.zero_()
    if moved.layout is not x.layout:
        moved.zero_()
    assert_same(x, X)


def test_printing_and_repr_never_communicate():
    x = put(X, P(dp=Partial()))
    x._locals = None  # type: ignore[assignment]  # any read would fail
    for text in (repr(x), str(x), f"{x}", f"{x.layout}"):
        assert "P(dp=Partial('sum'))" in text
    assert "shape=()" in f"{put(torch.tensor(1.0), P(dp=Partial()))}"


# Autograd and optimizers.


@pytest.mark.parametrize("spec", SPLIT, ids=str)
def test_gradients_accumulate(spec):
    w, plain = put(X, spec).requires_grad_(), X.clone().requires_grad_()
    for leaf, other in ((w, put(Y)), (plain, Y)):
        for _ in range(2):
            ((leaf @ other.t()).relu().sum() + leaf.sum() + leaf.t().square().mean()).backward()
    assert_same(w.grad, plain.grad, exact=False)
    w.grad.mul_(2)
    assert_same(w.grad, 2 * plain.grad, exact=False)
    w.grad.zero_()
    assert not w.grad.full_tensor().any()


def test_a_gradient_that_is_one_number_expanded_can_be_written():
    w = put(X).requires_grad_()
    w.sum().backward()
    w.grad.mul_(3)
    assert_same(w.grad, torch.full_like(X, 3))


OPTIMIZERS = {
    "sgd": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, **kw),
    "adamw": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.1, **kw),
}


@pytest.mark.parametrize("each", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers(name, each):
    specs = [P(dp=Shard(0)), P(tp=RaggedShard((0,), (3, 1))), P(), P(dp=RaggedShard((0, 1), (11, 37)))]
    ours = [nn.Parameter(put(X + n, spec)) for n, spec in enumerate(specs)]
    theirs = [nn.Parameter(X + n) for n in range(len(specs))]
    for params in (ours, theirs):
        opt = OPTIMIZERS[name](params, foreach=each)
        for _ in range(2):
            opt.zero_grad()
            x = put(Y, P(dp=Shard(0))) if params is ours else Y
            # Exact: whole numbers; so the update alone is compared.
            torch.stack([((x * p).relu() + p).sum() for p in params]).sum().backward()
            opt.step()
    for mine, other, spec in zip(ours, theirs, specs):
        assert isinstance(mine, nn.Parameter)
        assert mine.layout is Layout(MESH.abstract, spec, (8, 6))
        assert_same(mine.detach(), other.detach())


def test_a_module_with_dtensor_parameters():
    module = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 1)).double()
    mine = copy.deepcopy(module)
    for name, param in list(mine.named_parameters()):
        owner = mine.get_submodule(name.rpartition(".")[0])
        spec = P(dp=RaggedShard((0,), (1, 3) if param.shape[0] == 4 else (1, 0)))
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(put(param.detach(), spec)))
    for net, x in ((module, X), (mine, put(X))):
        net(x).square().mean().backward()
    for ours, theirs in zip(mine.parameters(), module.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, exact=False)
    assert copy.deepcopy(mine)[0].weight.layout is mine[0].weight.layout
    total = torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
    assert close(total.full_tensor(), torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    for ours, theirs in zip(mine.parameters(), module.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, exact=False)


def test_ops_in_inference_mode():
    with torch.inference_mode():
        x = put(X)
        x.add_(1)
        assert_same(x[2] * 2, (X + 1)[2] * 2)


# Nothing moves unasked.


def test_no_implicit_redistribution():
    x, y, column = put(X), put(Y, P(tp=Shard(1))), put(COLUMN, P())
    x + y  # decided and kept: a decision from outside says nothing about inside
    with vs.no_implicit_redistribute():
        assert_same(x + Y, X + Y)  # a plain tensor is the global value
        assert_same((x * 2).sum(), X.sum() * 2)
        assert_same(x.norm(), X.norm(), exact=False)
        assert (x.sum() > 0).item() == (X.sum() > 0).item()
        assert torch.equal(x, x.clone())
        x.add_(1).mul_(2)
        for op, name in [
            (lambda: x + y, r"aten\.add"),
            (lambda: x.add_(y), r"aten\.add_"),
            (lambda: x * column, r"aten\.mul"),
            (lambda: x @ x.t(), r"aten\.mm"),
            (lambda: put(X, P(dp=Partial())).exp(), r"aten\.exp"),
            (lambda: put(X.sum(), P(dp=Partial())).item(), r"_local_scalar_dense"),
            (lambda: torch._foreach_add([x], [y]), r"aten\.add"),
            (lambda: x.sort(0), r"aten\.sort"),
        ]:
            says = rf"operand \d in P\((.|\n)*{name}(.|\n)*redistribute\(P\("
            with pytest.raises(ShardingError, match=says):
                op()
        assert_same(x + y.redistribute(x.layout.spec), (X + 1) * 2 + Y)
        assert x.full_tensor().shape == (8, 6)
    assert_same(x + y, (X + 1) * 2 + Y)


def test_operands_on_two_meshes():
    with pytest.raises(ArgumentError, match=r"aten\.add(.|\n)*full_tensor"):
        put(X) + put(Y, P(ep=Shard(0)), OTHER)
    with pytest.raises(ArgumentError, match="2 meshes"):
        put(X).add_(put(Y, P(ep=Shard(0)), OTHER))


@pytest.mark.parametrize("vector", [P(), P(tp=Shard(0))], ids=str)
@pytest.mark.parametrize("matrix", [P(), P(tp=Shard(0)), P(tp=Shard(1))], ids=str)
def test_a_vector_times_a_matrix(vector, matrix):
    """Torch squeezes its product in place: the DTensor takes the shape, and its gradient the way back."""
    mesh = vs.make_mesh({"tp": 2}, backend="simulated")
    plain = [torch.arange(4.0).requires_grad_(), torch.arange(24.0).view(4, 6).requires_grad_()]
    ours = [
        vs.distribute_tensor(t.detach(), mesh, spec).requires_grad_()
        for t, spec in zip(plain, (vector, matrix), strict=True)
    ]
    product = ours[0] @ ours[1]
    assert product.shape == (6,)
    assert [tuple(p.shape) for p in product.locals] == [product.layout.local_shape(r) for r in (0, 1)]
    assert torch.equal(product.detach().full_tensor(), plain[0].detach() @ plain[1].detach())
    product.square().sum().backward()
    (plain[0] @ plain[1]).square().sum().backward()
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad)
