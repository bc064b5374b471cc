"""`vs.visualize`: which rank holds what, as text or as a picture.

The tensor is cut wherever some rank's part begins or ends; all elements of such a cell are on the same
ranks, and the cell shows which. Deciding what to draw (`slices`) is apart from drawing it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

from .._errors import ArgumentError, explain
from .dtensor import DTensor
from .layout import Interval, Layout

# What fits a terminal and a page. Beyond that the picture says how much it leaves out.
MAX_LINES, MAX_CELLS, MAX_SLICES = 32, 24, 8


@dataclass(frozen=True, slots=True)
class Slice:
    """A 2-d part of a tensor, cut into cells: `ranks[row][column]` hold cell (rows[row], columns[column])."""

    title: str
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]


def visualize(layout: Layout | DTensor, path: str | Path | None = None) -> None:
    """Print which ranks hold which elements, or draw it to a PNG or SVG file at `path`.

    Rows and columns of the grid are ranges of indices; each cell shows the ranks that hold it, several
    where it is replicated or pending. Tensors of three dims or more are drawn slice by slice. Of a ragged
    tensor the flat intervals of each rank are listed too.

    Raises ArgumentError when a path is given and matplotlib is not installed.

    >>> from vescale.spmd.layout import AbstractMesh
    >>> from vescale.spmd.placements import P, RaggedShard
    >>> mesh = AbstractMesh(("dp",), (2,))
    >>> visualize(Layout(mesh, P(dp=RaggedShard((0, 1), (5, 7))), (4, 6)))
    P(dp=RaggedShard((0, 1), (5, 7))) on dp=2, shape (4, 6)
          0:4   4:6
        +-----------+
    0:1 |  0     0  |
        |     +-----+
    1:2 |  0  |  1  |
        +-----+     |
    2:4 |  1     1  |
        +-----------+
    rank 0  0:10
    rank 1  10:24
    """
    if isinstance(layout, DTensor):
        layout = layout.layout
    if path is None:
        print(text(layout))
    else:
        _draw(layout, path)


def text(layout: Layout) -> str:
    """What `visualize` prints."""
    lines = [_title(layout)]
    parts, left_out = slices(layout)
    for part in parts:
        lines += [part.title] * bool(part.title) + _grid(part)
    if left_out:
        lines.append(f".. and {left_out} more slices")
    if not parts:
        lines.append("no elements")
    if layout.ragged is not None:
        lines += _listing(layout)
    return "\n".join(line.rstrip() for line in lines)


def slices(layout: Layout) -> tuple[list[Slice], int]:
    """The cells of each 2-d slice, and how many slices are left out."""
    cuts = _cuts(layout)
    if not math.prod(layout.shape):
        return [], 0
    *outer, rows, columns = [((0, 1),)] * (2 - len(cuts)) + cuts
    found = []
    for where in islice(product(*outer), MAX_SLICES):
        first = tuple(start for start, _ in where)

        def ranks(row: Interval, column: Interval, first: tuple[int, ...] = first) -> tuple[int, ...]:
            index = (*first, row[0], column[0])
            return layout.owner(index[len(index) - len(layout.shape) :])

        title = f"[{', '.join([*map(_range, where), ':', ':'])}]" if where else ""
        grid = tuple(tuple(ranks(row, column) for column in columns) for row in rows)
        found.append(Slice(title, rows, columns, grid))
    return found, math.prod(map(len, outer)) - len(found)


def _title(layout: Layout) -> str:
    return f"{layout.spec} on {layout.mesh}, shape {layout.shape}"


def _cuts(layout: Layout) -> list[tuple[Interval, ...]]:
    """The ranges into which each dim falls where some rank's box begins or ends."""
    ends: list[set[int]] = [{0, size} for size in layout.shape]
    for rank in range(layout.mesh.size):
        for box in layout.boxes(rank):
            for dim, interval in enumerate(box):
                ends[dim] |= set(interval)
    return [tuple(pairwise(sorted(dim))) for dim in ends]


def _range(interval: Interval) -> str:
    return f"{interval[0]}:{interval[1]}"


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks of a cell, short.

    >>> _ranks((0, 1)), _ranks((0, 1, 2, 3)), _ranks((0, 2, 4, 6))
    ('0,1', '0-3', '0,2..6')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        return f"{ranks[0]}-{ranks[-1]}" if steps == {1} else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]},..{ranks[-1]}"


