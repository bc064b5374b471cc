"""What a rank of a mesh that isn't here would hold and send in a step, by `vs.estimate`.

SOURCE is one of
  config.json       a Hugging Face config (needs transformers); a train step of its causal language model
  shapes.json       {"wte.weight": [50257, 768], ...}, or {"shape": [...], "dtype": "bfloat16"} for each: the
                    parameters alone, each multiplied once with the rows of a batch
  module:function   a function of yours that takes nothing and returns (step, arguments), or with a plan:
                    (step, arguments, plan); tensors may be on the meta device

Nothing is allocated, fetched or run, and time does not grow with the mesh.

  python -m vescale estimate llama-3-70b.json --mesh dp=8,tp=8 --plan llama --sequence-parallel \\
      --vocabulary-parallel --fsdp dp --batch 8 --sequence 4096
  python -m vescale estimate gpt2-shapes.json --mesh dp=1024 --fsdp dp --wrap 'h\\.\\d+'
  python -m vescale estimate my_model:step --mesh dp=16
"""

from __future__ import annotations

import argparse

from .._errors import ArgumentError, explain
from ..spmd.estimate import Estimate, estimate
from ..spmd.layout import AbstractMesh
from . import sources
from .table import show

HELP = "memory and bytes on the wire of a model on a mesh that isn't here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("source", metavar="SOURCE", help="a .json file, or module:function")
    parser.add_argument("--mesh", required=True, help="axes and their sizes: dp=8,tp=8")
    parser.add_argument(
        "--plan", choices=("llama", "mixtral", "dit", "none"), help="one of vs.plans; none: the batch over dp"
    )
    parser.add_argument("--fsdp", metavar="AXIS", help="shard parameters at rest over this axis, by vs.FSDP")
    parser.add_argument(
        "--wrap",
        default=r"(.*\.)?layers\.\d+",
        help="regex of the modules that FSDP gathers together: %(default)s",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters: %(default)s")
    parser.add_argument("--batch", type=_positive, default=8, help="rows of the global batch: %(default)s")
    parser.add_argument("--sequence", type=_positive, default=2048, help="tokens of a row: %(default)s")
    parser.add_argument("--layers", type=_positive, help="so many layers instead of the config's")
    parser.add_argument(
        "--optimizer", choices=("adamw", "none"), default="adamw", help="none: loss and gradients only"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="activations split along the sequence over tp"
    )
    parser.add_argument("--vocabulary-parallel", action="store_true", help="embedding and head split over tp")
    parser.add_argument("--rank", type=int, default=0, help="whose figures: %(default)s")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def run(options: argparse.Namespace) -> int:
    """Print the tables; 0 when it could be estimated."""
    mesh = parse_mesh(options.mesh)
    settings = sources.Settings(
        AbstractMesh(tuple(mesh), tuple(mesh.values())),
        options.plan,
        options.fsdp,
        options.wrap,
        sources.dtype_of(options.dtype),
        options.batch,
        options.sequence,
        options.layers,
        options.optimizer,
        options.sequence_parallel,
        options.vocabulary_parallel,
    )
    subject = sources.read(options.source, settings)
    found = estimate(subject.fn, subject.plan, subject.args, mesh, donate=subject.donate, rank=options.rank)
    _show(subject, found)
    return 0


def parse_mesh(text: str) -> dict[str, int]:
    """Axes and sizes.

    >>> parse_mesh("dp=8,tp=2")
    {'dp': 8, 'tp': 2}
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        mesh = {axis.strip(): int(size) for axis, size in pairs}
    except ValueError:
        mesh = {}
    if (
        not mesh
        or len(mesh) != len(pairs)
        or not all(axis.isidentifier() and size > 0 for axis, size in mesh.items())
    ):
        raise ArgumentError(
            explain(f"--mesh {text}", rule="axes with their sizes", remedy="for example --mesh dp=8,tp=8")
        )
    return mesh


def _show(subject: sources.Subject, found: Estimate) -> None:
    params = subject.parameters
    whole = sum(p.nbytes for p in params.values())
    peak, total = found.peak, found.cost.total
    rows = [
        ("parameters", f"{sources.count(params):,}", "in all"),
        ("", _bytes(whole), "in all, as they are without a mesh"),
        ("peak of memory", _bytes(peak), "of a rank"),
        *(("", _bytes(nbytes), kind) for kind, nbytes in found.peak_by_kind.items() if nbytes),
        ("received", _bytes(found.received), "by a rank, in a step"),
        *(("", _bytes(t.received), f"{t.kind} over {t.axis}, x{t.count:,}") for t in found.traffic),
        ("sent", _bytes(found.sent), "by a rank, in a step"),
        ("flops", f"{total.flops:,}", "of a rank, in a step"),
    ]
    show(f"{subject.name}, rank {found.rank} of {found.mesh}", ("", "", ""), rows, right=(1,))
    if found.buckets:
        buckets = [
            (b.name or "(the rest)", f"{b.parameters}", f"{b.shard:,}", f"{b.gathered:,}", f"{b.padding:,}")
            for b in found.buckets
        ]
        head = ("bucket", "parameters", "shard, B", "gathered, B", "padding, B")
        show(f"{len(buckets)} buckets", head, _some(buckets), right=(1, 2, 3, 4))


def _some(rows: list[tuple[str, ...]], limit: int = 12) -> list[tuple[str, ...]]:
    if len(rows) <= limit:
        return rows
    return [*rows[: limit - 2], (f".. {len(rows) - limit + 1} more ..", "", "", "", ""), rows[-1]]


def _bytes(count: int) -> str:
    """Bytes, and in a unit that is read at a glance.

    >>> _bytes(17_640_734_720)
    '17,640,734,720 B  16.43 GiB'
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count:,} B" if unit == "B" else f"{count:,} B {size:>6.2f} {unit}"


__all__ = ["HELP", "add_arguments", "parse_mesh", "run"]
