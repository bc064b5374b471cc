"""Lanes on simulated ranks: the bits of a step don't depend on how many ranks host them."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests import toy
from tests.lane_cases import CASES, LANES, contributions, equal, gpt, mesh_of, small, start, train
from tests.layouts import layouts, shapes
from vescale import _tree
from vescale._errors import ArgumentError, PlanError, VescaleError
from vescale.spmd.lane_boundary import cut, join
from vescale.spmd.lanes import LaneMesh, distinct, grouped, host_of, lanes_of, refined
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.locals import local_slice
from vescale.spmd.placements import P, Partial, RaggedShard, Shard
from vescale.spmd.redistribute import bind_many, plan, redistribute

ROWS = P(dp=Shard(0))


def simulated(**axes):
    return vs.make_mesh(axes, backend="simulated")


# The same bits.


@cache
def on_a_rank_each(case, model, rows):
    return train(mesh_of(case, LANES), case, model(rows), lanes=None)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_gpt(case, ranks):
    """AdamW, gradients clipped by their norm, with FSDP torch's dropout and a keyed one."""
    assert equal(train(mesh_of(case, ranks), case, gpt()), on_a_rank_each(case, gpt, 8))


@pytest.mark.parametrize(
    ("case", "rows", "ranks"),
    [
        ("replicated", 13, 1),  # lanes have 2, 2, 2, 2, 2, 2, 1 and 0 rows
        ("replicated", 13, 2),
        ("fsdp", 13, 1),
        ("fsdp", 13, 4),
        ("fsdp, tp inside", 16, 2),
    ],
)
def test_a_small_model(case, rows, ranks):
    assert equal(train(mesh_of(case, ranks), case, small(rows)), on_a_rank_each(case, small, rows))


def test_more_lanes_than_ranks_is_another_program():
    """Else the comparisons here would say nothing."""
    plain = train(simulated(dp=2), "replicated", small(13), lanes=None)
    assert not equal(plain, on_a_rank_each("replicated", small, 13))


def test_without_donation():
    found = train(simulated(dp=2), "fsdp", small(13), donate=())
    assert equal(found, on_a_rank_each("fsdp", small, 13))


@pytest.mark.parametrize("lanes", [{"tp": 2, "dp": 4}])
def test_lanes_on_other_axes(lanes):
    """Also on the one over which a parameter is split in use, and on both."""

    def run(mesh, lanes):
        where = vs.Plan(mesh, {r"blocks\.\d\.w": P(tp=Shard(1))}, {"batch": ROWS})
        opt = vs.optim.adamw(1e-2)

        def fn(params, state, batch):
            loss, grads = vs.value_and_grad(toy.loss_fn)(params, batch)
            updates, state = opt.update(grads, state, params)
            return vs.optim.apply_updates(params, updates), state, loss

        step = vs.parallelize(fn, where, lanes=lanes)
        params = vs.distribute({**toy.make_params(torch.float32)}, step.plan)
        state = opt.init(params)
        for seed in range(2):
            params, state, loss = step(params, state, toy.make_batch(torch.float32, seed)[:, :6])
        return [leaf.full_tensor() for leaf in _tree.leaves((params, state, loss))]

    expected = run(simulated(dp=4, tp=2), None)
    sizes = {"dp": 1 if "dp" in lanes else 4, "tp": 1}
    assert equal(run(simulated(**sizes), lanes), expected)


