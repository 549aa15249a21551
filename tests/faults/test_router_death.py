"""A router dies in mid-stream: its client goes on at another one, and nothing is computed again."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.faults.second_router import SecondRouter
from tests.http_client import HTTP
from tests.integration.fleets import all_counters, wait_for
from tests.integration.reference import DEMO_MODEL, NUM_TOKENS, Reference

PATIENCE = {"BATON_RESUME_GRACE_S": "60", "BATON_RESUME_WAIT_S": "60"}
"""Workers are held, and a busy machine keeps clients waiting."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    settings = {"prefill": 1, "decode": 2, "local_prefill_threshold_tokens": 0}
    with faulty_fleet(environment=PATIENCE, **settings) as fleet:
        yield fleet


@pytest.fixture
def victim(fleet: FaultyFleet, tmp_path: Path) -> Iterator[SecondRouter]:
    fleet.revive()
    victim = SecondRouter(fleet, tmp_path)
    yield victim
    victim.kill()


def connected(url: str, fleet: FaultyFleet) -> str:
    """The URL, once its router uses every worker."""

    def is_connected() -> bool:
        answer = HTTP.get(f"{url}/fleet")
        listed = answer.json()["workers"] if answer.status_code == 200 else []
        return len(listed) == 3 and all(each["connected"] for each in listed)

    wait_for("the second router to know all workers", is_connected)
    wait_for("its API", lambda: HTTP.get(f"{url}/health").status_code == 200)
    return url


def totals(fleet: FaultyFleet) -> dict[str, int]:
    """Counters of all workers together, once they are idle."""
    each = list(all_counters(fleet.fleet).values())
    return {name: sum(counts.get(name, 0) for counts in each) for name in each[0]}


def modes(fleet: FaultyFleet, name: str) -> list[str]:
    """Of the attempts of a generation that may still run; none if it is not known."""
    answer = HTTP.get(f"{fleet.url}/requests/{name}/trace")
    return [each["mode"] for each in answer.json().get("attempts", [])]


def test_between_two_steps(
    fleet: FaultyFleet, victim: SecondRouter, long_prompts: list[Reference]
) -> None:
    url = connected(victim.start(), fleet)
    reference = long_prompts[0]
    before = totals(fleet)
    fleet.arm(fleet.names(Role.DECODE), "decode", 7)
    stream = Stream(url, list(reference.prompt), NUM_TOKENS)
    held = fleet.held("decode")
    stream.wait_tokens(7)
    victim.kill()
    stream.wait()
    assert stream.error
    assert stream.finish is None
    rest = Stream(fleet.url, list(reference.prompt), NUM_TOKENS, last_id=stream.last_id)
    fleet.release(held, "decode")
    rest.wait()
    assert rest.error is None
    assert stream.tokens + rest.tokens == list(reference.output)
    assert rest.request_id == stream.request_id
    assert [each["mode"] for each in fleet.attempts(stream.request_id)] == ["resume"]
    after = totals(fleet)
    assert after["decode_tokens"] - before["decode_tokens"] == NUM_TOKENS
    assert after["prefill_tokens"] - before["prefill_tokens"] == len(reference.prompt)
    assert after["streams_resumed"] - before.get("streams_resumed", 0) == 1


