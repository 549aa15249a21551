"""Which tests run one after the other in one process, and which of them begin first.

They are those of a file, and those of a folder that share something slow to start: pytest-xdist
gives the next such group to a process that has nothing left to do. Groups that wait alternate with
groups that compute, so that the cores always have something to compute.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

FOLDERS = ("tests/browser/",)
"""Folders whose files share a browser or a fleet."""
COMPUTING = ("tests/chart/", "tests/fuzz/", "tests/images/", "tests/unit/")
"""Folders of tests that hardly wait; the others wait for processes."""
WAITING = ("tests/unit/cli/", "tests/unit/gateway/http/", "tests/unit/worker/ranks/")
"""Folders within these whose tests wait as well."""
LONG = ("tests/chart/", "tests/unit/engine/")
"""Folders whose files compute for long."""
WAITS_END, LONG_END = 0.8, 0.9
"""The part of the run in which groups that wait begin, and long ones: at the end of the run no
process works alone."""


class Groups(LoadScopeScheduling):
    """As `--dist loadscope`, with the groups of this file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Leave a process that has ended. Another one runs the rest of its groups, but not the test
        that ended it, which would end that one as well. Returns this test, if there is one."""
        for tests in self.assigned_work[node].values():
            for nodeid, is_over in tests.items():
                if not is_over:
                    tests[nodeid] = True
                    super().remove_node(node)
                    return nodeid
        return super().remove_node(node)


def group_of(nodeid: str) -> str:
    """The name of a test's group: a folder, a file, or a class in a file."""
    for folder in FOLDERS:
        if nodeid.startswith(folder):
            return folder
    return nodeid.partition("[")[0].rpartition("::")[0]


def order_of(nodeids: Iterable[str]) -> dict[str, float]:
    """When each group begins, by name: 0 for the first one, below 1 for the last one."""
    waiting: list[str] = []
    long: list[str] = []
    short: list[str] = []
    for group in sorted({group_of(each) for each in nodeids}, key=_mixed):
        if not group.startswith(COMPUTING) or group.startswith(WAITING):
            waiting.append(group)
        else:
            (long if group.startswith(LONG) else short).append(group)
    return _spread(waiting, WAITS_END) | _spread(long, LONG_END) | _spread(short, 1.0)


def _mixed(group: str) -> int:
    """An order that no folder follows: groups of one folder take about as long as one another."""
    return zlib.crc32(group.encode())


def _spread(groups: list[str], end: float) -> dict[str, float]:
    return {group: end * i / len(groups) for i, group in enumerate(groups)}
