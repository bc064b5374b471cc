"""Small models of the Hugging Face library and the DiT of the examples, and how they are compared."""

import os
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing here may reach the network

import torch
import transformers
from torch.overrides import TorchFunctionMode

import vescale as vs
from vescale import _tree

VOCABULARY, WIDTH, INNER, ROWS, LENGTH = 96, 32, 48, 4, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def llama(attention="sdpa", dtype=torch.float64, **sizes):
    config = transformers.LlamaConfig(attn_implementation=attention, **{**SIZES, **sizes})
    return made(transformers.LlamaForCausalLM, config, dtype)


def mixtral(experts, attention="sdpa", dtype=torch.float64, **sizes):
    config = transformers.MixtralConfig(
        attn_implementation=attention,
        experts_implementation=experts,
        num_local_experts=4,
        num_experts_per_tok=2,
        **{**SIZES, **sizes},
    )
    return made(transformers.MixtralForCausalLM, config, dtype)


def made(cls, config, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(config).to(dtype)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def tokens():
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Float64(TorchFunctionMode):
    """Casts to float32 become casts to float64.

    These models compute norms, softmax and loss in float32 whatever their dtype: in float64 what is left
    of a difference is the order of summation.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def loss_of(model):
    """The model's own loss, of batch["input_ids"] and batch["labels"]."""

    def loss_fn(params, batch):
        with Float64():
            return torch.func.functional_call(model, params, (), batch).loss

    return loss_fn


def compare(step, plan, params, batch):
    """How far `step` on the plan's mesh is from plain torch at most, in any result, and its collectives."""
    expected = _tree.leaves(step(params, batch))
    run, placed = vs.parallelize(step, plan), vs.distribute(params, plan)
    results = _tree.leaves(run(placed, batch))
    gaps = [(ours.full_tensor() - theirs).abs().max().item() for ours, theirs in zip(results, expected)]
    assert all(theirs.abs().max() > 0 for theirs in expected)  # else the comparison would say nothing
    assert len(results) == len(expected) == len(params) + 1
    found = run.lower(placed, batch).collectives()
    assert not [c for c in found if "no rule" in c.cause]
    return max(gaps), found


def counted(found):
    return Counter((c.kind, c.axis) for c in found)


def gradients(found):
    """Collectives that bring a gradient to where its parameter is."""
    return [c for c in found if c.cause.startswith("gradient of")]
