"""Generated programs: each value freed after its last use, the same ATen calls, tracebacks that tell."""

import math
import traceback
import weakref

import pytest
import torch

from vescale._compat import OpOverload, TorchDispatchMode
from vescale.spmd.program.codegen import binding, generate
from vescale.spmd.program.emit import Call
from vescale.spmd.program.ir import Origin, Ref

aten = torch.ops.aten
NOWHERE = Origin()


def looks(_):
    return (2, 2), torch.float32


def call(fn, *args, outs=(), unpack=False, origin=NOWHERE, **kwargs):
    return Call(fn, args, kwargs, outs, unpack, origin)


def test_each_value_is_gone_when_the_next_instruction_runs():
    alive = {}

    def probe(expected, *values):
        """What was made and is not read later is gone by now."""
        assert {name for name, ref in alive.items() if ref() is not None} == set(expected)
        return torch.ones(2)

    def named(name, expected):
        def run(*values):
            out = probe(expected, *values)
            alive[name] = weakref.ref(out)
            return out

        return run

    inputs = [torch.ones(2), torch.ones(2)]
    alive |= {"a": weakref.ref(inputs[0]), "b": weakref.ref(inputs[1])}
    instructions = [
        call(named("c", "ab"), Ref(0), Ref(1), outs=(2,)),  # the last use of a
        call(named("d", "bc"), Ref(1), outs=(3,)),  # of b
        call(named("e", "cd"), Ref(2), Ref(3), outs=(4,)),  # of c and d
        call(named("unused", "e"), Ref(4), outs=(5,)),
        call(named("f", "e"), Ref(4), outs=(6,)),
    ]
    program = generate(instructions, [0, 1], [6, 4, None, 6], looks).run
    outputs = program(inputs)
    assert not inputs
    assert {name for name, ref in alive.items() if ref() is not None} == {"e", "f"}
    assert outputs[0] is outputs[3] is alive["f"]()
    assert outputs[1:3] == [alive["e"](), None]


def test_an_input_that_nobody_reads_is_freed_first():
    dead = torch.ones(2)
    ref, inputs = weakref.ref(dead), [dead, torch.ones(2)]
    del dead
    program = generate([call(lambda x: [ref(), x], Ref(1), outs=(2,))], [0, 1], [2], looks).run
    assert program(inputs)[0][0] is None


def test_a_program_without_inputs_or_instructions():
    assert generate([], [], [], looks).run([]) == []
    one = torch.ones(1)
    assert generate([], [0], [0, 0], looks).run([one]) == [one, one]


def test_results_that_are_lists():
    instructions = [
        call(lambda: (1, 2, 3), outs=(0, None, 2), unpack=True),
        call(lambda: [4], outs=(3,), unpack=True),
    ]
    assert generate(instructions, [], [2, 0, 3], looks).run([]) == [3, 1, 4]


