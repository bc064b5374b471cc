"""The optimizers that the property matrix holds: a line each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import vescale as vs
from vescale import optim


@dataclass(frozen=True)
class Case:
    """An optimizer of a learning rate, and what the matrix may expect of it.

    `quadratic` and `gpt` are learning rates that suit. `bound`: by how much, of the largest element, meshes
    may differ (0: not by a bit). `elementwise`: its update is few calls. `dtypes`: those it takes.
    """

    make: Callable[[float], optim.Optimizer]
    quadratic: float = 0.1
    gpt: float = 1e-2
    bound: float = 0.0
    elementwise: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)


def clipped(lr: float) -> optim.Optimizer:
    """What a training script uses: clipping, a schedule, decay of matrices only, a safe step."""
    rate = optim.schedules.cosine(lr, steps=1000, warmup=2)
    inner = optim.adamw(rate, weight_decay=0.01, mask=lambda path, p: p.dim() > 1)
    return optim.chain(optim.clip_by_global_norm(1e3), optim.skip_if_nonfinite(inner))


def by_label(lr: float) -> optim.Optimizer:
    """Matrices and the rest by two optimizers."""
    pair = {True: optim.adam(lr), False: optim.sgd(lr, 0.9)}
    return optim.partition(lambda path, p: p.dim() > 1, pair)


def matrices(make: Callable[[float], optim.Optimizer]) -> Callable[[float], optim.Optimizer]:
    """An optimizer of matrices, and another one for the rest."""

    def made(lr: float) -> optim.Optimizer:
        return optim.partition(lambda path, p: p.dim() > 1, {True: make(lr), False: optim.adam(lr)})

    return made


OPTIMIZERS = {
    "sgd": Case(lambda lr: optim.sgd(lr, 0.9, nesterov=True, weight_decay=1e-4), 0.02, 0.3),
    "adam": Case(lambda lr: optim.adam(lr, amsgrad=True)),
    "adamw": Case(lambda lr: optim.adamw(lr)),
    "loss_scale": Case(lambda lr: optim.loss_scale(optim.adam(lr), init=1.0), elementwise=False),
    "clipped": Case(clipped, bound=1e-6, elementwise=False),
    "by_label": Case(by_label),
    # Tiles that no cut of the matrix goes through, every one with its own scales, short ones too.
    "adamw_8bit": Case(
        matrices(lambda lr: optim.adamw_8bit(lr, block=(1, 3), min_elements=1)), elementwise=False
    ),
    "muon": Case(matrices(lambda lr: optim.muon(lr, weight_decay=0.0)), gpt=0.02, elementwise=False),
    "shampoo": Case(matrices(lambda lr: optim.shampoo(lr, update_interval=2)), elementwise=False),
}


MESHES = {"1": {"dp": 1}, "2": {"dp": 2}, "4": {"dp": 4}, "2x2": {"dp": 2, "tp": 2}}


def plan_on(axes: dict[str, int], rules: dict[str, vs.P] | None = None, **options) -> vs.Plan:
    """Everything ragged over dp in buffers, and `rules` where there is a tp axis."""
    mesh = vs.make_mesh(axes)
    return vs.Plan(mesh, rules if "tp" in axes else None, fsdp=vs.FSDP("dp"), **options)
