"""Hypothesis profiles: CI sees the same examples each time; a person's runs look for new ones."""

import os

from hypothesis import settings

os.environ.setdefault("VESCALE_VERIFY", "1")  # passes are checked, in the pools of processes too

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("same" if os.environ.get("CI") else "new")
