"""Which tests run one after the other in one process, and which of them begin first.

They are those of a file, and those of a folder that share something slow to start: pytest-xdist
gives the next such group to a process that has nothing left to do. Groups that wait alternate with
groups that compute, so that the cores always have something to compute.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("tests/browser/",)
"""Folders whose files share a browser or a fleet."""
COMPUTING = ("tests/chart/", "tests/fuzz/", "tests/images/", "tests/unit/")
"""Folders of tests that hardly wait; the others wait for processes."""
WAITING = ("tests/unit/cli/", "tests/unit/gateway/http/", "tests/unit/worker/ranks/")
"""Folders within these whose tests wait as well."""
WAITS_END = 0.8
"""The part of the run in which groups that wait begin: at its end no process waits alone."""


class Groups(LoadScopeScheduling):
    """As `--dist loadscope`, with the groups of this file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The name of a test's group: a folder, a file, or a class in a file."""
    for folder in FOLDERS:
        if nodeid.startswith(folder):
            return folder
    return nodeid.partition("[")[0].rpartition("::")[0]


def order_of(nodeids: Iterable[str]) -> dict[str, float]:
    """When each group begins, by name: 0 for the first one, below 1 for the last one."""
    waiting: list[str] = []
    computing: list[str] = []
    for group in dict.fromkeys(group_of(each) for each in nodeids):
        computes = group.startswith(COMPUTING) and not group.startswith(WAITING)
        (computing if computes else waiting).append(group)
    waits = {group: WAITS_END * i / len(waiting) for i, group in enumerate(waiting)}
    return waits | {group: i / len(computing) for i, group in enumerate(computing)}
