"""Real models under `vs.parallelize`, not a line of them changed, by the ready-made plans.

The loss and every gradient of a step are those of plain torch in float64, and every collective is one that
the plan explains. Llama has L blocks of 9 parameters, an embedding, a last norm and a head.
"""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from tests.models import (
    LENGTH,
    ROWS,
    SIZES,
    WIDTH,
    compare,
    counted,
    gradients,
    llama,
    loss_of,
    mixtral,
    parameters,
    tokens,
)
from vescale._errors import TraceError

dit = import_module("examples.09_dit")

BOUND = 1e-10
L = SIZES["num_hidden_layers"]
PARAMETERS = 9 * L + 3
MESHES = [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}]


def simulated(axes):
    return vs.make_mesh(axes, backend="simulated")


def step_of(model):
    return vs.value_and_grad(loss_of(model))


def batch():
    return {"input_ids": tokens(), "labels": tokens()}


# Llama.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_llama(axes, attention):
    model = llama(attention)
    gap, found = compare(step_of(model), vs.plans.llama(simulated(axes)), parameters(model), batch())
    assert gap < BOUND
    expected = {}
    if "tp" in axes:  # a block: after attention and after the MLP; backward, before each of them
        expected["all_reduce", "tp"] = 4 * L
    if "dp" in axes:  # the loss, and how many targets count towards its mean
        expected["all_reduce", "dp"] = PARAMETERS + 2
        assert len(gradients(found)) == PARAMETERS
    assert counted(found) == expected
    assert all(c.value.endswith(f"[{ROWS},{LENGTH},{WIDTH}]") for c in found if c.axis == "tp")


def test_the_loss_by_hand():
    model = llama()

    def loss_fn(params, batch):
        logits = torch.func.functional_call(model, params, (batch,)).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    plan = vs.plans.llama(simulated({"dp": 2, "tp": 2}), vocabulary=True)
    gap, found = compare(vs.value_and_grad(loss_fn), plan, parameters(model), tokens())
    # In float32, as the model has it, norms round: by where sums end, to the next number or the one after.
    assert gap < 1e-6
    assert all(max(size(c)) < SIZES["vocab_size"] for c in found if not c.cause.startswith("gradient of"))


def size(collective):
    """The shape of what a collective moves."""
    return [int(n) for n in collective.value.partition("[")[2].rstrip("]").split(",") if n] or [0]


def test_llama_by_sequence():
    # Around each pair of matrices a gather and a reduce-scatter, forward and backward. The head and the
    # embedding are whole and meet a part of the sequence: their gradients are sums over tp, like the norms'.
    model = llama("eager")
    plan = vs.plans.llama(simulated({"tp": 4}), sequence=True)
    gap, found = compare(step_of(model), plan, parameters(model), batch())
    assert gap < BOUND
    whole = (2 * L + 1) + 2
    assert counted(found) == {
        ("all_gather", "tp"): 4 * L,
        ("reduce_scatter", "tp"): 4 * L,
        ("all_reduce", "tp"): whole + 2,
    }
    assert len(gradients(found)) == whole


def test_llama_by_vocabulary():
    # Five more: what was looked up; of the logits the largest and the sum of exponentials; the loss; the
    # gradient of what the head takes. None as large as the logits.
    model = llama()
    plan = vs.plans.llama(simulated({"tp": 4}), vocabulary=True)
    gap, found = compare(step_of(model), plan, parameters(model), batch())
    assert gap < BOUND
    assert counted(found) == {("all_reduce", "tp"): 4 * L + 5}
    assert max(max(size(c)) for c in found) < SIZES["vocab_size"]


def test_llama_by_sequence_and_vocabulary():
    model = llama()
    plan = vs.plans.llama(simulated({"dp": 2, "tp": 2}), sequence=True, vocabulary=True)
    gap, found = compare(step_of(model), plan, parameters(model), batch())
    assert gap < BOUND
    split = {c.cause for c in gradients(found) if c.axis == "dp+tp"}
    assert split == {  # whole parameters that met a part of the sequence
        f"gradient of {name}"
        for name in ["model.norm.weight"]
        + [f"model.layers.{i}.{n}_layernorm.weight" for i in range(L) for n in ("input", "post_attention")]
    }
    rest = [c for c in found if c not in gradients(found)]
    assert counted(rest) == {
        ("all_gather", "tp"): 4 * L
        + 2,  # and of what the head takes, and of the gradient of what was looked up
        ("reduce_scatter", "tp"): 4 * L + 2,  # and of what the embedding gives, and the head's gradient
        ("all_reduce", "tp"): 2,  # the largest logit, the sum of exponentials
        ("all_reduce", "dp"): 1,  # how many targets count
        ("all_reduce", "dp+tp"): 1,  # the loss
    }


