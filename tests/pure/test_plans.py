"""The ready-made plans: short, made of ordinary rules, for any mesh of dp and tp, and open to others."""

import ast
import inspect
import textwrap

import pytest
import torch

import vescale as vs
from vescale._errors import PlanError
from vescale.spmd.placements import InterleavedShard, P, Shard

LINES = {"llama": 29, "mixtral": 38, "dit": 29}
NAMES = {
    "embed_tokens.weight": (96, 32),
    "layers.0.input_layernorm.weight": (32,),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.o_proj.weight": (32, 32),
    "layers.0.mlp.experts.gate_up_proj": (4, 96, 32),
    "layers.0.mlp.experts.down_proj": (4, 32, 48),
    "lm_head.weight": (96, 32),
}


def mesh(**axes):
    return vs.make_mesh(axes, backend="simulated")


def resolved(plan, names=NAMES):
    tree = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    return {entry.path: entry.run.spec for entry in plan.resolve(tree)}


@pytest.mark.parametrize("name", LINES)
def test_is_short(name):
    source = textwrap.dedent(inspect.getsource(getattr(vs.plans, name)))
    (function,) = ast.parse(source).body
    document = function.body[0]
    lines = len(source.strip().splitlines()) - (document.end_lineno - document.lineno + 1)
    assert lines <= LINES[name]


def test_experts_inside_and_whole():
    inner, whole = (resolved(vs.plans.mixtral(mesh(dp=2, tp=2), experts=kind)) for kind in ("inner", "whole"))
    assert inner["layers.0.mlp.experts.gate_up_proj"] == P(tp=InterleavedShard(1, 2))
    assert inner["layers.0.mlp.experts.down_proj"] == P(tp=Shard(2))
    assert whole["layers.0.mlp.experts.gate_up_proj"] == P(tp=Shard(0))
    assert whole["layers.0.mlp.experts.down_proj"] == P(tp=Shard(0))
    assert inner["embed_tokens.weight"] == inner["lm_head.weight"] == P()


def test_options_add_rules():
    plan = vs.plans.mixtral(mesh(dp=2, tp=2), sequence=True, vocabulary=True, batch="tokens")
    assert resolved(plan)["embed_tokens.weight"] == resolved(plan)["lm_head.weight"] == P(tp=Shard(0))
    assert plan.inputs == {"tokens": P(dp=Shard(0))}
    assert list(plan.activations.values()) == [P(dp=Shard(0), tp=Shard(1))]


@pytest.mark.parametrize("make", [vs.plans.llama, vs.plans.mixtral, vs.plans.dit])
def test_a_mesh_of_one_axis(make):
    plans = [make(mesh(dp=2)), make(mesh(tp=2))]
    assert [plan.inputs["batch"] for plan in plans] == [P(dp=Shard(0)), P()]
    assert set(plans[0].params.values()) == {P()}
    assert P() not in plans[1].params.values()


def test_an_argument_that_is_no_choice():
    with pytest.raises(PlanError, match="experts='outer'"):
        vs.plans.mixtral(mesh(tp=2), experts="outer")


def test_compose():
    here = mesh(dp=2, tp=2)
    plan = vs.plans.llama(here) | vs.Plan(here, {r".*\.q_proj\.weight": P()})
    assert resolved(plan)["layers.0.self_attn.q_proj.weight"] == P()
    assert resolved(plan)["layers.0.self_attn.o_proj.weight"] == P(tp=Shard(1))


def test_a_model_with_other_names_is_told():
    with pytest.raises(PlanError, match=r"o\|down"):
        vs.plans.llama(mesh(tp=2)).resolve({"fc.q_proj.weight": torch.ones(4, 4)})
