"""A client that goes is forgotten within one step of each worker, counted and not timed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, faulty_fleet
from tests.http_client import HTTP
from tests.integration.fleets import counters, wait_for
from tests.integration.reference import DEMO_MODEL, Reference

CHUNK = 64
NUM_STEPS = 5
LARGE_BODY = 350_000


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(
        prefill=1, decode=1, chunk_max_tokens=CHUNK, transport=request.param
    ) as fleet:
        yield fleet


def test_the_prefill_worker_computes_at_most_one_more_chunk(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    before = counters(fleet.fleet, "prefill-1")["prefill_tokens"]
    leave_at(fleet, body_of(long_prompts[-1]), "prefill-1", "chunk", 2)
    computed = counters(fleet.fleet, "prefill-1")["prefill_tokens"] - before
    assert 2 * CHUNK <= computed <= 3 * CHUNK


@pytest.mark.parametrize("stream", [True, False])
def test_the_decode_worker_runs_at_most_one_more_step(
    fleet: FaultyFleet, long_prompts: list[Reference], stream: bool
) -> None:
    """Also for a whole answer, and a body that is not read at once."""
    before = counters(fleet.fleet, "decode-1")["decode_tokens"]
    body = body_of(long_prompts[0], stream, 0 if stream else LARGE_BODY)
    leave_at(fleet, body, "decode-1", "decode", NUM_STEPS)
    produced = counters(fleet.fleet, "decode-1")["decode_tokens"] - before
    assert NUM_STEPS + 1 <= produced <= NUM_STEPS + 2  # with the first token, from elsewhere


def leave_at(fleet: FaultyFleet, body: bytes, worker: str, point: str, passes: int) -> None:
    """Go while a worker is held, and let it go on once the router has told it."""
    fleet.arm([worker], point, passes)
    client = connect(fleet.url, body)
    fleet.held(point)
    assert num_inflight(fleet.url) == 1
    client.close()
    wait_for("the router to notice", lambda: num_inflight(fleet.url) == 0)
    fleet.wait_heard(worker, "Abort")
    fleet.release(worker, point)


def body_of(reference: Reference, stream: bool = True, num_bytes: int = 0) -> bytes:
    """A request for a long answer, in at least so many bytes."""
    prompt = list(reference.prompt)
    body = {"model": DEMO_MODEL.name, "prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
    return json.dumps(body | {"stream": stream}).encode().ljust(num_bytes)


def connect(url: str, data: bytes) -> socket.socket:
    """A client that sends this request and reads nothing."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port), timeout=30)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def num_inflight(url: str) -> int:
    """Generations under way, as the router counts them."""
    metrics = HTTP.get(f"{url}/metrics").raise_for_status().text
    found = [line for line in metrics.splitlines() if line.startswith("baton_router_inflight")]
    assert found, metrics
    return sum(int(float(line.rpartition(" ")[2])) for line in found)
