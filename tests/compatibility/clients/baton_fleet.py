"""What the programs in Python share: the fleet's address, whether it noticed an abort, and proxies
in front of it."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

FLEET = os.environ["BATON_TEST_URL"]
V1 = f"{FLEET}/v1"
MODEL = "demo_model"
LONG = "Explain all modules of the standard library, one by one"
DEADLINE_S = 5.0


@contextmanager
def aborted() -> Iterator[None]:
    """A context in which the client leaves a request before its end. The fleet must notice and stop
    its work."""
    before = _num_clients_gone()
    yield
    deadline = time.monotonic() + DEADLINE_S
    while _num_clients_gone() == before or _num_running():
        assert time.monotonic() < deadline, "the fleet did not notice that its client went away"
        time.sleep(0.02)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
    return port


@contextmanager
def proxy(
    command: Sequence[str],
    port: int,
    path: str,
    wait_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The address of a proxy that `command` runs on a port, once it answers at a path."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment) as process:
        try:
            deadline = time.monotonic() + wait_s
            while not _answers(url + path):
                assert process.poll() is None, "the proxy has ended"
                assert time.monotonic() < deadline, "the proxy does not answer"
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S):
            return True
    except OSError:
        return False


def _num_clients_gone() -> float:
    pattern = r'^baton_http_requests_total\{.*status="499"\} (\S+)$'
    return sum(map(float, re.findall(pattern, _get("/metrics"), re.MULTILINE)))


def _num_running() -> int:
    workers = json.loads(_get("/fleet"))["workers"]
    return sum(each["num_running"] + each["num_waiting"] for each in workers)


def _get(path: str) -> str:
    with urllib.request.urlopen(FLEET + path, timeout=DEADLINE_S) as answer:
        return answer.read().decode()
