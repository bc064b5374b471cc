"""A timeline as a picture: a row for each lane of each rank, as measured above, by the model below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import ArgumentError, explain

if TYPE_CHECKING:
    from .timeline import Span, Timeline

MAX_RANKS = 16


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draw the measured spans of up to 16 ranks, and the modelled ones of the first."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ArgumentError(
            explain(
                "no matplotlib",
                where=f"save({str(path)!r})",
                rule="pictures are drawn by matplotlib, which vescale does not need otherwise",
                remedy="pip install 'vescale[demo]', or save a .json",
            )
        ) from error
    shown = [span for span in timeline.spans if span.rank in timeline.ranks[:MAX_RANKS]]
    first = min((span.rank for span in timeline.modelled), default=0)
    model = [span for span in timeline.modelled if span.rank == first]
    heights = [max(len(_rows(spans)), 1) for spans in (shown, model)]
    figure = Figure(figsize=(12, 2.2 + 0.34 * sum(heights)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    kinds = list(dict.fromkeys(span.kind for span in (*shown, *model)))
    colours = mpl.colormaps["tab20"]
    hues = {kind: colours(number % colours.N) for number, kind in enumerate(kinds)}
    _bars(upper, shown, hues, f"measured: {timeline.clock}")
    _bars(lower, model, hues, f"modelled: {timeline.rates}")
    handles = [Patch(color=hues[kind], label=kind) for kind in kinds]
    upper.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{timeline.mesh}: {1e3 * timeline.seconds:.3g} ms measured", fontsize=11)
    figure.savefig(path, dpi=150)


def _rows(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """The lanes of each rank that have spans, compute first."""
    found = dict.fromkeys((span.rank, span.lane) for span in spans)
    return sorted(found, key=lambda row: (row[0], row[1] != "compute", row[1]))


def _bars(axes: Any, spans: Sequence[Span], hues: dict[str, Any], title: str) -> None:
    rows = _rows(spans)
    at = {row: number for number, row in enumerate(rows)}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in spans:
        bars.setdefault((at[span.rank, span.lane], span.kind), []).append(
            (span.start * 1e3, span.seconds * 1e3)
        )
    for (row, kind), pieces in bars.items():
        axes.broken_barh(pieces, (row - 0.42, 0.84), facecolors=hues[kind])
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max((span.end for span in spans), default=1.0) * 1e3 or 1.0)
    axes.set_xlabel(f"ms, {title}", fontsize=9)
    axes.tick_params(labelsize=8)
