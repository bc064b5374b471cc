"""Draw a lowered program: what a rank holds, computes and exchanges, over estimated time."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from .._errors import ArgumentError, explain
from .program.cost import REGIONS, CostAnalysis, Rates
from .program.memory import KINDS, MemoryAnalysis

MAX_LABELS = 24  # collectives that are named; beyond that they would cover each other


def draw(cost: CostAnalysis, memory: MemoryAnalysis, path: str | Path, rates: Rates) -> None:
    """Memory by kind above, and below a lane for the device and one for each axis; drawn to `path`."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ArgumentError(
            explain(
                "no matplotlib",
                where=f"visualize({str(path)!r})",
                rule="pictures are drawn by matplotlib, which vescale does not need otherwise",
                remedy="pip install 'vescale[demo]', or print memory_analysis() and cost_analysis()",
            )
        ) from error
    ends = list(accumulate(map(rates.seconds, cost.events)))
    scale, unit = _unit(ends[-1] if ends else 0.0, [(1.0, "s"), (1e3, "ms"), (1e6, "us")])
    starts = [scale * time for time in (0.0, *ends)]
    each, flop = _unit(cost.flops, [(1e-15, "Pflop"), (1e-12, "Tflop"), (1e-9, "Gflop"), (1e-6, "Mflop")])
    lanes = ["device", *dict.fromkeys(event.wire.axis for event in cost.events if event.wire is not None)]
    figure = Figure(figsize=(12, 4.2 + 1.15 * len(lanes)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1.15 * len(lanes)))
    _memory(upper, memory, starts, mpl.colormaps["tab10"])
    _lanes(lower, cost, starts, lanes, mpl.colormaps["Set2"], Patch)
    lower.set_xlabel(f"estimated time, {unit}, one instruction after the other ({rates})", fontsize=9)
    lower.set_xlim(0, starts[-1] or 1)
    figure.suptitle(
        f"rank {cost.rank}: {len(cost.events):,} instructions, {cost.flops * each:,.3g} {flop}, "
        f"{starts[-1]:.3g} {unit} by the rates",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _memory(axes: Any, memory: MemoryAnalysis, starts: list[float], colours: Any) -> None:
    """Stacked kinds, a step an instruction, and where the peak is."""
    scale, unit = _unit(memory.peak, [(2.0**-30, "GiB"), (2.0**-20, "MiB"), (2.0**-10, "KiB"), (1.0, "B")])
    shown = [kind for kind in KINDS if any(memory.kinds.get(kind, ()))]
    if not shown:
        return
    series = [[scale * nbytes for nbytes in (*memory.kinds[kind], memory.kinds[kind][-1])] for kind in shown]
    palette = [colours(KINDS.index(kind)) for kind in shown]
    axes.stackplot(starts, series, labels=shown, colors=palette, alpha=0.75, step="post", linewidth=0)
    event, height = memory.events[memory.at], scale * memory.peak
    where = (starts[memory.at] + starts[memory.at + 1]) / 2
    right = where > 0.6 * starts[-1]
    axes.annotate(
        f"peak {height:,.3g} {unit}: {event.name}\n{event.origin}",
        (where, height),
        xytext=(-12 if right else 12, 14),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "linewidth": 0.8},
    )
    axes.set_ylim(0, height * 1.2)
    axes.set_ylabel(f"memory, {unit}", fontsize=9)
    axes.tick_params(labelsize=8)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lanes(
    axes: Any, cost: CostAnalysis, starts: list[float], lanes: list[str], colours: Any, patch: Any
) -> None:
    """A bar an instruction: on the device by region, on the wire by kind."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event, start, end in zip(cost.events, starts, starts[1:]):
        key = ("device", event.region) if event.wire is None else (event.wire.axis, event.wire.kind)
        bars.setdefault(key, []).append((start, end - start))
    found = {what for _, what in bars}
    order = [region for region in REGIONS if region in found]
    order += dict.fromkeys(what for lane, what in bars if lane != "device")
    hues = {what: colours(number % colours.N) for number, what in enumerate(order)}
    for (lane, what), spans in bars.items():
        axes.broken_barh(spans, (lanes.index(lane) - 0.45, 0.9), facecolors=hues[what])
    _labels(axes, cost, starts, lanes)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.tick_params(labelsize=8)
    handles = [patch(color=hues[what], label=what) for what in order]
    axes.legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _labels(axes: Any, cost: CostAnalysis, starts: list[float], lanes: list[str]) -> None:
    """The longest collectives by kind and bytes, where there is room for the words."""
    found = [(starts[at + 1] - starts[at], at) for at, event in enumerate(cost.events) if event.wire]
    taken: dict[str, list[float]] = {}
    for width, at in sorted(found, reverse=True):
        wire = cost.events[at].wire
        assert wire is not None
        centre, others = starts[at] + width / 2, taken.setdefault(wire.axis, [])
        apart = min([abs(centre - x) for x in others], default=starts[-1]) / starts[-1]
        if len(others) >= MAX_LABELS or apart < 0.025 or not 0.01 < centre / starts[-1] < 0.99:
            continue
        others.append(centre)
        scale, unit = _unit(
            wire.received, [(2.0**-30, "GiB"), (2.0**-20, "MiB"), (2.0**-10, "KiB"), (1.0, "B")]
        )
        text = f"{wire.kind} {scale * wire.received:.3g} {unit}"
        axes.text(centre, lanes.index(wire.axis), text, rotation=90, ha="center", va="center", fontsize=6.5)


def _unit(value: float, units: list[tuple[float, str]]) -> tuple[float, str]:
    """The first unit of which `value` is at least one."""
    return next((unit for unit in units if value * unit[0] >= 1), units[-1])