def test_a_result_of_an_unknown_class_is_refused():
    model = llama()
    run = vs.parallelize(
        lambda params, batch: torch.func.functional_call(model, params, (batch,)),
        vs.plans.llama(simulated({"dp": 2})),
    )
    with pytest.raises(TraceError, match="CausalLMOutputWithPast") as caught:
        run(parameters(model), tokens())
    assert "output.loss" in str(caught.value)


# Mixtral.

MIXTRAL = 9 * L + 3  # parameters: a router and two of experts in the place of an MLP's three


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_mixtral(axes):
    model = mixtral("batched_mm")
    gap, found = compare(step_of(model), vs.plans.mixtral(simulated(axes)), parameters(model), batch())
    assert gap < BOUND
    expected = {}
    if "tp" in axes:
        expected["all_reduce", "tp"] = 4 * L
    if "dp" in axes:
        expected["all_reduce", "dp"] = MIXTRAL + 2
    assert counted(found) == expected
    assert len(parameters(model)) == MIXTRAL


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_mixtral_with_experts_whole_has_the_right_values(axes):
    model = mixtral("batched_mm", "eager")
    plan = vs.plans.mixtral(simulated(axes), experts="whole")
    gap, _ = compare(step_of(model), plan, parameters(model), batch())
    assert gap < BOUND


@pytest.mark.parametrize(("experts", "expected"), [("inner", 4 * L), ("whole", 7 * L)])
def test_mixtral_grouped(experts, expected):
    """torch's grouped product takes no float64.

    Experts split inside: as an MLP. Whole experts, and some a rank: gate and up are reduced too, since the
    next product takes the rows of all; forward two halves, backward their gradient at once.
    """
    model = mixtral("grouped_mm", dtype=torch.float32)

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, (), batch).loss

    plan = vs.plans.mixtral(simulated({"tp": 4}), experts=experts)
    gap, found = compare(vs.value_and_grad(loss_fn), plan, parameters(model), batch())
    assert gap < 1e-5
    assert counted(found) == {("all_reduce", "tp"): expected}


def test_mixtral_grouped_over_dp_has_the_right_values():
    """Tokens are sorted by expert over the whole batch, so they travel; weights don't."""
    model = mixtral("grouped_mm", dtype=torch.float32)

    def loss_fn(params, batch):
        return torch.func.functional_call(model, params, (), batch).loss

    plan = vs.plans.mixtral(simulated({"dp": 2, "tp": 2}))
    gap, found = compare(vs.value_and_grad(loss_fn), plan, parameters(model), batch())
    assert gap < 1e-5
    assert not [c for c in found if c.cause.startswith("params.")]


def test_experts_that_depend_on_data_are_refused():
    model = mixtral("eager")
    run = vs.parallelize(loss_of(model), vs.plans.mixtral(simulated({"dp": 2})))
    with pytest.raises(TraceError, match="traced without values") as caught:
        run(parameters(model), batch())
    assert "where: " in str(caught.value)


# The DiT.


def images(model):
    generator = torch.Generator().manual_seed(0)
    shape = (8, 3, model.size, model.size)
    return {
        "images": torch.randn(shape, generator=generator, dtype=torch.float64),
        "noise": torch.randn(shape, generator=generator, dtype=torch.float64),
        "times": torch.rand(8, generator=generator, dtype=torch.float64),
        "labels": torch.arange(8),
    }


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_dit(axes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = dit.DiT().double()
        params = {name: torch.randn_like(p) / 8 for name, p in model.named_parameters()}  # gates not zero

    def loss_fn(params, batch):
        inputs = (batch["images"], batch["times"], batch["labels"])
        return (torch.func.functional_call(model, params, inputs) - batch["noise"]).square().mean()

    plan = vs.plans.dit(simulated(axes))
    gap, found = compare(vs.value_and_grad(loss_fn), plan, params, images(model))
    assert gap < BOUND
    blocks = len(model.blocks)
    expected = {}
    if "dp" in axes:
        expected["all_reduce", "dp"] = len(params) + 1
    if "tp" in axes:
        # A block: 4 as in the GPT, and a gather of its modulation. The gradient of the condition is a sum
        # over tp: once for all blocks when it is so small that the part of `adapt`, which is whole, joins
        # the sum, else once a block.
        small = 8 // axes.get("dp", 1) * model.width * 8 <= 1024
        expected["all_reduce", "tp"] = 4 * blocks + (1 if small else blocks)
        expected["all_gather", "tp"] = blocks
    assert counted(found) == expected
