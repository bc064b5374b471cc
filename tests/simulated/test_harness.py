"""The harness finds what is planted, at the right instruction, and nothing in consistent programs."""

import inspect
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests import gpt
from tests.faults import FAULTS, aten, exchanges, noisy, rules, whole
from vescale._errors import ArgumentError
from vescale.spmd import hosted, lane_boundary
from vescale.spmd.placements import P, Shard
from vescale.spmd.program import binding, draw, passes
from vescale.testing import op_by_op, running, strategies


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_fault_is_found_and_named(planted, monkeypatch):
    options = dict(planted.options)
    assert vs.testing.assert_consistent(planted.fn, planted.args, planted.plan(), **options, bitwise=False)
    planted.plant(monkeypatch)
    with passes.verifying(False), pytest.raises(vs.testing.Inconsistent) as caught:
        vs.testing.assert_consistent(planted.fn, planted.args, planted.plan(), **options)
    found = caught.value.divergence
    assert found is not None, caught.value
    assert not found.excused, caught.value
    assert planted.op in found.op, caught.value
    assert planted.why in found.why, caught.value
    named = re.search(r"faults\.py:(\d+) in ", found.line)
    assert (int(named[1]) if named else None) in (lines_of(planted.fn.__code__) if planted.line else [None])


def lines_of(code):
    """The lines of a function, and of those that are written in it."""
    inside = [lines_of(one) for one in code.co_consts if inspect.iscode(one)]
    return {line for *_, line in code.co_lines() if line is not None}.union(*inside)


def test_twenty_faults_are_planted():
    assert len({planted.name for planted in FAULTS}) == len(FAULTS) >= 20


def random_program(data):
    mesh, program = data.draw(strategies.meshes()), data.draw(strategies.programs())
    plan = data.draw(strategies.plans(mesh, inputs=program.shapes))
    assert vs.testing.assert_consistent(program, program.args, plan).differing == 0


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True)


@examples(25)
@given(st.data())
def test_consistent_programs_are_not_reported(data):
    random_program(data)


@pytest.mark.slow
@examples(200)
@given(st.data())
def test_two_hundred_consistent_programs_are_not_reported(data):
    random_program(data)


@pytest.mark.slow
@examples(100)
@given(st.data())
def test_rounding_is_never_taken_for_a_fault(data):
    """The same programs on noisy numbers: what differs first is a sum in another order, or a kernel on
    pieces."""
    mesh, program = data.draw(strategies.meshes()), data.draw(strategies.programs())
    plan = data.draw(strategies.plans(mesh, inputs=program.shapes))
    tensors = tuple(noisy(*tensor.shape, seed=number) for number, tensor in enumerate(program.tensors))
    program = replace(program, tensors=tensors)
    found = []
    for static in (True, False):
        try:
            vs.testing.assert_consistent(program, program.args, plan, static=[static])
        except vs.testing.Inconsistent as error:
            found.append(error)
    assert all(error.divergence is not None and error.divergence.excused for error in found), found


# What a report says.


def noisy_step(params, x):
    loss, gradients = vs.value_and_grad(lambda params: (x @ params["w"]).square().sum())(params)
    return {"w": params["w"] - 0.01 * gradients["w"]}, loss


def arguments():
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(8, 8, generator=generator)}, torch.randn(16, 8, generator=generator)]


def plan_of(**axes):
    mesh = vs.make_mesh(axes, backend="simulated")
    return vs.Plan(mesh, {"w": P(tp=Shard(1))} if "tp" in axes else {}, {"x": P(dp=Shard(0))})


def test_a_sum_in_another_order_is_told_and_excused():
    with pytest.raises(vs.testing.Inconsistent, match="in another order than on one device") as caught:
        vs.testing.assert_consistent(noisy_step, arguments(), {"rows": plan_of(dp=4)}, static=[True])
    found = caught.value
    assert found.run == "rows on dp=4, static, simulated"
    assert found.divergence.excused
    assert "aten.mm.default" in found.divergence.op or "aten.sum" in found.divergence.op
    assert "test_harness.py:" in found.divergence.line
    assert re.search(r"at \[\d*.*\] expected 0x[0-9a-f]{8} \(.*\), got 0x[0-9a-f]{8} \(", str(found))


