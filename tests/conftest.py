"""For every test: hypothesis draws the same examples each time, however slow the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("baton", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("baton")
