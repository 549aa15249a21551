"""The limit on open files is raised as far as the system allows, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT

CODE = """
import resource
from process.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_open_files(2000)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


FULL_CODE = """
import logging, os, resource, sys
from process.open_files import FileRoom
from process.process_watch import WatchedProcess
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", level=logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
room, parent, none = FileRoom(), WatchedProcess(os.getppid()), WatchedProcess(2**22 + 1)
fds = []
for _ in range(3):
    try:
        while True:
            fds.append(os.dup(0))
    except OSError:
        pass
    room.check()
    room.check()
    newer, ended = WatchedProcess(os.getppid()), WatchedProcess(2**22 + 1)
    print(parent.has_ended(), none.has_ended(), newer.has_ended(), ended.has_ended())
    while fds:
        os.close(fds.pop())
    room.check()
    print(parent.has_ended(), none.has_ended(), newer.has_ended(), ended.has_ended())
"""


def test_a_process_without_room_for_files_says_so_once_and_takes_nobody_for_dead() -> None:
    found = subprocess.check_output(
        [sys.executable, "-c", FULL_CODE], cwd=ROOT, text=True, timeout=60
    )
    full = (
        "ERROR no more files and connections can be opened: Too many open files; raise the limit "
        "(ulimit -n), which is 40"
    )
    again = "INFO files and connections can be opened again"
    each = [full, "False True False False", again, "False True False True"]
    assert found.splitlines() == 3 * each


@pytest.mark.parametrize(
    ("soft", "hard", "limit"), [(256, 4096, 2000), (256, 1500, 1500), (3000, 4096, 3000)]
)
def test_the_limit_is_as_near_as_the_hard_limit_allows(soft: int, hard: int, limit: int) -> None:
    code = CODE.format(soft=soft, hard=hard)
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60)
    assert found.split() == [str(limit), str(hard)]
