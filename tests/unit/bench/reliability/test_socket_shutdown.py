"""Only the Unix sockets between two processes are shut down."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from bench.reliability.socket_shutdown import shut_down_between

CLIENT = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect("\\0" + sys.argv[1])
client.sendall(b"here")
sys.exit(len(client.recv(1)))
"""


def test_a_connection_between_two_processes_ends_and_both_live_on() -> None:
    name = f"baton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        with subprocess.Popen([sys.executable, "-c", CLIENT, name]) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(30.0)
                assert accepted.recv(4) == b"here"
                assert shut_down_between(client.pid, 1) == 0, "it is not connected with that one"
                assert shut_down_between(client.pid, os.getpid()) == 1
                assert accepted.recv(1) == b""
            assert client.wait(30) == 0
