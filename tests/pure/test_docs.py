"""Every example in a docstring runs, and so does every Python block of the pages."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import vescale

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/adamw_8bit.md",
    "docs/debugging.md",
    "docs/checkpoints.md",
    "docs/dtensor.md",
    "docs/errors.md",
    "docs/failures.md",
    "docs/fsdp.md",
    "docs/introspection.md",
    "docs/modules.md",
    "docs/optimizers.md",
    "docs/muon.md",
    "docs/shampoo.md",
    "docs/plans.md",
    "docs/programs.md",
    "docs/rng.md",
    "docs/testing.md",
]
MODULES = ["vescale"] + [m.name for m in pkgutil.walk_packages(vescale.__path__, "vescale.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(
        importlib.import_module(name),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page(page):
    """In one namespace, top to bottom, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    namespace: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
