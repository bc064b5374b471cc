"""Rows cut raggedly over one axis, and a dim below them split over another: a rank has a part of both.

Rules that look at which indices of a dim a rank has must find them whether or not the rows are ragged.
"""

import pytest
import torch

import vescale as vs
from vescale.spmd.placements import P, RaggedShard, Shard

MESH = vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated")
X = torch.arange(1.0, 49.0).view(4, 4, 3)
INDEX = torch.tensor([3, 0, 2, 1, 3, 1])

OPS = {
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "select_scatter": lambda x: x.select_scatter(-x[:, 0], 1, 3),
    "slice_scatter": lambda x: x.slice_scatter(-x[:, :2], 1, 1, 3),
    "index_add": lambda x: x.index_add(1, INDEX, torch.ones(4, 6, 3)),
    "index_copy": lambda x: x.index_copy(1, INDEX[:3], torch.ones(4, 3, 3)),
    "index_fill": lambda x: x.index_fill(1, INDEX[1:3], 7.0),
    "scatter_add": lambda x: x.scatter_add(1, INDEX.view(1, 6, 1).expand(4, 6, 3), torch.ones(4, 6, 3)),
    "index_put": lambda x: x.index_put((torch.arange(4)[:, None], INDEX[None, :2]), torch.tensor(5.0)),
    "index_select": lambda x: x.index_select(1, INDEX[:2]),
    "gather": lambda x: x.gather(1, INDEX[:2].view(1, 2, 1).expand(4, 2, 3)),
    "index": lambda x: x[:, INDEX[:1]],
}


@pytest.mark.parametrize("rows", [(2, 2), (1, 3), (4, 0)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_against_plain_torch(op, rows):
    for dims in ((0,), ()):
        spec = P(tp=Shard(1), dp=RaggedShard(dims, rows if dims else (0, 1)))
        x = vs.distribute_tensor(X, MESH, spec)
        found = vs.parallelize(OPS[op], vs.Plan(MESH))(x)
        assert torch.equal(found.full_tensor(), OPS[op](X)), spec
