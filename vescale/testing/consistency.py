"""`assert_consistent`: one function, plainly on one device and on meshes, and where the first bit differs.

A check is a short loop: run a step everywhere, compare every leaf, feed back what mirrors an argument. Only
when something differs are the programs looked into, by `bisect`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.dtensor import DTensor
from ..spmd.lane_plan import LanePlan
from ..spmd.lanes import lane_axes
from ..spmd.layout import AbstractMesh
from ..spmd.plan import Plan
from .bisect import first_divergence
from .compare import Difference, difference, wording
from .divergence import Divergence
from .pool import RankPool
from .processes import first_unlike, first_unlike_seen, observed, run_on
from .running import GENERATOR, Fn, Mode, Step, one_thread, replicas, run, simulated, whole

# In units of eps times the largest value of a leaf: room for some thousand sums in another order.
BOUND = 256.0


_LANES_AGREE = (
    "run lane by lane both have the same bits: the function itself differs from run to run, or this"
)


class Inconsistent(AssertionError):
    """A run that differs from plain torch.

    `run` names it, `step` counts from 0, `path` is that of the leaf in the result. `difference` is None where
    the leaves don't even agree in kind, shape or dtype. `divergence` is the first instruction whose output
    differs, where one was found.
    """

    def __init__(
        self,
        fn: str,
        run: str,
        step: int,
        path: str,
        found: str,
        difference: Difference | None = None,
        divergence: Divergence | None = None,
    ) -> None:
        self.run, self.step, self.path = run, step, path
        self.difference, self.divergence = difference, divergence
        lines = [f"{fn} is not consistent with plain torch: {run}, step {step}", f"{path}: {found}"]
        if divergence is not None:
            lines.append(str(divergence))
        if divergence is not None and divergence.excused and difference is not None:
            lines.append(
                "no instruction is at fault: pass whole numbers, whose sums are exact, or bitwise=False; "
                "where rounding grows, as Adam's does at gradients near 0, a larger bound=, absolute= or "
                "fewer steps"
            )
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Consistency:
    """What `assert_consistent` saw: the runs, how many values it compared, and the largest differences.

    `ulps` and `error` are those of `Difference`; `differing` counts leaves that were not bit-equal.
    """

    fn: str
    runs: tuple[str, ...]
    compared: int
    differing: int
    ulps: int
    error: float
    worst: str = ""

    def __str__(self) -> str:
        head = f"{self.fn}: {self.compared:,} leaves of {len(self.runs)} runs"
        if not self.differing:
            return f"{head} are bit-equal to plain torch"
        return (
            f"{head}, {self.differing:,} of them not bit-equal: {self.ulps:,} ulps and {self.error:.3g} eps "
            f"of the largest value at most, the latter in {self.worst}"
        )


def assert_consistent(
    fn: Fn,
    args: Sequence[Any],
    plans: Plan | Sequence[Plan] | Mapping[str, Plan],
    *,
    bitwise: bool = True,
    bound: float = BOUND,
    absolute: float = 0.0,
    steps: int = 1,
    static: Sequence[bool] = (True, False),
    processes: RankPool | bool = False,
    donate: Sequence[str] = (),
    lanes: Mapping[str, int] | None = None,
) -> Consistency:
    """Run `fn(*args)` in plain torch and on the mesh of each plan, and compare every leaf of the results.

    fn: (*trees) -> tree, as `vs.parallelize` takes it; args: global values, on one device. Each plan is run
    as a program and op by op (`static`), on simulated ranks, and with `processes` on real ones: `True` starts
    and ends a pool, a `RankPool` is used as it is. fn and args are pickled then. With `steps`, what mirrors
    an argument is fed back, as in a train step, and every step's results are compared. All runs start from
    the same state of torch's generators and must leave the state that plain torch leaves. Everything runs on
    one thread.

    With `bitwise`, every bit must agree. vescale promises that for draws, layout changes, the elementwise ops
    of docs/consistency.md, and sums that are exact; a sum over a dim that is split may be made in another
    order, and the report says so when that is what differs first. With `bitwise=False` leaves may differ by
    `bound`, in units of eps * the leaf's largest value, or by `absolute`, and the result states the
    differences that were seen. `absolute` is for leaves that are nothing but rounding, as the gradient of a
    bias of keys in attention is. Integers and booleans must agree.
    Replicas must agree bit by bit, and so must real processes with simulated ranks, either way.

    With `lanes`, as of `vs.parallelize`, plans are run as programs only, and those whose meshes differ in
    nothing but how many ranks host the lanes must have equal bits, also with `bitwise=False`.

    Raises Inconsistent, an AssertionError: the first leaf that differs with its path, index and both values,
    and the first instruction of the program whose output differs, with its op and source line. Generators
    that fn closes over are not set back between runs: pass them as arguments.

    >>> import torch, vescale as vs
    >>> plan = vs.Plan(vs.make_mesh({"dp": 2}), inputs={"x": vs.P(dp=vs.Shard(0))})
    >>> print(vs.testing.assert_consistent(lambda x: (x * 2).sum(), [torch.arange(4.0)], plan))
    <lambda>: 2 leaves of 2 runs are bit-equal to plain torch
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    _check_arguments(fn, args, steps, processes)
    modes = _modes(plans, static, tuple(donate), lanes)
    pools = _Pools(processes)
    check = _Check(fn, name, None if bitwise else bound, absolute)
    before = torch.get_rng_state()
    with one_thread():
        reference = list(run(_on_one_device(fn), tuple(args), steps, before))
        try:
            for mode in modes:
                check.simulated(mode, reference, tuple(args))
                if processes:
                    check.processes(mode, reference, pools)
        finally:
            pools.close()
            torch.set_rng_state(reference[-1].after[GENERATOR])
    return check.summary()


