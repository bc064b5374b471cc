"""The only file that touches private torch; each use lists the torch versions and the reason.

`tests/pure/test_house.py` bans private torch (`torch._x`, `torch.x._y`) everywhere else, so that a
new torch release is one file's work. Each name here says

* which torch versions it was checked on,
* what public spelling is missing, and what would let us drop it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

# 2.11 - 2.13. See `outside_functorch`.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# 2.11 - 2.13. Tracing without memory: torch documents fake tensors, but exports them from here only.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)

# 2.11 - 2.13. A mode that sees every ATen call, and a context without modes (a trace computes for real
# what it knows already); documented, but they live in a private module.
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes as no_modes,  # noqa: F401
)

# 2.11 - 2.13. What torch.func keeps of itself; it has no stub.
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

# 2.11 - 2.13. The type of `torch.ops.aten.mm.default`, for annotations and isinstance.
OpOverload = torch._ops.OpOverload


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """2.11 - 2.13. What a fake tensor raises when the program needs its value."""
    return DataDependentOutputException, DynamicOutputShapeException


def below_autograd() -> AbstractContextManager[Any]:
    """2.11 - 2.13. Calls inside skip the autograd key: a program has no tape to write.

    torch.no_grad still passes through it, at about a tenth of the cost of a small op;
    torch.inference_mode would make results that a later backward refuses.
    """
    return torch._C._AutoDispatchBelowAutograd()


def plain_dispatch() -> AbstractContextManager[Any]:
    """2.11 - 2.13. Ops on a wrapper subclass change the wrapper itself: its sizes, as `squeeze_` does."""
    return torch._C._DisableTorchDispatch()


def is_mutable(op: Any) -> bool:
    """2.11 - 2.13. Whether an overload writes to an argument; the schema has no public reader."""
    return op._schema.is_mutable


def default_store() -> Any:
    """2.11 - 2.13. The store of the default process group, which init_process_group keeps to itself."""
    return torch.distributed.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> Any:
    """2.11 - 2.13. The timeout of a process group, a timedelta; only init_process_group is told it."""
    device = "cuda" if "nccl" in torch.distributed.get_backend(group) else "cpu"
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", timedelta(seconds=300))


def make_wrapper(
    cls: type,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """2.11 - 2.13. A tensor of class `cls` with a shape and no storage; torch documents no other way."""
    # By place, 0.9 us; by name it takes 1.3.
    return _make_wrapper_subclass(
        cls, shape, strides, None, None, dtype, torch.strided, device, False, requires_grad
    )


_make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


# 2.11 - 2.13. As __torch_function__: calls go straight to __torch_dispatch__. The public default wraps
# every result in the subclass, plain tensors too.
disabled_torch_function = torch._C._disabled_torch_function_impl


def base_tensor(tensor: torch.Tensor) -> Any:
    """2.11 - 2.13. The tensor below torch.func's wrappers (grad levels, vmap), which hide who it is."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def outside_functorch() -> AbstractContextManager[Any]:
    """2.11 - 2.13. Inside, torch.func's transforms see no op: what is made of unwrapped tensors is plain."""
    return temporarily_clear_interpreter_stack()


def outlived(tensor: torch.Tensor) -> torch.Tensor:
    """2.11 - 2.13. The tensor below the wrappers of torch.func's levels that are over.

    A pullback of torch.func.vjp runs after its level, on what was saved inside; a vjp of such a wrapper is
    an internal error of torch's ("escaped?").
    """
    return _functorch.unwrap_if_dead(tensor)


def default_device() -> torch.device:
    """2.11 - 2.13. torch.get_default_device, at 0.1 us in place of 2.9 where no default was set.

    A default device is a mode on the stack of function modes, `with torch.device(...)` too.
    """
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


_CPU = torch.device("cpu")


def inside_functorch() -> bool:
    """2.11 - 2.13. Whether a transform of torch.func is running here: it would wrap what a trace makes."""
    return _functorch.peek_interpreter_stack() is not None


def written_arguments(op: Any) -> list[int]:
    """2.11 - 2.13. The positions of the arguments that an overload writes to."""
    arguments = enumerate(op._schema.arguments)
    return [index for index, argument in arguments if argument.alias_info and argument.alias_info.is_write]


def view_source(op: Any) -> int | None:
    """2.11 - 2.13. The position of the argument of which an overload returns a view, None if it doesn't."""
    if op._schema.is_mutable or not any(result.alias_info for result in op._schema.returns):
        return None
    arguments = enumerate(op._schema.arguments)
    return next((index for index, argument in arguments if argument.alias_info), None)


def functional_form(op: Any) -> Any:
    """2.11 - 2.13. The overload that computes what an in-place or `out=` one writes, or None."""
    name = op._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]
    for overload in packet.overloads() if packet is not None else ():
        form = getattr(packet, overload)
        found = [(argument.name, str(argument.type)) for argument in form._schema.arguments]
        if found == wanted and not form._schema.is_mutable:
            return form
    return None


def overload_name(op: Any) -> str:
    """2.11 - 2.13. "Tensor" of aten.add.Tensor."""
    return op._overloadname


def is_batched(tensor: torch.Tensor) -> bool:
    """2.11 - 2.13. Whether torch.func.vmap maps over a dim of the tensor, at any level."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def in_place_form(op: Any) -> Any:
    """2.11 - 2.13. The overload that writes to its first argument what an overload computes, or None."""
    packet = getattr(torch.ops.aten, op._schema.name.split("::")[1] + "_", None)
    form = getattr(packet, op._overloadname, None) if packet is not None else None
    if form is None or written_arguments(form) != [0]:
        return None
    same = [(a.name, str(a.type)) for a in form._schema.arguments] == [
        (a.name, str(a.type)) for a in op._schema.arguments
    ]
    return form if same else None


def foreach_form(op: Any, overload: str) -> Any:
    """2.11 - 2.13. The overload of `_foreach_x` for lists of the operands of aten's x, or None."""
    packet = getattr(torch.ops.aten, "_foreach_" + op._schema.name.split("::")[1], None)
    return getattr(packet, overload, None) if packet is not None else None


def storage_key(tensor: torch.Tensor) -> int:
    """2.11 - 2.13. Which memory a tensor views, fake ones too; as long as something views it."""
    return tensor.untyped_storage()._cdata


def forget_fakes(mode: Any) -> None:
    """2.11 - 2.13. Drop a fake tensor mode's weak references: `module.half()` refuses tensors with one."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def written_tensors(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """2.11 - 2.13. The tensors that a call of an overload writes to, `out=` ones too."""
    found: list[Any] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in found if tensor is not None]


def bound_arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """2.11 - 2.13. The arguments of a call of an overload by name, defaults filled in."""
    names = op._schema.arguments
    given = dict(zip((argument.name for argument in names), args)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in names}


def generator_key(generator: torch.Generator) -> int:
    """2.11 - 2.13. Which generator it is: what a dispatch mode sees is another Python object for it."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]
