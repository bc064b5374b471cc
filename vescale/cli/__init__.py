"""The command line of vescale: what is installed here, and what a model would need elsewhere.

python -m vescale doctor       what is installed, what works, and a self-test
python -m vescale estimate     memory and bytes on the wire of a model on a mesh that isn't here
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._errors import VescaleError
from . import doctor, estimate

_COMMANDS = (doctor, estimate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 when all is well, 1 when it isn't, 2 for a wrong use."""
    parser = argparse.ArgumentParser(prog="python -m vescale", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        name = command.__name__.rpartition(".")[2]
        made = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(made)
        made.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except VescaleError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 1
