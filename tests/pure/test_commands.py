"""Every command that the pages show is one that its script takes. Nothing is trained or measured."""

import inspect
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import train_gpt
from torch.distributed.run import get_args_parser

from vescale.cli import doctor, estimate, main

ROOT = Path(__file__).parents[2]
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS, "examples/train_gpt.py"]
# A block of commands, indented lines, or words in a sentence.
TEXT = re.compile(r"^```bash\n(.*?)^```|^((?: {4}\S.*\n)+)|`([^`]+)`", re.M | re.S)
COMMAND = re.compile(r"\s*(\S*/)?(python -m vescale |python \S+\.py|torchrun |make [a-z]+\b(?! [a-z]))")
TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)


def commands(page):
    """As lists of words."""
    for found in TEXT.finditer((ROOT / page).read_text()):
        text = next(filter(None, found.groups())).replace("\\\n", " ")
        for line in filter(COMMAND.match, text.splitlines()):
            yield shlex.split(line.rstrip("& "), comments=True)


SHOWN = [pytest.param(words, id=f"{page}: {' '.join(words)}") for page in PAGES for words in commands(page)]


def test_commands_are_found():
    assert len(SHOWN) > 20
    assert {words[0] for (words,) in (shown.values for shown in SHOWN)} >= {"make", "python", "torchrun"}


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_that_is_shown_is_one(words, monkeypatch):
    program, *rest = words
    if program == "make":
        assert rest[0] in TARGETS
        return
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        rest = ["-m"] * given.module + [given.training_script, *given.training_script_args]
    if rest[:2] == ["-m", "vescale"]:
        seen = []
        for command in (doctor, estimate):
            monkeypatch.setattr(command, "run", lambda options: seen.append(options) or 0)
        if "--help" not in rest:
            assert main(rest[2:]) == 0
            assert len(seen) == 1
            return
        with pytest.raises(SystemExit, match="0"):
            main(rest[2:])
        return
    assert (ROOT / rest[0]).is_file()
    if rest[0] != "examples/train_gpt.py":
        return
    seen, signature = [], inspect.signature(train_gpt.train)
    train = lambda *args, **given: seen.append(signature.bind(*args, **given)) or SimpleNamespace(hash=None)  # noqa: E731
    monkeypatch.setattr(train_gpt, "train", train)
    monkeypatch.setattr(train_gpt, "report", lambda *_: None)
    monkeypatch.setattr("sys.argv", rest)
    train_gpt.main()
    assert len(seen) == 1
