"""Another user of the host, at every socket and file of a real fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bench.tools.listeners import Listener, listeners_of
from tests.integration.fleets import complete, counters, running_fleet

AS_NOBODY = r"""
import json, os, socket, sys

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
pids, sockets = json.loads(sys.argv[1])
read = []
for pid in pids:
    for name in ("mem", "environ", "maps", "fd", "map_files", "cwd"):
        try:
            path = f"/proc/{pid}/{name}"
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            read.append(path)
        except OSError:
            pass
for name in os.listdir("/dev/shm"):
    if os.access(f"/dev/shm/{name}", os.R_OK):
        read.append(name)
held, answers = [], []
for kind, address, port in sockets:
    target = "\0" + address[1:] if kind == "Unix" else (address, port)
    family = socket.AF_UNIX if kind == "Unix" else socket.AF_INET
    for number in range(40):
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.settimeout(0.2)
            one.connect(target)
            if number % 2:
                one.sendall(os.urandom(5000))
            held.append(one)
        except ConnectionRefusedError:  # a socket for datagrams
            one = socket.socket(family, socket.SOCK_DGRAM)
            one.setblocking(False)
            try:
                one.sendto(os.urandom(64), target)
            except BlockingIOError:
                break
        except OSError:
            continue  # it was cut off, or too many knock at once
print(json.dumps([read, len(held)]), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "transport", ["auto", pytest.param("nixl", marks=pytest.mark.nightly)], ids=["shm", "nixl"]
)
def test_another_user_of_the_host_reads_nothing_and_stops_nothing(transport: str) -> None:
    with running_fleet(
        prefill=1, decode=1, transport=transport, local_prefill_threshold_tokens=0
    ) as fleet:
        expected = complete(fleet, [7] * 40, max_tokens=2)["choices"][0]["token_ids"]
        pids = [child.pid for child in fleet.processes.values()]
        sockets = [listed(each) for pid in pids for each in listeners_of(pid)]
        command = [sys.executable, "-c", AS_NOBODY, json.dumps([pids, sockets])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as attacker:  # type: ignore[call-overload]
            read, num_held = json.loads(attacker.stdout.readline())
            for number in range(5):
                prompt = [8 + number] * 40
                assert complete(fleet, prompt, max_tokens=2)["choices"][0]["token_ids"]
            answer = complete(fleet, [7] * 40, max_tokens=2)
            attacker.communicate(timeout=60)
        assert read == []
        assert num_held > 0
        assert answer["choices"][0]["token_ids"] == expected
        assert counters(fleet, "decode-1")["handoffs"] >= 6, "blocks move all the time"
        for name, child in fleet.processes.items():
            assert child.is_running(), f"{name} has ended"
            assert "Traceback" not in (fleet.log_dir / f"{name}.log").read_text(), name


def listed(listener: Listener) -> tuple[str, str, int]:
    return listener.kind, listener.address, listener.port
