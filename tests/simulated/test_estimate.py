"""`vs.estimate`: figures for meshes that don't exist here, and those of a mesh that does."""

import pytest
import torch

import vescale as vs
from tests import models
from vescale._errors import ArgumentError, LayoutError


def llama_step():
    """A train step of a Llama on the meta device, and its arguments for a batch of so many rows."""
    with torch.device("meta"):
        model = models.llama("sdpa", torch.float32, hidden_size=256, intermediate_size=688)
    opt = vs.optim.adamw(1e-3)

    def step(params, state, batch):
        def loss_fn(params, batch):
            return torch.func.functional_call(model, params, (), batch).loss

        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    params = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}

    def args(rows):
        tokens = torch.empty(rows, 64, dtype=torch.int64, device="meta")
        return params, opt.init(params), {"input_ids": tokens, "labels": tokens}

    return step, args


def make_plan():
    fsdp = vs.FSDP("dp", wrap=r"model\.layers\.\d+", param_dtype=torch.bfloat16)
    return vs.Plan(vs.make_mesh({"dp": 2}), inputs={"batch": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)


def test_a_llama_on_1024_ranks():
    step, args = llama_step()
    found = vs.estimate(step, make_plan(), args(1024), {"dp": 1024}, donate=("params", "state"))
    rest, layers = found.buckets, [bucket for bucket in found.buckets if bucket.name]
    assert {b.name for b in layers} == {"model.layers.0", "model.layers.1"}
    params = args(1)[0]
    elements = sum(p.numel() for p in params.values())
    assert sum(b.shard - b.padding for b in rest) == pytest.approx(elements * 4 / 1024, abs=8 * len(rest))
    # Everything is gathered once or twice in bfloat16, and a rank receives all shards but its own.
    gathers = next(t for t in found.traffic if t.kind == "all_gather")
    gathered = sum(b.gathered for b in rest)
    assert gathers.count == len(rest) + len(layers)
    again = sum(b.gathered for b in layers)
    assert gathers.received == (gathered + again) * 1023 // 1024
    assert found.peak > max(b.gathered for b in rest) + 3 * sum(b.shard for b in rest)
    assert found.peak == sum(found.peak_by_kind.values())
    text = str(found)
    assert all(
        word in text
        for word in (f"all_gather dp x{gathers.count}", "gathered parameters", "model.layers.1", "padding")
    )


def test_the_figures_are_those_of_a_mesh_that_exists():
    step, args = llama_step()
    found = vs.estimate(step, make_plan(), args(8), {"dp": 2}, donate=("params",))
    lowered = vs.parallelize(step, make_plan(), donate=("params",)).lower(*args(8))
    assert found.memory.peak == lowered.memory_analysis().peak
    assert found.received == lowered.cost_analysis().total.received
    assert found.padding == sum(bucket.padding_nbytes for bucket in lowered.buckets)


def test_hsdp_and_tensor_parallel_meshes_and_values_that_are_there():
    plan = vs.Plan(
        vs.make_mesh({"r": 1, "dp": 2, "tp": 1}),
        {"w": vs.P(tp=vs.Shard(1))},
        {"x": vs.P(r=vs.Shard(0), dp=vs.Shard(0))},
        fsdp=vs.FSDP(("r", "dp")),
    )
    params = vs.distribute({"w": torch.ones(64, 64)}, plan)
    loss = vs.value_and_grad(lambda params, x: (x @ params["w"]).square().mean())
    found = vs.estimate(loss, plan, (params, torch.ones(512, 64)), {"r": 4, "dp": 8, "tp": 2})
    kinds = {(t.kind, t.axis) for t in found.traffic}
    assert {("all_gather", "dp"), ("reduce_scatter", "dp"), ("all_reduce", "r")} <= kinds
    assert found.buckets[0].shard == 64 * 64 // 2 // 8 * 4


def test_what_is_refused():
    plan, args = make_plan(), ({"w": torch.ones(4, 4)}, torch.ones(4))
    fn = lambda params, batch: (params["w"] @ batch).sum()  # noqa: E731
    for mesh in ({}, {"dp": 0}, {"dp": "4"}, 4):
        with pytest.raises(ArgumentError, match="mesh"):
            vs.estimate(fn, plan, args, mesh)
    with pytest.raises(ArgumentError, match="rank"):
        vs.estimate(fn, plan, args, {"dp": 2}, rank=2)
    with pytest.raises(ArgumentError, match=r"vs\.Plan"):
        vs.estimate(fn, None, args, {"dp": 2})
    with pytest.raises(LayoutError, match="axis 'dp'"):
        vs.estimate(fn, plan, args, {"tp": 2})
