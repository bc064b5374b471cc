"""Passes on small listings: what they do, what they leave alone, and that the bits stay."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vescale as vs
from tests.listings import calls, listed, run, run_on
from vescale._compat import foreach_form, in_place_form
from vescale._errors import ArgumentError
from vescale.spmd.layout import AbstractMesh, Layout
from vescale.spmd.placements import P, Shard
from vescale.spmd.program import passes
from vescale.spmd.program.emit import Call, Exchange, Listing
from vescale.spmd.program.ir import Origin, Ref, TensorMeta
from vescale.spmd.program.partition import LocalValue, Move, Partitioned
from vescale.spmd.program.passes import InvalidProgram, Pass, registry, verify
from vescale.spmd.program.passes.common_collectives import common_collectives
from vescale.spmd.program.passes.dead_code import dead_code
from vescale.spmd.program.passes.foreach import GROUP_BYTES, MAX_LEVEL, SMALL_BYTES, fuse_foreach
from vescale.spmd.program.passes.in_place import in_place
from vescale.spmd.program.passes.join_addcdiv import join_addcdiv
from vescale.spmd.redistribute_plan import plan

aten = torch.ops.aten


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


X, Y, Z = (randn(4, 6, seed=seed) for seed in range(3))


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8) if tensor.dtype != torch.bool else tensor.reshape(-1)


def same_bits(before, after, *tensors):
    """Both listings give the same bits; the pass is a sound one."""
    verify(before, after, "the pass")
    for wanted, found in zip(run(before, *tensors), run(after, *tensors), strict=True):
        assert wanted.dtype == found.dtype
        assert wanted.shape == found.shape
        assert wanted.stride() == found.stride()
        assert torch.equal(bits(wanted), bits(found))


# In place.

IN_PLACE = {
    # name: (function, donated arguments, what is left)
    "donated": (lambda x, y: x * 2, (0,), ["mul_.Tensor"]),
    "not donated": (lambda x, y: x * 2, (), ["mul.Tensor"]),
    "the other is donated": (lambda x, y: y * x, (0,), ["mul.Tensor"]),
    "a temporary": (lambda x, y: (x * 2).exp(), (), ["mul.Tensor", "exp_"]),
    "a chain": (lambda x, y: (x * 2 + y).sqrt(), (0,), ["mul_.Tensor", "add_.Tensor", "sqrt_"]),
    "read later": (lambda x, y: (x * 2, x + 1), (0,), ["mul.Tensor", "add_.Tensor"]),
    "a result too": (lambda x, y: (x, x * 2), (0,), ["mul.Tensor"]),
    "a view read later": (
        lambda x, y: ((v := x.view(24)), x * 2, v + 1)[1:],
        (0,),
        ["view", "mul.Tensor", "add_.Tensor"],
    ),
    "a view that is a result": (lambda x, y: (x.view(24), x * 2), (0,), ["view", "mul.Tensor"]),
    "through a view": (lambda x, y: x.view(24) * 2, (0,), ["view", "mul_.Tensor"]),
    "through a view of another": (lambda x, y: x.view(24) * 2, (), ["view", "mul.Tensor"]),
    "the base of a view that is gone": (
        lambda x, y: (x.view(24).sum() + 1, x * 2),
        (0,),
        ["view", "sum", "add.Tensor", "mul_.Tensor"],
    ),
    "itself twice": (lambda x, y: x * x, (0,), ["mul_.Tensor"]),
    "itself and its view": (lambda x, y: x.view(24) * x.flatten(), (0,), ["view", "mul_.Tensor"]),
    "itself and another view": (lambda x, y: x.view(6, 4) * x.view(2, 3, 4).view(6, 4), (0,), None),
    "itself transposed": (lambda x, y: (z := x.view(-1)[:16].clone().view(4, 4)) * z.t(), (), None),
    "not contiguous": (lambda x, y: x.t() * 2, (0,), ["t", "mul.Tensor"]),
    "a slice": (lambda x, y: x[1:] * 2, (0,), ["slice.Tensor", "mul.Tensor"]),
    "broadcast to more": (lambda x, y: x[:1].clone() * y, (0,), ["slice.Tensor", "clone", "mul.Tensor"]),
    "another dtype": (lambda x, y: x > 1, (0,), ["gt.Scalar"]),
    "no elementwise op": (lambda x, y: x @ y.t(), (0,), ["t", "mm"]),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place(case):
    fn, donated, left = IN_PLACE[case]
    before = listed(fn, X, Y, donated=donated)
    after = in_place(before)
    same_bits(before, after, X, Y)
    assert left is None or calls(after) == left


def test_what_is_updated_in_place_is_the_argument():
    after = in_place(listed(lambda x, y: ((x * 2).add(y), y + 1), X, Y, donated=(0, 1)))
    given = [X.clone(), Y.clone()]
    places = [tensor.data_ptr() for tensor in given]
    results = run_on(after, given)
    assert [result.data_ptr() for result in results] == places


def test_what_is_not_donated_is_never_written():
    after = in_place(listed(lambda x, y: ((x * 2).add(y).exp(), y.view(24) + 1), X, Y, donated=()))
    given = [X.clone(), Y.clone()]
    run_on(after, [*given])
    assert torch.equal(given[0], X)
    assert torch.equal(given[1], Y)


# Edge values: all signs of zero and infinity, the smallest, and a spread of ordinary ones.
EDGES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e-45, -1e-39, 3.4e38, 1e300, 1 / 3]


def spread(dtype, seed, count=4096):
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(count, generator=generator, dtype=torch.float64)
    scaled = ordinary * 10.0 ** torch.randint(-30, 30, (count,), generator=generator).double()
    return torch.cat([torch.tensor(EDGES, dtype=torch.float64), ordinary, scaled])[
        torch.randperm(2 * count + 13, generator=generator)
    ].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.sqrt.default, aten.neg.default,
    aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.gelu.default, aten.silu.default,
    aten.relu.default, aten.reciprocal.default, aten.rsqrt.default, aten.abs.default,
    aten.lerp.Scalar, aten.addcmul.default, aten.addcdiv.default, aten.clamp.default, aten.log.default,
], ids=str)  # fmt: skip
def test_an_op_in_place_has_the_bits_of_the_op(op, dtype):
    form = in_place_form(op)
    tensors = [spread(dtype, seed) for seed in range(3)]
    taken = {aten.lerp.Scalar: [*tensors[:2], 0.1], aten.clamp.default: [tensors[0], -1.0, 2.0]}.get(op)
    if taken is None:
        count = sum(argument.type.kind() == "TensorType" for argument in op._schema.arguments)
        taken = tensors[:count]
    wanted = op(*taken)
    written = taken[0].clone()
    form(written, *taken[1:])
    assert torch.equal(wanted.view(torch.uint8), written.view(torch.uint8))


# addcdiv.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_addcdiv_has_the_bits_of_add_and_div(dtype, seed):
    x, n, d = (spread(dtype, 3 * seed + i, count=1 << 15) for i in range(3))
    wanted, found = torch.add(x, torch.div(n, d)), torch.addcdiv(x, n, d)
    assert torch.equal(wanted.view(torch.uint8), found.view(torch.uint8))


ADDCDIV = {
    "joined": (lambda x, n, d: x + n / d, ["addcdiv"]),
    "a quotient that is a result": (lambda x, n, d: ((q := n / d), x + q), ["div.Tensor", "add.Tensor"]),
    "a quotient read twice": (
        lambda x, n, d: (x + (q := n / d)) * q,
        ["div.Tensor", "add.Tensor", "mul.Tensor"],
    ),
    "a quotient first": (lambda x, n, d: n / d + x, ["div.Tensor", "add.Tensor"]),
    "scaled": (lambda x, n, d: torch.add(x, n / d, alpha=2), ["div.Tensor", "add.Tensor"]),
    "rounded": (
        lambda x, n, d: x + torch.div(n, d, rounding_mode="floor"),
        ["div.Tensor_mode", "add.Tensor"],
    ),
    "broadcast": (
        lambda x, n, d: x + n[:1] / d[:1],
        ["slice.Tensor", "slice.Tensor", "div.Tensor", "add.Tensor"],
    ),
    "by a number": (lambda x, n, d: x + n / 3, ["div.Tensor", "add.Tensor"]),
}


@pytest.mark.parametrize("case", ADDCDIV)
def test_join_addcdiv(case):
    fn, left = ADDCDIV[case]
    before = listed(fn, X, Y, Z)
    after = join_addcdiv(before)
    assert calls(after) == left
    same_bits(before, after, X, Y, Z)


def test_16_bit_sums_are_not_joined():
    """addcdiv rounds once where the two ops round twice."""
    before = listed(lambda x, n, d: x + n / d, *(t.bfloat16() for t in (X, Y, Z)))
    assert join_addcdiv(before) == before


def test_other_devices_are_left_alone():
    before = replace(listed(lambda x, n, d: (x + n / d, x * 2, n * 2), X, Y, Z), device="cuda")
    assert join_addcdiv(before) is before
    assert fuse_foreach(before) is before


# Foreach.


def test_the_links_of_chains_are_made_together():
    def update(p, q, g, h):
        return [x * 0.9 + torch.lerp(x, y, 0.1) for x, y in ((p, g), (q, h))]

    before = listed(update, X, randn(5), Y, randn(5, seed=7))
    after = fuse_foreach(before)
    assert calls(after) == ["_foreach_mul.Scalar", "_foreach_lerp.Scalar", "_foreach_add.List"]
    same_bits(before, after, X, randn(5), Y, randn(5, seed=7))


FOREACH = {
    "another number": (lambda x, y: (x * 2, y * 3), ["mul.Tensor", "mul.Tensor"]),
    "an int and a float": (lambda x, y: (x * 2, y * 2.0), ["mul.Tensor", "mul.Tensor"]),
    "minus zero": (lambda x, y: (x + 0.0, y + -0.0), ["add.Tensor", "add.Tensor"]),
    "another alpha": (lambda x, y: (torch.add(x, y, alpha=2), torch.add(y, x)), ["add.Tensor", "add.Tensor"]),
    "one alpha": (lambda x, y: (torch.add(x, y, alpha=2), torch.add(y, x, alpha=2)), ["_foreach_add.List"]),
    "alpha and a number": (
        lambda x, y: (torch.add(x, 3, alpha=2), torch.add(y, 3, alpha=2)),
        ["add.Tensor", "add.Tensor"],
    ),
    "values": (
        lambda x, y: (torch.addcmul(x, y, y, value=3), torch.addcmul(y, x, x, value=3)),
        ["_foreach_addcmul.Scalar"],
    ),
    "a 0-d tensor": (lambda x, y: ((s := x.sum()), x * s, y * s)[1:], ["sum", "_foreach_mul.Tensor"]),
    "two 0-d tensors": (lambda x, y: (x * x.sum(), y * y.sum()), ["sum", "sum", "mul.Tensor", "mul.Tensor"]),
    "of a 0-d tensor": (lambda x, y: ((s := x.sum()) * 2, s * 3), ["sum", "mul.Tensor", "mul.Tensor"]),
    "one needs the other": (lambda x, y: x * 2 * 2, ["mul.Tensor", "mul.Tensor"]),
    "something between": (lambda x, y: (x * 2).cumsum(0) @ (y * 2).t(), None),
    "broadcast": (
        lambda x, y: (x + y[:1], y + x[:1]),
        ["slice.Tensor", "slice.Tensor", "add.Tensor", "add.Tensor"],
    ),
    "unary": (lambda x, y: (x.sqrt(), y.sqrt()), ["_foreach_sqrt"]),
    "the larger": (lambda x, y: (torch.maximum(x, y), torch.maximum(y, x)), ["_foreach_maximum.List"]),
    "16 bits": (
        lambda x, y: ((a := x.bfloat16()), (b := y.bfloat16()), a * 2, b * 2)[2:],
        ["_to_copy", "_to_copy", "mul.Tensor", "mul.Tensor"],
    ),
    "two dtypes": (
        lambda x, y: ((a := x.double()), a * 2, y * 2)[1:],
        ["_to_copy", "mul.Tensor", "mul.Tensor"],
    ),
}


@pytest.mark.parametrize("case", FOREACH)
def test_foreach(case):
    fn, left = FOREACH[case]
    before = listed(fn, X.abs(), Y.abs())
    after = fuse_foreach(before)
    assert left is None or sorted(calls(after)) == sorted(left)
    same_bits(before, after, X.abs(), Y.abs())


def test_large_tensors_are_left_alone():
    large, small = torch.ones(SMALL_BYTES // 4 + 1), torch.ones(SMALL_BYTES // 4)
    assert "_foreach_mul.Scalar" not in calls(fuse_foreach(listed(lambda x, y: (x * 2, y * 2), large, large)))
    assert calls(fuse_foreach(listed(lambda x, y: (x * 2, y * 2), small, small))) == ["_foreach_mul.Scalar"]


def test_groups_are_bounded_and_chains_stay_in_one():
    count = 3 * GROUP_BYTES // SMALL_BYTES
    tensors = [torch.full((SMALL_BYTES // 4,), float(i)) for i in range(count)]
    after = fuse_foreach(listed(lambda *xs: [x * 2 + x for x in xs], *tensors[:8]))
    tops = calls(after)
    assert tops == ["_foreach_mul.Scalar", "_foreach_add.List"] * (len(tops) // 2)
    assert len(tops) // 2 == math.ceil(8 * SMALL_BYTES / GROUP_BYTES)


def test_a_long_chain_starts_anew():
    def chain(x):
        for _ in range(3 * MAX_LEVEL):
            x = x * 2 + 1
        return x

    before = listed(chain, X)
    after = fuse_foreach(before)
    assert calls(after) == calls(before)


def test_regions_are_not_mixed():
    def call(op, *args, out, region):
        return Call(op, args, {}, (out,), False, Origin(region=region))

    def made(*regions):
        steps = [call(aten.mul.Tensor, Ref(i), 2.0, out=2 + i, region=r) for i, r in enumerate(regions)]
        return Listing(tuple(steps), (0, 1), (2, 3), lambda value: ((4,), torch.float32))

    assert calls(fuse_foreach(made("forward", "forward"))) == ["_foreach_mul.Scalar"]
    assert calls(fuse_foreach(made("forward", "backward"))) == ["mul.Tensor"] * 2


FORMS = [
    (aten.add.Tensor, "List", 2), (aten.add.Tensor, "Scalar", 1), (aten.sub.Tensor, "List", 2),
    (aten.sub.Tensor, "Scalar", 1), (aten.mul.Tensor, "List", 2), (aten.mul.Tensor, "Scalar", 1),
    (aten.mul.Tensor, "Tensor", 1), (aten.div.Tensor, "List", 2), (aten.div.Tensor, "Scalar", 1),
    (aten.div.Tensor, "Tensor", 1), (aten.sqrt.default, "default", 1), (aten.neg.default, "default", 1),
    (aten.reciprocal.default, "default", 1), (aten.lerp.Scalar, "Scalar", 2),
    (aten.abs.default, "default", 1), (aten.maximum.default, "List", 2),
    (aten.addcmul.default, "Scalar", 3), (aten.addcdiv.default, "Scalar", 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("op", "overload", "lists"), FORMS, ids=str)
def test_a_form_for_lists_has_the_bits_of_the_op(op, overload, lists, dtype):
    """In place too, also for sizes that leave a rest to the vector loop, and for no elements."""
    form = foreach_form(op, overload)
    rows = [[spread(dtype, 10 * i + seed, count=40)[: 1 + 31 * i] for i in range(3)] for seed in range(lists)]
    for row in rows:
        row.append(row[0][:0])
    number = {"Tensor": torch.tensor(0.3, dtype=dtype), "Scalar": 0.3}.get(overload)
    last = [] if lists == 3 or number is None else [number]
    wanted = [op(*elements, *last) for elements in zip(*rows, strict=True)]
    found = form(*rows, *last)
    written = [tensor.clone() for tensor in rows[0]]
    in_place_form(form)(written, *rows[1:], *last)
    for a, b, c in zip(wanted, found, written, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(a.view(torch.uint8), c.view(torch.uint8))


# Foreach, then in place.


def test_lists_are_updated_in_place():
    fn = lambda p, q: [x * 0.9 + 1 for x in (p, q)]  # noqa: E731
    after = in_place(fuse_foreach(listed(fn, X, Y, donated=(0, 1))))
    assert calls(after) == ["_foreach_mul_.Scalar", "_foreach_add_.Scalar"]
    given = [X.clone(), Y.clone()]
    places = [tensor.data_ptr() for tensor in given]
    assert [result.data_ptr() for result in run_on(after, given)] == places


def test_a_list_is_updated_in_place_where_it_may_be():
    before = fuse_foreach(listed(lambda p, q, r: [x * 0.9 for x in (p, q, r)], X, Y, Z, donated=(0, 2)))
    after = in_place(before)
    assert calls(after) == ["_foreach_mul_.Scalar", "_foreach_mul.Scalar"]
    same_bits(before, after, X, Y, Z)


def test_an_element_that_another_one_reads_is_kept():
    before = fuse_foreach(
        listed(lambda p, q: (torch.lerp(p, q, 0.1), torch.lerp(q, p, 0.1)), X, Y, donated=(0, 1))
    )
    after = in_place(before)
    assert calls(after) == ["_foreach_lerp.Scalar"]
    same_bits(before, after, X, Y)


# Dead code.


def test_dead_calls_go_and_exchanges_stay():
    nowhere = Origin()
    steps = (
        Call(aten.neg.default, (Ref(0),), {}, (1,), False, nowhere),
        Exchange(1, 2, nowhere),
        Call(aten.exp.default, (Ref(0),), {}, (3,), False, nowhere),
        Call(aten.exp.default, (Ref(3),), {}, (4,), False, nowhere),
        Call(aten.abs.default, (Ref(0),), {}, (5,), False, nowhere),
    )
    before = Listing(steps, (0,), (5,), lambda value: ((2,), torch.float32))
    after = dead_code(before)
    verify(before, after, "dead_code")
    assert after.instructions == (steps[0], steps[1], steps[4])


# Common collectives.

MESH = AbstractMesh(("dp",), (2,))
ROWS, WHOLE = (Layout(MESH, spec, (4, 4)) for spec in (P(dp=Shard(0)), P()))
(GATHER,) = plan(ROWS, WHOLE)


def decided(*moves, outputs):
    """Moves (step, source, target, region) of an input that is cut by rows."""
    meta = TensorMeta((4, 4), torch.float32, torch.device("cpu"))
    layouts = {0: ROWS} | {target: step.dst for step, _, target, _ in moves}
    steps = tuple(
        Move(step, source, target, "", Origin(region=region)) for step, source, target, region in moves
    )
    values = tuple(LocalValue(meta, layouts[value]) for value in sorted(layouts))
    return Partitioned(MESH, (0,), steps, outputs, values, ())


def test_a_repeated_collective_is_done_once():
    (cut,) = plan(WHOLE, ROWS)
    before = decided(
        (GATHER, 0, 1, "forward"),
        (GATHER, 0, 2, "forward"),
        (cut, 1, 3, "forward"),
        (cut, 2, 4, "forward"),
        outputs=(3, 4),
    )
    after = common_collectives(before)
    verify(before, after, "common_collectives", merges=True)
    assert [(move.source, move.target) for move in after.steps] == [(0, 1), (1, 3), (1, 4)]
    with pytest.raises(InvalidProgram, match="in the place of"):
        verify(before, after, "another pass")


def test_regions_and_results_keep_their_collectives():
    other = decided((GATHER, 0, 1, "forward"), (GATHER, 0, 2, "backward"), outputs=(1,))
    assert common_collectives(other) == other
    results = decided((GATHER, 0, 1, "forward"), (GATHER, 0, 2, "forward"), outputs=(1, 2))
    assert common_collectives(results) == results


# The verifier.

LOOKS = {1: ((2, 2), torch.float32)}
NOWHERE, BACKWARD = Origin("a.py:1"), Origin("a.py:2", region="backward")
SOUND = Listing(
    (
        Call(aten.mul.Tensor, (Ref(0), 2.0), {}, (2,), False, NOWHERE),
        Exchange(2, 3, NOWHERE),
        Call(aten.view.default, (Ref(3), (4,)), {}, (4,), False, NOWHERE),
        Exchange(0, 5, BACKWARD),
        Call(aten.add.Tensor, (Ref(1), Ref(5)), {}, (6,), False, BACKWARD),
    ),
    (0, 1),
    (4, 6),
    lambda value: ((4,) if value == 4 else (2, 2), torch.float32),
    frozenset({1}),
)


def changed(index, **changes):
    steps = list(SOUND.instructions)
    steps[index] = replace(steps[index], **changes)
    return replace(SOUND, instructions=tuple(steps))


def moved(*order):
    return replace(SOUND, instructions=tuple(SOUND.instructions[index] for index in order))


FAULTS = {
    "read before it is made": (moved(1, 0, 2, 3, 4), "v2 is read before it is made"),
    "made twice": (moved(0, 0, 1, 2, 3, 4), "v2 is made twice"),
    "an output is not made": (moved(0, 1, 2, 3), "the output v6 is not made"),
    "other inputs": (replace(SOUND, inputs=(0, 1, 7)), "other inputs"),
    "more is donated": (replace(SOUND, donated=frozenset({0, 1})), "other donated inputs"),
    "fewer outputs": (replace(SOUND, outputs=(4,)), "another number of outputs"),
    "an output is dropped": (replace(SOUND, outputs=(4, None)), "an output is missing"),
    "another output": (replace(SOUND, outputs=(6, 6)), "v6 is not like v4"),
    "collectives out of order": (moved(0, 3, 1, 2, 4), "effects"),
    "a collective is missing": (
        replace(moved(0, 1, 2, 4), outputs=(4, 1), instructions=moved(0, 1, 2).instructions),
        "effects",
    ),
    "another region": (changed(4, origin=NOWHERE), "v6 is made in another region"),
    "another shape": (changed(2, args=(Ref(3), (2, 2))), r"v4 is \(\(2, 2\)"),
    "not ours": (changed(0, fn=aten.mul_.Tensor, overwrites=(0,)), "v0 is not ours to write"),
    "no operand": (changed(0, fn=aten.mul_.Tensor, overwrites=(1,)), "v1 is overwritten and no operand"),
    "a result of the program": (
        replace(changed(4, fn=aten.add_.Tensor, overwrites=(1,)), outputs=(4, 1)),
        "v1 is read after v1, its memory",
    ),
}


def test_the_verifier_takes_what_is_sound():
    verify(SOUND, SOUND, "nothing")
    verify(SOUND, changed(4, fn=aten.add_.Tensor, overwrites=(1,)), "in place")
    verify(SOUND, moved(0, 1, 3, 2, 4), "a view later")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_finds(fault):
    after, words = FAULTS[fault]
    with pytest.raises(InvalidProgram, match=words) as caught:
        verify(SOUND, after, "some_pass")
    assert "some_pass" in str(caught.value)


def test_the_verifier_finds_reads_through_a_view():
    steps = (
        Call(aten.view.default, (Ref(0), (4,)), {}, (1,), False, NOWHERE),
        Call(aten.neg.default, (Ref(0),), {}, (2,), False, NOWHERE),
        Call(aten.exp.default, (Ref(1),), {}, (3,), False, NOWHERE),
    )
    before = Listing(
        steps, (0,), (2, 3), lambda v: ((4,) if v in (1, 3) else (2, 2), torch.float32), frozenset({0})
    )
    written = replace(steps[1], fn=aten.neg_.default, overwrites=(0,))
    with pytest.raises(InvalidProgram, match="v1 is read after v0, its memory, was overwritten"):
        verify(before, replace(before, instructions=(steps[0], written, steps[2])), "some_pass")
    verify(before, replace(before, instructions=(steps[0], steps[2], written)), "some_pass")


def test_the_verifier_finds_faults_of_decisions():
    sound = decided((GATHER, 0, 1, "forward"), outputs=(1,))
    verify(sound, sound, "nothing")
    (move,) = sound.steps
    for after, words in [
        (replace(sound, steps=()), "output v1 is not made"),
        (replace(sound, steps=(move, move)), "v1 is made twice"),
        (replace(sound, outputs=(0,)), "the output v0 is not like v1"),
        (
            replace(sound, values=(sound.values[1], sound.values[0])),
            "not in the layout that its move starts from",
        ),
        (replace(sound, steps=(replace(move, origin=BACKWARD),)), "effects"),
    ]:
        with pytest.raises(InvalidProgram, match=words):
            verify(sound, after, "some_pass", merges=False)
    verify(sound, replace(sound, steps=(replace(move, origin=BACKWARD),)), "a rewriting pass", rewrites=True)


# The registry.


def test_passes_are_applied_in_order_and_can_be_left_out():
    seen = []
    first, second = (
        Pass(name, passes.LISTING, lambda data, name=name: seen.append(name) or data)
        for name in ("one", "two")
    )
    passes.register(second, before="dead_code")
    passes.register(first, before="two")
    try:
        assert passes.names(passes.LISTING)[:3] == ("one", "two", "dead_code")
        passes.apply(passes.LISTING, SOUND)
        with passes.without("one"):
            passes.apply(passes.LISTING, SOUND)
        assert seen == ["one", "two", "two"]
        with pytest.raises(ArgumentError, match="registered once"):
            passes.register(first)
    finally:
        for name in ("one", "two"):
            registry.unregister(name)
    assert passes.names(passes.LISTING)[0] == "dead_code"


def test_what_cannot_be_registered():
    with pytest.raises(ArgumentError, match="one of decisions, listing"):
        passes.register(Pass("new", "graph", lambda data: data))
    with pytest.raises(ArgumentError, match="before='later'"):
        passes.register(Pass("new", passes.LISTING, lambda data: data), before="later")
    with pytest.raises(ArgumentError, match="no pass nothing"), passes.without("nothing"):
        pass


def test_a_broken_pass_is_found_where_it_is_verified():
    passes.register(Pass("broken", passes.LISTING, lambda data: replace(data, outputs=data.outputs[:1])))
    try:
        with passes.verifying(), pytest.raises(InvalidProgram, match="broken"):
            passes.apply(passes.LISTING, SOUND)
        with passes.verifying(False):
            assert len(passes.apply(passes.LISTING, SOUND).outputs) == 1
    finally:
        registry.unregister("broken")


# All of them, on programs drawn at random.

UNARY = [
    lambda x: x * 0.5,
    lambda x: x + 1,
    torch.exp,
    torch.neg,
    torch.tanh,
    lambda x: x.sum(),
    lambda x: x.sqrt(),
]
VIEWS = [
    lambda x: x.reshape(-1),
    lambda x: x.t() if x.dim() == 2 else x,
    lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x,
    lambda x: x.view(x.shape[::-1]) if x.is_contiguous() else x,
    lambda x: x.unsqueeze(0),
]
BINARY = [
    torch.add,
    torch.mul,
    torch.div,
    torch.sub,
    lambda a, b: torch.lerp(a, b, 0.25),
    lambda a, b: torch.addcmul(a, b, b, value=0.5),
]


@settings(max_examples=60)
@given(data=st.data())
def test_all_passes_keep_the_bits_of_random_programs(data):
    shapes = [data.draw(st.sampled_from([(4, 6), (6, 4), (24,), (4, 6)])) for _ in range(3)]
    count = data.draw(st.integers(1, 14))
    choices = [
        (
            data.draw(st.sampled_from("uuvbb")),
            data.draw(st.integers(0, 99)),
            data.draw(st.integers(0, 99)),
            data.draw(st.integers(0, 99)),
        )
        for _ in range(count)
    ]
    picked = [data.draw(st.integers(0, 99)) for _ in range(data.draw(st.integers(1, 4)))]

    def fn(*inputs):
        values = list(inputs)
        for kind, op, a, b in choices:
            x, y = values[a % len(values)], values[b % len(values)]
            if kind == "u":
                values.append(UNARY[op % len(UNARY)](x))
            elif kind == "v":
                values.append(VIEWS[op % len(VIEWS)](x))
            else:
                try:
                    values.append(BINARY[op % len(BINARY)](x, y))
                except RuntimeError:  # shapes that don't go together
                    values.append(x + x)
        return [values[-1 - (index % len(values))] for index in picked]

    tensors = [randn(*shape, seed=seed).abs() for seed, shape in enumerate(shapes)]
    donated = data.draw(st.sets(st.integers(0, 2)))
    before = listed(fn, *tensors, donated=donated)
    with passes.verifying():
        after = passes.apply(passes.LISTING, before)
    given = [tensor.clone() for tensor in tensors]
    for wanted, found in zip(run(before, *tensors), run_on(after, [*given]), strict=True):
        assert torch.equal(wanted.nan_to_num(7.0), found.nan_to_num(7.0))
        assert torch.equal(wanted.isnan(), found.isnan())
    for place, (tensor, was) in enumerate(zip(given, tensors, strict=True)):
        if place not in donated:
            assert torch.equal(tensor, was)


def test_an_optimizer_is_a_few_calls():
    """AdamW on ten parameters: one call for each link of its chain, in place but for two temporaries."""
    opt = vs.optim.adamw(1e-3)
    shapes = [(4, 6), (7,), (3, 3), (2,), (5, 2)] * 2
    params = {f"p{i}": randn(*shape, seed=i) for i, shape in enumerate(shapes)}
    grads = {name: randn(*p.shape, seed=99) for name, p in params.items()}
    state = opt.init(params)
    count = len(params)
    flat = [
        *params.values(),
        *grads.values(),
        *state["exp_avg"].values(),
        *state["exp_avg_sq"].values(),
        state["step"],
    ]

    def step(*flat):
        names = list(params)
        group = lambda i: dict(zip(names, flat[i * count : (i + 1) * count]))  # noqa: E731
        old = {"step": flat[-1], "exp_avg": group(2), "exp_avg_sq": group(3)}
        updates, new = opt.update(group(1), old, group(0))
        return vs.optim.apply_updates(group(0), updates), new

    donated = [*range(count), *range(2 * count, len(flat))]
    before = listed(step, *flat, donated=donated)
    after = passes.apply(passes.LISTING, before)
    lists = [name for name in calls(after) if name.startswith("_foreach")]
    assert sorted(lists) == sorted([
        "_foreach_lerp_.Scalar", "_foreach_mul_.Scalar", "_foreach_addcmul_.Scalar", "_foreach_mul.Tensor",
        "_foreach_sqrt", "_foreach_div_.Tensor", "_foreach_add_.Scalar", "_foreach_mul_.Scalar",
        "_foreach_addcdiv_.List" if "_foreach_addcdiv_.List" in lists else "_foreach_addcdiv_.Scalar",
    ])  # fmt: skip
    assert not any(".".join(name.split(".")[:1]) in ("lerp", "addcmul", "sqrt") for name in calls(after))
    same_bits(before, after, *flat)
