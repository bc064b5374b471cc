"""A breakpoint that shows the values of all ranks that live in this process."""

from __future__ import annotations

import bdb
import math
import pdb
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._compat import base_tensor, outside_functorch
from .._errors import ArgumentError, ConsistencyError, TraceError, explain
from ..spmd.agree import no_word
from ..spmd.dtensor import DTensor
from ..spmd.mesh import Mesh
from ..spmd.program.trace import current_trace, is_recording, user_line
from ..spmd.records import Missing, gather
from ..spmd.varying import is_mapped

MAX_LEAVES = 30  # of the variables that are shown on entry
_stops: Counter[str] = Counter()  # how often each mesh has stopped: every rank counts alike


def breakpoint(*, rank: int = 0) -> None:
    """Stop here in pdb, inside `vs.parallelize(fn, plan, static=False)` or outside of any program.

    The DTensors among the caller's variables are shown with the piece of each rank that this process hosts.
    Two commands are added to those of pdb: `ranks x` shows the pieces of an expression, `whole x` its global
    value.

    On simulated ranks this is pdb: lines can be stepped through. In processes every rank makes this call;
    `rank` opens the prompt, the others wait for as long as it takes, and when it is left all go on. There it
    is for looking: `n` and `s` go on like `c`, and an expression that communicates would wait for ranks that
    don't. `q` is an error on all ranks. The prompt reads the standard input of its process.

    Raises TraceError in a function that is being traced, where there are no values, and ArgumentError
    inside `vs.shard_map`, where values are plain tensors: Python's own breakpoint() stops there.
    """
    frame = sys._getframe(1)
    if is_recording():
        raise TraceError(
            explain(
                "vs.debug.breakpoint() in a function that is being traced",
                where=user_line(),
                rule="a static program has no values while it is made, and no Python when it runs",
                remedy="vs.parallelize(fn, plan, static=False); for a program, vs.debug.record",
            )
        )
    if is_mapped():
        raise ArgumentError(
            explain(
                "vs.debug.breakpoint() inside vs.shard_map",
                where=user_line(),
                rule="values are this rank's own plain tensors there",
                remedy="Python's breakpoint() shows them, with static=False",
            )
        )
    tracing = current_trace()
    mesh = tracing.mesh if tracing is not None else _mesh_of(frame)
    debugger = _Debugger(mesh)
    if mesh is None or mesh.is_simulated:
        debugger.show(frame)
        debugger.set_trace(frame)
    elif mesh.local_ranks:
        _stop(debugger, mesh, frame, rank)


def _stop(debugger: _Debugger, mesh: Mesh, frame: FrameType, rank: int) -> None:
    """One rank looks, the others wait for it: through the store, so that no collective runs out of time."""
    if not 0 <= rank < mesh.size:
        raise ArgumentError(
            explain(f"breakpoint(rank={rank})", rule=f"the ranks of {mesh} are 0 to {mesh.size - 1}")
        )
    name = f"{mesh.abstract}@{','.join(map(str, mesh.world_ranks))}"
    key = f"vescale/breakpoint/{name}/{_stops[name]}"
    _stops[name] += 1
    if mesh.rank != rank:
        try:  # for as long as it likes, while it lives
            (told,) = gather(mesh.store, [key], [mesh.world_ranks[rank]], math.inf, in_step=False)
        except (Missing, RuntimeError) as error:
            raise no_word("vs.debug.breakpoint", error) from None
        if told != b"go":
            raise ConsistencyError(
                explain(f"rank {rank} left the debugger with q", where=user_line(), rule="q ends the run")
            )
        return
    said = "quit"
    try:
        debugger.show(frame)
        debugger.reset()
        debugger.interaction(frame, None)
        said = "quit" if debugger.left else "go"
    finally:
        mesh.store.set(key, said)
    if debugger.left:
        raise bdb.BdbQuit


class _Debugger(pdb.Pdb):
    """pdb with two commands for tensors on a mesh."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__(nosigint=True)
        self.mesh, self.left = mesh, False
        self.prompt = "(vescale) "

    def show(self, frame: FrameType) -> None:
        """The DTensors among the variables of a frame."""
        code = frame.f_code
        self.message(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}, on {self.mesh}")
        leaves = list(_named(frame.f_locals))
        for name, tensor in leaves[:MAX_LEAVES]:
            self.message("\n".join(_pieces(name, tensor)))
        if len(leaves) > MAX_LEAVES:
            self.message(f".. and {len(leaves) - MAX_LEAVES} more: ranks EXPRESSION")

    def do_ranks(self, arg: str) -> None:
        """ranks expression: the pieces of a DTensor, or of those in a tree, on the ranks hosted here."""
        value = self._value(arg)
        for name, tensor in _named({arg.strip(): value}):
            self.message("\n".join(_pieces(name, tensor, whole=True)))

    def do_whole(self, arg: str) -> None:
        """whole expression: the global value of a DTensor. Not in processes, where it takes all ranks."""
        value = self._value(arg)
        base = base_tensor(value) if isinstance(value, Tensor) else value
        if not isinstance(base, DTensor):
            self.message(repr(value))
        elif base.mesh.is_simulated:
            with outside_functorch(), torch.no_grad():
                self.message(repr(base.full_tensor()))
        else:
            self.message("the other ranks are waiting: the whole takes them all; see ranks")

    def do_quit(self, arg: str) -> Any:
        """q(uit): end the run."""
        self.left = True
        return super().do_quit(arg)

    do_q = do_exit = do_quit

    def _value(self, arg: str) -> Any:
        assert self.curframe is not None
        try:
            return eval(arg, self.curframe.f_globals, self.curframe_locals)
        except Exception as error:
            self.error(f"{type(error).__name__}: {error}")
            return None


def _named(variables: dict[str, Any]) -> Iterator[tuple[str, DTensor]]:
    """The DTensors in some variables, by path."""
    for name, value in variables.items():
        leaves = _tree.leaves(value) if isinstance(value, (Tensor, dict, list, tuple)) else []
        paths = _tree.paths(value) if leaves else []
        for path, leaf in zip(paths, leaves):
            base = base_tensor(leaf) if isinstance(leaf, Tensor) else leaf
            if isinstance(base, DTensor):
                yield f"{name}.{path}" if path else name, base


def _pieces(name: str, tensor: DTensor, whole: bool = False) -> Iterator[str]:
    """A DTensor in lines: its layout, and what each rank holds."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    yield f"{name}: {dtype}{list(tensor.layout.shape)} {tensor.layout.spec}"
    with outside_functorch(), torch.no_grad():
        for rank in tensor.mesh.local_ranks:
            piece = tensor.to_local(rank).detach()
            if whole or piece.numel() <= 8:
                text = " ".join(str(piece.tolist()).split()) if not whole else f"\n{piece}"
            else:
                wide = piece.abs().double() if piece.is_complex() else piece.double()
                text = f"from {wide.amin():.6g} to {wide.amax():.6g}, mean {wide.mean():.6g}"
            yield f"  rank {rank} {list(piece.shape)}: {text}"


def _mesh_of(frame: FrameType) -> Mesh | None:
    """The mesh of the first DTensor among a frame's variables."""
    return next((tensor.mesh for _, tensor in _named(frame.f_locals)), None)


__all__ = ["breakpoint"]
