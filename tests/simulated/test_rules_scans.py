"""Sorting, selecting, scanning: every placement has the values of plain torch, other dims are silent."""

import torch

from tests.rule_cases import Case, family, normal, whole

aten = torch.ops.aten
words = str.split

X, CUBE, ANY = whole(8, 6), whole(4, 8, 6), normal(4, 6, 5)
SORTED, VALUES, SHUFFLED = X.sort(1)[0], whole(8, 3), X.argsort(1)
LINE = torch.tensor([-3.0, -1, 0, 2]).double()
GAPS = torch.where(X > 2, torch.nan, X)

CASES = [
    Case(aten.sort, (X,), "0"),
    Case(aten.sort, (CUBE, 1, True), "0 2"),
    Case(aten.sort, (CUBE,), "0 1", kwargs={"stable": True, "dim": 2}),
    Case(aten.topk, (CUBE, 3), "0 1"),
    Case(aten.topk, (CUBE, 2, 0, False), "1 2"),
    *(Case(getattr(aten, name), (ANY, 2, 1), "0 2") for name in words("kthvalue")),
    *(Case(getattr(aten, name), (ANY, 1), "0 2") for name in words("median nanmedian mode")),
    *(Case(getattr(aten, name), (X, 1, True), "0") for name in words("median nanmedian mode")),
    Case(aten.kthvalue, (X, 2, -1, True), "0"),
    Case(aten.nanmedian, (GAPS, 0), "1"),
    Case(aten.median, (ANY,)),
    Case(aten.nanmedian, (GAPS,)),
    *(Case(getattr(aten, name), (ANY, 1), "0 2") for name in words("cummax cummin cumprod")),
    Case(aten.logcumsumexp, (ANY, 1), "0 2", ulps=4),
    Case(aten.cumprod, (X, 0), "1", kwargs={"dtype": torch.float32}),
    Case(aten.searchsorted, (SORTED, VALUES), "00"),
    Case(aten.searchsorted, (X, VALUES), "000", kwargs={"sorter": SHUFFLED}, bitwise=False),
    Case(aten.searchsorted, (LINE, CUBE), ".0 .1 .2", kwargs={"right": True}),
    Case(aten.bucketize, (CUBE, LINE), "0. 1. 2."),
]  # fmt: skip


test_values, test_promises, test_two_axes = family(CASES)
