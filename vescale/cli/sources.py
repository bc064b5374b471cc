"""What `estimate` can be asked about: a function of yours, a model by its config, or shapes alone.

Each source gives a step, its arguments on the meta device, and a plan on an abstract mesh; nothing is
allocated, fetched or run.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import optim
from .._errors import ArgumentError, PlanError, explain
from ..fsdp.config import FSDP
from ..spmd import plans
from ..spmd.functional import functional
from ..spmd.layout import AbstractMesh
from ..spmd.placements import P, Shard
from ..spmd.plan import Plan
from ..spmd.transforms import value_and_grad

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Subject:
    """A step to be estimated: `fn(*args)`, which may consume the arguments `donate`."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    plan: Plan
    donate: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The tensors of the first argument, by name."""
        return {name: leaf for name, leaf in self.args[0].items() if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class Settings:
    """What the command line says beside the source."""

    mesh: AbstractMesh
    plan: str | None
    fsdp: str | None
    wrap: str
    dtype: torch.dtype
    batch: int
    sequence: int
    layers: int | None
    optimizer: str
    split_sequence: bool
    split_vocabulary: bool


def read(source: str, settings: Settings) -> Subject:
    """The subject that a source names: a .json file, or `module:function`."""
    if source.endswith(".json"):
        return _from_file(Path(source), settings)
    if ":" in source:
        return _from_function(source, settings)
    raise _refused(
        f"{source!r}",
        "a source is a .json file (shapes, or a Hugging Face config), or module:function",
        "for example config.json, or my_model:step",
    )


def _from_file(path: Path, settings: Settings) -> Subject:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refused(f"{path}: {error}", "the file is there and is JSON", "check its path") from None
    if not isinstance(content, dict) or not content:
        raise _refused(f"{path}: not an object", "names and shapes, or a config", "see --help")
    if "model_type" in content:
        return _from_config(path.name, content, settings)
    return _from_shapes(path.name, content, settings)


def _from_function(source: str, settings: Settings) -> Subject:
    module, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python script.py` has it
    try:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ImportError(f"{module!r} is no name of a module")
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise AttributeError(f"{type(function).__name__}, which can't be called")
    except (ImportError, AttributeError) as error:
        raise _refused(f"{source}: {error}", "it can be imported from here", "check both names") from error
    else:
        made: Any = function()
    finally:
        sys.path.pop(0)
    if (
        not isinstance(made, tuple)
        or len(made) not in (2, 3)
        or not (callable(made[0]) and isinstance(made[1], (tuple, list)))
    ):
        raise _refused(
            f"{source} returned {f'{made!r}'[:100]}",
            "the function takes nothing and returns (step, arguments) or (step, arguments, plan)",
            "arguments are a tuple; its tensors may be on the meta device",
        )
    fn, args, *rest = made
    plan = rest[0] if rest and settings.plan is None else _plan(settings)
    return Subject(source, fn, tuple(args), _with_fsdp(plan, settings))


def _from_config(name: str, content: dict[str, Any], settings: Settings) -> Subject:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config says all that is needed
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        remedy = "pip install transformers"
        raise _refused(f"{name}: {error}", "a config is read by transformers", remedy) from None
    content = {**content, "use_cache": False}
    kind = content.pop("model_type")
    if settings.layers is not None:
        content["num_hidden_layers"] = settings.layers
    if kind == "mixtral":  # of the ways to run experts, one that can be traced and sharded within each
        content.setdefault("experts_implementation", "batched_mm")
    try:
        config = transformers.AutoConfig.for_model(kind, **content)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config).to(settings.dtype)
    except (KeyError, ValueError) as error:
        rule = "the config is one of a causal language model"
        raise _refused(f"{name}: {error}", rule, "check model_type") from error
    fn, params, buffers = functional(model)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return fn(params, buffers, input_ids=batch, labels=batch)[0].loss

    batch = torch.empty(settings.batch, settings.sequence, dtype=torch.int64, device="meta")
    return _step(f"{kind} of {name}", loss, params, batch, settings)


def _from_shapes(name: str, content: dict[str, Any], settings: Settings) -> Subject:
    params = {path: _tensor(path, told, settings.dtype) for path, told in content.items()}

    def used(p: Tensor, rows: Tensor) -> Tensor:
        """Every parameter is a matrix that rows are multiplied with: its gradient is a sum over them."""
        matrix = p.reshape(p.shape[0] if p.ndim else 1, math.prod(p.shape[1:]))
        return (rows.to(p.dtype).expand(-1, matrix.shape[0]) @ matrix).float().sum()

    def loss(params: Any, batch: Tensor) -> Tensor:
        return torch.stack([used(p, batch) for p in params.values()]).sum()

    batch = torch.empty(settings.batch, 1, device="meta")
    return _step(f"the parameters of {name}", loss, params, batch, settings)


def _tensor(path: str, told: Any, dtype: torch.dtype) -> Tensor:
    """A parameter from its shape, or from {"shape": ..., "dtype": ...}."""
    shape = told.get("shape") if isinstance(told, Mapping) else told
    if isinstance(told, Mapping) and "dtype" in told:
        dtype = dtype_of(told["dtype"])
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _refused(
            f"{path}: {told!r}",
            'a parameter is [sizes], or {"shape": [sizes], "dtype": "bfloat16"}',
            'for example "wte.weight": [50257, 768]',
        )
    return torch.empty(shape, dtype=dtype, device="meta")


def _step(name: str, loss: Loss, params: Any, batch: Tensor, settings: Settings) -> Subject:
    plan = _with_fsdp(_plan(settings), settings)
    if settings.optimizer == "none":
        return Subject(name, value_and_grad(loss), (params, batch), plan)
    opt = optim.adamw(1e-4)

    def train_step(params: Any, opt_state: Any, batch: Tensor) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return Subject(name, train_step, (params, opt.init(params), batch), plan, ("params", "opt_state"))


def _plan(settings: Settings) -> Plan:
    mesh: Any = settings.mesh
    if settings.plan in (None, "none"):
        rows = [axis for axis in mesh.axis_names if axis == "dp"]
        return Plan(mesh, inputs={"batch": P(**{axis: Shard(0) for axis in rows})})
    if settings.plan == "dit":
        return plans.dit(mesh)
    made = {"llama": plans.llama, "mixtral": plans.mixtral}[settings.plan]
    return made(mesh, sequence=settings.split_sequence, vocabulary=settings.split_vocabulary)


def _with_fsdp(plan: Plan, settings: Settings) -> Plan:
    if settings.fsdp is None:
        return plan
    if settings.fsdp not in settings.mesh.axis_names:
        raise PlanError(
            explain(
                f"--fsdp {settings.fsdp}",
                rule="parameters are sharded over an axis of the mesh",
                remedy=f"one of {', '.join(settings.mesh.axis_names)}",
            )
        )
    fsdp = FSDP(settings.fsdp, wrap=settings.wrap)
    return plan.on(plan.mesh, fsdp=fsdp)


def dtype_of(name: str) -> torch.dtype:
    """A floating dtype of torch by its name."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise _refused(
            f"dtype {name!r}", "a dtype of parameters is a floating one of torch's", "for example bfloat16"
        )
    return found


def count(params: Mapping[str, Tensor]) -> int:
    """How many numbers the parameters are."""
    return sum(math.prod(p.shape) for p in params.values())


def _refused(found: str, rule: str, remedy: str) -> ArgumentError:
    return ArgumentError(explain(found, where="estimate", rule=rule, remedy=remedy))