def mapped(mesh):
    """Every collective of a mapped function, inside a program."""

    @vs.shard_map(mesh=mesh, in_specs=(ROWS, ROWS), out_specs=P())
    def fn(w, x):
        y = vs.all_to_all(vs.all_gather(w, "dp"), "dp", 1, 0) + vs.pmean(x.sum(), "dp")
        part = vs.psum_scatter(y.sin(), "dp")
        moved = vs.ppermute(part, "dp", [(0, 1), (1, 2), (2, 0), (5, 4)])
        root = vs.broadcast(x, "dp", root=2)
        return vs.psum((moved.cos().sum() * root).sum() * (vs.axis_index("dp") + 1), "dp")

    def step(w, x):
        return vs.value_and_grad(lambda w: fn(w, x) + (w * w).sum())(w)

    placed = vs.Plan(mesh, inputs={"w": ROWS, "x": ROWS})
    step = vs.parallelize(step, placed, lanes={"dp": LANES})
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(shape, generator=generator) for shape in [(8, 64), (16, 8)])
    return [result.full_tensor() for result in step(w, x)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mapped_function_is_mapped_over_lanes(ranks):
    assert equal(mapped(simulated(dp=ranks)), mapped(simulated(dp=LANES)))


# The boundary.


@st.composite
def hosted(draw, partial=False):
    """A layout over lanes, and the mesh of their hosts."""
    count = draw(st.integers(1, 2))
    each = [draw(st.sampled_from((1, 2, 4))) for _ in range(count)]
    ranks = [draw(st.sampled_from((1, 2))) for _ in range(count)]
    names = ("dp", "tp")[:count]
    lanes = AbstractMesh(names, tuple(a * b for a, b in zip(each, ranks)))
    return draw(layouts(lanes, draw(shapes()), partial)), AbstractMesh(names, tuple(ranks))


@settings(max_examples=200)
@given(hosted())
def test_lanes_of_a_rank_hold_what_it_holds(case):
    layout, hosts = case
    outer = grouped(layout, hosts)
    if outer is None:
        return
    value = torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape)
    for host in range(hosts.size):
        held = local_slice(value, outer, host).contiguous()
        pieces = cut(layout, outer, host)(held)
        for lane, piece in zip(distinct(layout, hosts, host), pieces, strict=True):
            assert torch.equal(piece, local_slice(value, layout, lane))
            assert host_of(lane, layout.mesh, hosts) == host
        assert torch.equal(join(layout, outer, host)([piece.clone() for piece in pieces]), held)
        assert torch.equal(join(layout, outer, host)(pieces), held)
    finer = refined(outer, layout.mesh)
    assert finer is None or grouped(finer, hosts) is outer


def test_what_divides_by_the_lanes_is_never_refused():
    lanes, hosts = AbstractMesh(("dp", "tp"), (8, 2)), AbstractMesh(("dp", "tp"), (2, 2))
    for spec in [
        ROWS,
        P(dp=Shard(1)),
        P(tp=Shard(0), dp=Shard(0)),
        P(tp=Shard(1)),
        P(dp=Shard(0), tp=Shard(1)),
    ]:
        layout = Layout(hosts, spec, (16, 16))
        assert grouped(refined(layout, lanes), hosts) is layout
    # Here a lane would have two cuts, one on either side of tp's.
    assert refined(Layout(hosts, P(dp=Shard(0), tp=Shard(0)), (32, 2)), lanes) is None
    assert lanes_of(2, lanes, hosts) == (8, 10, 12, 14)


def test_pieces_at_rest_are_views_of_the_storage_of_their_rank():
    """Cut and put together without a copy; what is updated in place stays where it is."""
    mesh = simulated(dp=2)
    step, params, state, batches = start(mesh, "fsdp", small())
    packed = vs.fsdp.memory.packed.counts.copy()
    for batch in batches:
        where = [leaf.locals[rank].data_ptr() for leaf in _tree.leaves(params) for rank in (0, 1)]
        params, state, _ = step(params, state, batch)
        assert where == [leaf.locals[rank].data_ptr() for leaf in _tree.leaves(params) for rank in (0, 1)]
    assert vs.fsdp.memory.packed.counts == packed


def test_replicated_parameters_are_updated_in_place_once():
    step, params, state, batches = start(simulated(dp=1), "replicated", small())
    before = [leaf.locals[0].data_ptr() for leaf in _tree.leaves(params)]
    params, state, _ = step(params, state, batches[0])
    assert before == [leaf.locals[0].data_ptr() for leaf in _tree.leaves(params)]


def test_results_come_back_in_the_layouts_of_ranks():
    mesh = simulated(dp=2)
    run = vs.parallelize(
        lambda x, y, z: (x + 1, y.t() * 2, z.sum(), 7),
        vs.Plan(mesh, inputs={"x": ROWS, "y": ROWS, "z": ROWS}),
        lanes={"dp": 8},
    )
    x, y, z = torch.ones(16, 2), torch.ones(13, 2), torch.ones(10)
    more, turned, total, number = run(x, y, z)
    assert (more.layout.spec, turned.layout.spec, total.layout.spec, number) == (ROWS, P(), P(), 7)
    assert torch.equal(turned.full_tensor(), y.t() * 2)  # 13 columns: their pieces are no placement's
    uneven = vs.parallelize(lambda y: y * 2, vs.Plan(mesh, inputs={"y": ROWS}), lanes={"dp": 8})(y)
    assert uneven.layout.spec == P(dp=RaggedShard((0,), (8, 5)))
    again = vs.parallelize(lambda y: y * 2, vs.Plan(mesh), lanes={"dp": 8})
    assert torch.equal(again(uneven).full_tensor(), y * 4)  # and are taken as they are


