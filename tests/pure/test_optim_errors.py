"""What optimizers are given and can't take: errors that name the parameter, the rule and the remedy."""

# pyright: reportArgumentType=false
import math

import pytest
import torch

import vescale as vs
from vescale import optim
from vescale._errors import ArgumentError
from vescale.optim import schedules

PARAMS = {"w": torch.ones(4, 4)}
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, 0.9),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(0.1, amsgrad=True),
    "adamw_8bit": optim.adamw_8bit(0.1, block=2, min_elements=4, stochastic_rounding=vs.rng.key(0)),
    "muon": optim.muon(0.1),
    "loss_scale": optim.loss_scale(optim.sgd(0.1)),
    "scale": optim.scale(lambda step: 1 + step),
    "partition": optim.partition(lambda path, p: "all", {"all": optim.sgd(0.1)}),
    "chain": optim.chain(optim.sgd(0.1), optim.scale(0.5)),
    "skip": optim.skip_if_nonfinite(optim.adamw(0.1)),
}
each = pytest.mark.parametrize("name", OPTIMIZERS)
real = pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adamw_8bit", "muon"])


@each
@pytest.mark.parametrize("state", [{}, None, (), {"other": 1}], ids=repr)
def test_the_state_of_something_else(name, state):
    with pytest.raises(ArgumentError, match=r"(?s)a state that is a .*vs\.optim.*give update"):
        OPTIMIZERS[name].update(PARAMS, state, PARAMS)


@real
@pytest.mark.parametrize(
    ("grad", "says"),
    [
        (None, "no gradient for w .*label: None"),
        (1.0, "float as the gradient for w"),
        (torch.ones(4), r"a gradient of shape \(4,\)"),
        (torch.ones(2, 4, 4), r"a gradient of shape \(2, 4, 4\)"),
        (torch.ones(4, 4).double(), "torch.float64, for w of shape .* torch.float32"),
        (torch.ones(4, 4).to_sparse(), r"torch.sparse_coo .*g.to_dense\(\)"),
    ],
    ids=["none", "number", "small", "large", "dtype", "sparse"],
)
def test_a_gradient_that_is_not_that_of_its_parameter(name, grad, says):
    opt = OPTIMIZERS[name]
    with pytest.raises(ArgumentError, match=f"(?s){says}"):
        opt.update({"w": grad}, opt.init(PARAMS), PARAMS)


@real
@pytest.mark.parametrize("leaf", [torch.ones(4, 4, dtype=torch.int64), 1.0], ids=["integers", "number"])
def test_what_is_no_parameter(name, leaf):
    with pytest.raises(ArgumentError, match=r"(?s)^found: +w.*floating-point tensors.*freeze it"):
        OPTIMIZERS[name].init({"w": leaf})


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw_8bit", "muon"])
def test_complex_parameters_are_those_of_sgd_alone(name):
    """Their second moment would be g * g, where torch has |g| squared in each part."""
    with pytest.raises(ArgumentError, match=r"w of torch\.complex64"):
        OPTIMIZERS[name].init({"w": torch.ones(4, 4, dtype=torch.complex64)})


def test_complex_parameters_have_the_bits_of_torch_in_sgd():
    p, g = torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)
    theirs = p.clone().requires_grad_()
    theirs.grad = g.clone()
    torch.optim.SGD([theirs], 0.1, momentum=0.9, weight_decay=0.1, foreach=False).step()
    opt = optim.sgd(0.1, 0.9, weight_decay=0.1)
    updates, _ = opt.update([g], opt.init([p]), [p])
    assert torch.equal(optim.apply_updates([p], updates)[0], theirs)


def test_norms_of_complex_gradients_are_those_of_torch():
    grads = [torch.tensor([3j, 4.0]), torch.tensor([1 + 2j])]
    for order in (2.0, math.inf):
        wanted = torch.nn.utils.get_total_norm(grads, order)
        torch.testing.assert_close(optim.global_norm(grads, order), wanted)
    assert optim.global_norm([grads[0].to(torch.complex128)]).dtype is torch.float64
    with pytest.raises(ArgumentError, match="float at 'keep'"):
        optim.global_norm(optim.Updates(1.0, grads))


