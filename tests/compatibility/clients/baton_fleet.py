"""What the programs in Python share: the fleet's address, and whether it noticed an abort."""

import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator
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


def _num_clients_gone() -> float:
    pattern = r'^baton_http_requests_total\{.*status="499"\} (\S+)$'
    return sum(map(float, re.findall(pattern, _get("/metrics"), re.MULTILINE)))


def _num_running() -> int:
    workers = json.loads(_get("/fleet"))["workers"]
    return sum(each["num_running"] + each["num_waiting"] for each in workers)


def _get(path: str) -> str:
    with urllib.request.urlopen(FLEET + path, timeout=DEADLINE_S) as answer:
        return answer.read().decode()
