"""The rules of the house: who imports whom, the public names, private torch, plain files."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vescale as vs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vescale"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Held to the same rules, though nothing imports them.
SCRIPTS = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py")])
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "Makefile", ".ci/run", "docs/**/*.md", "tests/**/*.py")
    for path in ROOT.glob(pattern)
)

# A file may import its own room and rooms on lower floors; rooms of one floor not each other.
FLOORS = [{"_errors"}, {"_tree"}, {"_compat"}, {"rng"}, {"spmd"}]
FLOORS += [{"fsdp", "optim", "checkpoint"}, {"testing", "debug"}, {"cli"}, {"__main__"}]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

PUBLIC = [
    "VescaleError",
    "PeerError",
    "AbstractMesh",
    "Mesh",
    "make_mesh",
    "InterleavedShard",
    "P",
    "Partial",
    "RaggedShard",
    "Replicate",
    "Shard",
    "StridedRaggedShard",
    "from_torch",
    "redistribute_many",
    "visualize",
    "Layout",
    "DTensor",
    "distribute_tensor",
    "from_local",
    "distribute",
    "no_implicit_redistribute",
    "Plan",
    "Staged",
    "parallelize",
    "functional",
    "init",
    "plans",
    "estimate",
    "shard_map",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pvary",
    "all_gather_ragged",
    "all_to_all_ragged",
    "psum_scatter_ragged",
    "constrain",
    "grad",
    "remat",
    "value_and_grad",
    "vmap",
    "optim",
    "rng",
    "checkpoint",
    "fsdp",
    "FSDP",
    "TensorGroup",
    "Elements",
    "Rows",
    "Tile",
    "Whole",
]
LAZY = ["vescale.testing", "vescale.debug"]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(parts: tuple[str, ...]) -> str:
    return parts[1] if len(parts) > 1 else ""


def module_name(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, relative imports resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def ladder_faults(source: str, name: tuple[str, ...], is_package: bool) -> list[str]:
    here, faults = room(name), []
    for line, target in imports(source, name if is_package else name[:-1]):
        parts = tuple(target.split("."))
        if parts[0] != "vescale" or room(parts) == here:
            continue
        if FLOOR.get(room(parts), 99) >= FLOOR[here]:
            faults.append(f"line {line}: {here} imports {target}")
    return faults


def private_torch(source: str) -> list[str]:
    """Uses of private torch: `torch._x`, `torch.x._y`, imported, or reached from an imported name.

    Ops are data, not API: after `torch.ops.<namespace>` any name goes.
    """
    tree, found = ast.parse(source), []
    alias = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name if name.asname else name.name.split(".")[0]
                alias[name.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                alias[name.asname or name.name] = f"{node.module}.{name.name}"
    names = list(imports(source, ()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                chain, at = [at.attr, *chain], at.value
            if isinstance(at, ast.Name) and at.id in alias:
                names.append((node.lineno, ".".join([alias[at.id], *chain])))
    for line, name in names:
        parts = name.split(".")
        if parts[0] != "torch" or parts[1:2] == ["ops"]:
            continue
        if any(p.startswith("_") and not p.endswith("__") for p in parts):
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_go_one_way(path):
    name = module_name(path)
    if name == ("vescale",):
        return  # the front door names everything
    assert room(name) in FLOOR, f"{ids(path)} is in no room of the house"
    assert not ladder_faults(path.read_text(), name, path.name == "__init__.py")


@pytest.mark.parametrize("path", MODULES + SCRIPTS, ids=ids)
def test_private_torch_only_in_compat(path):
    if path != PACKAGE / "_compat.py":
        assert not private_torch(path.read_text())


@pytest.mark.parametrize("path", MODULES + SCRIPTS, ids=ids)
def test_no_long_file(path):
    assert len(path.read_text().splitlines()) <= 800, "split it"


@pytest.mark.parametrize("path", MODULES + SCRIPTS + TEXTS, ids=ids)
def test_ascii(path):
    odd = [(n, c) for n, c in enumerate(path.read_text(encoding="utf-8")) if ord(c) > 127]
    assert not odd[:5]


def test_public_names_are_frozen():
    """In a fresh interpreter, where no test has imported anything by its own path."""
    code = (
        "import json, sys, types, vescale;"
        "own = [n for n in vars(vescale) if not n.startswith('_')"
        " and not isinstance(getattr(vescale, n), types.ModuleType)];"
        "print(json.dumps([sorted(vescale.__all__), own, sorted(sys.modules)]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    names, own, loaded = json.loads(out.stdout)
    assert names == sorted(PUBLIC)
    assert set(own) <= set(names), "imported into the front door but not in __all__"
    assert not set(LAZY) & set(loaded)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    assert getattr(vs, name).__doc__


def test_the_checks_see_what_they_must():
    """The rules above, on sources that break them."""
    name = ("vescale", "rng", "keys")
    for bad in (
        "from ..spmd import mesh",
        "from .. import spmd",
        "import vescale",
        "import vescale.optim",
    ):
        assert ladder_faults(bad, name, False), bad
    for good in ("from . import philox", "from .._errors import x", "import torch"):
        assert not ladder_faults(good, name, False), good
    assert ladder_faults("from ..fsdp import planner", ("vescale", "optim", "adamw"), False)
    assert not ladder_faults("from .fsdp import x", ("vescale", "spmd"), True)  # a file of spmd
    for bad in (
        "import torch._C",
        "from torch import _C",
        "from torch.utils._pytree import tree_map",
        "import torch\nx = torch._C._get()",
        "import torch.distributed as dist\ndist._thing()",
        "from torch import distributed\ndistributed.tensor._ops",
    ):
        assert private_torch(bad), bad
    for good in (
        "import torch\ntorch.ops.aten._softmax.default(x)",
        "import torch\ntorch.__version__",
        "from torch.ops.aten import _softmax",
        "from ._tree import flatten",
    ):
        assert not private_torch(good), good


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()