CONSTANTS = [
    None, True, 3, -1, 2.5, "gelu", (1,), (), [1, 2], [], (1, [2, (3,)]),
    math.inf, -math.inf, torch.float64, torch.device("cpu"), slice(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants_arrive_as_they_are(value):
    for instruction in (call(lambda x: x, value, outs=(0,)), call(lambda *, x: x, x=value, outs=(0,))):
        (found,) = generate([instruction], [], [0], looks).run([])
        assert type(found) is type(value)
        assert found == value


def test_nan_arrives():
    (found,) = generate([call(lambda x: x, math.nan, outs=(0,))], [], [0], looks).run([])
    assert math.isnan(found)


def test_a_traceback_shows_the_line_of_the_user():
    origin = Origin("train.py:12 in forward", "blocks.0.fc1", "backward")
    program = generate([call(aten.mm.default, Ref(0), Ref(0), outs=(1,), origin=origin)], [0], [1], looks).run
    with pytest.raises(RuntimeError) as caught:
        program([torch.ones(2, 3)])
    text = "".join(traceback.format_exception(caught.value))
    assert "mm" in text
    assert "# backward blocks.0.fc1 train.py:12 in forward" in text


# Bindings.


class Calls(TorchDispatchMode):
    """The ATen calls that are made, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args, {k: v for k, v in (kwargs or {}).items() if v is not None}))
        return func(*args, **(kwargs or {}))


X = torch.rand(2, 2, generator=torch.Generator().manual_seed(0)) + 0.5
Y = X.flip(0)
INDEX = torch.tensor([[0, 1], [1, 0]])

CALLS = [
    (aten.add.Tensor, (X, Y), {}),
    (aten.add.Tensor, (X, Y), {"alpha": 2}),
    (aten.add.Tensor, (X, 2), {}),
    (aten.sub.Tensor, (X, Y), {}),
    (aten.rsub.Scalar, (X, 2), {}),
    (aten.mul.Tensor, (X, 0.5), {}),
    (aten.div.Tensor, (X, Y), {}),
    (aten.div.Tensor_mode, (X, Y), {"rounding_mode": "floor"}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Scalar, (2, X), {}),
    (aten.pow.Tensor_Tensor, (X, Y), {}),
    (aten.sqrt.default, (X,), {}),
    (aten.gelu.default, (X,), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.gelu_backward.default, (X, Y), {}),
    (aten.silu.default, (X,), {}),
    (aten.mm.default, (X, Y), {}),
    (aten.addmm.default, (X, X, Y), {}),
    (aten.t.default, (X,), {}),
    (aten.transpose.int, (X, 0, 1), {}),
    (aten.view.default, (X, [4]), {}),
    (aten.expand.default, (X[:, :1], [2, 2]), {}),
    (aten.sum.default, (X,), {}),
    (aten.sum.dim_IntList, (X, [0], True), {}),
    (aten.sum.dim_IntList, (X, [0]), {"dtype": torch.float64}),
    (aten.mean.dim, (X, [0]), {}),
    (aten.amax.default, (X, [0], True), {}),
    (aten.max.dim, (X, 0), {}),
    (aten.where.self, (X > 1, X, Y), {}),
    (aten.lerp.Scalar, (X, Y, 0.1), {}),
    (aten.addcmul.default, (X, X, Y), {"value": 0.1}),
    (aten.clamp.default, (X, 0.6), {}),
    (aten._softmax.default, (X, 1, False), {}),
    (aten._log_softmax.default, (X, 1, False), {}),
    (aten.embedding.default, (X, INDEX), {}),
    (aten.native_layer_norm.default, (X, [2], X[0], X[1], 1e-5), {}),
    (aten.cat.default, ([X, Y], 1), {}),
    (aten.split.Tensor, (X, 1), {}),
    (aten.gather.default, (X, 0, INDEX), {}),
    (aten.clone.default, (X,), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.float64}),
    (aten.zeros_like.default, (X,), {}),
    (aten.nll_loss_forward.default, (X, INDEX[0], None, 1, -100), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=[str(op) for op, *_ in CALLS])
def test_the_binding_makes_the_same_call(op, args, kwargs):
    values = {}

    def number(value):
        if isinstance(value, torch.Tensor):
            values[len(values)] = value
            return Ref(len(values) - 1)
        return type(value)(map(number, value)) if isinstance(value, (list, tuple)) else value

    numbered = tuple(map(number, args))
    looks = lambda index: (tuple(values[index].shape), values[index].dtype)  # noqa: E731
    fn = binding(op, numbered, kwargs, looks)
    with Calls() as wanted:
        expected = op(*args, **kwargs)
    with Calls() as made:
        found = fn(*args, **kwargs)
    ((func, taken, extra),) = made.seen
    ((_, given, named),) = wanted.seen
    assert func is op
    assert _plain(taken) == _plain(given)
    assert extra == named
    for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (found, expected))):
        assert torch.equal(a, b)


def _plain(value):
    """Arguments with tensors by identity, and lists like tuples."""
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.div.Tensor], ids=str)
def test_the_ops_of_the_inner_loop_have_a_fast_binding(op):
    """An overload called through torch.ops costs twice as much."""
    assert not isinstance(binding(op, (Ref(0), Ref(1)), {}, looks), OpOverload)
