"""The limit on open files is raised as far as the system allows, and never lowered."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys

import pytest

from process.open_files import is_reserved
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
        "ERROR new connections are closed: Too many open files; raise the limit (ulimit -n), "
        "which is 40"
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


RESERVE_CODE = """
import logging, os, resource, sys
from process.open_files import FileRoom, is_reserved
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
room, fds = FileRoom(), [os.dup(0)]
first = fds[0]
while not is_reserved(fds[-1]):
    fds.append(os.dup(0))
    room.check()
print(fds[-1])
while fds:
    os.close(fds.pop())
room.check()
assert os.dup(0) == first, "the checks keep no descriptor"
"""


@pytest.mark.parametrize(("limit", "reserve"), [(40, 10), (200, 50), (1000, 64)])
def test_a_part_of_the_descriptors_is_kept_and_the_log_says_so(limit: int, reserve: int) -> None:
    code = RESERVE_CODE.format(limit=limit)
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60)
    assert found.splitlines() == [
        "new connections are closed: few descriptors are left; raise the limit (ulimit -n), "
        f"which is {limit}",
        str(limit - reserve),
        "files and connections can be opened again",
    ]


def test_without_a_limit_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    no_limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (no_limit, no_limit))
    assert not is_reserved(10**6)


CROWD_CODE = """
import os, resource, sys, time, zmq
from process.sockets import options
from process.sockets.encrypted_sockets import Network
options.HANDSHAKE_MS = 0  # strangers may stay
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
network = Network("the secret")
socket, endpoint = network.listening(zmq.ROUTER, "tcp://127.0.0.1:*")
print(endpoint, flush=True)
sys.stdin.readline()
deadline = time.monotonic() + 30
while True:
    try:
        if len(os.listdir("/proc/self/fd")) < 95:
            break
    except OSError as error:
        print(error, file=sys.stderr)
    assert time.monotonic() < deadline
    time.sleep(0.01)
print("has room", flush=True)
sys.stdin.readline()
socket.close()
network.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_crowd_at_a_port_of_a_worker_leaves_it_descriptors() -> None:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CROWD_CODE], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        process.stdin.write("count\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has room\n"
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
