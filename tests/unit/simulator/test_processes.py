"""Processes for simulations end with the command that started them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HANGING = """
import signal, socket, sys
from simulator.commands.processes import simulation_processes

def hang(path):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.recv(1)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with simulation_processes(2, bool) as pool:
        list(pool.map(hang, [sys.argv[1]] * 4))
"""


IMPORTING = """
import socket, sys
from simulator.commands.processes import simulation_processes

if __name__ == "__mp_main__":  # a process that still imports
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(sys.argv[1])
        link.recv(1)

if __name__ == "__main__":
    with simulation_processes(1, bool) as pool:
        assert pool.submit(len, "abc").result() == 3
"""


@contextmanager
def running(
    code: str, folder: Path, errors: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A command that runs the code, and the socket to which its processes connect."""
    script, path = folder / "command.py", folder / "link"
    script.write_text(code)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(120)
        command = subprocess.Popen(
            [sys.executable, script, path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=errors,
        )
        yield command, server


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a socket names no process here")
def test_ctrl_c_is_no_error_of_a_process_that_still_imports(tmp_path: Path) -> None:
    with running(IMPORTING, tmp_path, subprocess.PIPE) as (command, server):
        link = server.accept()[0]
        (pid,) = struct.unpack("i8x", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        assert pid != command.pid
        os.kill(pid, signal.SIGINT)
        link.close()
        _, errors = command.communicate(timeout=120)
    assert (command.returncode, errors) == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_command_that_a_signal_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(HANGING, tmp_path) as (command, server):
        links = [server.accept()[0] for _ in range(2)]
        command.send_signal(number)
        for link in links:
            link.settimeout(120)
            assert link.recv(1) == b""
            link.close()
        assert command.wait(120) != 0
