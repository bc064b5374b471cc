"""Hugging Face's Mixtral as it is, its experts on different ranks: a plan, and nothing else.

    python examples/10_mixtral_expert_parallel.py          # needs `transformers`

Claim: on dp x tp, with whole experts a rank of tp, loss and all gradients are those of one device to
rounding, and no op had to run whole. (The model sorts the tokens of the global batch by expert: that is
what moves over dp.)
"""

import os
from collections import Counter
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import vescale as vs

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "use_cache": False,
}
SIZES |= {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def main() -> None:
    torch.manual_seed(0)
    how: Any = {"experts_implementation": "grouped_mm", "attn_implementation": "sdpa"}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **how))
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.randint(SIZES["vocab_size"], (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, (), batch).loss

    step = vs.value_and_grad(loss_fn)
    loss, grads = step(params, batch)

    mesh = vs.make_mesh({"dp": 2, "tp": 2})
    plan = vs.plans.mixtral(mesh, experts="whole")
    placed, run = vs.distribute(params, plan), vs.parallelize(step, plan)
    experts = placed["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.to_local(rank=0).shape[0] == SIZES["num_local_experts"] // 2  # two experts here, two there
    ours, slopes = run(placed, batch)
    gap = max((slopes[name].full_tensor() - grads[name]).abs().max().item() for name in grads)
    assert abs(ours.item() - loss.item()) < 1e-5, (ours, loss)
    assert gap < 1e-5, gap
    table = run.lower(placed, batch).collectives()
    assert not [call for call in table if "no rule" in call.cause], table
    counts = Counter((call.kind, call.axis, call.reason) for call in table)
    for (kind, axis, reason), count in sorted(counts.items()):
        print(f"{count:3} {kind} over {axis}: {reason}")
    print(f"Mixtral, 4 experts on tp=2: loss {ours.item():.4f}, gradients within {gap:.0e} of one device")


if __name__ == "__main__":
    main()
