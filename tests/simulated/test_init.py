"""`vs.init`: the bits, and the generator, of plain torch, for any plan and mesh; and little memory."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import vescale as vs
from examples.gpt import GPT
from tests.gpt import TP, ragged
from vescale._errors import ArgumentError, PlanError, TraceError
from vescale.spmd.placements import P, RaggedShard, Shard

MESHES = [{"dp": 1}, {"dp": 2}, {"dp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}]


def mesh_of(axes):
    return vs.make_mesh(axes, backend="simulated")


MESH = mesh_of({"dp": 2, "tp": 2})


def plan_of(mesh, rules=None):
    """The rules of the axes that the mesh has."""
    return vs.Plan(
        mesh,
        {
            rule: P.of((axis, placement) for axis, placement in spec.items() if axis in mesh.axis_names)
            for rule, spec in (rules or {}).items()
        },
    )


def check(make, plan, *args, seed=11, **kwargs):
    """Bitwise plain torch: values, flags, what the state dict names, the generator afterwards."""
    torch.manual_seed(seed)
    plain = make(*args, **kwargs)
    after = torch.get_rng_state()
    model = vs.init(make, *args, plan=plan, seed=seed, **kwargs)
    assert torch.equal(torch.get_rng_state(), after)
    for theirs, ours in ((plain.named_parameters(), model.params), (plain.named_buffers(), model.buffers)):
        theirs = dict(theirs)
        assert list(theirs) == list(ours)
        for name, value in theirs.items():
            found = ours[name].full_tensor()
            assert found.dtype == value.dtype, name
            assert torch.equal(found, value), name
            assert ours[name].requires_grad == value.requires_grad, name
    assert list(model.state_dict()) == list(plain.state_dict())
    resolved = plan.resolve(model.params)
    assert all(model.params[entry.path].layout is entry.rest for entry in resolved)
    return plain, model


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_gpt(axes):
    mesh = mesh_of(axes)
    rules = TP if "tp" in axes else {".*weight": P(dp=Shard(0))}
    check(GPT, plan_of(mesh, rules), 2, 64, 16)
    if "dp" in axes and mesh.size == 4:
        check(GPT, vs.Plan(mesh, ragged(TP, RaggedShard((0,), (5, 3)))), blocks=1, width=32, context=8)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_what_the_model_computes(axes):
    """The module that init returns runs, trains, and updates its buffers."""

    def make():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3, bias=False)
        ).double()

    plain, model = check(make, plan_of(mesh_of(axes), {"0.weight": P(dp=Shard(0), tp=Shard(0))}))
    x = torch.linspace(-2, 3, 4 * 2 * 36, dtype=torch.float64).view(4, 2, 6, 6).cos()
    loss, expected = model(x), plain(x)
    loss.square().sum().backward()
    expected.square().sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-12), name
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer.full_tensor(), plain.get_buffer(name), rtol=1e-13), name


class Awkward(nn.Module):
    """What constructors do, all at once, interleaved."""

    def __init__(self, ask=True):
        super().__init__()
        self.a, self.b, self.tied = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        nn.init.trunc_normal_(self.a.weight, std=1.0)  # loops until all are inside
        nn.init.orthogonal_(self.b.weight, gain=2)
        nn.init.trunc_normal_(self.a.bias, std=5.0)  # the other algorithm
        self.a.weight.data[0].normal_()
        self.b.weight.data.mul_(0.5)
        self.a.weight.data[:, 2] = 0
        if ask and self.a.weight.max() > 0:
            self.c = nn.Parameter(torch.randn(5, 7))
            with torch.no_grad():
                self.c += self.a.weight
                self.a.weight[1] = self.c[0]
        self.d = nn.Parameter(torch.randperm(8).float(), requires_grad=False)
        self.e = nn.Parameter(torch.empty(6, 6).t())
        nn.init.sparse_(self.e, 0.3)
        nn.init.dirac_(self.add(torch.empty(4, 4, 3)))
        nn.init.eye_(self.add(torch.empty(3, 4)))
        nn.init.kaiming_normal_(self.b.weight)  # over all that was before
        self.b.bias.data[self.b.bias > 0] = torch.rand(int((self.b.bias > 0).sum()))
        self.a.weight.data.mul_(0.25)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)] + torch.rand(3).tolist()
        self.register_buffer("table", torch.arange(6.0).view(2, 3).cumsum(0), persistent=False)
        self.plain, self.pair = torch.arange(3.0) * 2, (torch.ones(2), {"x": torch.zeros(1) + 1})
        self.mixed = nn.Parameter(
            torch.bernoulli(torch.full((9,), 0.3)) + torch.multinomial(torch.ones(4), 2)[0]
        )
        self.given = nn.Parameter(torch.from_numpy(np.eye(2)))

    def add(self, tensor):
        self.register_parameter(f"added{len(self._parameters)}", nn.Parameter(tensor))
        return list(self._parameters.values())[-1]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_what_constructors_do(axes):
    rules = {"a.weight": P(tp=Shard(0), dp=Shard(1)), "c": P(dp=Shard(1)), "mixed": P(dp=Shard(0))}
    plain, model = check(Awkward, plan_of(mesh_of(axes), rules))
    assert model.module.rates == plain.rates
    assert torch.equal(model.module.plain, plain.plain)
    assert torch.equal(model.module.pair[1]["x"], torch.ones(1))
    assert "tied.weight" not in model.params
    assert model.module.tied.weight is model.module.a.weight


def test_casts_devices_and_default_dtypes():
    def half():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16)
        nn.init.normal_(model[0].weight)
        return model

    def double():
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Linear(4, 4)
        finally:
            torch.set_default_dtype(torch.float32)
        model.extra = nn.Parameter(torch.rand(3))
        return model

    def somewhere():
        with torch.device("cpu"):
            return nn.Linear(4, 4).half().float()

    for make in (half, double, somewhere):
        check(make, plan_of(MESH, {}))


def test_generators_inside():
    """The constructor sees generators where plain torch has them."""

    class Seeds(nn.Module):
        def __init__(self, generator):
            super().__init__()
            self.a = nn.Parameter(torch.randn(20))
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.b = nn.Parameter(torch.randn(20))
            self.c = nn.Parameter(torch.empty(20).uniform_(generator=generator))
            self.d = nn.Parameter(torch.randn(3))
            state = torch.get_rng_state()
            self.e = nn.Parameter(torch.rand(4))
            torch.set_rng_state(state)
            self.f = nn.Parameter(torch.rand(4))

    torch.manual_seed(2)
    theirs = torch.Generator().manual_seed(1)
    plain, after = Seeds(theirs), torch.get_rng_state()
    ours = torch.Generator().manual_seed(1)
    model = vs.init(Seeds, ours, plan=plan_of(MESH), seed=2)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(ours.get_state(), theirs.get_state())
    for name, value in plain.named_parameters():
        assert torch.equal(model.params[name].full_tensor(), value), name


def test_without_a_seed_the_generator_goes_on():
    torch.manual_seed(4)
    torch.rand(7)
    plain = nn.Linear(5, 5)
    torch.manual_seed(4)
    torch.rand(7)
    model = vs.init(nn.Linear, 5, 5, plan=plan_of(MESH))
    assert torch.equal(model.params["weight"].full_tensor(), plain.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama(tied):
    """Constructors initialise, and post_init does again over the whole model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    rules = {
        r".*(q|k|v)_proj\.weight": P(tp=Shard(0)),
        r".*(o|down)_proj\.weight": P(tp=Shard(1), dp=Shard(0)),
    }
    for axes in MESHES:
        mesh = mesh_of(axes)
        _, model = check(transformers.LlamaForCausalLM, plan_of(mesh, rules if "tp" in axes else {}), config)
    assert ("lm_head.weight" in model.params) is not tied


