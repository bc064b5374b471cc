"""A Llama in Hugging Face's files, sharded as it is read: no rank ever holds the model.

    python examples/08_llama_from_safetensors.py           # needs `transformers` and `safetensors`

Claim: each rank reads the bytes of its own shards; the logits on dp x tp are those of the library on one
device to rounding; and what is written back, the library loads bit for bit.
"""

import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import vescale as vs

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(256, (4, 16))
    mesh = vs.make_mesh({"dp": 2, "tp": 2})
    plan = vs.plans.llama(mesh) | vs.Plan(mesh, fsdp=vs.FSDP("dp", wrap=r"model\.layers\.\d+"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="200KB")  # several files and an index
        params = vs.checkpoint.load_safetensors(folder, plan)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    own = [sum(p.to_local(rank).nbytes for p in params.values()) for rank in range(mesh.size)]
    assert max(own) < whole / 2, own

    def forward(params, batch):
        return torch.func.functional_call(model, params, (batch,)).logits

    logits = vs.parallelize(forward, plan)(params, tokens).full_tensor()
    gap = (logits - forward(dict(model.named_parameters()), tokens)).abs().max().item()
    assert gap < 1e-5, gap

    with tempfile.TemporaryDirectory() as folder:
        vs.checkpoint.save_safetensors(params, folder)
        config.save_pretrained(folder)
        again = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    shares = ", ".join(f"{share / whole:.0%}" for share in own)
    print(f"ranks read {shares} of {whole:,} B; logits within {gap:.0e}; written back bit for bit")


if __name__ == "__main__":
    main()
