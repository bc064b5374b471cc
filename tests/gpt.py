"""The GPT of the training example, small, with its train step and its plans: shared by several tests."""

import torch

import vescale as vs
from examples.gpt import GPT
from vescale.spmd.placements import InterleavedShard, P, Shard
from vescale.spmd.plan import Staged

BLOCKS, WIDTH, CONTEXT, ROWS = 2, 64, 16, 8

# What a hand-written tensor parallel block does: columns of the first matmul, rows of the second.
TP = {
    r".*\.qkv\.(weight|bias)": P(tp=InterleavedShard(0, 3)),
    r".*\.fc1\.(weight|bias)": P(tp=Shard(0)),
    r".*\.(proj|fc2)\.weight": P(tp=Shard(1)),
}


def ragged(rules, cut):
    """The rules with every parameter cut over dp at rest."""
    rules = {**rules, ".*": P()}
    return {rule: Staged(init=P(**dict(spec.items()), dp=cut), run=spec) for rule, spec in rules.items()}


def make_model(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(BLOCKS, WIDTH, CONTEXT).to(dtype)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (ROWS, CONTEXT + 1), generator=generator)


def train_step(model, opt):
    def step(params, opt_state, batch):
        def loss_fn(params, batch):
            return torch.func.functional_call(model, params, batch)

        loss, grads = vs.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state, loss

    return step
