"""Llama-3-70B and Mixtral-8x7B lowered at their true width on 8 x 8 ranks, against computations by hand.

Nothing runs and nothing is allocated: arguments are on the meta device, the mesh is abstract. A few layers
by default; all of them in the slow test.
"""

import time
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import vescale as vs
from tests.models import gradients, transformers  # first: it sets that nothing is fetched
from vescale.spmd.redistribute_plan import GATHER_BYTES

DP = TP = 8
MESH = vs.AbstractMesh(("dp", "tp"), (DP, TP))
BATCH, LENGTH = 8, 4096
T = BATCH * LENGTH // DP  # tokens of a rank
HEAD = 128  # width of a head, in both models
BF16, F32, INT64 = 2, 4, 8


def lowered(cls, config, plan):
    """A step's loss and gradients; the parameters by name."""
    with torch.device("meta"):
        model = cls(config).bfloat16()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, (), {"input_ids": batch, "labels": batch}).loss

    batch = torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta")
    return vs.parallelize(vs.value_and_grad(loss_fn), plan).lower(params, batch), params


def reduced(nbytes, ranks):
    """Bytes that a rank receives in an all-reduce: all contributions if they are few, else twice a share."""
    return (ranks - 1) * nbytes if ranks * nbytes <= GATHER_BYTES else 2 * nbytes * (ranks - 1) // ranks


def shared(nbytes, ranks):
    """In an all-gather to, or a reduce-scatter of, so many bytes."""
    return nbytes * (ranks - 1) // ranks


def received(low):
    return {(entry.kind, entry.axis): entry.received for entry in low.cost_analysis().traffic}


# Llama-3-70B: sequence parallel, and the vocabulary split over tp.

LLAMA = SimpleNamespace(H=8192, I=28672, V=128256, heads=64, keys=8)


