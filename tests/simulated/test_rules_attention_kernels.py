"""The attention kernels of cuda, which run nowhere here: what their rule decides, from shapes alone."""

import pytest
import torch

import vescale as vs
from tests.rule_cases import mesh_of, names, spelled
from vescale import _tree
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

Q, K, BIAS = torch.zeros(4, 8, 6, 16), torch.zeros(4, 8, 5, 16), torch.zeros(4, 8, 6, 5)
FEW_KEYS, ROW_BIAS = torch.zeros(4, 2, 5, 16), torch.zeros(1, 1, 6, 5)
ROWS, STATE = torch.zeros(4, 8, 6), torch.zeros(2, dtype=torch.uint64)
STARTS = torch.zeros(5, dtype=torch.int32)


class Meta:
    """A call that is traced and never run, and the placements that cost nothing."""

    def __init__(self, op, args, free, **kwargs):
        self.op, self.args, self.free, self.kwargs = op, args, free, kwargs

    @property
    def __name__(self):
        return self.op.__name__


FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)
EFFICIENT, EFFICIENT_BACKWARD = (
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
)
CUDNN, CUDNN_BACKWARD = (
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
)
MASK = [True, True, True, True]

CASES = [
    Meta(FLASH, (Q, K, K), "000 111"),
    Meta(FLASH, (Q, FEW_KEYS, FEW_KEYS), "000 111"),
    Meta(EFFICIENT, (Q, K, K, BIAS, True), "0000 1111"),
    Meta(EFFICIENT, (Q, K, K, ROW_BIAS, True), "000. 111."),
    Meta(EFFICIENT, (Q, K, K, None, False), "000 111"),
    Meta(CUDNN, (Q, K, K, None, True), "000 111"),
    Meta(
        FLASH_BACKWARD,
        (Q, Q, K, K, Q, ROWS, STARTS, STARTS, 6, 5, 0.0, False, STATE, STATE),
        "000000.... 111111....",
    ),
    Meta(
        EFFICIENT_BACKWARD,
        (Q, Q, K, K, BIAS, Q, ROWS, STATE, STATE, 0.0, MASK),
        "0000000.. 1111111..",
    ),
    # The gradient of a bias that all share is a sum over them
    Meta(
        EFFICIENT_BACKWARD,
        (Q, Q, K, K, ROW_BIAS, Q, ROWS, STATE, STATE, 0.0, MASK),
        "0000.00.. 1111.11..",
    ),
    Meta(
        CUDNN_BACKWARD,
        (Q, Q, K, K, Q, ROWS, STATE, STATE, BIAS, STARTS, STARTS, 6, 5, 0.0, False),
        "000000..0.. 111111..1..",
    ),
    Meta(aten._safe_softmax, (Q, -1), "0 1 2"),
]


def lowered(case, word, size):
    mesh = mesh_of(size)
    tensors = [arg for arg in case.args if isinstance(arg, torch.Tensor)]

    def fn(*tensors):
        taken = iter(tensors)
        args = [next(taken) if isinstance(arg, torch.Tensor) else arg for arg in case.args]
        found = case.op(*args, **case.kwargs)
        return [out for out in _tree.leaves(found) if isinstance(out, torch.Tensor)]

    specs = spelled(word)
    placed = [vs.distribute_tensor(tensor, mesh, spec) for tensor, spec in zip(tensors, specs, strict=True)]
    return vs.parallelize(fn, vs.Plan(mesh)).lower(*placed).collectives()


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_batch_and_heads_are_silent(case):
    for size in (2, 4):
        for word in case.free.split():
            if size == 2 or not any(arg is FEW_KEYS for arg in case.args) or word[0] == "0":
                moves = lowered(case, word, size)
                assert all(move.cause.startswith("result") for move in moves), f"{word}: {moves}"
                shared = any(arg is ROW_BIAS for arg in case.args) and "backward" in case.__name__
                assert len(moves) == shared


@pytest.mark.parametrize("case", CASES[:6], ids=names(CASES[:6]))
def test_a_sharded_sequence_is_gathered(case):
    """Never a part of the keys: each query needs them all."""
    tensors = [arg for arg in case.args if isinstance(arg, torch.Tensor)]
    kinds = {move.kind for move in lowered(case, ".2" + "." * (len(tensors) - 2), 2)}
    assert kinds & {"all_gather", "all_to_all"}


def test_dropout_is_refused():
    mesh = mesh_of(2)
    query = vs.distribute_tensor(Q, mesh, P(dp=Shard(0)))
    with pytest.raises(vs.VescaleError, match="dropout"):
        vs.parallelize(lambda q: FLASH(q, q, q, 0.1)[0], vs.Plan(mesh)).lower(query)


def test_the_plain_variant_is_made_of_ops_that_have_rules():
    mesh = mesh_of(2)
    query = vs.distribute_tensor(torch.randn(4, 8, 6, 16), mesh, P(dp=Shard(1)))

    def plain(q):
        return aten._scaled_dot_product_attention_math(q, q, q, None, 0.0, True)[0]

    run = vs.parallelize(plain, vs.Plan(mesh))
    assert not run.lower(query).collectives()
    assert torch.equal(run(query).full_tensor(), plain(query.full_tensor()))
