"""Links between the pages point at files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(r"`((?:docs|examples|benchmarks|tests|vescale)/[\w./]+\.(?:py|md|c))\b")


def prose(path: Path) -> str:
    return FENCED.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page(page):
    here = ROOT / page
    for target, anchor in LINK.findall(prose(here)):
        found = here if not target else here.parent / target
        assert found.exists(), f"{page}: no {target}"
        assert not anchor or anchor in anchors(found), f"{page}: no #{anchor} in {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names(page):
    for name in NAMED.findall(prose(ROOT / page)):
        assert (ROOT / name).exists(), f"{page}: no {name}"


def test_every_page_is_reached_from_the_readme():
    linked = {target for target, _ in LINK.findall(prose(ROOT / "README.md"))}
    assert set(PAGES) - {"README.md"} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_it_is_for(page):
    """A title, and then a sentence, before any block, table or list."""
    title, _, rest = (ROOT / page).read_text().partition("\n")
    assert title.startswith("# "), page
    assert re.match(r"\n+(?!Made by)[A-Z`*\[]", rest), page
