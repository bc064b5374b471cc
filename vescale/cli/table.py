"""Tables on a terminal: rich's where it is installed, else plain columns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec

Rows = Sequence[Sequence[str]]


def show(title: str, columns: Sequence[str], rows: Rows, right: Sequence[int] = ()) -> None:
    """Print a table; `right` are the columns that are numbers."""
    if find_spec("rich") is None:
        print(plain(title, columns, rows, right))
        return
    console = importlib.import_module("rich.console").Console
    made = importlib.import_module("rich.table").Table(
        title=title, title_justify="left", show_header=any(columns)
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index in right else "left", overflow="fold")
    text = importlib.import_module("rich.text").Text  # not markup: values may have brackets
    for row in rows:
        made.add_row(*map(text, row))
    console(width=None if sys.stdout.isatty() else 110).print(made)


def plain(title: str, columns: Sequence[str], rows: Rows, right: Sequence[int] = ()) -> str:
    """The table as text.

    >>> print(plain("a title", ("name", "bytes"), [("weights", "1,024"), ("x", "8")], right=(1,)))
    a title
      name     bytes
      weights  1,024
      x            8
    """
    lines = [columns, *rows] if any(columns) else [*rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    shown = [title]
    for line in lines:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append("  " + "  ".join(cells).rstrip())
    return "\n".join(shown)