class _Check:
    """One check under way: what is compared, and what was seen."""

    def __init__(self, fn: Fn, name: str, bound: float | None, absolute: float) -> None:
        self.fn, self.name, self.bound, self.absolute = fn, name, bound, absolute
        self.runs: list[str] = []
        self.compared = 0
        self.seen: list[tuple[str, Difference]] = []
        self.local: dict[str, list[list[Any]]] = {}  # what simulated ranks got, by run: [step][leaf]
        self.of_lanes: dict[AbstractMesh, tuple[Mode, list[list[Any]]]] = {}  # the first run, by lanes

    def simulated(self, mode: Mode, reference: Sequence[Step], args: tuple[Any, ...]) -> None:
        mode = mode.simulated()
        given = [leaf.detach().clone() for leaf in _tree.leaves(args) if isinstance(leaf, Tensor)]
        on_mesh, kept, wholes = mode.on_mesh(self.fn), [], []
        self.runs.append(f"{mode.name}, simulated")
        for number, (plain, ours) in enumerate(
            zip(reference, run(on_mesh, args, len(reference), reference[0].before), strict=True)
        ):
            fault = self.compare(plain, ours)
            if fault is not None:
                path, found, apart = fault
                where = first_divergence(self.fn, mode, on_mesh, plain)
                raise Inconsistent(self.name, self.runs[-1], number, path, found, apart, where)
            kept.append(_held(ours.result))
            if mode.lanes is not None:
                wholes.append([_own(whole(leaf)) for leaf in _tree.leaves((ours.result, ours.after))])
        after = [leaf for leaf in _tree.leaves(args) if isinstance(leaf, Tensor)]
        for path, old, new in zip(_tensor_paths(args), given, after, strict=True):
            if (apart := difference(old, new.detach(), zeros=True)) is not None:
                found = f"an argument of the caller's was changed: {apart}"
                raise Inconsistent(self.name, self.runs[-1], len(reference) - 1, path, found, apart)
        self.local[mode.name] = kept
        if mode.lanes is not None:
            over = lane_axes(mode.plan.mesh.abstract, mode.lanes)
            first, expected = self.of_lanes.setdefault(over, (mode, wholes))
            self.same_lanes(first, mode, expected, wholes, reference)

    def same_lanes(
        self,
        first: Mode,
        mode: Mode,
        expected: Sequence[list[Any]],
        got: Sequence[list[Any]],
        reference: Sequence[Step],
    ) -> None:
        """Two runs of the same lanes, that other ranks hosted."""
        for number, (plain, there, here) in enumerate(zip(reference, expected, got, strict=True)):
            paths = [*_tree.paths(plain.result), *plain.after]
            for path, a, b in zip(paths, there, here, strict=True):
                apart = difference(a, b, zeros=True) if isinstance(a, Tensor) else None
                if apart is None:
                    continue
                runs = [observed(self.fn, one, plain.args, plain.before) for one in (first, mode)]
                parted = first_unlike_seen(runs[0], [runs[1]])
                if parted is None:
                    where = Divergence("what ranks make of lanes", "", "", _LANES_AGREE)
                else:
                    seen, lane, inside = parted
                    where = Divergence(seen.op, seen.line, "", f"lane {lane} parts here", "", inside)
                found = f"other bits than {first.name}, with the same lanes: {apart}"
                raise Inconsistent(self.name, self.runs[-1], number, path or "result", found, apart, where)

    def processes(self, mode: Mode, reference: Sequence[Step], pools: _Pools) -> None:
        """The same on real ranks, which must have the bits of the simulated ones."""
        self.runs.append(f"{mode.name}, real processes")
        mesh = mode.plan.mesh.abstract
        pool = pools.of(mesh.size)
        first = reference[0]
        answers = run_on(pool, self.fn, first.args, mode, len(reference), first.before)[: mesh.size]
        for rank, steps in enumerate(answers):
            for number, (got, leaves) in enumerate(zip(steps, self.local[mode.name], strict=True)):
                for path, there, here in zip(_tree.paths(reference[number].result), got, leaves, strict=True):
                    expected, apart = here[rank] if isinstance(here, list) else here, None
                    found = wording(expected, there)
                    if found is None and isinstance(there, Tensor):
                        apart = difference(expected, there, zeros=True)
                    self.compared += 1
                    if found or apart:
                        found = f"rank {rank} has other bits than the simulated rank: {found or apart}"
                        where = self.where_unlike(mode, pool, reference[number])
                        raise Inconsistent(
                            self.name, self.runs[-1], number, path or "result", found, apart, where
                        )

    def where_unlike(self, mode: Mode, pool: RankPool, plain: Step) -> Divergence | None:
        """The first instruction after which real ranks have other bits than simulated ones."""
        if not mode.static:
            return None
        mode = Mode(mode.name, simulated(mode.plan), mode.static, lanes=mode.lanes)
        found = first_unlike(pool, self.fn, mode, plain.args, plain.before)
        if found is None:
            return None
        seen, rank, apart = found
        why = f"rank {rank} of the real processes parts from the simulated rank here"
        return Divergence(seen.op, seen.line, "", why, "", apart)

    def compare(self, plain: Step, ours: Step) -> tuple[str, str, Difference | None] | None:
        """The first leaf that differs: its path, how it does, and by how much."""
        paths, expected, spec = _tree.flatten_with_path(plain.result)
        got, their_spec = _tree.flatten(ours.result)
        if spec != their_spec:
            return "result", f"expected the structure {spec}, got {their_spec}", None
        self.compared += len(paths)
        paths, expected, got = (
            [*paths, *plain.after],
            [*expected, *plain.after.values()],
            [*got, *ours.after.values()],
        )
        for path, a, b in zip(paths, expected, got, strict=True):
            value, path = whole(b), path or "result"
            found = wording(a, value)
            if found is not None:
                return path, found, None
            if not isinstance(a, Tensor):
                continue
            apart = difference(a, value)
            if apart is not None and not self.allows(apart, a, value):
                over = "" if self.bound is None else f", where bound={self.bound:g} are allowed"
                return path, f"{apart}{over}", apart
            if apart is not None:
                self.seen.append((path, apart))
            if not isinstance(b, DTensor):
                continue
            pieces = dict(zip(b.mesh.local_ranks, b.locals, strict=True))
            if (unlike := replicas(value, b.layout, pieces)) is not None:
                rank, apart = unlike
                return path, f"rank {rank} of the replicas disagrees: {apart}", apart
        return None

    def allows(self, apart: Difference, expected: Tensor, got: Tensor) -> bool:
        """Whether rounding may be all that is different."""
        if self.bound is None or not (expected.is_floating_point() or expected.is_complex()):
            return False
        if apart.error <= self.bound:
            return True
        wide = torch.promote_types(expected.dtype, torch.float64)
        gaps = (expected.detach().to(wide) - got.detach().to(wide)).abs()
        return apart.ulps is not None and float(gaps[gaps.isfinite()].max()) <= self.absolute

    def summary(self) -> Consistency:
        ulps = max((apart.ulps or 0 for _, apart in self.seen), default=0)
        worst, error = max(
            ((path, apart.error) for path, apart in self.seen), key=lambda pair: pair[1], default=("", 0.0)
        )
        return Consistency(self.name, tuple(self.runs), self.compared, len(self.seen), ulps, error, worst)


