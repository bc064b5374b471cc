"""`python -m vescale doctor` and `python -m vescale estimate ...`: see `vescale.cli`."""

import sys

from vescale.cli import main

if __name__ == "__main__":
    sys.exit(main())
