"""How many collectives the partition of a whole train step has: those of a hand-written implementation.

The GPT has 2 blocks and 29 parameters: 12 a block, 2 embeddings, the last norm's 2 and the head. Nothing
runs here, and there are no ranks: the step is traced, and partitioned on an abstract mesh.
"""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import vescale as vs
from tests.gpt import CONTEXT, TP, make_model, parameters, ragged, train_step
from vescale import _tree, optim
from vescale.spmd.layout import Layout, replicated
from vescale.spmd.placements import P, RaggedShard, Shard
from vescale.spmd.plan import Plan
from vescale.spmd.program.cleanup import cleanup
from vescale.spmd.program.ir import TensorMeta
from vescale.spmd.program.partition import partition
from vescale.spmd.program.program import collectives
from vescale.spmd.program.trace import Mark, Tracing, trace


def decide(axes, rules, activations=None, rows=8):
    """The partition of the train step, with parameters placed by `rules` and the batch's rows over dp."""
    model, opt = make_model(), optim.adamw(1e-3)
    params = parameters(model)
    plan = Plan(vs.make_mesh(axes, backend="simulated"), rules, activations=activations)
    mesh, resolved = plan.mesh.abstract, plan.resolve(params)
    rest, marks = zip(*((entry.rest, Mark(entry.path, entry.run, entry.rest)) for entry in resolved))
    batch = torch.empty(rows, CONTEXT + 1, dtype=torch.int64, device="meta")
    paths, leaves, spec = _tree.flatten_with_path((params, opt.init(params), batch))

    scalar = replicated(mesh, ())
    read = Layout(mesh, P(dp=Shard(0)) if "dp" in axes else P(), tuple(batch.shape))
    state = [*rest, *rest, *rest, scalar]  # of the parameters and of both moments; the step comes last
    assert [layout.shape for layout in state] == [tuple(leaf.shape) for leaf in leaves[:-1]]

    tracing = Tracing(activations=plan.activation_rules())
    step = train_step(model, opt)
    graph = cleanup(
        trace(
            lambda values: _tree.leaves(step(*_tree.unflatten(spec, values))),
            [replace(TensorMeta.of(leaf), device=torch.device("cpu")) for leaf in leaves],
            paths,
            tracing,
            marks,
        )
    )
    pinned = frozenset(graph.inputs[: len(rest)])
    return partition(graph, mesh, [*state, read], [*state, None], pinned, dict(zip(graph.inputs, paths)))


def count(axes, rules, activations=None, rows=8):
    found = collectives(decide(axes, rules, activations, rows))
    return Counter((c.kind, c.axis) for c in found), found


def test_data_parallel():
    # A gradient a parameter. The scalars: the loss, and how many targets count towards its mean.
    counts, _ = count({"dp": 4}, {})
    assert counts == {("all_reduce", "dp"): 29 + 2}


def test_tensor_parallel():
    # A block: forward after attention and after the MLP, backward before each of them. The row-parallel
    # biases, norms and embeddings are whole on every rank, and so are their gradients.
    counts, _ = count({"tp": 4}, TP)
    assert counts == {("all_reduce", "tp"): 4 * 2}


def test_both():
    counts, _ = count({"dp": 2, "tp": 2}, TP)
    assert counts == {("all_reduce", "tp"): 4 * 2, ("all_reduce", "dp"): 29 + 2}


def test_both_ragged_at_rest():
    # A parameter is gathered on entry, and its gradient scattered on exit; the optimizer moves nothing.
    counts, _ = count({"dp": 2, "tp": 2}, ragged(TP, RaggedShard((0,), (5, 3))))
    assert counts == {
        ("all_gather", "dp"): 29,
        ("reduce_scatter", "dp"): 29,
        ("all_reduce", "tp"): 4 * 2,
        ("all_reduce", "dp"): 2,
    }


# The second is as lopsided as the training example's: by the bytes of rank 0 alone an all-reduce is less.
@pytest.mark.parametrize("units", [(3, 1, 2, 2), (5, 1, 1, 1), (1, 0, 1, 0)], ids=str)
def test_data_parallel_ragged_at_rest(units):
    counts, _ = count({"dp": 4}, ragged({}, RaggedShard((0,), units)))
    assert counts == {("all_gather", "dp"): 29, ("reduce_scatter", "dp"): 29, ("all_reduce", "dp"): 2}


SEQUENCE = {r"blocks\.\d+\.(input|output)": P(dp=Shard(0), tp=Shard(1))}

# Their gradients are sums over the positions, of which a rank has some: 4 norms in blocks and the last,
# 2 each, both embeddings and the head. The row-parallel biases' gradients are summed from the
# gradient that is gathered for the weight, and the column-parallel ones' belong to the rank.
SUMMED = 5 * 2 + 2 + 1


def test_sequence_parallel():
    # What is an all-reduce without it is now a reduce-scatter, and a gather on the other side.
    counts, found = count({"tp": 4}, TP, {rule: P(tp=Shard(1)) for rule in SEQUENCE})
    assert counts == {
        ("all_gather", "tp"): 4 * 2,
        ("reduce_scatter", "tp"): 4 * 2,
        ("all_reduce", "tp"): SUMMED + 2,
    }
    assert sum("gradient of" in c.cause for c in found) == SUMMED
    assert all(c.bytes < 4096 for c in found if c.kind == "all_reduce" and "gradient" not in c.cause)


def test_sequence_and_data_parallel():
    # A gradient that is a sum over both axes is reduced once, over both.
    counts, _ = count({"dp": 2, "tp": 2}, TP, SEQUENCE)
    assert counts == {
        ("all_gather", "tp"): 4 * 2,
        ("reduce_scatter", "tp"): 4 * 2,
        ("all_reduce", "dp+tp"): SUMMED + 2,
        ("all_reduce", "dp"): 29 - SUMMED,
    }


def test_vocabulary_parallel():
    rules = {**TP, r"(wte|head)\.weight": P(tp=Shard(0))}
    counts, found = count({"tp": 4}, rules)
    assert counts == {("all_reduce", "tp"): 4 * 2 + 5}
    # Of the five: what the embedding looked up and the gradient of the head's input are (rows, width);
    # the largest logit and the sum of exponentials are a number a position; the loss is one.
    shapes = Counter(c.value for c in found)
    assert shapes == {"float32[8,16,64]": 4 * 2 + 2, "float32[128,1]": 2, "float32[]": 1}


@pytest.mark.parametrize("resting", [False, True])
def test_ten_thousand_ranks_cost_what_eight_cost(resting):
    """The same decisions in about the same time, for a batch with a row a rank."""
    counts, seconds = [], []
    for dp in (2, 2560):
        kept = ragged(TP, RaggedShard.on_rank(1, dp))
        start = time.perf_counter()
        counts.append(count({"dp": dp, "tp": 4}, kept if resting else TP, rows=dp)[0])
        seconds.append(time.perf_counter() - start)
    assert counts[0] == counts[1]
    assert counts[0].total() == 8 + 2 + (2 * 29 if resting else 29)
    assert seconds[1] < 5 * seconds[0] + 2  # about 0.3 s each; 1,280 times as long would be minutes