def _grid(part: Slice) -> list[str]:
    """Cells, with lines between those that are on other ranks."""
    rows, columns = part.rows[:MAX_LINES], part.columns[:MAX_CELLS]
    held = [line[: len(columns)] for line in part.ranks[: len(rows)]]
    names = [_ranks(cell) for line in held for cell in line] + [_range(column) for column in columns]
    width = max(map(len, names)) + 2
    margin = max(len(_range(row)) for row in rows)
    # With a frame of cells that nobody holds, every line of the grid is one between two cells.
    grid: list[list[tuple[int, ...] | None]] = [[None, *line, None] for line in held]
    frame: list[tuple[int, ...] | None] = [None] * (len(columns) + 2)
    lines = [" " * (margin + 2) + " ".join(_range(column).center(width) for column in columns)]
    for number, (above, below) in enumerate(pairwise([frame, *grid, frame])):
        rule = ""
        for column in range(len(columns) + 1):
            across = [above[c] != below[c] for c in (column, column + 1)]
            down = [line[column] != line[column + 1] for line in (above, below)]
            rule += ("+" if any(down) else "-") if any(across) else "|" if any(down) else " "
            rule += ("-" if across[1] else " ") * width * (column < len(columns))
        lines.append(" " * (margin + 1) + rule)
        if number == len(rows):
            break
        body = "|"
        for cell, after in pairwise(below[1:]):
            body += _ranks(cell or ()).center(width) + ("|" if cell != after else " ")
        lines.append(f"{_range(rows[number]):>{margin}} {body}")
    hidden = {"rows": len(part.rows) - len(rows), "columns": len(part.columns) - len(columns)}
    if any(hidden.values()):
        lines.append(f".. and {', '.join(f'{n} more {what}' for what, n in hidden.items() if n)}")
    return lines


def _listing(layout: Layout) -> list[str]:
    """The flat intervals of each rank."""
    lines = []
    for rank in range(min(layout.mesh.size, MAX_LINES)):
        found = list(layout.regions(rank))
        more = f" .. {len(found)} in all" * (len(found) > MAX_SLICES)
        lines.append(f"rank {rank}  {' '.join(map(_range, found[:MAX_SLICES])) or 'nothing'}{more}")
    hidden = layout.mesh.size - len(lines)
    return lines + [f".. and {hidden} more ranks"] * bool(hidden)


def _draw(layout: Layout, path: str | Path) -> None:
    """Cells as coloured rectangles, to scale; one colour for each set of ranks."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ArgumentError(
            explain(
                "no matplotlib",
                where=f"visualize(..., {str(path)!r})",
                rule="pictures are drawn by matplotlib, which vescale does not need otherwise",
                remedy="pip install 'vescale[demo]', or leave the path out for text",
            )
        ) from error
    parts, left_out = slices(layout)
    count = max(len(parts), 1)
    across = min(count, 4)
    figure = Figure(figsize=(1 + 4 * across, 1 + 3.4 * math.ceil(count / across)), layout="constrained")
    figure.suptitle(f"{layout.spec}\n{layout.mesh}, shape {layout.shape}", fontsize=10)
    held = dict.fromkeys(cell for part in parts for line in part.ranks for cell in line)
    palette = mpl.colormaps["tab20" if len(held) > 10 else "tab10"]
    colour: dict[tuple[int, ...], Any] = {cell: palette(i % palette.N) for i, cell in enumerate(sorted(held))}
    for number, part in enumerate(parts):
        axes = figure.add_subplot(math.ceil(count / across), across, number + 1)
        height, width = part.rows[-1][1], part.columns[-1][1]
        for (top, bottom), line in zip(part.rows, part.ranks):
            for (left, right), cell in zip(part.columns, line):
                size = right - left, bottom - top
                box = Rectangle((left, top), *size, facecolor=colour[cell], edgecolor="white", alpha=0.75)
                axes.add_patch(box)
                if len(part.rows) * len(part.columns) <= MAX_LINES * MAX_CELLS:
                    axes.text(left + size[0] / 2, top + size[1] / 2, _ranks(cell), ha="center", va="center")
        axes.set_title(part.title, fontsize=9)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_xticks([part.columns[0][0], *(stop for _, stop in part.columns)][: MAX_CELLS + 1])
        axes.set_yticks([part.rows[0][0], *(stop for _, stop in part.rows)][: MAX_LINES + 1])
        axes.tick_params(labelsize=8)
    if left_out:
        figure.supxlabel(f"and {left_out} more slices", fontsize=8)
    figure.savefig(path, dpi=150)
