"""Indexing with tensors: every placement has the values of plain torch, and the promised ones are silent."""

import pytest
import torch

import vescale as vs
from tests.rule_cases import Case, family, mesh_of, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

X, CUBE = whole(8, 6), whole(4, 8, 6)
BIG = whole(24, 6)  # so long that a lookup of a few rows is summed, not gathered
ROWS, PERMUTED = torch.tensor([5, 0, 2, 2]), torch.tensor([3, 0, 7, 5])
PAIRS = torch.tensor([[0, 7], [3, 3], [-1, 2]])
PLACES, FEW = torch.randint(0, 6, (8, 6), generator=torch.Generator().manual_seed(1)), torch.tensor([[1, 3]])
DISTINCT = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n)) for n in range(8)])
MASK = whole(8, 6, seed=3) > 0
BAGS, OFFSETS = torch.tensor([1, 4, 5, 4, 2, 7]), torch.tensor([0, 2, 5])

CASES = [
    Case(aten.index_select, (X, 1, ROWS), "0. .0 P. "),
    Case(aten.index_select, (BIG, 0, ROWS), "1. .0 0. P."),
    Case(aten.index_select, (CUBE, -2, ROWS), "0. 2. .0 P."),
    Case(aten.index_select, (PLACES, 0, ROWS), "1. .0"),
    Case(aten.gather, (X, 1, PLACES), "00 P."),
    Case(aten.gather, (X, 1, PLACES[:, :2]), "00 .1"),
    Case(aten.gather, (X, 0, PLACES), "11 .0 P."),
    Case(aten.gather, (BIG, 0, FEW), ".0 0."),
    Case(aten.gather, (BIG, 0, PLACES[:2]), "11 0. P."),
    Case(aten.scatter, (X, 1, DISTINCT, whole(8, 6, seed=1)), "000"),
    Case(aten.scatter, (X, 0, FEW, whole(8, 6, seed=1)), "0.."),
    Case(aten.scatter, (X, 1, PLACES, 3.0), "00"),
    Case(aten.scatter, (X, 1, PLACES, whole(8, 6, seed=1)), "000 1..", kwargs={"reduce": "add"}),
    Case(aten.scatter, (X, 1, DISTINCT, 2.0), "00 1.", kwargs={"reduce": "multiply"}),
    Case(aten.scatter_add, (X, 1, PLACES, whole(8, 6, seed=1)), "000 .11 1.. P.P"),
    Case(aten.scatter_add, (X, 0, PLACES[:4], whole(8, 6, seed=1)), "111 0.."),
    *(
        Case(aten.scatter_reduce, (X, 1, PLACES, whole(8, 6, seed=1), reduce), "000 1..")
        for reduce in ("prod", "mean")
    ),
    *(
        Case(aten.scatter_reduce, (X, 1, PLACES, whole(8, 6, seed=1), reduce), "000 .11 1..")
        for reduce in ("sum", "amax", "amin")
    ),
    Case(
        aten.scatter_reduce, (X, 1, PLACES, whole(8, 6), "sum"), "000 1..", kwargs={"include_self": False}
    ),
    Case(aten.index_add, (X, 0, PERMUTED, whole(4, 6)), ".00 1.1 0.. P.P"),
    Case(aten.index_add, (X, 1, ROWS, whole(8, 4)), ".01 0.0 1.. P.P", kwargs={"alpha": 2}),
    Case(aten.index_add, (PLACES, 0, PERMUTED, PLACES[:4]), ".00 1.1 0.."),
    Case(aten.index_copy, (X, 0, PERMUTED, whole(4, 6)), "1.1 0.."),
    Case(aten.index_reduce, (X, 0, PERMUTED, whole(4, 6), "amax"), ".00 1.1 0.."),
    Case(aten.index_reduce, (X, 0, PERMUTED, whole(4, 6), "prod"), "1.1 0.."),
    Case(aten.index_fill, (X, 0, PERMUTED, 2.0), "1. 0."),
    Case(aten.index_fill, (X, 0, PERMUTED, torch.tensor(2.0).double()), "1.. 0.."),
    Case(aten.index, (X, [PAIRS]), ".0 .1 1. P."),
    Case(aten.index, (BIG, [ROWS]), ".0 1. 0. P."),
    Case(aten.index, (BIG, [ROWS, ROWS]), ".00 0.. 1.. P.."),
    Case(aten.index, (CUBE, [None, PAIRS]), ".0 .1 0. 2."),
    Case(aten.index, (CUBE, [torch.arange(4), None, ROWS]), ".00 1.. P.."),
    Case(aten.index, (CUBE, [torch.arange(4)[:, None], PAIRS[:1]]), ".0. ..1 2.. P.."),
    Case(aten.index, (PLACES, [ROWS]), ".0 1."),
    Case(aten.index_put, (X, [PERMUTED], whole(4, 6)), "1.1 0.."),
    Case(aten.index_put, (X, [PERMUTED], whole(4, 6), True), ".00 1.1 0.. P.P"),
    Case(aten.index_put, (X, [PAIRS], whole(6), True), ".0. .1. 1.0 0.."),
    Case(aten.index_put, (X, [PERMUTED], whole(1, 1)), "1.. 0.."),
    Case(aten.index_put, (CUBE, [None, PAIRS], whole(4, 3, 2, 6), True), ".01 .12 0.0 2.3 1.."),
    Case(aten.index_put, (X, [PERMUTED, ROWS], whole(4)), "0... 1..."),
    Case(aten.index_put, (X, [PERMUTED, ROWS], whole(4), True), "0... 1... .000"),
    Case(aten.index_put, (CUBE, [torch.arange(4), None, ROWS], whole(4, 8), True), ".000 1..1 0... 2..."),
    Case(aten.index_put, (X, [MASK], torch.tensor(2.0).double()), "00. 11."),
    Case(aten.index_put, (X, [MASK[:, 0]], torch.tensor([2.0]).double()), "00. 1.."),
    Case(aten._unsafe_index, (X, [PAIRS]), ".0 1."),
    Case(aten._unsafe_index_put, (X, [PERMUTED], whole(4, 6), True), ".00 1.1 0.. P.P"),
    Case(aten.take, (X, PLACES), ".0 .1 P."),
    Case(aten.put, (X, FEW, whole(1, 2), True), ".11 P.P"),
    Case(aten.put, (X, FEW, whole(1, 2)), "..."),
    *(
        Case(aten._embedding_bag, (X, BAGS, OFFSETS, False, mode), "1..", bitwise=False)
        for mode in (0, 1, 2)
    ),
    Case(aten._embedding_bag_forward_only, (X, BAGS, OFFSETS), "1..", bitwise=False),
    *(
        Case(
            aten._embedding_bag_backward,
            (whole(3, 6), BAGS, OFFSETS, *aten._embedding_bag(X, BAGS, OFFSETS, False, mode)[1:], 8, False,
             mode, False, None),
            "1....." if mode < 2 else "1....1",
            bitwise=False,
        )
        for mode in (0, 1, 2)
    ),
    Case(
        aten._embedding_bag_dense_backward,
        (whole(3, 6), BAGS, *aten._embedding_bag(X, BAGS, OFFSETS)[1:], 8, False, 0, None),
        "1....",
        bitwise=False,
    ),
]  # fmt: skip


