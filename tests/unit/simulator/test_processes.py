"""Processes for simulations end with the command that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_command_that_a_signal_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    script, path = tmp_path / "hanging.py", tmp_path / "link"
    script.write_text(HANGING)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(120)
        command = subprocess.Popen(
            [sys.executable, script, path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        links = [server.accept()[0] for _ in range(2)]
        command.send_signal(number)
        for link in links:
            link.settimeout(120)
            assert link.recv(1) == b""
            link.close()
        assert command.wait(120) != 0