def test_ragged_units_are_for_lanes_or_for_ranks():
    mesh, x = simulated(dp=2), torch.arange(16.0).view(8, 2)
    for units, at_rest in [((3, 1, 0, 0, 2, 0, 1, 1), (1, 1)), ((3, 1), (3, 1))]:
        cut_so = vs.Plan(mesh, {"w": P(dp=RaggedShard((0, 1), units))})
        step = vs.parallelize(lambda params: {"w": params["w"] * 2}, cut_so, lanes={"dp": 8})
        params = step(vs.distribute({"w": x}, step.plan))
        assert params["w"].layout.spec == P(dp=RaggedShard((0, 1), at_rest))
        assert torch.equal(step(params)["w"].full_tensor(), x * 4)
        assert step.cache_info().misses == 1


# What is communicated and computed.


@settings(max_examples=150)
@given(st.data())
def test_an_exchange_of_lanes_is_that_of_ranks(data):
    """Any move, any number of hosts: with floats, whose sums tell in which order they were taken."""
    src, hosts = data.draw(hosted(partial=True))
    dst = data.draw(layouts(src.mesh, src.shape))
    mesh = LaneMesh(
        simulated(**dict(zip(hosts.axis_names, hosts.shape))), dict(zip(src.mesh.axis_names, src.mesh.shape))
    )
    whole = simulated(**dict(zip(src.mesh.axis_names, src.mesh.shape)))
    pieces = contributions(src)
    before = [piece.clone() for piece in pieces]
    expected = redistribute(pieces, src, dst, whole)
    assert equal(redistribute(pieces, src, dst, mesh), expected)
    assert equal(pieces, before)
    steps = plan(src, dst)
    if len(steps) == 1 and steps[0].is_collective:  # and two at once
        for found in bind_many((steps[0], steps[0]), mesh)([pieces, pieces]):
            assert equal(found, expected)


def source(fn, lanes, **inputs):
    mesh = simulated(dp=1)
    run = vs.parallelize(fn, vs.Plan(mesh, inputs={"x": ROWS}), lanes=lanes)
    return run.lower(**inputs).source()


def test_values_that_do_not_vary_are_computed_once():
    text = source(lambda w, x: (w.exp() * x).sum(), {"dp": 8}, w=torch.ones(3), x=torch.ones(16, 3))
    assert text.count(" = exp") == 1
    assert text.count("mul") == 8


def test_lower_shows_lanes():
    fn = lambda x: x.sum()  # noqa: E731
    lowered = vs.parallelize(fn, vs.Plan(simulated(dp=2), inputs={"x": ROWS}), lanes={"dp": 8}).lower(
        torch.ones(16)
    )
    assert lowered.as_text().startswith("lanes dp=8, 4 on each rank of the mesh dp=2\nmesh dp=8")
    assert [c.kind for c in lowered.collectives()] == ["all_reduce"]
    abstract = vs.Plan(vs.AbstractMesh(("dp",), (2,)), inputs={"x": ROWS})
    meta = vs.parallelize(fn, abstract, lanes={"dp": 8}).lower(torch.ones(16, device="meta"))
    assert meta.as_text() == lowered.as_text()


def test_a_lane_a_rank_is_the_ordinary_program():
    mesh = simulated(dp=8)
    where = vs.Plan(mesh, inputs={"x": ROWS})
    fn = lambda x: x.sum()  # noqa: E731
    plain, lanes = vs.parallelize(fn, where), vs.parallelize(fn, where, lanes={"dp": 8})
    assert lanes.plan is where
    x = torch.ones(16)
    assert lanes.lower(x).as_text() == plain.lower(x).as_text()
    assert type(lanes._boundary) is type(plain._boundary)


# Errors.


def scale(x):
    return x * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lanes": {"dp": 6}}, "power of two"),
        ({"lanes": {"dp": 0}}, "power of two"),
        ({"lanes": {"dp": True}}, "power of two"),
        ({"lanes": 8}, "said by axis"),
        ({"lanes": {"dp": 1}}, "lanes on an axis of 2 ranks"),
        ({"lanes": {"pp": 8}}, "the mesh has the axes dp"),
        ({"lanes": {"dp": 8}, "reduction": "native"}, "in their tree"),
        ({"lanes": {"dp": 8}, "static": False}, "static=True"),
        ({"reduction": "fast"}, '"ordered" or "native"'),
        ({"reduction": "native", "static": False}, "static=True"),
    ],
)
def test_what_can_not_be_meant(given, told):
    with pytest.raises(ArgumentError, match=told):
        vs.parallelize(scale, vs.Plan(simulated(dp=2)), **given)


def test_ranks_that_do_not_divide_the_lanes():
    with pytest.raises(ArgumentError, match="8 lanes on an axis of 3 ranks"):
        vs.parallelize(scale, vs.Plan(simulated(dp=3)), lanes={"dp": 8})


