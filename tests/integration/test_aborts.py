"""Clients that go away at random moments leave nothing behind."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cli.fleet import Fleet
from cli.up_settings import UpSettings
from tests.effort import in_turn, some, times
from tests.faults.faulty_fleet import FaultyFleet, faulty_fleet
from tests.integration.fleets import (
    PATIENCE,
    assert_idle,
    complete,
    counters,
    workers,
)
from tests.integration.reference import DEMO_MODEL, NUM_TOKENS, Reference

NUM_REQUESTS = times(30, 200)
SEED = 41
NUM_STEPS = 10
THRESHOLD = UpSettings.local_prefill_threshold_tokens


TRANSPORTS = some(["nixl", "shm"], 1)


@pytest.fixture(scope="module")
def faulty(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    # Few blocks and small chunks: prompts queue, handoffs wait, sequences are preempted.
    settings = {"transport": request.param, "num_blocks": 320, "chunk_max_tokens": 32}
    with faulty_fleet(PATIENCE, local_prefill_threshold_tokens=THRESHOLD, **settings) as fleet:
        yield fleet


@pytest.fixture
def fleet(faulty: FaultyFleet) -> Fleet:
    return faulty.fleet


@pytest.mark.parametrize("faulty", TRANSPORTS, indirect=True, scope="module")
def test_aborts_leave_every_counter_at_zero(fleet: Fleet, references: list[Reference]) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    plans = [
        (
            rng.choice(references).prompt,
            rng.choice(["before the answer", "in mid-stream", "not streamed"]),
            rng.uniform(0.001, 0.4),
            rng.randrange(1, 60),
        )
        for _ in range(NUM_REQUESTS)
    ]
    with ThreadPoolExecutor(16) as pool:
        ends = Counter(pool.map(lambda plan: abort(fleet, *plan), plans))
    assert ends["aborted"] > NUM_REQUESTS // 2, ends
    assert ends["failed"] == 0, ends
    assert_idle(fleet)
    # And nothing that was given up has spoilt anything for those who come after.
    for reference in references[::9]:
        answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
        assert answer["choices"][0]["token_ids"] == list(reference.output)
    assert counters(fleet, "decode-1")["decode_tokens"] > 0


MESSAGES = [{"role": "user", "content": "What is a lambda?"}]
LONG = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2000}},
    "required": ["a"],
}
TOOL = {"name": "f", "input_schema": LONG}
ENDPOINTS = {
    "/v1/completions": {"prompt": "A class is ", "max_tokens": 3900, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3900, "ignore_eos": True},
    "/v1/responses": {
        "input": "What is a lambda?",
        "text": {"format": {"type": "json_schema", "name": "long", "schema": LONG}},
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 3700,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    },
}
"""What each is asked so that it goes on for thousands of tokens."""
CASES = [(path, stream) for stream in (False, True) for path in ENDPOINTS]


@pytest.mark.parametrize(
    ("faulty", "case"),
    in_turn(TRANSPORTS, CASES),
    indirect=["faulty"],
    scope="module",
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, tuple) else each,
)
def test_a_client_that_leaves_any_endpoint_frees_the_workers(
    faulty: FaultyFleet, fleet: Fleet, case: tuple[str, bool]
) -> None:
    """It leaves while the decode worker is held after some steps."""
    path, stream = case
    before = decode_tokens(fleet)  # it was idle when the test before this one ended
    url = httpx.URL(fleet.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    body = {"model": DEMO_MODEL.name, "stream": stream, **ENDPOINTS[path]}
    headers = {"content-type": "application/json"}
    faulty.arm(["decode-1"], "decode", NUM_STEPS)
    connection.request("POST", path, json.dumps(body), headers)
    faulty.held("decode")
    if stream:
        answer = connection.getresponse()
        assert answer.status == 200
        answer.close()
    connection.close()
    faulty.wait_heard("decode-1", "Abort")
    faulty.release("decode-1", "decode")
    assert_idle(fleet)
    assert decode_tokens(fleet) - before <= NUM_STEPS + 2, "it did not go on"


def decode_tokens(fleet: Fleet) -> int:
    """As the decode worker last reported them; all of them if the fleet was found idle since."""
    return int(workers(fleet)["decode-1"]["counters"].get("decode_tokens", 0))


def abort(fleet: Fleet, prompt: tuple[int, ...], how: str, after_s: float, events: int) -> str:
    """Send a long request and go away: by a time-out, or after some events."""
    body = {
        "model": DEMO_MODEL.name,
        "prompt": list(prompt),
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": how != "not streamed",
    }
    timeout = 60.0 if how == "in mid-stream" else after_s
    try:
        with httpx.Client(timeout=timeout) as client:
            with client.stream("POST", f"{fleet.url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return "failed"
                for number, _line in enumerate(answer.iter_lines()):
                    if number >= events:
                        return "aborted"
    except httpx.TimeoutException:
        return "aborted"
    return "finished"