def test_a_bound_states_what_it_saw():
    plans = {"rows": plan_of(dp=4), "both": plan_of(dp=2, tp=2)}
    found = vs.testing.assert_consistent(
        noisy_step, arguments(), plans, bitwise=False, steps=3, donate=["params"]
    )
    assert len(found.runs) == 4
    assert found.compared == 4 * 3 * 2
    assert 0 < found.error < 64
    assert found.ulps >= 1
    assert found.differing
    assert found.worst in ("0.w", "1")
    with pytest.raises(vs.testing.Inconsistent):
        vs.testing.assert_consistent(noisy_step, arguments(), plans, bitwise=False, bound=0.01)


def test_a_fault_behind_rounding_is_found(monkeypatch):
    """The first bits that differ are those of a sum, which may; the fault comes later."""
    rules(monkeypatch, aten.add.Tensor, lambda pattern: replace(pattern, linear=(frozenset((0,)),)))

    def fn(x, w, b):
        return (x * x.sum()) @ w + b

    inputs = {"x": P(tp=Shard(1)), "w": P(tp=Shard(0))}
    plan = vs.Plan(vs.make_mesh({"tp": 4}, backend="simulated"), inputs=inputs)
    args = [noisy(4, 8), noisy(8, 4, seed=1), noisy(4, seed=2)]
    with passes.verifying(False), pytest.raises(vs.testing.Inconsistent) as caught:
        vs.testing.assert_consistent(fn, args, plan, static=[True])
    assert caught.value.divergence.op == "aten.add.Tensor"
    assert not caught.value.divergence.excused


@pytest.mark.parametrize(
    ("axis", "shape", "line"), [("tp", (8, 16, 64), "blocks.0.attn.proj"), ("dp", (64,), "test_harness.py:")]
)
def test_missing_reductions_of_a_gpt_are_found(axis, shape, line, monkeypatch):
    """The first of those of one shape, where most bits before it differ by rounding."""
    model = gpt.make_model()
    fn = vs.value_and_grad(lambda params, batch: torch.func.functional_call(model, params, batch))
    mesh = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    plan = vs.Plan(mesh, gpt.TP, {"batch": P(dp=Shard(0))})
    keep = lambda run, values, step: [value.clone() for value in values]  # noqa: E731
    exchanges(monkeypatch, "all_reduce", keep, lambda s: (s.axes, s.src.shape) == ((axis,), shape))
    with passes.verifying(False), pytest.raises(vs.testing.Inconsistent) as caught:
        vs.testing.assert_consistent(fn, [gpt.parameters(model), gpt.batch(0)[:8]], plan, static=[True])
    found = caught.value.divergence
    assert found.op == f"all_reduce over {axis}"
    assert line in found.line
    assert "replicas differ" in found.why
    assert not found.excused


def test_what_differs_beside_plain_torch_is_told():
    """Op by op, where every op does what it says: another op, or other bits of the same."""

    def other(x, w):
        return x.mul(2) if isinstance(x, vs.DTensor) else x.add(x)

    def step_of(*args):
        return running.Step(args, torch.get_rng_state(), None, {})

    on_mesh = vs.parallelize(other, plan_of(dp=2), static=False)
    found = op_by_op.first_op(on_mesh, step_of(noisy(4), noisy(4)))
    assert found.op == "aten.mul.Tensor"
    assert found.excused == op_by_op.OTHER_OP
    assert "test_harness.py:" in found.line


