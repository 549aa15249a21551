"""Which tests run in turn in one process: those of a file, and those of a folder that share what is
dear to start. pytest-xdist gives the next such group to a process that has nothing left to do."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("tests/browser/",)
"""Folders whose files share a browser or a fleet."""
FIRST = ("tests/unit/worker/ranks/",)
"""Tests that would else be among the last ones. They wait for seconds, in which others compute."""


def waits_first(nodeid: str) -> bool:
    """Whether a test is one of FIRST."""
    return nodeid.startswith(FIRST)


class Groups(LoadScopeScheduling):
    """As `--dist loadscope`, with `FOLDERS` as groups of their own."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next((each for each in FOLDERS if nodeid.startswith(each)), None)
        found: str = shared or super()._split_scope(nodeid)
        return found
