"""One function, run plainly and on a mesh, some steps long, from the same arguments and generator states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.layout import Layout
from ..spmd.locals import assemble, local_slice
from ..spmd.mesh import Mesh, make_mesh
from ..spmd.parallelize import Parallelized, parallelize
from ..spmd.plan import Plan
from .compare import Difference, difference

Fn = Callable[..., Any]
GENERATOR = "the state of torch's default generator"


@dataclass(frozen=True)
class Step:
    """A step of a run: what it was given, and what came of it.

    `args` are those of the call, `before` the state of torch's generator then, `after` the ones that it left:
    of the default generator, and of those among the arguments, by name.
    """

    args: tuple[Any, ...]
    before: Tensor
    result: Any
    after: dict[str, Tensor]


@dataclass(frozen=True)
class Mode:
    """One way to run a function on a mesh: the name that a report gives it, and what it takes."""

    name: str
    plan: Plan
    static: bool
    donate: tuple[str, ...] = ()
    lanes: Mapping[str, int] | None = None

    def on_mesh(self, fn: Fn) -> Parallelized:
        """The function on the plan's mesh."""
        return parallelize(fn, self.plan, static=self.static, donate=self.donate, lanes=self.lanes)

    def simulated(self) -> Mode:
        """The same on simulated ranks."""
        return replace(self, plan=simulated(self.plan))


def run(fn: Fn, args: tuple[Any, ...], steps: int, before: Tensor) -> Iterator[Step]:
    """Each step of `fn` from `args`, with the generator in the state `before` at the start.

    A step is handed out before the next one runs, which may consume what it was given.
    """
    args = own_generators(args)
    state = before
    for number in range(steps):
        torch.set_rng_state(state)
        given = own_generators(args)
        result = fn(*args)
        after = {GENERATOR: torch.get_rng_state(), **_states(args)}
        yield Step(given, state, result, after)
        if number < steps - 1:
            args, state = feed_back(args, result), after[GENERATOR]


def _states(args: tuple[Any, ...]) -> dict[str, Tensor]:
    paths, leaves, _ = _tree.flatten_with_path(args)
    return {
        f"the state of the generator {path} of the arguments": leaf.get_state()
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, torch.Generator)
    }


def own_generators(tree: Any) -> Any:
    """The tree with generators of its own, in the same states: every run starts alike."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Generator):
            return leaf
        return torch.Generator(leaf.device).set_state(leaf.get_state())

    return _tree.tree_map(copy, tree)


def feed_back(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    """The arguments of the next step: what mirrors an argument takes its place.

    The parts of the result (it, or the items of a tuple or list) are taken in order; each goes to the first
    argument of its structure, shapes and dtypes that has none yet. A part that is a bare tensor goes back as
    a global value: `parallelize` keeps layouts of trees only. One without dims, as a loss is, stays out.

    >>> w, batch = torch.ones(2), torch.ones(3, 2)
    >>> feed_back((w, batch), (w * 2, torch.tensor(0.5)))[0]
    tensor([2., 2.])
    """
    parts = result if type(result) in (tuple, list) else (result,)
    following, taken = list(args), set[int]()
    for part in parts:
        look = _look(part)
        for place, arg in enumerate(args):
            if place not in taken and look is not None and _look(arg) == look:
                following[place] = whole(part)
                taken.add(place)
                break
    if not taken:
        raise ArgumentError(
            explain(
                "no part of the result has the structure, shapes and dtypes of an argument",
                where="steps > 1",
                rule="what mirrors an argument is fed back: new parameters, new optimizer state",
                remedy="return what the next step starts from, or leave steps at 1",
            )
        )
    return tuple(following)


def _look(tree: Any) -> Any:
    leaves, spec = _tree.flatten(tree)
    if not leaves or (tree is leaves[0] and isinstance(tree, Tensor) and not tree.dim()):
        return None
    kinds = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return spec, kinds


def whole(leaf: Any) -> Any:
    """The global value of a DTensor, by the plain definition where all ranks are here; others as they are."""
    if not isinstance(leaf, DTensor):
        return leaf
    leaf.check_fresh()
    if not leaf.mesh.is_simulated:
        return leaf.full_tensor().detach()
    return assemble(dict(enumerate(piece.detach() for piece in leaf.locals)), leaf.layout)


def replicas(value: Tensor, layout: Layout, pieces: Mapping[int, Tensor]) -> tuple[int, Difference] | None:
    """The first rank whose piece is not its part of the global value; pending reductions have no such
    parts."""
    if layout.partials:
        return None
    for rank, piece in pieces.items():
        apart = difference(local_slice(value, layout, rank), piece.detach(), zeros=True)
        if apart is not None:
            return rank, apart
    return None


def simulated(plan: Plan) -> Plan:
    """The same plan on a mesh of simulated ranks."""
    if isinstance(plan.mesh, Mesh) and plan.mesh.is_simulated:
        return plan
    return plan.on(make_mesh(axes_of(plan), backend="simulated"))


def axes_of(plan: Plan) -> dict[str, int]:
    mesh = plan.mesh.abstract
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """How a kernel cuts its work among threads changes the order of its sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
