"""Keys that are used twice are found, and keys that are not aren't."""

import io
import pickle
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import vescale as vs
from vescale._errors import VescaleError
from vescale.rng import (
    Key,
    KeyReuseError,
    bernoulli,
    bits,
    categorical,
    check_key_reuse,
    choice,
    clone,
    dropout,
    exponential,
    fold_in,
    gumbel,
    key,
    normal,
    permutation,
    randint,
    split,
    truncated_normal,
    uniform,
)

CONSUMERS = {
    "split": split,
    "bits": lambda k: bits(k, 3),
    "uniform": lambda k: uniform(k, 3),
    "normal": lambda k: normal(k, 3),
    "truncated_normal": lambda k: truncated_normal(k, -1, 1, 3),
    "exponential": lambda k: exponential(k, 3),
    "gumbel": lambda k: gumbel(k, 3),
    "bernoulli": lambda k: bernoulli(k, 0.5, 3),
    "randint": lambda k: randint(k, 3, 0, 2**40),
    "categorical": lambda k: categorical(k, torch.zeros(3)),
    "permutation": lambda k: permutation(k, 3),
    "choice": lambda k: choice(k, 3, 2, replace=False, p=torch.ones(3)),
    "dropout": lambda k: dropout(k, torch.ones(3)),
}


@pytest.mark.parametrize("second", CONSUMERS)
@pytest.mark.parametrize("first", ["split", "normal", "randint"])
def test_the_second_use_is_an_error(first, second):
    one = key(1)
    with check_key_reuse():
        here = sys._getframe().f_lineno
        CONSUMERS[first](one)
        with pytest.raises(KeyReuseError) as error:
            CONSUMERS[second](one)
    assert isinstance(error.value, VescaleError)
    lines = dict(line.split(": ", 1) for line in str(error.value).splitlines())
    assert f"vs.rng.{second} at {__file__}:" in lines["found"]
    place = f"{__file__}:{here + 1}" if first == "split" else f"{__file__}:"
    assert f"vs.rng.{first} at {place}" in lines["where"]
    assert "clone" in lines["remedy"]
    CONSUMERS[second](one)  # outside nobody looks


def test_what_is_no_reuse():
    with check_key_reuse():
        one, other = split(key(1))
        normal(one, 3)
        normal(clone(other), 3)
        normal(clone(other), 3)
        for step in range(3):
            normal(fold_in(other, step), 3)
        uniform(other, 3)
        for child in split(key(2), 5):
            uniform(child, 3)
    with check_key_reuse():
        normal(one, 3)  # each block looks for itself


def test_a_key_stays_itself_through_trees():
    with check_key_reuse():
        one = key(1)
        normal(one, 3)
        (again,) = vs._tree.leaves([one])  # its data
        with pytest.raises(KeyReuseError):
            normal(Key(again), 3)


def test_inside_transforms():
    def twice(k):
        return normal(k, 3) + uniform(k, 3)

    one, keys = key(2), torch.stack([child.data for child in split(key(1), 4)])
    for run in (
        lambda: make_fx(lambda data: twice(Key(data)), tracing_mode="fake")(key(1).data),
        lambda: torch.func.vmap(lambda data: twice(Key(data)))(keys),
        lambda: torch.func.grad(lambda x: (x * twice(one)).sum())(torch.ones(3)),
        lambda: [normal(k, 3) for k in [key(3)] * 2],
    ):
        with check_key_reuse(), pytest.raises(KeyReuseError):
            run()


def test_many_keys_are_told_apart():
    with check_key_reuse():
        for step in range(2000):  # no key gets the place in memory of one that is gone
            normal(key(step), 2)


def test_checkpoints():
    state = {"key": key(2**64 - 3), "data": key(7).data}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert repr(back["key"]) == "Key(0xfffffffffffffffd)"
    assert torch.equal(normal(Key(back["data"]), 3), normal(key(7), 3))
    assert torch.equal(normal(pickle.loads(pickle.dumps(key(7))), 3), normal(key(7), 3))
