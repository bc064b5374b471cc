"""Plan: where parameters, inputs, outputs and activations of a one-device function live on a mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import _tree
from .._errors import ArgumentError, LayoutError, PlanError, explain, nearest
from .layout import AbstractMesh, Layout
from .mesh import Mesh
from .placements import P


@dataclass(frozen=True, slots=True)
class Staged:
    """One layout for a parameter at rest (`init`) and one in use (`run`), as in ZeRO-3.

    At rest are the parameter between calls, its gradient and its optimizer state; in use it is
    inside `vs.value_and_grad`.

    >>> from vescale.spmd.placements import RaggedShard
    >>> Staged(init=P(dp=RaggedShard((0,), (3, 1))), run=P())
    Staged(init=P(dp=RaggedShard((0,), (3, 1))), run=P())
    """

    init: P
    run: P


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as whoever stages it sees it: its layout in use, or a `Staged` of its own."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    entry: P | Staged


@dataclass(frozen=True, slots=True)
class Staging:
    """Where parameters rest and which move together: what `Plan(fsdp=)` decides.

    `entries` by path; `buckets` are for the passes of whoever staged, see `Facts`. `run_dtype` and
    `reduce_dtype` are those of parameters in use and of gradients on the way (None: the parameter's own).
    """

    entries: Mapping[str, Staged]
    buckets: tuple[Any, ...]
    run_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Stager(Protocol):
    """What `Plan` asks of its `fsdp`: see `vs.FSDP`."""

    def stage(self, mesh: AbstractMesh, parameters: Sequence[Parameter]) -> Staging:
        """Where each parameter rests. Raises PlanError."""
        ...

    def store(self, buckets: tuple[Any, ...], tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The DTensors at rest of each bucket, in memory of its own."""
        ...

    def grouped(
        self, buckets: Sequence[Any], mesh: AbstractMesh, outside: Callable[[Layout], Layout]
    ) -> tuple[Any, ...]:
        """The buckets of lanes as those of the ranks of `mesh` that host them, see `lanes`."""
        ...


@dataclass(frozen=True, slots=True)
class ResolvedParameter:
    """What a plan says of one parameter: its layouts, and the rule that says so (None: no rule).

    `run_dtype` and `reduce_dtype` are those of its uses and of its gradient while it is reduced.
    """

    path: str
    rest: Layout
    run: Layout
    rule: str | None
    dtype: torch.dtype | None = None
    run_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def local(self) -> str:
        """What rank 0 holds at rest: its shape, and its bytes where the dtype is known."""
        shape = self.rest.local_shape(0)
        held = "" if self.dtype is None else f" {math.prod(shape) * self.dtype.itemsize:,} B"
        return f"{shape}{held}"


class Resolved(tuple[ResolvedParameter, ...]):
    """What a plan says of each parameter of a tree, in the order of its leaves; prints as a table.

    `buckets` are the parameters that move together, those of `Plan(fsdp=)`.
    """

    buckets: tuple[Any, ...] = ()

    def __str__(self) -> str:
        rows = [("parameter", "shape", "at rest", "in use", "on rank 0", "rule")]
        for entry in self:
            run = "same" if entry.run is entry.rest else str(entry.run.spec)
            shape, rest, rule = str(entry.rest.shape), str(entry.rest.spec), entry.rule or "-"
            rows.append((entry.path, shape, rest, run, entry.local, rule))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *map(str, self.buckets)])