class Events:
    """A client that reads a stream of named events in a thread of its own."""

    def __init__(self, url: str, path: str, last_id: str = "") -> None:
        """With the `last_id` of a stream that broke off, its rest."""
        self.ids: list[str] = []
        self.told: list[tuple[str, Any]] = []
        self._thread = threading.Thread(target=self._read, args=(url + path, last_id), daemon=True)
        self._thread.start()

    def wait(self) -> Events:
        """Until the stream has ended, or broke off."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self

    def _read(self, url: str, last_id: str) -> None:
        question = "What is a lambda?"
        body = {"model": DEMO_MODEL.name, "temperature": 0, "stream": True}
        if url.endswith("responses"):
            body |= {"input": question, "max_output_tokens": 40}
        else:
            body |= {"messages": [{"role": "user", "content": question}], "max_tokens": 40}
        headers = {"accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        with (
            contextlib.suppress(httpx.HTTPError),
            HTTP.stream("POST", url, json=body, timeout=60, headers=headers) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            name = event_id = ""
            for line in answer.iter_lines():
                event_id = line.removeprefix("id: ") if line.startswith("id: ") else event_id
                name = line.removeprefix("event: ") if line.startswith("event: ") else name
                if line.startswith("data: "):
                    self.told.append((name, json.loads(line[6:]).get("delta")))
                    self.ids.append(event_id)


@pytest.mark.parametrize("path", some(["/v1/responses", "/v1/messages"], 1))
def test_among_the_events_of_a_token(fleet: FaultyFleet, victim: SecondRouter, path: str) -> None:
    """Also where the last one was in the middle of what a token makes."""
    url = connected(victim.start(), fleet)
    undisturbed = Events(fleet.url, path).wait().told
    before = totals(fleet)
    fleet.arm(fleet.names(Role.DECODE), "decode", 7)
    cut = Events(url, path)
    held = fleet.held("decode")
    wait_for("some events", lambda: len(cut.told) > 5)
    victim.kill()
    known = cut.wait().told
    assert known == undisturbed[: len(known)]
    fleet.release(held, "decode")
    for number in (len(known) - 1, 2):
        rest = Events(fleet.url, path, cut.ids[number]).wait()
        assert rest.told == undisturbed[number + 1 :]
    after = totals(fleet)
    assert after["streams_resumed"] - before.get("streams_resumed", 0) == 2
    assert after["decode_tokens"] - before["decode_tokens"] == 40, "nothing was computed again"


def test_when_all_was_generated_but_not_read(
    fleet: FaultyFleet, victim: SecondRouter, long_prompts: list[Reference]
) -> None:
    url = connected(victim.start(), fleet)
    reference = long_prompts[1]
    before = totals(fleet)
    fleet.arm(fleet.names(Role.DECODE), "decode", 4)
    stream = Stream(url, list(reference.prompt), NUM_TOKENS)
    held = fleet.held("decode")
    stream.wait_tokens(4)
    victim.child.signal(signal.SIGSTOP)
    fleet.release(held, "decode")
    after = totals(fleet)
    assert after["decode_tokens"] - before["decode_tokens"] == NUM_TOKENS
    victim.kill()
    stream.wait()
    rest = Stream(fleet.url, list(reference.prompt), NUM_TOKENS, last_id=stream.last_id).wait()
    assert rest.error is None
    assert stream.tokens + rest.tokens == list(reference.output)
    again = totals(fleet)
    assert again["decode_tokens"] == after["decode_tokens"], "nothing was computed for it"


def test_the_decode_worker_dies_too(
    fleet: FaultyFleet, victim: SecondRouter, long_prompts: list[Reference]
) -> None:
    """Nobody has the stream then: it is generated again from its seed, also when it is sampled."""
    url = connected(victim.start(), fleet)
    prompt = list(long_prompts[2].prompt)
    fields = {"temperature": 1.0, "seed": 7, "logprobs": 1}
    undisturbed = Stream(fleet.url, prompt, NUM_TOKENS, **fields).wait()
    assert len(undisturbed.tokens) == NUM_TOKENS
    fleet.arm(fleet.names(Role.DECODE), "decode", 5)
    stream = Stream(url, prompt, NUM_TOKENS, **fields)
    held = fleet.held("decode")
    stream.wait_tokens(5)
    victim.kill()
    fleet.kill(held)
    stream.wait()
    assert stream.finish is None
    rest = Stream(fleet.url, prompt, NUM_TOKENS, last_id=stream.last_id, **fields).wait()
    assert rest.error is None
    assert stream.tokens + rest.tokens == undisturbed.tokens
    assert stream.text + rest.text == undisturbed.text
    assert "resume" not in [each["mode"] for each in fleet.attempts(stream.request_id)]


def test_while_a_prompt_is_prefilled(
    fleet: FaultyFleet, victim: SecondRouter, long_prompts: list[Reference]
) -> None:
    """Of two prompts one has a few tokens; the other has none yet, and its prefill has begun."""
    url = connected(victim.start(), fleet)
    both = long_prompts[3:5]
    assert all(512 <= len(each.prompt) <= 513 for each in both), "chunks 8 or 9 give the token"
    prompts = [list(each.prompt) for each in both]
    before = totals(fleet)
    fleet.arm(["prefill-1"], "chunk", 1)
    stream = Stream(url, prompts, NUM_TOKENS)
    assert fleet.held("chunk") == "prefill-1"
    fleet.arm(fleet.names(Role.DECODE), "decode", 4)
    fleet.move_on("prefill-1", "chunk", 11)
    decoding = fleet.held("decode")
    stream.wait_tokens(1)
    victim.kill()
    stream.wait()
    (told,) = stream.choices
    untold = 1 - told
    rest = Stream(fleet.url, prompts, NUM_TOKENS, last_id=stream.last_id)
    name = f"{stream.request_id}-{untold}"
    # Both may lie on the worker that is held, which answers between its steps.
    fleet.step_until(decoding, 5, NUM_TOKENS - 4, lambda: modes(fleet, name) == ["resume"])
    fleet.release("prefill-1", "chunk")
    rest.wait()
    assert rest.error is None
    assert stream.choices[told] + rest.choices[told] == list(both[told].output)
    assert rest.choices[untold] == list(both[untold].output)
    after = totals(fleet)
    assert after["decode_tokens"] - before["decode_tokens"] == 2 * NUM_TOKENS
    assert after["streams_resumed"] - before.get("streams_resumed", 0) == 2
