"""Every example in a docstring runs; every Python block of the pages runs, and prints what they show."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import vescale

ROOT = Path(__file__).parents[2]
# A block of Python, and behind it, where there is one, the text that it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```)?", re.M | re.S)
ALL_PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
PAGES = [page for page in ALL_PAGES if BLOCK.search((ROOT / page).read_text())]
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
    """In one namespace, top to bottom, as a reader would type them. Lines are those of the page."""
    text = (ROOT / page).read_text()
    namespace: dict = {}
    for block in BLOCK.finditer(text):
        lines_before = "\n" * text.count("\n", 0, block.start(1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(lines_before + block[1], str(ROOT / page), "exec"), namespace)
        if block[2] is not None:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            got = printed.getvalue()
            assert doctest.OutputChecker().check_output(block[2], got, flags), f"{block[0]}\nprinted\n{got}"


def test_text_stands_behind_the_block_that_prints_it():
    """Elsewhere nothing compares it: what is shown and not run has no language, or another."""
    for page in ALL_PAGES:
        text = (ROOT / page).read_text()
        assert text.count("\n```text\n") == sum(block[2] is not None for block in BLOCK.finditer(text)), page


def test_the_index_of_errors_is_complete():
    for name in MODULES:
        importlib.import_module(name)
    index, found = (ROOT / "docs/errors.md").read_text(), [vescale.VescaleError]
    for error in found:
        found += [child for child in error.__subclasses__() if child.__module__.startswith("vescale")]
        assert f"`{error.__name__}`" in index or f"`vs.{error.__name__}`" in index, error