def test_generators_are_where_one_device_leaves_them():
    """The default one, and one that is passed; and the caller's own isn't touched."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def fn(x, generator):
        return x + torch.rand(x.shape, generator=generator) + torch.rand(x.shape)

    torch.manual_seed(5)
    vs.testing.assert_consistent(fn, [torch.zeros(12), generator], plan_of(dp=4), steps=2)
    assert torch.equal(generator.get_state(), before)
    ours = torch.get_rng_state()
    torch.manual_seed(5)
    _ = torch.rand(12), torch.rand(12)
    assert torch.equal(ours, torch.get_rng_state())


def test_a_passed_generator_that_ends_elsewhere_is_told():
    def fn(x, generator):
        y = x + torch.rand(x.shape, generator=generator)
        if isinstance(x, vs.DTensor):  # on a mesh, op by op
            torch.rand((), generator=generator)
        return y

    args = [torch.zeros(12), torch.Generator().manual_seed(3)]
    with pytest.raises(vs.testing.Inconsistent, match="the state of the generator 1 of the arguments"):
        vs.testing.assert_consistent(fn, args, plan_of(dp=4), static=[False])


def test_a_draw_too_many_is_told(monkeypatch):
    bind = binding.bind_draw

    def twice(step, partitioned, mesh):
        run = bind(step, partitioned, mesh)
        return draw.BoundDraw(lambda values: (run(values), torch.rand(1))[0])

    monkeypatch.setattr(binding, "bind_draw", twice)
    with pytest.raises(vs.testing.Inconsistent, match="the state of torch's default generator"):
        vs.testing.assert_consistent(lambda x: x + torch.rand(8), [torch.zeros(8)], plan_of(dp=2))


def test_leaves_that_are_no_tensors_are_compared():
    def fn(x):
        return {"size": x.shape[0], "kind": type(x) is torch.Tensor}

    with pytest.raises(vs.testing.Inconsistent, match="kind: expected True, got False"):
        vs.testing.assert_consistent(fn, [torch.ones(2)], plan_of(dp=2), static=[False])


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: vs.testing.assert_consistent(torch.nn.Linear(2, 2), [], plan_of(dp=2)), "vs.functional"),
        (lambda: vs.testing.assert_consistent(torch.neg, torch.ones(2), plan_of(dp=2)), "pass \\[params"),
        (lambda: vs.testing.assert_consistent(torch.neg, [torch.ones(2)], []), "vs.Plan\\(mesh"),
        (
            lambda: vs.testing.assert_consistent(
                torch.neg, [vs.distribute_tensor(torch.ones(2), plan_of(dp=2).mesh, P())], plan_of(dp=2)
            ),
            "full_tensor",
        ),
        (
            lambda: vs.testing.assert_consistent(lambda x: x.sum(), [torch.ones(2)], plan_of(dp=2), steps=2),
            "leave steps at 1",
        ),
        (lambda: vs.testing.assert_max_traces(torch.neg, 1), "pass it itself"),
    ],
)
def test_errors_say_what_to_do(call, remedy):
    with pytest.raises(ArgumentError, match=remedy):
        call()


# What must not happen.


def test_traces_are_counted_and_explained():
    scaled = vs.parallelize(lambda x, factor: x["a"] * factor, plan_of_dict())
    for factor in (2, 2, 3):
        scaled({"a": torch.ones(4)}, factor)
    vs.testing.assert_max_traces(scaled, 2)
    with pytest.raises(
        AssertionError, match=r"traced 2 times, at most 1 expected(.|\n)*factor: .*2.* -> .*3"
    ):
        vs.testing.assert_max_traces(scaled, 1)
    with vs.testing.max_traces(scaled, 0):
        scaled({"a": torch.zeros(4)}, 3)
    with pytest.raises(AssertionError, match=r"x\.a: .*\(8,\)"), vs.testing.max_traces(scaled, 0):
        scaled({"a": torch.zeros(8)}, 3)


def plan_of_dict():
    return vs.Plan(vs.make_mesh({"dp": 2}, backend="simulated"), inputs={"x": P(dp=Shard(0))})


def test_collectives_are_counted_by_kind_and_axis():
    step = vs.parallelize(noisy_step, plan_of(dp=2, tp=2))
    found = vs.testing.count_collectives(step, *arguments())
    assert found["all_reduce", "dp"] == 1  # of the gradient
    assert found["all_gather", "tp"] == 0
    assert sum(found.values()) == len(step.lower(*arguments()).collectives())
    assert "all_reduce over dp" in str(found)


def test_copies_are_told():
    x = vs.distribute_tensor(torch.ones(4, 4), plan_of(dp=2).mesh, P(dp=Shard(0)))
    kept = vs.testing.assert_no_copy(lambda x: {"x": x.detach()}, x)
    assert kept["x"].locals[0].data_ptr() == x.locals[0].data_ptr()
    with pytest.raises(AssertionError, match=r"1 of 2 .* have memory of their own: y \(64 bytes\)"):
        vs.testing.assert_no_copy(lambda x: {"x": x, "y": x + 1}, x)


def test_a_donated_parameter_is_updated_where_it_is():
    plan = plan_of(dp=2, tp=2)
    step = vs.parallelize(lambda params, x: {"w": params["w"] * 0.5}, plan, donate=["params"])
    params, x = arguments()
    params = vs.distribute(params, plan)
    vs.testing.assert_no_copy(step, params, x)


# The strategies.


@examples(30)
@given(st.data())
def test_what_is_drawn_is_legal(data):
    mesh = data.draw(strategies.meshes(abstract=True))
    shape = data.draw(strategies.shapes())
    layout = data.draw(strategies.layouts(mesh, shape))
    assert layout.mesh == mesh
    assert layout.shape == shape
    placement = data.draw(strategies.placements(shape, 2))
    assert vs.Layout(vs.AbstractMesh(("a",), (2,)), P(a=placement), shape)
    plan = data.draw(strategies.plans(mesh, params={"a.b": shape}, inputs={"x": shape}))
    resolved = plan.resolve({"a.b": torch.empty(shape)})
    assert resolved[0].rest.shape == shape


def test_a_mapped_function_inside_is_compared():
    plan = plan_of(dp=2)

    @vs.shard_map(mesh=plan.mesh, in_specs=(P(dp=Shard(0)), P()), out_specs=P())
    def loss(x, w):
        return vs.psum((x @ w).sum(), "dp")

    def step(params, x):
        value, gradients = vs.value_and_grad(lambda params: loss(x * 2, params["w"]))(params)
        return {"w": params["w"] - gradients["w"]}, value

    args = [{"w": whole(4, 2)}, whole(8, 4)]
    found = vs.testing.assert_consistent(step, args, plan, steps=2)
    assert found.differing == 0
    assert found.compared == 8


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_bounds_are_for_floats(dtype):
    """An index that is off by one is no rounding."""
    off = lambda x: (x + int(isinstance(x, vs.DTensor))).to(dtype)  # noqa: E731
    with pytest.raises(vs.testing.Inconsistent):
        vs.testing.assert_consistent(off, [torch.arange(8)], plan_of(dp=2), static=[False], bitwise=False)


def test_a_leaf_that_is_nothing_but_rounding():
    """The gradient of a bias that softmax takes no notice of."""

    def fn(b, x):
        return vs.grad(lambda b: (torch.softmax(x + b, 1) * x).sum())(b)

    args = [torch.zeros(()), noisy(16, 8)]
    with pytest.raises(vs.testing.Inconsistent, match="absolute="):
        vs.testing.assert_consistent(fn, args, plan_of(dp=2), bitwise=False)
    assert vs.testing.assert_consistent(fn, args, plan_of(dp=2), bitwise=False, absolute=1e-5).differing


def test_a_function_that_differs_on_a_mesh_is_no_rounding():
    fn = lambda x: x * (torch.nan if isinstance(x, vs.DTensor) else 2.0)  # noqa: E731
    with pytest.raises(vs.testing.Inconsistent) as caught:
        vs.testing.assert_consistent(fn, [noisy(8)], plan_of(dp=2), static=[False], bitwise=False)
    assert (caught.value.divergence.op, caught.value.divergence.excused) == ("aten.mul.Tensor", "")


# Lanes.


def test_lanes_have_one_value_whoever_hosts_them():
    plans = [plan_of(dp=ranks) for ranks in (1, 2, 4)]
    found = vs.testing.assert_consistent(
        noisy_step, arguments(), plans, bitwise=False, steps=2, lanes={"dp": 4}, donate=["params"]
    )
    assert len(found.runs) == 3
    assert found.differing  # not those of one device: sums are in another order


def test_a_host_that_makes_something_else_of_its_lanes(monkeypatch):
    join = lane_boundary.join

    def joined(layout, outer, host):
        return lambda pieces: join(layout, outer, host)(pieces) + 1e-6 * (outer.mesh.size == 2)

    plans = [plan_of(dp=ranks) for ranks in (1, 2)]
    monkeypatch.setattr(lane_boundary, "join", joined)
    with pytest.raises(vs.testing.Inconsistent, match="with the same lanes") as caught:
        vs.testing.assert_consistent(noisy_step, arguments(), plans, bitwise=False, lanes={"dp": 4})
    assert caught.value.run == "plan 1 on dp=2, static, simulated"
    assert caught.value.divergence.op == "what ranks make of lanes"


def test_a_fault_in_a_program_of_lanes_is_named(monkeypatch):
    """Looked for lane by lane, as in a program of as many ranks."""

    class Twice(hosted.Reduction):
        def tree(self, values):
            return super().tree([values[0], *values[:-1]])

    monkeypatch.setattr(hosted, "Reduction", Twice)
    whole = [{"w": torch.ones(6, 5)}, torch.arange(96.0).view(16, 6)]
    with pytest.raises(vs.testing.Inconsistent) as caught:
        vs.testing.assert_consistent(
            lambda params, x: (x @ params["w"]).sum(), whole, plan_of(dp=2), lanes={"dp": 4}
        )
    assert caught.value.divergence.op == "all_reduce over dp"
    assert "test_harness.py" in caught.value.divergence.line


def test_op_by_op_there_are_no_lanes():
    with pytest.raises(ArgumentError, match="lanes are of programs"):
        vs.testing.assert_consistent(noisy_step, arguments(), plan_of(dp=2), static=[False], lanes={"dp": 4})
