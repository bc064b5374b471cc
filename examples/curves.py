"""What a training run was: a table of losses, and a picture of their curves."""

from pathlib import Path
from types import SimpleNamespace

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


def report(seen: SimpleNamespace, title: str, picture: Path) -> None:
    table = Table("loss, nats a byte", "first", "last", title=title)
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for width, (name, curve) in zip((6, 2, 2), seen.curves.items()):  # the second lies on the first
        if losses := list(curve.values()):
            table.add_row(name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}")
            axes.plot(list(curve), losses, label=name, linewidth=width)
    axes.set(title=title, xlabel="step", ylabel="nats a byte")
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    words = f"{seen.rate:,.0f} tokens/s; {seen.step.cache_info()}"
    if any(seen.curves["plain torch, one device"]):
        words = f"relative difference <= {seen.gap:.1e}; {words}"
    Console().print(table, words, f"curves: {picture}", sep="\n")
