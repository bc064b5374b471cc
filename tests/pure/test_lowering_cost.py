"""What lowering costs: a few milliseconds a node, whatever the number of ranks.

The bounds are generous, and ratios where they can be: other work shares the machine.
"""

import time
import tracemalloc

import pytest
import torch

import vescale as vs
from tests.gpt import CONTEXT, TP, make_model, parameters, ragged, train_step
from vescale.spmd.placements import P, RaggedShard, Shard


def lower(dp, rest=False):
    model, opt = make_model().to("meta"), vs.optim.adamw(1e-3)
    params = parameters(model)
    mesh = vs.AbstractMesh(("dp", "tp"), (dp, 4))
    rules = ragged(TP, RaggedShard.on_rank(1, dp)) if rest else TP
    step = vs.parallelize(train_step(model, opt), vs.Plan(mesh, rules, {"batch": P(dp=Shard(0))}))
    batch = torch.empty(dp, CONTEXT + 1, dtype=torch.int64, device="meta")
    start = time.perf_counter()
    lowered = step.lower(params, opt.init(params), batch)
    return lowered, time.perf_counter() - start


def nodes(lowered):
    return lowered.cost_analysis().total.instructions


@pytest.mark.parametrize("rest", [False, True], ids=["whole", "ragged at rest"])
def test_lowering_takes_a_few_milliseconds_a_node_whatever_the_ranks(rest):
    """At most 4 ms a node, and for 10,240 ranks at most twice what it takes for 8."""
    few, many = [], []
    for _ in range(4):  # in turns, so that both meet the same machine
        few.append(lower(2, rest))
        many.append(lower(2560, rest))
    seconds = [min(taken for _, taken in found) for found in (few, many)]
    assert max(seconds) < 4e-3 * nodes(few[0][0])
    assert seconds[1] < 2 * seconds[0] + 0.1
    counts = [[(c.kind, c.axis) for c in found[0][0].collectives()] for found in (few, many)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_memory_does_not_grow_with_ranks():
    peaks = []
    for dp in (2, 2, 2560):
        tracemalloc.start()
        lowered, _ = lower(dp)
        lowered.memory_analysis(3)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 2 * peaks[1]  # the first filled caches


def test_a_rank_of_ten_thousand_is_analysed_alone():
    lowered, _ = lower(2560, rest=True)
    start = time.perf_counter()
    last = lowered.memory_analysis(10_239)
    cost = lowered.cost_analysis(10_239)
    assert time.perf_counter() - start < 4e-3 * len(last.events) + 1
    assert last.peak < lowered.memory_analysis(4).peak  # who has all parameters at rest has more
    assert cost.flops == lowered.cost_analysis(0).flops
