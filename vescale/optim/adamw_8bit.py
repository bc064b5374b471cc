"""AdamW whose moments are 8-bit codes with one scale a block."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from ..rng import Key, fold_in, split, uniform
from . import quantize_rules as _rules  # noqa: F401  (says how programs run the ops)
from .adam import corrections
from .gradients import check_parameters, entries, gradients
from .optimizer import Optimizer, Updates, beside, cast_scalar, scalar_dtype, state_scalar
from .quantize import dequantize, quantize, quantized_zeros
from .quantize_layout import Block
from .quantize_map import SIGNED, UNSIGNED
from .rates import Rate, check_numbers, check_rate, pair, rate_at

_WHERE = "vs.optim.adamw_8bit"


def adamw_8bit(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block: Block = (32, 32),
    min_elements: int = 4096,
    stochastic_rounding: Key | None = None,
) -> Optimizer:
    """AdamW with block-wise quantized moments (Dettmers et al., 2022, 8-bit optimizers).

        m <- b1 dequantized(m) + (1 - b1) g                     in float32
        v <- b2 dequantized(v) + (1 - b2) g^2
        p <- p (1 - lr weight_decay)  -  lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
        m, v are kept as quantized(m), quantized(v): see `quantize.py`

    `lr`, `betas`, `eps` and `weight_decay` are those of `adamw`. A block is a tile of (r, c) elements over
    the last two dims (runs of r * c elements of a 1-d parameter), or a run of `block` elements; the last may
    be short. Parameters of fewer than `min_elements` elements, by their global size, and 0-d ones keep
    float32 moments, and are updated as `adamw` updates float32 ones. With a key in `stochastic_rounding`
    moments are rounded up or down at random, to themselves in expectation: other draws at each step, the
    same on every mesh.

    No block may be cut, and then an update communicates nothing. `vs.FSDP(.., block={regex: vs.Tile(32,
    32)})` plans so. A parameter in a layout that cuts a block raises ShardingError, in `init` and when
    `update` is traced: it names the parameter, the cut and the block to declare.

    The state is {"step": 0-d float64, "exp_avg", "exp_avg_sq": like params, uint8 codes or float32 moments,
    "exp_avg_scale", "exp_avg_sq_scale": {path of a quantized parameter: float32, one scale a block}}, and
    "key" with stochastic rounding. Codes have their parameter's layout, and each scale is where its block
    is. Make the state of parameters that are distributed: scales that are plain tensors are whole on every
    rank.

    An inf or nan in a gradient makes all of its block nan, in this state and all later ones.

    >>> opt = adamw_8bit(0.1, weight_decay=0.0)
    >>> params = {"w": torch.ones(64, 70)}
    >>> state = opt.init(params)
    >>> state["exp_avg"]["w"].dtype, state["exp_avg_scale"]["w"].shape
    (torch.uint8, torch.Size([2, 3]))
    >>> updates, state = opt.update({"w": torch.full((64, 70), 3.0)}, state, params)
    >>> updates.delta["w"][0, 0]
    tensor(-0.1000)
    """
    beta1, beta2 = pair(_WHERE, betas)
    check_rate(_WHERE, "lr", lr)
    check_numbers(_WHERE, {"eps": eps, "weight_decay": weight_decay}, {"betas[0]": beta1, "betas[1]": beta2})
    _check_own(block, min_elements, stochastic_rounding)

    def quantized(p: torch.Tensor) -> bool:
        return p.dim() > 0 and p.numel() >= max(min_elements, 1)

    def init(params: Any) -> dict[str, Any]:
        check_parameters(params, _WHERE)
        paths, leaves, spec = _tree.flatten_with_path(params)
        device = leaves[0].device if leaves else None
        state: dict[str, Any] = {"step": state_scalar(params)}
        for moment, kind in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
            values, scales = [], {}
            for path, p in zip(paths, leaves, strict=True):
                if quantized(p):
                    codes, scales[path] = quantized_zeros(p, kind, block, path)
                    values.append(codes)
                else:
                    values.append(torch.zeros_like(p, dtype=torch.float32))
            state |= {moment: _tree.unflatten(spec, values), f"{moment}_scale": scales}
        if stochastic_rounding is not None:
            state["key"] = Key(beside(params, stochastic_rounding.data.to(device, copy=True)))
        return state

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        paths, leaves, spec = _tree.flatten_with_path(params)
        gs = gradients(grads, params, _WHERE)
        names = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        before, ms, vs, *_ = entries(state, names if stochastic_rounding is None else (*names, "key"), _WHERE)
        ms = _tree.leaves_like(spec, ms, where="state['exp_avg']")
        vs = _tree.leaves_like(spec, vs, where="state['exp_avg_sq']")

        rate = rate_at(lr, before)
        step = before + 1
        step_size, root = corrections(rate, step, beta1, beta2)
        cast = functools.cache(cast_scalar)

        m_scales, v_scales = {}, {}
        noises = _noises(state.get("key"), step, [p for p in leaves if quantized(p)])

        def leaf(
            path: str, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            if quantized(p):
                m = dequantize(m, _scales(state, "exp_avg", path), SIGNED, block, path)
                v = dequantize(v, _scales(state, "exp_avg_sq", path), UNSIGNED, block, path)
            g = g.to(torch.float32)
            m = torch.lerp(m, g, 1 - beta1)
            v = torch.addcmul(v * beta2, g, g, value=1 - beta2)
            dtype = scalar_dtype(m)
            delta = m * cast(step_size, dtype) / (v.sqrt() / cast(root, dtype) + eps)
            if quantized(p):
                m, m_scales[path] = quantize(m, SIGNED, block, next(noises, None), path)
                v, v_scales[path] = quantize(v, UNSIGNED, block, next(noises, None), path)
            return m, v, delta.to(p.dtype)

        ms, vs, deltas = zip(*map(leaf, paths, leaves, gs, ms, vs)) if leaves else ((), (), ())
        keep = 1 - rate * weight_decay if weight_decay else 1.0
        return Updates(keep, _tree.unflatten(spec, deltas)), {
            **state,
            "step": step,
            "exp_avg": _tree.unflatten(spec, ms),
            "exp_avg_sq": _tree.unflatten(spec, vs),
            "exp_avg_scale": m_scales,
            "exp_avg_sq_scale": v_scales,
        }

    return Optimizer(init, update)


def _noises(key: Key | None, step: torch.Tensor, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Two draws for each of the parameters, of its shape and of this step; none without a key."""
    if key is None or not parameters:
        return iter(())
    keys = iter(split(fold_in(key, step.to(torch.int64)), 2 * len(parameters)))
    return (uniform(next(keys), tuple(p.shape)) for p in parameters for _ in range(2))