def lower_llama(layers):
    config = transformers.LlamaConfig(
        hidden_size=LLAMA.H,
        intermediate_size=LLAMA.I,
        vocab_size=LLAMA.V,
        num_attention_heads=LLAMA.heads,
        num_key_value_heads=LLAMA.keys,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    plan = vs.plans.llama(MESH, sequence=True, vocabulary=True)
    return lowered(transformers.LlamaForCausalLM, config, plan)


def check_llama(layers):
    low, params = lower_llama(layers)
    H, inner, V, K = LLAMA.H, LLAMA.I, LLAMA.V, LLAMA.keys * HEAD
    matrices = 2 * H * H + 2 * H * K + 3 * H * inner
    norms = 2 * layers + 1
    assert sum(p.numel() for p in params.values()) == layers * matrices + 2 * V * H + norms * H

    # Two operations a token and weight, forward once and backward twice, the embedding none; attention has
    # two products of length x length forward, and five backward.
    linear = 2 * T * (layers * matrices + V * H) // TP
    scores = layers * 2 * LENGTH * LENGTH * HEAD * (LLAMA.heads // TP) * (T // LENGTH)
    assert low.cost_analysis().flops == 3 * linear + (2 + 5) * scores

    # Around each two matrices a gather and a reduce-scatter each way; two more of each for the embedding
    # and the head. A gradient is reduced over dp; those of norms, which met parts of the sequence, over both.
    rows = shared(T * H * BF16, TP)
    split = (layers * matrices + 2 * V * H) // TP * BF16
    assert received(low) == {
        ("all_gather", "tp"): (4 * layers + 2) * rows,
        ("reduce_scatter", "tp"): (4 * layers + 2) * rows,
        ("all_reduce", "tp"): 2 * reduced(T * F32, TP),  # the largest logit, and the sum of exponentials
        ("all_reduce", "dp"): 2 * split * (DP - 1) // DP + reduced(INT64, DP),  # and the number of targets
        ("all_reduce", "dp+tp"): norms * reduced(H * BF16, DP * TP) + reduced(F32, DP * TP),  # and the loss
    }
    assert len(gradients(low.collectives())) == len(params)

    # The peak is where the loss turns back: log-probabilities in float32, the probabilities that are made of
    # them, and the gradient made of these; and of each layer what its backward pass reads.
    part = T // TP
    norm = part * H * (F32 + BF16) + part * F32  # input in float32, normalised, and one number a token
    gated = 4 * T * inner // TP  # gate, its silu, up, their product
    heads = (2 * H + 2 * K) * T // TP  # queries, what attention gives; keys, values
    layer = 2 * norm + (2 * T * H + heads + gated) * BF16 + T * LLAMA.heads // TP * F32
    ends = norm + T * H * BF16 + 3 * T * V // TP * F32 + 2 * LENGTH * HEAD * BF16  # last: the rotation
    held = split + norms * H * BF16 + 2 * T * INT64 + HEAD // 2 * BF16  # last: tokens, labels, frequencies
    peak = low.memory_analysis().peak
    assert 0 <= peak - (held + layers * layer + ends) < 16 * T  # and a few numbers a token


def test_llama_3_70b_in_width():
    check_llama(2)


@pytest.mark.slow
def test_llama_3_70b():
    start = time.perf_counter()
    check_llama(80)
    print(f"{time.perf_counter() - start:.1f} s")


# Mixtral-8x7B: each dp rank sorts its own tokens by expert; experts are split inside over tp.

MIXTRAL = SimpleNamespace(H=4096, I=14336, V=32000, heads=32, keys=8, experts=8, chosen=2)


def own_tokens(self, x, choice, weights):
    """The library's grouped experts, on a rank's tokens and its part of each expert: registered by name."""

    def local(x, choice, weights, gate_up, down):
        given = {"gate_up_proj": gate_up, "down_proj": down, "act_fn": self.act_fn}
        mine = SimpleNamespace(**vars(self) | given, _apply_gate=self._apply_gate)
        return vs.psum(grouped_mm_experts_forward(mine, vs.pvary(x, "tp"), choice, weights), "tp")

    rows, inner = vs.P(dp=vs.Shard(0)), (vs.P(tp=vs.InterleavedShard(1, 2)), vs.P(tp=vs.Shard(2)))
    mapped = vs.shard_map(local, mesh=MESH, in_specs=(rows, rows, rows, *inner), out_specs=rows)
    return mapped(x, choice, weights, self.gate_up_proj, self.down_proj)


ALL_EXPERTS_FUNCTIONS.register("own tokens", own_tokens)


def check_mixtral(layers):
    config = transformers.MixtralConfig(
        num_hidden_layers=layers,
        sliding_window=None,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="own tokens",
    )
    plan = vs.plans.mixtral(MESH, vocabulary=True)
    low, params = lowered(transformers.MixtralForCausalLM, config, plan)
    m = MIXTRAL
    H, V, K = m.H, m.V, m.keys * HEAD
    attention, router, expert = 2 * H * H + 2 * H * K, m.experts * H, 3 * H * m.I
    norms = 2 * layers + 1
    total = layers * (attention + router + m.experts * expert) + 2 * V * H + norms * H
    assert sum(p.numel() for p in params.values()) == total

    # The router is whole on every rank of tp; a token meets the experts that it chose. What is mapped
    # computes its forward pass again in the backward pass.
    chosen = 2 * T * layers * m.chosen * expert // TP
    linear = 2 * T * (layers * attention + V * H) // TP + 2 * T * layers * router
    scores = layers * 2 * LENGTH * LENGTH * HEAD * (m.heads // TP) * (T // LENGTH)
    assert low.cost_analysis().flops == 3 * linear + 4 * chosen + (2 + 5) * scores

    # Over tp, as without experts: after attention and after the experts, backward before each; the
    # embedding's and the head's; and one number a token and expert for the router's gradient.
    rows = reduced(T * H * BF16, TP)
    others = 2 * (layers * attention + 2 * V * H) // TP * BF16 * (DP - 1) // DP
    others += layers * reduced(router * BF16, DP) + norms * reduced(H * BF16, DP)
    found = received(low)
    assert found == {
        ("all_reduce", "tp"): (2 * layers + 2) * rows + 2 * reduced(T * F32, TP),
        ("psum", "tp"): layers * (2 * rows + reduced(m.chosen * T * F32, TP)),
        ("psum", "dp"): 2 * layers * m.experts * expert // TP * BF16 * (DP - 1) // DP,
        ("all_reduce", "dp"): others + reduced(INT64, DP),
        ("all_reduce", "dp+tp"): reduced(F32, DP * TP),
    }

    # The peak is in the first layer's backward pass, where its gate and up are reduced: beside them all
    # gradients but the embedding's and those of the rest of the layer, and what the rest still reads.
    gates, experts = 2 * m.experts * expert // 3 // TP, m.experts * expert // TP
    whole = router + 2 * H  # of a layer, on every rank of tp
    weights = layers * (attention // TP + experts + whole) + 2 * V * H // TP + H
    done = layers * experts + (layers - 1) * (attention // TP + whole) + V * H // TP + H
    norm = T * H * (F32 + 2 * BF16) + T * F32
    heads = (2 * H + 2 * K) * T // TP * BF16 + T * m.heads // TP * F32
    routing = T * (m.experts * F32 + F32 + m.chosen * (F32 + INT64))  # probabilities, sums, choices
    reads = 2 * norm + heads + routing + 2 * LENGTH * HEAD * BF16
    sorting = m.chosen * T * (2 * INT64 + F32)  # whose token is where, and what it weighs
    running = 3 * gates * BF16 + (1 + m.chosen) * T * H * BF16 + sorting  # two of them to communicate
    held = T * INT64 + HEAD // 2 * BF16  # tokens, and the frequencies of the rotation
    peak = low.memory_analysis().peak
    assert 0 <= peak - ((weights + done) * BF16 + reads + running + held) < 64  # and some scalars


def test_mixtral_8x7b_in_width():
    check_mixtral(2)


@pytest.mark.slow
def test_mixtral_8x7b():
    check_mixtral(32)