@pytest.mark.parametrize("delta", [torch.ones(2, 4, 4), torch.ones(4), torch.ones(4, 4).double()], ids=str)
def test_updates_keep_shape_and_dtype(delta):
    with pytest.raises(ArgumentError, match="a parameter keeps its shape and dtype"):
        optim.apply_updates(PARAMS, {"w": delta})


def test_another_structure_is_said_without_values():
    with pytest.raises(ArgumentError, match="'Tensor'") as error:
        optim.apply_updates(PARAMS, {"v": torch.full((4, 4), 7.25)})
    assert "7.25" not in str(error.value)


@pytest.mark.parametrize("found", [None, "0.1", torch.ones(1), math.nan], ids=repr)
def test_a_schedule_that_returns_no_rate(found):
    opt = optim.adamw(lambda step: found)
    with pytest.raises(ArgumentError, match="a schedule that returns"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.adamw(math.inf), "lr=inf"),
        (lambda: optim.adamw(0.1, betas=0.9), "betas=0.9"),
        (lambda: optim.adam(0.1, betas=("a", 0.9)), "betas.0.='a'"),
        (lambda: optim.adamw(0.1, weight_decay=None), "weight_decay=None"),
        (lambda: optim.decay(math.inf), "rate=inf"),
        (lambda: optim.clip_by_global_norm("1"), "max_norm='1'"),
        (lambda: optim.loss_scale(optim.sgd(0.1), init=1e300), "init=1e.300"),
        (lambda: optim.loss_scale(optim.sgd(0.1), init=math.inf), "init=inf"),
        (lambda: optim.loss_scale(optim.sgd(0.1), init=1e-300), "init=1e-300"),
        (lambda: optim.loss_scale(optim.sgd(0.1), interval=2.5), "interval=2.5"),
        (lambda: optim.muon(0.1, ns_dtype="bfloat16"), "ns_dtype='bfloat16'"),
        (lambda: optim.muon(0.1, ns_coefficients=3.0), "ns_coefficients=3.0"),
        (lambda: optim.muon(0.1, matrix_dims={"w(": "r c -> r c"}), r"'w\('"),
        (lambda: optim.muon(0.1, matrix_dims="r c -> r c"), "matrix_dims='r c"),
        (lambda: optim.chain(optim.adamw), "transform 0"),
        (lambda: optim.skip_if_nonfinite(None), "None"),
        (lambda: optim.partition("a", {"a": "adam"}), "label 'a'"),
        (lambda: optim.partition("a", [None]), "a mapping"),
        (lambda: optim.partition(lambda path, p: [], {1: None}).init(PARAMS), r"has the label \[\]"),
        (lambda: schedules.linear(1.0, 0.0, "9"), "steps='9'"),
        (lambda: schedules.joined([1.0], []), "schedule 0"),
    ],
)
def test_hyperparameters_that_can_not_be_meant(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()


def test_a_constant_of_an_integer_step_is_not_rounded():
    assert schedules.constant(0.1)(torch.tensor(7)).item() == 0.1


def test_a_loss_scale_that_fell_all_the_way_recovers():
    """A scale of 0, or one whose reciprocal is inf, would make NaN of finite gradients."""
    opt = optim.loss_scale(optim.sgd(0.1), init=2.0**-120)
    params, state = [torch.ones(2)], None
    state = opt.init(params)
    for _ in range(30):
        updates, state = opt.update([torch.tensor([math.nan, 1.0])], state, params)
        params = optim.apply_updates(params, updates)
    assert state["scale"].item() == torch.finfo(torch.float32).tiny
    updates, _ = opt.update([torch.full((2,), 2.0**-126)], state, params)
    torch.testing.assert_close(optim.apply_updates(params, updates)[0], torch.tensor([0.9, 0.9]))
