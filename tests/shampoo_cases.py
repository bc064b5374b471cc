"""What tests of Shampoo share: a plain dense implementation, and layouts that cut matrices."""

import torch

import vescale as vs
from tests.muon_cases import CUTS_OF_BOTH

P, S, R = vs.P, vs.Shard, vs.RaggedShard
LR = 0.0123
SHAPES = [(8, 6), (10, 7), (4, 5, 6)]

CUTS = {
    "one rank": ({"dp": 1}, [P(dp=S(0)), P(), P(dp=S(0))]),
    "rows": ({"dp": 4}, [P(dp=S(0)), P(dp=S(0)), P(dp=S(0))]),
    "columns": ({"dp": 2}, [P(dp=S(1)), P(dp=S(1)), P(dp=S(2))]),
    "more ranks than rows": ({"dp": 16}, [P(dp=S(1)), P(dp=S(0)), P(dp=S(1))]),
    "two axes": ({"dp": 2, "tp": 2}, [P(dp=S(0), tp=S(0)), P(tp=S(0), dp=S(1)), P(dp=S(0), tp=S(0))]),
    "stack over tp": ({"dp": 2, "tp": 2}, [P(tp=S(1)), P(dp=S(0)), P(tp=S(0), dp=R((0, 1), (1, 4)))]),
    **CUTS_OF_BOTH,
}


def root_of(matrix, power, eps):
    """An inverse root by singular values."""
    u, s, _ = torch.linalg.svd(matrix.double())
    return (u @ torch.diag((s + eps * s.max()) ** (-1 / power)) @ u.T).to(matrix.dtype)


def densely(
    params,
    gradients,
    lr=LR,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.0,
    update_interval=10,
    grafting="adam",
    grafting_eps=1e-8,
    root=None,
    max_dim=8192,
):
    """Parameters after the formulas, a matrix at a time, of tensors whose last two dims are matrices."""
    b1, b2 = betas
    done = {}
    for name, whole in params.items():
        matrices = []
        for index, p in enumerate(whole.reshape(-1, *whole.shape[-2:])):
            m, v = torch.zeros_like(p), torch.zeros_like(p)
            sides = [n for n in p.shape if n <= max_dim]
            left, right = (torch.zeros(n, n, dtype=p.dtype) for n in p.shape)
            pl, pr = (torch.eye(n, dtype=p.dtype) for n in p.shape)
            for t, grads in enumerate(gradients, 1):
                g = grads[name].reshape(-1, *p.shape)[index]
                new = 1 - b2 if b2 < 1 else 1.0
                since = 1 - b2**t if b2 < 1 else 1.0
                left, right, v = b2 * left + new * g @ g.T, b2 * right + new * g.T @ g, b2 * v + new * g**2
                if (t - 1) % update_interval == 0:
                    power = root or 2 * len(sides)
                    pl = root_of(left / since, power, eps) if p.shape[0] <= max_dim else pl
                    pr = root_of(right / since, power, eps) if p.shape[1] <= max_dim else pr
                a = {
                    None: g,
                    "sgd": g,
                    "rmsprop": g / (v.sqrt() + grafting_eps),
                    "adam": g / ((v / since).sqrt() + grafting_eps),
                }[grafting]
                d = pl @ g @ pr
                if grafting is not None:
                    d = d * a.norm() / d.norm()
                m = b1 * m + (1 - b1) * (d if sides else a)
                p = p * (1 - lr * weight_decay) - lr * m / (1 - b1**t)
            matrices.append(p)
        done[name] = torch.stack(matrices).reshape(whole.shape)
    return done