def _scales(state: dict[str, Any], moment: str, path: str) -> torch.Tensor:
    try:
        return state[f"{moment}_scale"][path]
    except KeyError:
        raise ArgumentError(
            explain(
                f"no scales of {path}",
                where=f"vs.optim.adamw_8bit, state['{moment}_scale']",
                rule="update takes the state that init made, with the same block and min_elements",
                remedy="make the state with this optimizer's init",
            )
        ) from None


def _check_own(block: Any, min_elements: Any, key: Any) -> None:
    sizes = block if isinstance(block, tuple) and len(block) == 2 else (block,)
    if any(type(size) is not int or size < 1 for size in sizes):
        found, rule = f"block={block!r}", "a tile of (rows, columns), or a number of elements, 1 or more"
        remedy = "block=(32, 32), or block=2048"
    elif type(min_elements) is not int or min_elements < 0:
        found, rule = f"min_elements={min_elements!r}", "a number of elements, 0 or more"
        remedy = "min_elements=4096"
    elif key is not None and not isinstance(key, Key):
        found, rule = f"stochastic_rounding={key!r}", "a key, or None to round to nearest"
        remedy = "stochastic_rounding=vs.rng.key(0)"
    else:
        return
    raise ArgumentError(explain(found, where="vs.optim.adamw_8bit", rule=rule, remedy=remedy))
