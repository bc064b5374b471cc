"""Record: what every instruction of a run made, as fingerprints in files that other runs are compared with.

A process writes two files of JSON lines, named by the first rank that it hosts:

    rank-0.index.jsonl   of each program the traced graph, and its instructions with layouts and lines
    rank-0.calls.jsonl   of each call which program, and a fingerprint of each result on each rank

Nothing is communicated, and nothing is gathered: see `fingerprint`.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from ..spmd.agree import digest
from ..spmd.observe import Observation, Observed, Value, prepare, ranks_of
from ..spmd.parallelize import Entry, drawing
from ..spmd.program.ir import Graph, Node, Origin
from ..spmd.program.partition import Compute
from .fingerprint import fingerprint

FORMAT = 1


def record(step: Any, directory: str | Path, *, statistics: bool = False) -> Recorded:
    """`step`, a function of `vs.parallelize`, that writes a fingerprint of every value to `directory`.

        record : (step, directory) -> step with the same arguments and results

    Calls run instruction by instruction, with the bits of the program that would run, and donate what `step`
    donates. Each process writes files of its own; directories of several machines may be merged, their
    names don't clash. With `statistics` the norm, the largest magnitude and the number of elements that
    aren't finite are written too, for `diff(..., tolerance=)`.

    Raises ArgumentError for a directory that has a recording of this rank, and for a step that is no
    program: a module, or `static=False`.

    >>> import tempfile, torch, vescale as vs
    >>> mesh = vs.make_mesh({"dp": 2})
    >>> double = vs.parallelize(lambda x: 2 * x, vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     y = record(double, directory)(torch.ones(4))
    ...     sorted(path.name for path in Path(directory).iterdir())
    ['rank-0.calls.jsonl', 'rank-0.index.jsonl']
    """
    return Recorded(step, Path(directory), statistics)


class Recorded:
    """A step whose calls are recorded: see `record`."""

    def __init__(self, step: Any, directory: Path, statistics: bool) -> None:
        self.step, self.directory, self.statistics = step, directory, statistics
        self._observed = Observed(step)
        self._programs: dict[int, tuple[int, Entry]] = {}
        self.calls = 0
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self.step, args, kwargs)
        entry, leaves, _ = prepared
        if not ranks_of(self.step).local_ranks:
            return self._observed.call(prepared, lambda seen: None, donate=True)
        index, calls = self._files
        with drawing(entry, leaves):
            generators = {str(s): digest(s.find().get_state()) for s in entry.decision.sources}
        new = id(entry) not in self._programs
        number = len(self._programs) if new else self._programs[id(entry)][0]
        lines: list[dict[str, Any]] = []
        marks: list[list[Tensor]] = []
        figures: list[list[Tensor]] = []

        def watch(seen: Observation) -> None:
            if new:
                lines.append(_instruction(seen, number, len(lines)))
            for value in () if _is_view(seen) else seen.results:
                if not value.is_filling:
                    marks.append([fingerprint(t, value.layout, rank) for rank, t in value.locals.items()])
                    if self.statistics:
                        figures.append([_statistics(tensor) for tensor in value.locals.values()])

        result = self._observed.call(prepared, watch, donate=True)
        if new:
            self._programs[id(entry)] = number, entry
            _write(index, [*_program(self.step, entry, number), *lines])
        line: dict[str, Any] = {"call": self.calls, "program": number, "generators": generators}
        line["fingerprints"] = [[f"{mark % 2**64:016x}" for mark in row] for row in _numbers(marks)]
        if self.statistics:
            line["statistics"] = _numbers(figures)
        _write(calls, [line])
        self.calls += 1
        return result

    @functools.cached_property
    def _files(self) -> tuple[Path, Path]:
        """The files of this process, looked up before the first call runs: it may consume its arguments."""
        stem = self.directory / f"rank-{ranks_of(self.step).local_ranks[0]}"
        files = Path(f"{stem}.index.jsonl"), Path(f"{stem}.calls.jsonl")
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(path.exists() for path in files):
            raise ArgumentError(
                explain(
                    f"a recording in {self.directory}",
                    where="vs.debug.record",
                    rule="a directory holds one run",
                    remedy="name another directory, or delete this one",
                )
            )
        return files


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _numbers(rows: list[list[Tensor]]) -> list[list[Any]]:
    """The numbers of small tensors, fetched from their device at once."""
    if not rows:
        return []
    flat = iter(torch.stack([tensor for row in rows for tensor in row]).tolist())
    return [[next(flat) for _ in row] for row in rows]


def _statistics(local: Tensor) -> Tensor:
    """(sum of squares, largest magnitude, elements that aren't finite) of a local tensor, float64[3].

    The first two are of the finite elements.
    """
    with torch.no_grad():
        wide = local.detach()
        if wide.is_complex():
            wide = wide.abs()
        if not wide.is_floating_point() or wide.dtype.itemsize == 1:
            wide = wide.to(torch.float64)
        if not wide.numel():
            return torch.zeros(3, dtype=torch.float64, device=local.device)
        norm, largest = _sizes(wide)
        if bool(torch.isfinite(norm)):
            return torch.stack([norm * norm, largest, torch.zeros_like(norm)])
        finite = torch.isfinite(wide)
        norm, largest = _sizes(torch.where(finite, wide, 0.0))
        return torch.stack([norm * norm, largest, (~finite).sum().to(torch.float64)])


def _sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.linalg.vector_norm(x, dtype=torch.float64)
    return wide, torch.linalg.vector_norm(x, math.inf, dtype=x.dtype).to(torch.float64)


def _is_view(seen: Observation) -> bool:
    """Whether the step shows its operand in another shape: the operand's fingerprint says it all."""
    if not (isinstance(seen.step, Compute) and seen.step.pattern.view and len(seen.results) == 1):
        return False
    (operand, *_), (result,) = seen.operands, seen.results
    return all(t.numel() == result.locals[rank].numel() for rank, t in operand.locals.items())


# The index.


def _program(step: Any, entry: Entry, number: int) -> list[dict[str, Any]]:
    mesh, graph = ranks_of(step), entry.decision.graph
    head = {
        "format": FORMAT,
        "program": number,
        "function": step._name,
        "mesh": dict(zip(mesh.axis_names, mesh.shape)),
        "ranks": list(mesh.local_ranks),
        "reduction": mesh.reduction,
        "inputs": [*graph.inputs, *(value for value, _ in graph.hidden)],
        "constants": len(graph.hidden),
    }
    return [head, *(_node(node, index, number, graph) for index, node in enumerate(graph.nodes))]


def _node(node: Node, index: int, number: int, graph: Graph) -> dict[str, Any]:
    named = [f"{name}={value}" for name, value in node.kwargs.items()]
    # A mapped function is named by a handle, which counts the functions of its process.
    given = node.args[:1] if node.op.name() == "vescale::mapped" else node.args
    return {
        "program": number,
        "node": index,
        "op": str(node.op),
        "arguments": ", ".join([*map(str, given), *named]),
        "operands": list(dict.fromkeys(node.refs())),
        "results": [None if out is None else [out, str(graph.metas[out])] for out in node.outs],
        **_origin(node.origin),
    }


def _instruction(seen: Observation, number: int, place: int) -> dict[str, Any]:
    view = _is_view(seen)
    return {
        "program": number,
        "instruction": place,
        "view": view,
        "reshape": view and any(f"aten.{op}." in seen.name for op in _RESHAPES),
        "step": seen.index,
        "inner": seen.inner,
        "op": seen.name,
        "node": seen.node,
        "operands": list(dict.fromkeys(value.number for value in seen.operands)),
        "results": [_value(value, view) for value in seen.results],
        **_origin(seen.origin),
    }


# Views that keep the order of the elements, and with it the fingerprint.
_RESHAPES = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")


def _value(value: Value, view: bool) -> dict[str, Any]:
    split = None if value.layout is None else list(dict(value.layout.spec.items()))
    return {
        "value": value.number,
        "source": value.source,
        "name": value.name,
        "look": str(value.meta),
        "layout": None if value.layout is None else str(value.layout.spec),
        "split": split,
        "pending": value.layout is not None and bool(value.layout.partials),
        "recorded": not (value.is_filling or view),
        "ranks": list(value.locals),
    }


def _origin(origin: Origin) -> dict[str, str]:
    return {"line": origin.line, "module": origin.module, "region": origin.region}


__all__ = ["Recorded", "record"]
