"""Batches of matrices, and distances: values of plain torch; the batch, and the points, are silent."""

import pytest
import torch

import vescale as vs
from tests.rule_cases import Case, family, mesh_of, normal, whole
from vescale.spmd.placements import P, Shard

aten = torch.ops.aten

A, B, VECTORS = normal(5, 4, 3, 3), normal(5, 4, 3, 2), normal(5, 4, 3)
SYMMETRIC = A @ A.mT + 3 * torch.eye(3).double()
LOWER, TALL = torch.linalg.cholesky(SYMMETRIC), normal(5, 4, 4, 3)
LU, PIVOTS = torch.linalg.lu_factor(SYMMETRIC)
LD, LD_PIVOTS, _ = torch.linalg.ldl_factor_ex(SYMMETRIC)
REFLECTORS, TAU = torch.geqrf(TALL)
POINTS, OTHERS = normal(3, 6, 2), normal(3, 4, 2, seed=1)
DISTANCES = torch.cdist(POINTS, OTHERS)
words = str.split

CASES = [
    *(
        Case(getattr(aten, name), (SYMMETRIC,), "0 1", ulps=8)
        for name in words(
            "linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet linalg_matrix_exp "
            "linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_eigh linalg_eig linalg_eigvals "
            "_linalg_eigvals"
        )
    ),
    Case(aten._linalg_eigh, (SYMMETRIC, "L", False), "0 1", ulps=8),
    *(Case(getattr(aten, name), (TALL,), "0 1", ulps=8) for name in words("linalg_qr geqrf _linalg_svd")),
    Case(aten._linalg_svd, (TALL, False, False), "0 1", ulps=8),
    Case(aten.linalg_qr, (TALL, "r"), "0 1", ulps=8),
    Case(aten.linalg_pinv, (TALL, 1e-9), "0 1", ulps=64),
    Case(aten.linalg_pinv, (TALL,), "0 1", kwargs={"rtol": 1e-9}, ulps=64),
    Case(aten.linalg_pinv, (TALL,), "00 1.", kwargs={"rtol": torch.full((5, 1), 1e-9).double()}, ulps=64),
    Case(aten.linalg_pinv, (TALL, torch.tensor(1e-9).double()), "0. 1.", ulps=64),
    Case(aten.cholesky_inverse, (LOWER,), "0 1", ulps=64),
    Case(aten.lu_unpack, (LU, PIVOTS), "00 11", ulps=8),
    Case(aten.linalg_householder_product, (REFLECTORS, TAU), "00 11", ulps=8),
    Case(aten.ormqr, (REFLECTORS, TAU, normal(5, 4, 4, 2)), "000 111", ulps=8),
    Case(aten._linalg_solve_ex, (SYMMETRIC, B), "00 11", ulps=64),
    Case(aten._linalg_solve_ex, (SYMMETRIC, VECTORS), "00 11", ulps=64),
    Case(aten._linalg_solve_ex, (SYMMETRIC[:, :1], B), "00", ulps=64),
    Case(aten.linalg_lu_solve, (LU, PIVOTS, B), "000 111", ulps=64),
    Case(aten.linalg_lu_solve, (LU, PIVOTS, whole(5, 4, 3, 2)), "..P", ulps=64),
    Case(aten.linalg_ldl_solve, (LD, LD_PIVOTS, B), "000 111", ulps=64),
    Case(aten.linalg_solve_triangular, (LOWER, B), "00 11", kwargs={"upper": False}, ulps=64),
    Case(aten.linalg_solve_triangular, (LOWER[0], B), ".0", kwargs={"upper": False}, ulps=64),
    Case(aten.cholesky_solve, (B, LOWER), "00 11", ulps=64),
    Case(aten._cdist_forward, (POINTS, OTHERS, 2.0, None), "00 1. .1", ulps=8),
    Case(aten._cdist_forward, (POINTS, OTHERS, 1.0, None), "00 1. .1", ulps=8),
    Case(aten._euclidean_dist, (POINTS, OTHERS), "00 1. .1", ulps=1e5),  # squares, and their difference
    Case(
        aten._cdist_backward,
        (whole(3, 6, 4), POINTS, OTHERS, 2.0, DISTANCES),
        "0000 11.1 2.12 P...",
        ulps=16,
    ),
]


test_values, test_promises, test_two_axes = family(CASES)


@pytest.mark.parametrize("name", words("cholesky inv lu_factor solve"))
def test_a_matrix_without_an_answer_is_an_error(name):
    """As on one device, also when it is on one rank only."""
    mesh = mesh_of(2)
    matrices = torch.stack([torch.eye(3), torch.zeros(3, 3)])

    def fn(x):
        return getattr(torch.linalg, name)(*(x, x) if name == "solve" else (x,))

    with pytest.raises(RuntimeError, match="Batch element 1"):
        fn(matrices)
    for spec in (P(), P(dp=Shard(0))):
        placed = vs.distribute_tensor(matrices, mesh, spec)
        with pytest.raises(RuntimeError, match="Batch element"):
            vs.parallelize(fn, vs.Plan(mesh))(placed)