class Plan:
    """Placements for a one-device function, by name.

        Plan(mesh, params={regex: P or Staged}, inputs={path: P}, outputs={path: P},
             activations={regex: P}, fsdp=vs.FSDP(...), params_arg="params")

    `params` regexes fullmatch the dotted path of a parameter inside the argument named `params_arg`;
    the first that matches wins, a parameter that none matches is replicated. `inputs` keys are
    argument paths, or prefixes that end at a dot: "batch" covers "batch.tokens". `outputs` keys are
    paths in the result ("0.loss", or "" for all of it) or such prefixes. `activations` regexes fullmatch
    a module path + ".input" or ".output" and pin floating-point tensors there. `fsdp` shards what the
    rules say over one more axis at rest, and moves it a bucket at a time.

    A rule that matches nothing is a PlanError that lists near misses. Plans compose: in `a | b` the rules
    of b come first. A plan on an `AbstractMesh` can be resolved and lowered, and has no ranks to run on.

    >>> from vescale.spmd.mesh import make_mesh
    >>> from vescale.spmd.placements import Shard
    >>> mesh = make_mesh({"tp": 2}, backend="simulated")
    >>> plan = Plan(mesh, params={r".*fc1.weight": P(tp=Shard(0))})
    >>> import torch
    >>> print(plan.resolve({"mlp.fc1.weight": torch.ones(4, 2), "mlp.fc2.bias": torch.ones(2)}))
    parameter       shape   at rest         in use  on rank 0    rule
    mlp.fc1.weight  (4, 2)  P(tp=Shard(0))  same    (2, 2) 16 B  .*fc1.weight
    mlp.fc2.bias    (2,)    P()             same    (2,) 8 B     -
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        params: Mapping[str, P | Staged] | None = None,
        inputs: Mapping[str, P] | None = None,
        outputs: Mapping[str, P] | None = None,
        activations: Mapping[str, P] | None = None,
        *,
        fsdp: Stager | None = None,
        params_arg: str = "params",
    ) -> None:
        self.mesh, self.fsdp, self.params_arg = mesh, fsdp, params_arg
        self.params = dict(params or {})
        self.inputs, self.outputs = dict(inputs or {}), dict(outputs or {})
        self.activations = dict(activations or {})
        self._check()

    @property
    def device(self) -> torch.device:
        """Where its mesh computes; the CPU stands for the device of an AbstractMesh."""
        return self.mesh.device if isinstance(self.mesh, Mesh) else torch.device("cpu")

    def hosted(self, where: str) -> Mesh:
        """The mesh, to put tensors on and run programs; ArgumentError when there are no ranks."""
        if isinstance(self.mesh, Mesh):
            return self.mesh
        raise ArgumentError(
            explain(
                f"a plan on the abstract mesh {self.mesh}",
                where=where,
                rule="an AbstractMesh has no ranks: its programs can be lowered, not run",
                remedy="call .lower(...), or make the plan with vs.make_mesh(...)",
            )
        )

    def __or__(self, other: Plan) -> Plan:
        if other.mesh is not self.mesh:
            raise PlanError(
                explain(
                    f"plans on {self.mesh} and {other.mesh}",
                    where="plan | plan",
                    rule="plans compose on one mesh",
                    remedy="make both with the same mesh object",
                )
            )
        return Plan(
            self.mesh,
            {
                **other.params,
                **{rule: spec for rule, spec in self.params.items() if rule not in other.params},
            },
            {**self.inputs, **other.inputs},
            {**self.outputs, **other.outputs},
            {
                **other.activations,
                **{rule: spec for rule, spec in self.activations.items() if rule not in other.activations},
            },
            fsdp=other.fsdp or self.fsdp,
            params_arg=other.params_arg,
        )

    def on(self, mesh: Mesh | AbstractMesh, *, fsdp: Stager | None = None) -> Plan:
        """The same rules on another mesh of these axes; `fsdp` takes the place of the plan's own."""
        return Plan(
            mesh,
            self.params,
            self.inputs,
            self.outputs,
            self.activations,
            fsdp=self.fsdp if fsdp is None else fsdp,
            params_arg=self.params_arg,
        )

    def resolve(self, tree: Any) -> Resolved:
        """What the plan says of each parameter of `tree`, as a table.

        Raises PlanError for rules that match nothing and for placements that a parameter can't have,
        all of them at once.
        """
        paths, leaves, _ = _tree.flatten_with_path(tree)
        return self.resolve_leaves(paths, leaves)

    def resolve_leaves(self, paths: Sequence[str], leaves: Sequence[torch.Tensor]) -> Resolved:
        """`resolve` for parameters by path; of a leaf only shape and dtype count."""
        parameters, rules = self._match(paths, leaves)
        staging = self.fsdp.stage(self.mesh.abstract, parameters) if self.fsdp else Staging({}, ())
        problems, resolved = [], []
        for parameter, rule in zip(parameters, rules, strict=True):
            path, shape = parameter.path, parameter.shape
            is_float = parameter.dtype.is_floating_point
            entry = staging.entries.get(path, parameter.entry)
            rest, run = (entry.init, entry.run) if isinstance(entry, Staged) else (entry, entry)
            try:
                made = ResolvedParameter(
                    path,
                    Layout(self.mesh.abstract, rest, shape),
                    Layout(self.mesh.abstract, run, shape),
                    rule,
                    parameter.dtype,
                    staging.run_dtype if is_float else None,
                    staging.reduce_dtype if is_float else None,
                )
                resolved.append(made)
            except LayoutError as error:
                problems.append(f"{path} of shape {shape}: {error}")
        if problems:
            raise PlanError("\n".join(["these parameters can't be placed as the plan says:", *problems]))
        table = Resolved(resolved)
        table.buckets = staging.buckets
        return table

    def _match(
        self, paths: Sequence[str], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[Parameter], list[str | None]]:
        """Each parameter with what the first rule that matches says of it, and that rule."""
        unmatched, parameters, rules = dict(self.params), [], []
        for path, leaf in zip(paths, leaves, strict=True):
            matches = [rule for rule in self.params if re.fullmatch(rule, path)]
            for rule in matches:
                unmatched.pop(rule, None)
            entry = self.params[matches[0]] if matches else P()
            parameters.append(Parameter(path, tuple(leaf.shape), leaf.dtype, entry))
            rules.append(matches[0] if matches else None)
        if unmatched:
            raise PlanError(
                explain(
                    f"params rules that match no parameter: {with_near_misses(unmatched, paths)}",
                    where=f"argument {self.params_arg!r}, {len(paths)} parameters",
                    rule="a rule is a regex that fullmatches the dotted path of at least one parameter",
                    remedy="mend the regex, or drop the rule",
                )
            )
        return parameters, rules

    def input_spec(self, path: str) -> P | None:
        """The placements of an argument path: those of its longest prefix among `inputs`."""
        return _longest_prefix(self.inputs, path)

    def output_spec(self, path: str) -> P | None:
        """The placements of a result path: those of its longest prefix among `outputs`."""
        return _longest_prefix(self.outputs, path)

    def check_inputs(self, paths: Sequence[str]) -> None:
        """Raises PlanError for `inputs` that are a prefix of no argument path."""
        _check_prefixes(self.inputs, paths, "inputs")

    def check_outputs(self, paths: Sequence[str]) -> None:
        """Raises PlanError for `outputs` that are a prefix of no result path."""
        _check_prefixes(self.outputs, paths, "outputs")

    def activation_rules(self) -> list[tuple[re.Pattern[str], P]]:
        return [(re.compile(rule), spec) for rule, spec in self.activations.items()]

    def _check(self) -> None:
        for kind, rules in (
            ("params", self.params),
            ("inputs", self.inputs),
            ("outputs", self.outputs),
            ("activations", self.activations),
        ):
            for rule, spec in rules.items():
                where = f"Plan {kind}[{rule!r}]"
                specs = (spec.init, spec.run) if kind == "params" and isinstance(spec, Staged) else (spec,)
                for one in specs:
                    if not isinstance(one, P):
                        raise PlanError(
                            explain(
                                repr(one),
                                where=where,
                                rule="a value is a P of placements by axis name"
                                + (", or a Staged of two" if kind == "params" else ""),
                                remedy="for example vs.P(tp=vs.Shard(0))",
                            )
                        )
                    for axis in one:
                        self.mesh.abstract.check_axis(axis, where=where)
                if kind in ("params", "activations"):
                    try:
                        re.compile(rule)
                    except re.error as error:
                        raise PlanError(
                            explain(
                                f"{rule!r}: {error}",
                                where=where,
                                rule="keys are regular expressions",
                                remedy="escape dots and brackets, as in r'blocks\\.0\\..*'",
                            )
                        ) from None

    def __repr__(self) -> str:
        parts = [
            f"{name}={getattr(self, name)!r}"
            for name in ("params", "inputs", "outputs", "activations", "fsdp")
            if getattr(self, name)
        ]
        return f"Plan({', '.join([repr(self.mesh), *parts])})"


def _longest_prefix(rules: Mapping[str, P], path: str) -> P | None:
    matching = [key for key in rules if key in ("", path) or path.startswith(f"{key}.")]
    return rules[max(matching, key=len)] if matching else None


def _check_prefixes(rules: Mapping[str, P], paths: Sequence[str], kind: str) -> None:
    for key in rules:
        if key and not any(path == key or path.startswith(f"{key}.") for path in paths):
            raise PlanError(
                explain(
                    f"{kind} key {key!r} that matches nothing",
                    rule=f"a key of {kind} is a path, or a prefix of one that ends at a dot",
                    remedy=nearest(key, paths),
                )
            )


def with_near_misses(rules: Iterable[str], paths: Sequence[str]) -> str:
    """A list of rules that match none of `paths`, each with the paths that may have been meant."""
    return "; ".join(f"{rule!r} ({nearest(_plain(rule), paths)})" for rule in rules)


def _plain(rule: str) -> str:
    """The regex without its punctuation, to look for near misses."""
    return re.sub(r"\\d\+|\.\*|[\\^$()?+*\[\]]", "", rule)
