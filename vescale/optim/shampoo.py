"""Shampoo: gradients between inverse roots of their statistics, with the norms of another method's steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._compat import base_tensor
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.layout import Layout
from ..spmd.matrices import Matrices
from ..spmd.transforms import pinned
from .adam import corrections
from .arrangements import arrangements, checked_texts
from .at_owners import decide, from_owners, layouts_at_rest, to_owners
from .beside import beside, kept_shape
from .gradients import check_parameters, entries, gradients
from .optimizer import Optimizer, Updates, cast_scalar, scalar_dtype, state_scalar
from .precondition import GRAFTINGS, SQUARED, Kept, Recipe, flops, graft, precondition
from .rates import Rate, check_numbers, check_rate, rate_at

_WHERE = "vs.optim.shampoo"


def shampoo(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    update_interval: int = 10,
    grafting: str | None = "adam",
    grafting_eps: float = 1e-8,
    root: int | None = None,
    root_dtype: torch.dtype = torch.float64,
    max_dim: int = 8192,
    matrix_dims: Mapping[str, str] | None = None,
) -> Optimizer:
    """Gradients preconditioned on both sides (Gupta et al., 2018), with grafted norms (Anil et al., 2020).

        L <- b2 L + (1 - b2) g g^T                R <- b2 R + (1 - b2) g^T g
        d  = (L + eps max(L) I)^(-1/p)  g  (R + eps max(R) I)^(-1/p)
        d <- d |a| / |d|                           a: the step that `grafting` would take
        m <- b1 m + (1 - b1) d                     t = 1, 2, ..
        p <- p (1 - lr weight_decay)  -  lr / (1 - b1^t) m

    max(L) is the largest eigenvalue, and L and R count as L / (1 - b2^t) there. A b2 of 1 takes sums, as
    Gupta et al. do. `root` is p; by default it is twice the number of sides that are preconditioned: 4, and 2
    for one. Roots are computed anew at the first update and at every `update_interval`-th after it, from
    eigenvalues in `root_dtype`; between these nothing of theirs is computed.

    `grafting`: "adam" takes norms of g / (sqrt(v / (1 - b2^t)) + grafting_eps), v <- b2 v + (1 - b2) g^2,
    "rmsprop" those without the correction, "sgd" those of g, and None leaves d as it is. A side of more than
    `max_dim` elements has no statistic: it is left alone, as if its root were the identity. Where that is
    true of both, a itself takes the place of d, and nothing moves. `lr` is as in `adamw`.

    Parameters are matrices, three dims a batch of them, each with statistics and norms of its own;
    `matrix_dims` says it for others: see `muon`. Other parameters are an error, for `vs.optim.partition`.

    Inside a program a matrix that is cut has an owner, a rank that keeps its statistics and roots. Gradients
    go there whole and directions come back, many in one collective, as for `muon`: see `docs/shampoo.md`.
    Owners follow from layouts: make the state of parameters that are distributed. State of plain ones is
    whole on every rank, which then computes with every matrix.

    The state is {"step": 0-d float64, "momentum": like params, absent where b1 is 0, "owned": {path: {"left",
    "right", "left_root", "right_root", "squares"}}}, in float32, or float64 for float64 parameters. What
    isn't kept has no rows. Of a matrix without statistics it is {"squares": like the parameter}, or {}.

    Raises ArgumentError for hyperparameters out of range, parameters that are no matrices, texts of
    `matrix_dims` that don't fit, and state that another `max_dim` made. An inf or nan in a gradient makes all
    of the statistics of its matrix nan for good: see `skip_if_nonfinite`.

    >>> from vescale.optim import apply_updates
    >>> opt = shampoo(0.1)
    >>> params = {"w": torch.eye(2)}
    >>> updates, state = opt.update({"w": 5 * torch.eye(2)}, opt.init(params), params)
    >>> apply_updates(params, updates)["w"]  # as far as Adam goes, elsewhere too
    tensor([[0.9000, 0.0000],
            [0.0000, 0.9000]])
    """
    beta1, beta2 = betas
    _check(lr, betas, eps, weight_decay, update_interval, grafting, grafting_eps, root, root_dtype, max_dim)
    texts = checked_texts(matrix_dims, _WHERE)

    def recipe(power: int) -> Recipe:
        return Recipe(beta2, eps, power, update_interval, grafting, grafting_eps, root_dtype)

    def read(params: Any) -> list[_Parameter]:
        """What is known of parameters from their layouts: the same in `init` and in `update`."""
        paths, found = arrangements(texts, params, _WHERE)
        leaves = _tree.leaves(params)
        each = zip(paths, leaves, found, layouts_at_rest(leaves), strict=True)
        made = [_Parameter.of(*one, max_dim) for one in each]
        owned = [one for one in made if one.sides]
        where = iter(decide([one.rest for one in owned], [one.matrices for one in owned], cost))
        return [replace(one, there=next(where)) if one.sides else one for one in made]

    def cost(rows: int, columns: int) -> int:
        return flops(rows, columns, rows <= max_dim, columns <= max_dim, update_interval)

    def shapes(one: _Parameter) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept for a parameter."""
        squared = grafting in SQUARED
        if not one.sides:
            return {"squares": tuple(one.tensor.shape)} if squared else {}
        left, right = one.kept_shape(one.left * one.rows), one.kept_shape(one.right * one.columns)
        squares = one.kept_shape(one.rows, one.columns) if squared else one.kept_shape(0)
        return Kept(left, right, left, right, squares)._asdict()  # pyright: ignore[reportArgumentType]

    def kept_of(one: _Parameter, state: dict[str, Any]) -> dict[str, Tensor]:
        """What the state has for a parameter. Raises ArgumentError for the state of another optimizer."""
        found, expected = state["owned"].get(one.path, {}), shapes(one)
        if {name: tuple(value.shape) for name, value in found.items()} == expected:
            return found
        raise ArgumentError(
            explain(
                f"{one.path} has { ({name: tuple(value.shape) for name, value in found.items()}) } in "
                f"state['owned'], and not {expected}",
                where=_WHERE,
                rule="update takes the state that init made, with the same max_dim, grafting and matrix_dims",
                remedy="make the state with this optimizer's init",
            )
        )

    def init(params: Any) -> dict[str, Any]:
        check_parameters(params, _WHERE)
        owned = {
            one.path: {name: one.zeros(shape) for name, shape in shapes(one).items()} for one in read(params)
        }
        state = {"step": state_scalar(params), "owned": owned}
        if beta1:
            state["momentum"] = _tree.tree_map(torch.zeros_like, params)
        return state

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        leaves, spec = _tree.flatten(params)
        gs = gradients(grads, params, _WHERE)
        before, *_ = entries(state, ("step", "owned", *(("momentum",) if beta1 else ())), _WHERE)
        step, rate = before + 1, rate_at(lr, before)
        step_size, _ = corrections(rate, step, beta1, beta2)
        made = read(params)
        kept = {one.path: kept_of(one, state) for one in made}
        new = dict[str, dict[str, Tensor]]()
        directions: list[Any] = [None] * len(made)

        owned = [index for index, one in enumerate(made) if one.sides]
        names, rest, where = ([getattr(made[i], name) for i in owned] for name in ("path", "rest", "there"))
        done = list[Tensor]()
        for index, g in zip(owned, to_owners([gs[i] for i in owned], names, where), strict=True):
            one = made[index]
            how, before = recipe(root or 2 * one.sides), Kept(**kept[one.path])
            direction, after = precondition(g, before, state["step"], one.matrices, how)
            new[one.path] = after._asdict()
            done.append(direction)
        for index, direction in zip(owned, from_owners(done, names, rest, where), strict=True):
            directions[index] = direction

        for index, one in enumerate(made):
            if not one.sides:
                directions[index], new[one.path] = grafted(one, gs[index], kept[one.path], step)

        if beta1:
            old = _tree.leaves_like(spec, state["momentum"], where="state['momentum']")
            directions = [torch.lerp(m, d, 1 - beta1) for m, d in zip(old, directions, strict=True)]
        cast = functools.cache(cast_scalar)  # once for each dtype, not for each parameter
        deltas = [d * cast(step_size, scalar_dtype(p)) for d, p in zip(directions, leaves, strict=True)]
        after = {"step": step, "owned": new}
        if beta1:
            after["momentum"] = _tree.unflatten(spec, directions)
        keep = 1 - rate * weight_decay if weight_decay else 1.0
        return Updates(keep, _tree.unflatten(spec, deltas)), after

    def grafted(
        one: _Parameter, g: Tensor, kept: dict[str, Tensor], step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction where no side has a statistic, where the parameter is, and what is kept for it."""
        if grafting not in SQUARED:
            return g, {}
        since = cast_scalar(1 - beta2**step, scalar_dtype(kept["squares"])) if beta2 < 1 else 1.0
        a, squares = graft(g.to(kept["squares"].dtype), kept["squares"], since, recipe(1))
        return a.to(one.tensor.dtype), {"squares": squares}

    return Optimizer(init, update)


@dataclass(frozen=True)
class _Parameter:
    """A parameter, its matrices, which of their sides have statistics, and where these are."""

    path: str
    tensor: Tensor
    matrices: Matrices
    rest: Layout | None
    rows: int
    columns: int
    left: bool
    right: bool
    there: Layout | None = None

    @classmethod
    def of(
        cls, path: str, tensor: Tensor, matrices: Matrices, rest: Layout | None, max_dim: int
    ) -> _Parameter:
        _, rows, columns = matrices.grid(tensor.shape)
        left, right = (tensor.numel() > 0 and side <= max_dim for side in (rows, columns))
        return cls(path, tensor, matrices, rest, rows, columns, left, right)

    @property
    def sides(self) -> int:
        """How many sides have a statistic."""
        return self.left + self.right

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is kept."""
        return torch.float64 if self.tensor.dtype is torch.float64 else torch.float32

    def kept_shape(self, rows: int, columns: int | None = None) -> tuple[int, ...]:
        """The shape of numbers rows x columns, or rows x rows, for each matrix."""
        return kept_shape(self.matrices, self.tensor.shape, rows, rows if columns is None else columns)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros for each matrix, where the matrix has its owner; where the parameter is, without one."""
        if not self.sides:
            return torch.zeros_like(self.tensor, dtype=self.dtype)
        layout, base = self.there or self.rest, base_tensor(self.tensor)
        if layout is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.tensor.device)
        target = beside(layout, self.matrices, *shape[-2:])
        if not isinstance(base, DTensor):
            made = torch.zeros(shape, dtype=self.dtype, device=self.tensor.device)
            return pinned(made, target, f"statistics of {self.path}")
        pieces = [
            torch.zeros(target.local_shape(rank), dtype=self.dtype, device=piece.device)
            for rank, piece in zip(base.mesh.local_ranks, base.locals, strict=True)
        ]
        return DTensor(pieces, base.mesh, target)


def _check(
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    interval: int,
    grafting: str | None,
    grafting_eps: float,
    root: int | None,
    root_dtype: torch.dtype,
    max_dim: int,
) -> None:
    check_rate(_WHERE, "lr", lr)
    at_least_0 = {"eps": eps, "weight_decay": weight_decay, "grafting_eps": grafting_eps}
    check_numbers(_WHERE, at_least_0, {"betas[0]": betas[0]})
    wide = (torch.float32, torch.float64)
    faults = [
        (0 <= betas[1] <= 1, f"betas[1]={betas[1]}", "0 <= betas[1] <= 1; 1 takes sums"),
        (
            type(interval) is int and interval > 0,
            f"update_interval={interval!r}",
            "a number of steps",
        ),
        (grafting in GRAFTINGS, f"grafting={grafting!r}", f"one of {GRAFTINGS}"),
        (root is None or (type(root) is int and root > 0), f"root={root!r}", "the p of an inverse p-th root"),
        (root_dtype in wide, f"root_dtype={root_dtype}", "torch.float32 or torch.float64"),
        (type(max_dim) is int and max_dim >= 0, f"max_dim={max_dim!r}", "a number of elements, 0 or more"),
    ]
    for fine, found, rule in faults:
        if not fine:
            raise ArgumentError(explain(found, where=_WHERE, rule=rule))
