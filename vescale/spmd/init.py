"""`vs.init`: a module whose parameters are sharded from the start, with the bits of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import FakeTensor
from .._errors import ArgumentError, explain
from .agree import digest, same_on_all
from .deferred import Deferred, deferred
from .dtensor import DTensor
from .layout import Layout
from .locals import local_slice
from .mesh import Mesh
from .parallel_module import ParallelModule, buffer_layout
from .plan import Plan


def init(
    make: Callable[..., nn.Module], /, *args: Any, plan: Plan, seed: int | None = None, **kwargs: Any
) -> ParallelModule:
    """`vs.parallelize(make(*args, **kwargs), plan)`, without the whole module in memory.

    `make` is a module's class, or a function that returns one. Parameters and buffers have the bits, and the
    default generator the state, that `torch.manual_seed(seed); make(*args, **kwargs)` gives, for any plan and
    mesh; without a seed the generator goes on from where it is, and is in the same state on all ranks. A rank
    holds its shards and, one at a time, a whole parameter with what its initialisation takes. Each rank draws
    every number, since later ones depend on it; no rank sends anything.

    The constructor may do what it likes with tensors of its own: in-place initialisers, several in a row,
    tied weights, values read in Python. Raises TraceError when it writes to a tensor that existed before,
    ArgumentError when it returns no module, and PlanError as `plan.resolve` does.

    >>> import torch, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"tp": 2}), params={"weight": vs.P(tp=vs.Shard(0))})
    >>> model = vs.init(torch.nn.Linear, 4, 6, plan=plan, seed=0)
    >>> model.params["weight"].locals[0].shape
    torch.Size([3, 4])
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(model.params["weight"].full_tensor(), torch.nn.Linear(4, 6).weight)
    True
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(
            explain(
                f"init(..., plan={plan!r})",
                rule="the plan says where parameters live",
                remedy="pass plan=vs.Plan(mesh, params=...)",
            )
        )
    if seed is not None:
        torch.manual_seed(seed)
    mesh = plan.hosted("vs.init")
    if not mesh.is_simulated:
        same_on_all(mesh, "init", {"the default generator's state": digest(torch.get_rng_state())})
    module, record = deferred(lambda: make(*args, **kwargs))
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            explain(
                f"{getattr(make, '__qualname__', make)} made a {type(module).__name__}",
                rule="init makes a module: the first argument is its class, or a function that returns one",
                remedy="return the module",
            )
        )
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    resolved = plan.resolve_leaves(list(params), list(params.values()))
    layouts = {entry.path: entry.rest for entry in resolved}
    layouts |= {name: buffer_layout(plan, name, buffer) for name, buffer in buffers.items()}
    whole = {**params, **buffers}
    # All of them first: pieces that are allocated between whole parameters leave holes that fit none.
    moved = {name for bucket in resolved.buckets for name in bucket.names}
    sharded = {
        name: _empty(mesh, layouts[name], tensor.dtype, hollow=name in moved)
        for name, tensor in whole.items()
    }
    if plan.fsdp:
        sharded |= plan.fsdp.store(resolved.buckets, sharded)
    for name, tensor in whole.items():
        value = _real(record, tensor, name)
        for rank, piece in zip(mesh.local_ranks, sharded[name].locals, strict=True):
            piece.copy_(local_slice(value, layouts[name], rank))
        del value
    _settle(module, record)
    return ParallelModule(module, plan, ({n: sharded[n] for n in params}, {n: sharded[n] for n in buffers}))


def _empty(mesh: Mesh, layout: Layout, dtype: torch.dtype, hollow: bool) -> DTensor:
    """A DTensor without values; a hollow one has no memory either: it will get its place in a buffer."""
    shapes = [layout.local_shape(rank) for rank in mesh.local_ranks]
    make = lambda shape: torch.empty((), dtype=dtype, device=mesh.device).expand(shape)  # noqa: E731
    if not hollow:
        make = lambda shape: torch.empty(shape, dtype=dtype, device=mesh.device)  # noqa: E731
    return DTensor([make(shape) for shape in shapes], mesh, layout)


def _real(record: Deferred, tensor: Tensor, name: str) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    if tensor.device.type == "meta":
        raise ArgumentError(
            explain(
                f"{name}, a tensor on the meta device",
                rule="init makes values",
                remedy="build the module on a real device: init takes no memory for it",
            )
        )
    return record.real(tensor)


def _settle(module: nn.Module, record: Deferred) -> None:
    """A module that lends its code: its parameters and buffers on the meta device, other tensors real."""
    settled: dict[int, Tensor] = {}
    for owner in module.modules():
        for store in (owner._parameters, owner._buffers):
            for name, tensor in store.items():
                if not isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in settled:
                    settled[id(tensor)] = _on_meta(tensor)
                store[name] = settled[id(tensor)]  # type: ignore[assignment]

    def real(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if id(value) not in settled:
                settled[id(value)] = record.real(value)
            return settled[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(real, value))
        if type(value) is dict:
            return {name: real(item) for name, item in value.items()}
        return value

    own = vars(nn.Module())
    for owner in module.modules():
        for name, value in list(vars(owner).items()):
            if name not in own and _has_fake(value):
                vars(owner)[name] = real(value)


def _has_fake(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_fake, value))
    return any(map(_has_fake, value.values())) if type(value) is dict else isinstance(value, FakeTensor)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    for name, value in vars(tensor).items():  # such as a mark that says how to decay it
        if name not in ("fake_device", "fake_mode", "constant", "item_memo"):
            setattr(made, name, value)
    return made


__all__ = ["init"]