class _Pools:
    """The pool of real ranks: the caller's, or one that is started when it is needed."""

    def __init__(self, given: RankPool | bool) -> None:
        self.given = given if isinstance(given, RankPool) else None
        self.own: RankPool | None = None

    def of(self, size: int) -> RankPool:
        pool = self.given or self.own
        if pool is None or (pool is self.own and pool.size < size):
            self.close()
            pool = self.own = RankPool(size, timeout=120)
        if pool.size < size:
            raise ArgumentError(
                explain(
                    f"a plan for {size} ranks",
                    where="assert_consistent(..., processes=)",
                    rule=f"the pool has {pool.size}",
                    remedy=f"pass a RankPool({size}), or processes=True",
                )
            )
        return pool

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
            self.own = None


def _on_one_device(fn: Fn) -> Fn:
    """fn with plain results: a `vs.shard_map` that it calls gives DTensors outside a program too."""
    return lambda *args: _tree.tree_map(whole, fn(*args))


def _modes(
    plans: Plan | Sequence[Plan] | Mapping[str, Plan],
    static: Sequence[bool],
    donate: tuple[str, ...],
    lanes: Mapping[str, int] | None,
) -> list[Mode]:
    named = (
        dict(plans)
        if isinstance(plans, Mapping)
        else {
            f"plan {number}": plan
            for number, plan in enumerate([plans] if isinstance(plans, Plan) else plans)
        }
    )
    wrong = [repr(plan) for plan in named.values() if not isinstance(plan, Plan)]
    if wrong or not named or not static:
        raise ArgumentError(
            explain(
                f"plans={wrong or plans!r}, static={static!r}",
                where="assert_consistent",
                rule="one vs.Plan or several, and True, False or both for static",
                remedy='pass {"tp": vs.Plan(mesh, params=...)}',
            )
        )
    modes = [
        Mode(f"{name} on {plan.mesh.abstract}, {'static' if kind else 'op by op'}", plan, kind, donate, of)
        for name, plan in named.items()
        for of in [plan.lanes if lanes is None and isinstance(plan, LanePlan) else lanes]
        for kind in static
        if kind or of is None
    ]
    if not modes:
        raise ArgumentError(
            explain(
                f"static={list(static)} and lanes",
                where="assert_consistent",
                rule="op by op each rank is one rank: lanes are of programs",
                remedy="static=[True]",
            )
        )
    return modes


