"""What tests of Muon share: parameters and gradients, torch's optimizer, and a plain one in float32."""

import torch

import vescale as vs

P, S, R = vs.P, vs.Shard, vs.RaggedShard
LR = 0.0123

# Meshes and layouts of matrices of 8 x 6, 10 x 7 and 4 of 5 x 6 that cut them, for Shampoo too.
CUTS_OF_BOTH = {
    "ragged elements": (
        {"dp": 4},
        [
            P(dp=R((0, 1), (5, 11, 0, 32))),
            P(dp=R((0, 1), (1, 0, 69, 0))),
            P(dp=R((0, 1, 2), (7, 20, 33, 60))),
        ],
    ),
    "ragged rows, empty ranks": (
        {"dp": 4},
        [P(dp=R((0,), (1, 0, 7, 0))), P(dp=R((0,), (0, 0, 0, 1))), P(dp=R((0, 1), (3, 0, 10, 7)))],
    ),
    "tp and ragged dp": (
        {"dp": 2, "tp": 2},
        [P(tp=S(0), dp=R((0,), (1, 3))), P(tp=S(0), dp=R((0, 1), (9, 26))), P(tp=S(1), dp=R((0,), (1, 3)))],
    ),
    "replicas": ({"replica": 2, "dp": 2}, [P(dp=R((0,), (3, 5))), P(), P(dp=S(1))]),
}


def draw(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}


def named(values):
    return {f"w{i}": value for i, value in enumerate(values)}


def by_torch(params, gradients, **hyper):
    """Parameters after steps of torch.optim.Muon."""
    leaves = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    opt = torch.optim.Muon(leaves.values(), **hyper)
    for grads in gradients:
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        opt.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def plainly(params, gradients, lr=LR, momentum=0.95, decay=0.1, steps=5):
    """The formulas in float32, a matrix at a time, of tensors whose last two dims are matrices."""
    params, buffers = dict(params), {name: torch.zeros_like(p) for name, p in params.items()}
    for grads in gradients:
        for name, grad in grads.items():
            buffers[name] = momentum * buffers[name] + (1 - momentum) * grad
            x = momentum * buffers[name] + (1 - momentum) * grad
            rows, columns = x.shape[-2:]
            x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
            for _ in range(steps):  # also of tall ones: X^T X has the same singular values
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            params[name] = params[name] * (1 - lr * decay) - lr * max(1, rows / columns) ** 0.5 * x
    return params


def step_of(opt):
    def step(params, opt_state, grads):
        updates, opt_state = opt.update(grads, opt_state, params)
        return vs.optim.apply_updates(params, updates), opt_state

    return step


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        torch.testing.assert_close(found, theirs[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
