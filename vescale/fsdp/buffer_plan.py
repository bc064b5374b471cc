"""`BufferPlan`: where each tensor of a bucket lies in a buffer of equal shards. A frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from .._errors import ArgumentError, PlanError, explain, near_misses
from ..spmd.placements import RaggedShard
from .bound import Floor
from .spec import TensorSpec

# What fits a page. Beyond that a picture says how much it leaves out.
MAX_SHARDS = 48


@dataclass(frozen=True)
class BufferPlan:
    """Addresses of the tensors of one bucket. Sizes and offsets in elements, `unit` in bytes.

    Shard r of the global buffer is `[r * shard_size, (r + 1) * shard_size)`; rank r of the axis owns it.
    `starts` are in the order of `specs`; `floor` is the counting bound and the block that it comes from.

    >>> from vescale.fsdp import Rows, TensorSpec, plan_buffer
    >>> import torch
    >>> w = TensorSpec.of("w", (6, 8), torch.float32, Rows(2))
    >>> b = TensorSpec("b", (8,), torch.float32, block=1)
    >>> plan = plan_buffer([w, b], num_shards=2)
    >>> plan
    BufferPlan(2 tensors, 2 shards of 32, padding 8 = 14.3%, bound 32)
    >>> plan.units("w"), plan.placement("w", (0,))
    (((32, 1), (16, 1)), RaggedShard((0,), (2, 1)))
    """

    specs: tuple[TensorSpec, ...]
    num_shards: int
    unit: int
    shard_size: int
    starts: tuple[int, ...]
    floor: Floor

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Name to offset in the global buffer."""
        return MappingProxyType({spec.name: start for spec, start in zip(self.specs, self.starts)})

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(spec.elements for spec in self.specs)

    @property
    def padding(self) -> int:
        """Elements of the global buffer that no tensor owns."""
        return self.num_shards * self.shard_size - self.elements

    @property
    def overhead(self) -> float:
        """Padding as a part of the tensors' elements."""
        return self.padding / self.elements if self.elements else 0.0

    @property
    def lower_bound(self) -> int:
        """The least shard size that counting allows (`counting_bound`): no plan of one buffer is below it."""
        return self.floor.size

    def spec(self, name: str) -> TensorSpec:
        """The tensor of that name. Raises PlanError where there is none."""
        if name not in self._numbers:
            close = near_misses(name, self._numbers)
            raise PlanError(
                explain(
                    found=f"no tensor {name!r} in this buffer",
                    rule="names are those of the specs",
                    remedy=f"did you mean {' or '.join(close)}?" if close else "see plan.table()",
                )
            )
        return self.specs[self._numbers[name]]

    def units(self, name: str) -> tuple[tuple[int, int], ...]:
        """How many elements of the tensor the ranks hold, in rank order: (elements, neighbouring ranks) runs.

        At most five runs, however many shards: none, a part, whole shards, a part, none.
        """
        elements, start = self.spec(name).elements, self.offsets[name]
        if not elements:
            return ((0, self.num_shards),)
        size, end = self.shard_size, start + elements
        first, last = start // size, (end - 1) // size
        if first == last:
            runs = [(0, first), (elements, 1), (0, self.num_shards - first - 1)]
        else:
            head, tail = (first + 1) * size - start, end - last * size
            runs = [
                (0, first),
                (head, 1),
                (size, last - first - 1),
                (tail, 1),
                (0, self.num_shards - last - 1),
            ]
        return tuple((count, ranks) for count, ranks in runs if ranks)

    def placement(self, name: str, dims: Sequence[int]) -> RaggedShard:
        """The RaggedShard over `dims` that the addresses imply; `Block.dims` gives the dims.

        A tensor without elements is rank 0's. Raises PlanError where a cut goes through a row of these dims.
        """
        spec, dims = self.spec(name), tuple(dims)
        row = 1
        for size in spec.shape[len(dims) :]:
            row *= size
        runs = self.units(name)
        if not spec.elements:
            return RaggedShard.from_runs(dims, ((1, 1), (0, self.num_shards - 1)))
        if any(count % row for count, _ in runs):
            raise PlanError(
                explain(
                    found=f"RaggedShard over dims {dims}, whose rows have {row} elements",
                    where=name,
                    rule=f"cuts are after multiples of the block, here {spec.block} elements",
                    remedy="use the dims of the block that was declared (`Block.dims`)",
                )
            )
        return RaggedShard.from_runs(dims, tuple((count // row, ranks) for count, ranks in runs))

    def table(self) -> str:
        """The plan as text, tensors in the order of their addresses."""
        head = ("tensor", "shape", "block", "offset", "shards")
        lines: list[tuple[str, ...]] = [head]
        for number in sorted(range(len(self.specs)), key=lambda number: (self.starts[number], number)):
            spec, start = self.specs[number], self.starts[number]
            block = f"{spec.block} / {spec.period}" if spec.period else str(spec.block)
            lines.append((spec.name, str(spec.shape), block, str(start), self._shards_text(spec, start)))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*text, repr(self)])

    def picture(self, path: str | Path) -> None:
        """Draw the buffer to a PNG or SVG file: one line a shard, a colour a tensor, padding white.

        Neighbouring shards that one tensor fills are one line. Raises ArgumentError without matplotlib.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ArgumentError(
                explain(
                    found="no matplotlib",
                    where="picture(path)",
                    rule="pictures are drawn by matplotlib",
                    remedy="install vescale[demo], or print plan.table()",
                )
            ) from None
        lines, left_out = self._lines()
        figure = Figure(figsize=(10, 1 + 0.22 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for height, (_, parts) in enumerate(lines):
            for number, start, count in parts:
                axes.barh(
                    height, count, left=start, color=f"C{number % 10}", edgecolor="white", linewidth=0.4
                )
                if count > self.shard_size / 12:
                    name = self.specs[number].name.split(".", 1)[-1][-int(90 * count / self.shard_size) :]
                    axes.text(start + count / 2, height, name, ha="center", va="center", fontsize=5)
        axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=6)
        axes.set_xlim(0, max(self.shard_size, 1))
        axes.invert_yaxis()
        axes.set_xlabel("elements of the shard" + (f"; {left_out} more lines left out" if left_out else ""))
        axes.set_title(repr(self), fontsize=8)
        figure.savefig(Path(path), dpi=150)

    def __repr__(self) -> str:
        return (
            f"BufferPlan({len(self.specs)} tensors, {self.num_shards} shards of {self.shard_size}, "
            f"padding {self.padding} = {self.overhead:.1%}, bound {self.lower_bound})"
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {spec.name: number for number, spec in enumerate(self.specs)}

    def _shards_text(self, spec: TensorSpec, start: int) -> str:
        if not spec.elements:
            return "-"
        first, last = start // self.shard_size, (start + spec.elements - 1) // self.shard_size
        return str(first) if first == last else f"{first}-{last}"

    def _lines(self) -> tuple[list[tuple[str, list[tuple[int, int, int]]]], int]:
        """What a picture shows: (label, [(tensor, start in shard, elements)]) a line, and lines left out."""
        shards: dict[int, list[tuple[int, int, int]]] = {}
        alike: dict[int, int] = {}
        for number, (spec, start) in enumerate(zip(self.specs, self.starts)):
            if not spec.elements:
                continue
            shard = start // self.shard_size
            for count, ranks in (run for run in self.units(spec.name) if run[0]):
                inside = start % self.shard_size if shard == start // self.shard_size else 0
                shards.setdefault(shard, []).append((number, inside, count))
                alike[shard] = ranks
                shard += ranks
        labels = {s: f"shard {s}" if alike[s] == 1 else f"shards {s}-{s + alike[s] - 1}" for s in shards}
        lines = [(labels[shard], shards[shard]) for shard in sorted(shards)]
        return lines[:MAX_SHARDS], max(0, len(lines) - MAX_SHARDS)