def _check_arguments(fn: Fn, args: Sequence[Any], steps: int, processes: RankPool | bool) -> None:
    if isinstance(fn, nn.Module):
        raise ArgumentError(
            explain(
                f"assert_consistent({type(fn).__name__}, ...)",
                rule="the first argument is a function, whose results are all that it does",
                remedy="call, params, buffers = vs.functional(module), and pass params and buffers in args",
            )
        )
    if not isinstance(args, (tuple, list)) or steps < 1:
        raise ArgumentError(
            explain(
                f"args={type(args).__name__}, steps={steps}",
                where="assert_consistent",
                rule="args is the list of the arguments, steps a positive number",
                remedy="pass [params, batch]",
            )
        )
    wrapped = [leaf for leaf in _tree.leaves(tuple(args)) if isinstance(leaf, DTensor)]
    if wrapped:
        raise ArgumentError(
            explain(
                f"{len(wrapped)} DTensors among the arguments",
                where="assert_consistent",
                rule="plain torch runs on global values, and the plans place them",
                remedy="pass x.full_tensor(), and say where it lives in the plan",
            )
        )


def _held(result: Any) -> list[Any]:
    """What each simulated rank holds of each leaf; static leaves as they are."""
    return [
        [piece.detach().clone() for piece in leaf.locals] if isinstance(leaf, DTensor) else leaf
        for leaf in _tree.leaves(result)
    ]


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _tensor_paths(tree: Any) -> list[str]:
    paths, leaves, _ = _tree.flatten_with_path(tree)
    return [path for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