test_values, test_promises, test_two_axes = family(CASES, examples=60)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x.index_select(0, i[:1]),
        lambda x, i: x[i[:1]],
        lambda x, i: x.index_add(0, i, x[:4]),
        lambda x, i: x.index_put((i,), x[:4]),
        lambda x, i: x.gather(0, i[:1, None]),
    ],
)
@pytest.mark.parametrize("index", [24, -25])
def test_an_index_that_no_rank_has_is_an_error(call, index):
    """Masked, it would be a silent zero or a write that is lost."""
    mesh = mesh_of(3)
    run = vs.parallelize(call, vs.Plan(mesh))
    indices = torch.tensor([index, 1, 2, 3])
    with pytest.raises((RuntimeError, IndexError), match=r"out of (range|bounds)"):
        run(vs.distribute_tensor(BIG, mesh, P(dp=Shard(0))), indices)


def test_a_sharded_lookup_that_makes_more_than_it_reads_moves_what_it_reads():
    """The sum of what each rank finds would be larger than the tensor that is looked through."""
    mesh = mesh_of(3)
    run = vs.parallelize(lambda x, index: x.index_select(0, index), vs.Plan(mesh))
    for x, kind in [(BIG, "all_reduce"), (X, "all_to_all")]:
        operand = vs.distribute_tensor(x, mesh, P(dp=Shard(0)))
        (move,) = run.lower(operand, PAIRS.abs().flatten()).collectives()
        assert move.kind == kind