def test_functional_of_it():
    model = vs.init(nn.Linear, 4, 2, plan=plan_of(MESH, {"weight": P(tp=Shard(0))}), seed=1)
    fn, params, buffers = vs.functional(model)
    x = torch.ones(3, 4)
    step = vs.parallelize(
        lambda params, x: fn(params, buffers, x)[0], plan_of(MESH, {"weight": P(tp=Shard(0))})
    )
    torch.manual_seed(1)
    assert torch.allclose(step(params, x).full_tensor(), nn.Linear(4, 2)(x))


def test_marks_on_parameters_stay():
    def make():
        model = nn.Linear(3, 3)
        model.weight.no_decay = True
        return model

    assert vs.init(make, plan=plan_of(MESH), seed=0).module.weight.no_decay


# Memory.


def peak_of(run):
    """The most bytes that tensors took at once while `run` ran, above what they took before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, result


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_memory_is_the_shards_and_one_parameter(again):
    """Also when the whole model is initialised twice, and scaled at the end."""

    def make():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
        for layer in model if again else ():
            nn.init.normal_(layer.weight)
        for layer in model:
            layer.weight.data.mul_(0.5)
        return model

    one = 4 * 256 * 256
    peak, model = peak_of(
        lambda: vs.init(make, plan=plan_of(MESH, {".*": P(tp=Shard(0), dp=Shard(0))}), seed=0)
    )
    shards = sum(piece.nbytes for p in model.parameters() for piece in p.locals)
    assert shards == 12 * one
    assert peak >= shards
    # States of the generator: 5,056 bytes a draw.
    assert peak <= shards + 1.1 * one + 24 * 5056 + 10_000, (peak - shards) / one
    plain, _ = peak_of(lambda: vs.parallelize(make(), plan_of(MESH)))
    assert plain >= 2 * shards  # what the measure shows of the other way


# What is refused.


def test_what_is_refused():
    outside = torch.zeros(3)

    def writes():
        outside.add_(1)
        return nn.Linear(3, 3)

    def resizes():
        torch.empty(3).resize_(5)
        return nn.Linear(3, 3)

    def reads():
        model = nn.Linear(3, 3)
        model.weight.data.add_(outside)
        return model

    with pytest.raises(TraceError, match="existed before"):
        vs.init(writes, plan=plan_of(MESH))
    assert not outside.any()
    with pytest.raises(TraceError, match="resize_"):
        vs.init(resizes, plan=plan_of(MESH))
    check(reads, plan_of(MESH))
    with pytest.raises(ArgumentError, match="made a list"):
        vs.init(lambda: [nn.Linear(3, 3)], plan=plan_of(MESH))
    for refused in (lambda: nn.LazyLinear(3), lambda: torch.ones(3).numpy()):
        with pytest.raises(TraceError, match=r"pass it to vs\.parallelize"):
            vs.init(refused, plan=plan_of(MESH))
    with pytest.raises(ArgumentError, match="meta device"):
        vs.init(lambda: nn.Linear(3, 3, device="meta"), plan=plan_of(MESH))
    with pytest.raises(PlanError, match="wieght"):
        vs.init(nn.Linear, 3, 3, plan=plan_of(MESH, {"wieght": P(tp=Shard(0))}))
    with pytest.raises(ArgumentError, match=r"pass plan=vs\.Plan"):
        vs.init(nn.Linear, 3, 3, plan=None)
    with pytest.raises(TypeError):
        vs.init(nn.Linear, 3, plan=plan_of(MESH))


def test_math_is_left_as_it_was():
    """Nothing of the recording stays behind."""
    vs.init(nn.Linear, 3, 3, plan=plan_of(MESH))
    assert math.isclose(torch.ones(3).sum().item(), 3)
    assert type(torch.empty(2)) is torch.Tensor
