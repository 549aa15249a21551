"""Clients that go away at random moments leave nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cli.fleet import Fleet
from tests.integration.fleets import assert_idle, complete, counters, running_fleet
from tests.integration.reference import DEMO_MODEL, NUM_TOKENS, Reference

NUM_REQUESTS = 200
SEED = 41


@pytest.fixture(scope="module", params=["nixl", "shm"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    # Few blocks and small chunks: prompts queue, handoffs wait, sequences are preempted.
    with running_fleet(transport=request.param, num_blocks=320, chunk_max_tokens=32) as fleet:
        yield fleet


def test_200_aborts_leave_every_counter_at_zero(fleet: Fleet, references: list[Reference]) -> None:
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