def test_modules_have_no_lanes():
    with pytest.raises(ArgumentError, match="functional"):
        vs.parallelize(torch.nn.Linear(2, 2), vs.Plan(simulated(dp=2)), lanes={"dp": 8})


def test_a_module_of_a_plan_with_lanes_lends_its_parameters():
    mesh = simulated(dp=2)
    placed = vs.Plan(mesh, fsdp=vs.FSDP("dp"), inputs={"x": ROWS})

    def square(params, x):
        return (x @ params["weight"].t()).square().sum()

    step = vs.parallelize(square, placed, lanes={"dp": 8})
    model = vs.init(torch.nn.Linear, 16, 64, bias=False, plan=step.plan, seed=0)
    assert step(model.params, torch.ones(8, 16)).full_tensor() > 0
    assert vs.parallelize(square, step.plan).plan is step.plan  # an evaluation with the same lanes
    with pytest.raises(ArgumentError, match="functional"):
        model(torch.ones(8, 16))


def test_pieces_that_can_not_be_cut_into_lanes():
    mesh = simulated(dp=2)
    run = vs.parallelize(scale, vs.Plan(mesh), lanes={"dp": 8})
    with pytest.raises(PlanError, match=r"x, P\(dp=Shard\(1\)\) of shape \(2, 10\), with 8 lanes over 'dp'"):
        run(vs.distribute_tensor(torch.ones(2, 10), mesh, P(dp=Shard(1))))
    with pytest.raises(PlanError, match="pending can't be cut"):
        run(vs.from_local([torch.ones(2)] * 2, mesh, P(dp=Partial())))
    assert equal(
        [run(vs.distribute_tensor(torch.ones(2, 16), mesh, P(dp=Shard(1)))).full_tensor()],
        [torch.full((2, 16), 2.0)],
    )


def test_parameters_that_were_placed_for_ranks():
    mesh = simulated(dp=2)
    loss_fn, values, _, wrap = small()
    placed = vs.Plan(mesh, inputs={"batch": ROWS}, fsdp=vs.FSDP("dp", wrap))
    step = vs.parallelize(vs.grad(loss_fn), placed, lanes={"dp": 8})
    with pytest.raises(PlanError, match=r"vs\.distribute\(\.\.\., step\.plan\)"):
        step(vs.distribute(values, placed), toy.make_batch(torch.float32))


def test_results_whose_pieces_no_placement_says():
    run = vs.parallelize(
        scale,
        vs.Plan(simulated(dp=2), inputs={"x": P(dp=Shard(1))}, outputs={"": P(dp=Shard(1))}),
        lanes={"dp": 8},
    )
    with pytest.raises(PlanError, match="the result of fn"):
        run(torch.ones(2, 10))


def test_parameters_that_no_placement_says_at_rest():
    """Over lanes of tp each half of the rows is cut over dp: on one rank of tp that is no single cut."""
    mesh = simulated(dp=2, tp=1)
    placed = vs.Plan(mesh, {"w": P(tp=Shard(0))}, fsdp=vs.FSDP("dp"))
    step = vs.parallelize(lambda params: params["w"] * 2, placed, lanes={"tp": 2})
    with pytest.raises(VescaleError, match="some placement"):
        vs.distribute({"w": torch.ones(64, 3)}, step.plan)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1)])
def test_fsdp_over_lanes_of_what_lanes_of_another_axis_split(sizes):
    """The buffers of a rank's lanes are no buffer of the rank: it holds its pieces one by one."""

    def run(mesh, lanes):
        placed = vs.Plan(mesh, {r"blocks\..*w": P(tp=Shard(1))}, {"batch": ROWS}, fsdp=vs.FSDP("dp"))
        step = vs.parallelize(vs.value_and_grad(toy.loss_fn), placed, lanes=lanes)
        found = step(vs.distribute(toy.make_params(torch.float32), step.plan), toy.make_batch(torch.float32))
        return [leaf.full_tensor() for leaf in _tree.leaves(found)]

    dp, tp = sizes
    expected = run(simulated(dp=4, tp=2), None)
    assert equal(run(simulated(dp=dp, tp=tp), {"dp": 4, "tp": 2}), expected)


def test_reduction_is_an_argument():
    where = vs.Plan(simulated(dp=4), inputs={"x": ROWS})
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    found = [
        vs.parallelize(lambda x: x.sum(), where, reduction=r)(x).full_tensor()
        for r in (None, "ordered", "native")
    ]
    assert equal(found[:2], found[1:])  # simulated ranks have one order


assert set(CASES) >= {"replicated", "fsdp"}
