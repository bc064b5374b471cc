"""Faults, planted in rules, decisions, passes, exchanges, draws and caches: one way each to be inconsistent.

Each plants itself with a monkeypatch, and says at which instruction the harness has to find it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import vescale as vs
from vescale.rng.numbers import compressed
from vescale.spmd import boundary, redistribute, signature
from vescale.spmd.placements import P, Shard
from vescale.spmd.program import binding, dispatch, draw, emit, passes
from vescale.spmd.program.cache import ProgramCache
from vescale.spmd.program.emit import Call
from vescale.spmd.program.partition import Compute, Local, Move
from vescale.spmd.program.passes import Pass, registry
from vescale.spmd.reduction import Reduction
from vescale.spmd.rules import notation, random

aten = torch.ops.aten


@dataclass(frozen=True)
class Fault:
    """A way to go wrong: `plant(monkeypatch)`, a function with arguments and inputs' placements, and where it
    must be found."""

    name: str
    plant: Callable[[Any], None]
    fn: Callable[..., Any]
    args: list
    placed: dict[str, P]
    op: str  # what the divergence names
    why: str = ""  # what it says of it
    mesh: tuple[tuple[str, int], ...] = (("dp", 2), ("tp", 2))
    options: tuple[tuple[str, Any], ...] = (("static", [True]),)
    line: bool = True  # whether it has a source line
    fsdp: vs.FSDP | None = None

    def plan(self) -> vs.Plan:
        mesh = vs.make_mesh(dict(self.mesh), backend="simulated")
        return vs.Plan(mesh, inputs=self.placed, fsdp=self.fsdp)


FAULTS: list[Fault] = []


def fault(fn, args, placed, op, why="", **options):
    """Registers a plant, by the words of its name."""

    def register(plant):
        name = plant.__name__.replace("_", " ")
        FAULTS.append(Fault(name, plant, fn, args, placed, op, why, **options))
        return plant

    return register


def whole(*shape, seed=0):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def noisy(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# How they are planted.


def exchanges(monkeypatch, kind, wrong, when=lambda step: True):
    """Collectives of a kind become wrong(run, values, step)."""
    bind = binding.bind

    def bind_wrongly(step, mesh, **options):
        run = bind(step, mesh, **options)
        if step.kind != kind or not when(step):
            return run
        return lambda values: wrong(run, values, step)

    monkeypatch.setattr(binding, "bind", bind_wrongly)


def rules(monkeypatch, op, change):
    """The rule of an op gives change(pattern)."""
    rule = notation.find_rule(op)
    monkeypatch.setitem(notation._rules, op, lambda node, metas: change(rule(node, metas)))


def decisions(monkeypatch, edit):
    """The last pass over decisions is edit(step) -> steps, for each step."""

    def run(data):
        return replace(data, steps=tuple(made for step in data.steps for made in edit(step, data)))

    added = [*registry._passes["decisions"], Pass("planted", passes.DECISIONS, run, rewrites=True)]
    monkeypatch.setitem(registry._passes, "decisions", added)


def listings(monkeypatch, edit):
    """The last pass over listings is edit(instruction), for each."""

    def run(made):
        return replace(made, instructions=tuple(edit(one) for one in made.instructions))

    added = [*registry._passes["listing"], Pass("planted", passes.LISTING, run)]
    monkeypatch.setitem(registry._passes, "listing", added)


# Functions that they are planted in.


def product(x, w):
    return x @ w


def biased(x, w, b):
    return torch.relu(x @ w + b)


def total(x):
    return (x * 2).sum()


def train(params, x):
    loss, gradients = vs.value_and_grad(lambda params: (x @ params["w"]).square().sum())(params)
    return {"w": params["w"] - gradients["w"]}, loss


def update(params, x):
    """The second line reads `w` for the last time, and the third its memory."""
    flat = params["w"].flatten()
    moved = params["w"] * 2
    return {"w": moved}, (flat + x).sum()


def counted(x, n):
    return {"x": x["x"] * n}, n + 1


SUMMED = {"x": P(tp=Shard(1)), "w": P(tp=Shard(0))}
ROWS = {"x": P(dp=Shard(0))}
FOUR = (("dp", 4),)


# Exchanges.


@fault(product, [whole(4, 8), whole(8, 4)], SUMMED, "all_reduce over tp", "replicas differ")
def a_missing_reduction(monkeypatch):
    exchanges(monkeypatch, "all_reduce", lambda run, values, step: [value.clone() for value in values])


@fault(product, [whole(4, 8), whole(8, 4)], SUMMED, "all_reduce over tp", "keeps its bits")
def a_doubled_reduction(monkeypatch):
    exchanges(monkeypatch, "all_reduce", lambda run, values, step: run(run(values)))


@fault(train, [{"w": whole(4, 4)}, whole(8, 4)], ROWS, "all_reduce over dp", "replicas differ")
def a_gradient_that_is_not_reduced_over_one_axis(monkeypatch):
    keep = lambda run, values, step: [value.clone() for value in values]  # noqa: E731
    exchanges(monkeypatch, "all_reduce", keep, lambda step: step.axes == ("dp",) and len(step.src.shape) == 2)


class Backwards(Reduction):
    """((d + c) + b) + a in the place of the tree."""

    def tree(self, contributions):
        result = contributions[-1].clone()
        for one in contributions[-2::-1]:
            result = self.combine(result, one)
        return self.finish(result)


@fault(lambda x: x.sum(0), [noisy(4, 64)], ROWS, "all_reduce over dp", "keeps its bits", mesh=FOUR)
def a_wrong_tree_order(monkeypatch):
    monkeypatch.setattr(redistribute, "Reduction", Backwards)


@fault(lambda x: x.sum(0), [noisy(4, 64)], ROWS, "all_reduce over dp", "keeps its bits", mesh=FOUR)
def a_wrong_dtype_in_a_reduction(monkeypatch):
    narrow = lambda run, values, step: [v.float() for v in run([v.bfloat16() for v in values])]  # noqa: E731
    exchanges(monkeypatch, "all_reduce", narrow)


@fault(lambda x: vs.constrain(x * 2, P(dp=Shard(1))), [whole(8, 8)], ROWS, "all_to_all over dp", mesh=FOUR)
def swapped_ranks_in_an_exchange(monkeypatch):
    def swap(run, values, step):
        found = run(values)
        return [found[1], found[0], *found[2:]]

    exchanges(monkeypatch, "all_to_all", swap)


@fault(lambda x: vs.constrain(x * 2, P()), [whole(8, 8)], ROWS, "all_gather over dp", mesh=FOUR)
def pieces_in_the_wrong_order(monkeypatch):
    exchanges(monkeypatch, "all_gather", lambda run, values, step: run([*values[1:], values[0]]))


@fault(lambda x: vs.constrain(x * 2, P(dp=Shard(0))), [whole(8, 3)], {}, "slice", mesh=FOUR)
def an_off_by_one_slice(monkeypatch):
    bind = emit.bind_local

    def bind_wrongly(step, rank):
        run = bind(step, rank)
        if step.kind != "slice" or rank == 0:
            return run
        return lambda value: run(value.roll(1, 0))

    monkeypatch.setattr(emit, "bind_local", bind_wrongly)


# Rules.


@fault(product, [whole(8, 8), whole(8, 8)], {"x": P(dp=Shard(0))}, "aten.mm", "was decided")
def a_wrong_dim_that_is_split(monkeypatch):
    def transposed(pattern):
        ((a, b),) = pattern.results
        return replace(pattern, results=((b, a),))

    rules(monkeypatch, aten.mm.default, transposed)


@fault(product, [whole(8, 8), whole(8, 8)], {"x": P(dp=Shard(0))}, "aten.mm", "",
       options=(("static", [False]),))  # fmt: skip
def a_wrong_dim_that_is_split_op_by_op(monkeypatch):
    a_wrong_dim_that_is_split(monkeypatch)


@fault(lambda table, x: F.embedding(x, table), [whole(8, 3), torch.arange(8)], {"table": P(tp=Shard(0))},
       "aten.embedding")  # fmt: skip
def a_wrong_offset_in_an_embedding(monkeypatch):
    def shifted(pattern):
        def local(call):
            made = pattern.local(call)
            return replace(made, fn=lambda table, x, *rest: made.fn(table, (x + call.rank % 2) % 8, *rest))

        return replace(pattern, local=local)

    rules(monkeypatch, aten.embedding.default, shifted)


@fault(biased, [whole(4, 8), whole(8, 4), whole(4)], SUMMED, "aten.add.Tensor")
def a_bias_that_every_rank_adds(monkeypatch):
    rules(monkeypatch, aten.add.Tensor, lambda pattern: replace(pattern, linear=(frozenset((0,)),)))


def heads(x):
    return (x * 2).view(4, 3, 4, 2).unbind(1)


@fault(heads, [whole(4, 24)], {"x": P(tp=Shard(1))}, "aten.view.default")
def wrong_view_groups_of_fused_qkv(monkeypatch):
    view = notation.find_rule(aten.view.default)

    def regrouped(node, metas):
        pattern = view(node, metas)
        if len(metas[node.outs[0]].shape) != 4:
            return pattern
        _, three, four, two = pattern.results[0]
        return replace(pattern, operands=((pattern.operands[0][0], four + three + two),))

    monkeypatch.setitem(notation._rules, aten.view.default, regrouped)


@fault(lambda x: F.softmax(x, 1), [whole(4, 8)], {"x": P(tp=Shard(1))}, "aten._softmax.default")
def a_softmax_of_each_rank(monkeypatch):
    alone = lambda pattern: replace(pattern, whole=frozenset(), expand={})  # noqa: E731
    rules(monkeypatch, aten._softmax.default, alone)


@fault(lambda x: F.layer_norm(x, (8,)), [whole(4, 8)], {"x": P(tp=Shard(1))}, "aten.native_layer_norm")
def a_layer_norm_of_each_rank(monkeypatch):
    def alone(pattern):
        def local(call):
            return call.with_arg(1, [call.operands[0].local_shape(call.rank)[-1]])

        return replace(pattern, whole=frozenset(), expand={}, local=local)

    rules(monkeypatch, aten.native_layer_norm.default, alone)


# Decisions.


@fault(lambda x: (x * 2).mean(), [whole(16)], ROWS, "aten.div", mesh=FOUR)
def a_local_mean_in_place_of_a_global_mean(monkeypatch):
    def edit(step, data):
        if isinstance(step, Compute) and step.node.op.overloadpacket is aten.div:
            x, count = step.node.args
            return [replace(step, node=replace(step.node, args=(x, count // 4)))]
        return [step]

    decisions(monkeypatch, edit)


@fault(biased, [whole(4, 8), whole(8, 4), whole(4)], ROWS, "aten.relu.default", "it reads")
def a_dropped_bias(monkeypatch):
    dropped = {}

    def edit(step, data):
        if isinstance(step, Compute) and step.node.op is aten.add.Tensor:
            dropped[step.results[0]] = step.operands[0]
            return []
        if isinstance(step, Compute):
            return [replace(step, operands=tuple(dropped.get(n, n) for n in step.operands))]
        return [step]

    decisions(monkeypatch, edit)


@fault(lambda x: (vs.constrain(x * 2, P()), vs.constrain(x * 3, P())), [whole(8)], ROWS, "return", "returns",
       mesh=FOUR, line=False)  # fmt: skip
def two_gathers_that_are_taken_for_one(monkeypatch):
    def run(data):
        gathers = [s.target for s in data.steps if isinstance(s, Move) and s.step.kind == "all_gather"]
        return replace(data, outputs=(gathers[0],) * len(data.outputs))

    added = [*registry._passes["decisions"], Pass("planted", passes.DECISIONS, run, rewrites=True)]
    monkeypatch.setitem(registry._passes, "decisions", added)


# Buckets.


def two_layers(params, x):
    loss, gradients = vs.value_and_grad(lambda p: ((x @ p["a.w"]) @ p["a.v"]).sum())(params)
    return {name: params[name] - gradients[name] for name in params}, loss


BUCKET = {"mesh": (("dp", 2),), "fsdp": vs.FSDP(axis="dp", wrap="a")}
LAYERS = [{"a.w": whole(4, 4), "a.v": whole(4, 2)}, whole(8, 4)]


@fault(two_layers, LAYERS, ROWS, "parameters of a", **BUCKET)
def a_view_at_a_wrong_address_of_a_buffer(monkeypatch):
    def edit(step, data):
        if isinstance(step, Local) and step.name == "parameters of a":
            make = step.make
            moved = lambda rank: lambda *buffers: make(rank)(*(b.roll(1) for b in buffers))  # noqa: E731
            return [replace(step, make=moved)]
        return [step]

    decisions(monkeypatch, edit)


@fault(two_layers, LAYERS, ROWS, "gradients at rest of a", **BUCKET)
def a_bucket_of_gradients_that_is_scattered_to_the_wrong_ranks(monkeypatch):
    exchanges(monkeypatch, "reduce_scatter", lambda run, values, step: run(values)[::-1])


# Draws.


def one_less(runs):
    """Every run of indices starts one before, but for the first."""
    return torch.cat([runs[:, :1] - (runs[:, :1] > 0).long(), runs[:, 1:]], 1)


@fault(lambda x: F.dropout(x, 0.5), [whole(8, 8)], {}, "draw bernoulli", "replicas differ")
def a_mask_that_each_rank_draws_for_itself(monkeypatch):
    def of_each(step, partitioned, mesh):
        (number,) = step.results
        shape = partitioned.values[number].layout.shape
        return draw.BoundDraw(lambda values: [[torch.empty(shape).bernoulli_(0.5)] for _ in mesh.local_ranks])

    monkeypatch.setattr(binding, "bind_draw", of_each)


@fault(lambda x: x + torch.rand(16), [whole(16)], ROWS, "draw", "one device", mesh=FOUR)
def a_torch_draw_that_is_off_by_one(monkeypatch):
    monkeypatch.setattr(draw, "compressed", lambda intervals: one_less(compressed(intervals)))


@fault(lambda x: x + vs.rng.uniform(vs.rng.key(0), (16,)), [whole(16)], ROWS, "vescale.draw", mesh=FOUR)
def a_keyed_draw_that_is_off_by_one(monkeypatch):
    monkeypatch.setattr(random, "compressed", lambda intervals: one_less(compressed(intervals)))
    monkeypatch.setattr(random, "own_draw", random.own_draw.__wrapped__)  # uncached


# The memory of a rank, and what is kept between calls.


@fault(update, [{"w": whole(4, 2)}, whole(8, seed=1)], {"params.w": P(dp=Shard(0))}, "aten.mul", "'in_place'",
       options=(("static", [True]), ("donate", ["params"])))  # fmt: skip
def a_donated_buffer_that_is_read_after_it_is_overwritten(monkeypatch):
    def careless(self, index, target, out, read):
        """Without a look at the values that share the memory."""
        return self.last_use[target] == index and self.looks(target) == self.looks(out)

    in_place = importlib.import_module("vescale.spmd.program.passes.in_place")
    monkeypatch.setattr(in_place._Walk, "may_write", careless)


@fault(lambda x, y: (x - y) * 2, [whole(8), whole(8, seed=1)], {}, "aten.sub", "'planted'")
def operands_that_a_pass_swaps(monkeypatch):
    def swap(instruction):
        if isinstance(instruction, Call) and "sub" in str(instruction.fn):
            return replace(instruction, args=instruction.args[1::-1] + instruction.args[2:])
        return instruction

    listings(monkeypatch, swap)


@fault(counted, [{"x": whole(8)}, 2], {"x.x": P(dp=Shard(0))}, "cache", "stale",
       options=(("static", [True]), ("steps", 3)), line=False)  # fmt: skip
def a_stale_program(monkeypatch):
    key = signature._leaf_key
    monkeypatch.setattr(signature, "_leaf_key", lambda leaf: int if type(leaf) is int else key(leaf))


@fault(lambda x: (x * 2) + (x * 3), [whole(8)], ROWS, "aten.mul.Tensor", options=(("static", [False]),))
def a_stale_program_of_one_op(monkeypatch):
    """Op by op: the key of an op forgets its numbers."""

    class Forgetful(ProgramCache):
        def get(self, key):
            return super().get(plain(key))

        def put(self, key, program):
            super().put(plain(key), program)

    def plain(key):
        if isinstance(key, tuple):
            return tuple(map(plain, key))
        return "a number" if isinstance(key, dispatch._Number) else key

    monkeypatch.setattr(dispatch, "_programs", Forgetful(("op", "arguments", "mesh", "mode")))


# Where arguments come in.


@fault(
    lambda x: x * 2,
    [whole(12)],
    {"x": P(tp=vs.InterleavedShard(0, 3))},
    "arguments",
    "x is not placed",
    line=False,
)
def interleaved_pieces_that_are_cut_in_one(monkeypatch):
    def plain_cut(tensor, layout, rank):
        spec = P.of((axis, Shard(0)) for axis, _ in layout.spec.items())
        return cut(tensor, vs.Layout(layout.mesh, spec, layout.shape), rank)

    cut = boundary.local_slice
    monkeypatch.setattr(boundary, "local_slice", plain_cut)
