"""The loads of the chaos and soak benches: what a client sees wrong is counted as what it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.chaos import is_clean
from bench.reliability import chaos_load
from bench.reliability.chaos_load import Load, Tally
from bench.reliability.soak_load import SoakLoad
from tests.paths import DEMO_MODEL
from tests.unit.bench.engine.answering_server import AnsweringServer, header

ANSWER = [5, 6, 7]
DONE = "data: [DONE]\n\n"


def text_of(*tokens: int) -> str:
    return "".join(f" {token}" for token in tokens)


def event(number: int, *tokens: int, text: str | None = None) -> str:
    text = text_of(*tokens) if text is None else text
    document = json.dumps({"choices": [{"token_ids": tokens, "text": text}]})
    return f"id: cmpl-1:{number}\ndata: {document}\n\n"


def stream_of(*tokens: int) -> str:
    return "".join(event(number, token) for number, token in enumerate(tokens, start=1)) + DONE


class Router(AnsweringServer):
    """Answers a question to learn from with ANSWER, and any stream with `stream`."""

    def __init__(self, stream: str, status: str = "200 OK") -> None:
        super().__init__()
        self.resumed_from: list[str] = []
        self._stream = stream
        self._status = status

    async def answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.resumed_from.append(header(head, "last-event-id"))
        status, text = "200 OK", json.dumps({"choices": [LEARNT]})
        if body.get("stream") or self._status != status:
            status, text = self._status, self._stream
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{text}".encode())


LEARNT = {
    "token_ids": ANSWER,
    "text": text_of(*ANSWER),
    "logprobs": {"top_logprobs": [{"a": -0.1, "b": -3.0} for _ in ANSWER]},
    "message": {"content": "text"},
}


@pytest.fixture(autouse=True)
def nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_load, "ABORTED", 0.0)
    monkeypatch.setattr(chaos_load, "TURNS", 1)


async def tally_of(routers: Callable[[Load], dict[str, str]]) -> Tally:
    """Of one request, after its answer was learnt."""
    load: Load = Load(str(DEMO_MODEL), lambda: routers(load), seed=1)
    await load.learn([4], len(ANSWER))
    await load.run(1, lambda: load.tally.requests > 0)
    return load.tally


@pytest.mark.parametrize(
    ("stream", "seen"),
    [
        (stream_of(5, 6, 7), {}),
        (stream_of(5, 9, 7), {"mismatches": 1}),
        (event(1, 5, 6, text=" 5 ") + event(2, 7) + DONE, {"mismatches": 1}),
        (stream_of(5, 6), {"mismatches": 1, "losses": 1}),
        (stream_of(5, 6, 6, 7), {"mismatches": 1, "duplicates": 1}),
        (stream_of(5, 6, 7).removesuffix(DONE), {"errors": 1}),
        (event(1, 5) + 'data: {"error": {"message": "no"}}\n\n', {"errors": 1}),
    ],
    ids=[
        "right",
        "another token",
        "another text",
        "a token lost",
        "a token twice",
        "no end",
        "an error",
    ],
)
async def test_a_stream_is_compared_with_the_learnt_answer(
    stream: str, seen: dict[str, int]
) -> None:
    async with Router(stream) as router:
        tally = await tally_of(lambda load: {"router-1": router.url})
    counts = {name: getattr(tally, name) for name in ("mismatches", "duplicates", "losses")}
    counts["errors"] = len(tally.errors)
    assert counts == dict.fromkeys(counts, 0) | seen
    assert tally.requests == 1
    assert is_clean(tally, left=0) is not bool(seen)


async def test_a_talk_goes_on_with_what_was_said_and_with_its_cached_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chaos_load, "TURNS", 2)
    monkeypatch.setattr(chaos_load, "UNCACHED", 1.0)
    async with Router(stream_of(*ANSWER)) as router:
        tally = await tally_of(lambda load: {"router-1": router.url})
    learnt, asked = router.bodies[:2], router.bodies[2:]
    assert [body["prompt"] for body in asked] == [body["prompt"] for body in learnt]
    assert asked[1]["prompt"][:7] == asked[0]["prompt"] + ANSWER
    assert len(asked[1]["prompt"]) == 7 + chaos_load.TURN_TOKENS
    assert asked[0]["cache_salt"] == asked[1]["cache_salt"]
    assert (tally.requests, tally.turns, tally.finished) == (2, 1, 2)


async def test_a_stream_whose_router_is_killed_goes_on_at_another() -> None:
    async with Router(event(1, 5)) as killed, Router(event(3, 6, 7) + DONE) as other:

        def routers(load: Load) -> dict[str, str]:
            if "router-1" in load.doomed:
                return {"router-2": other.url}
            if killed.bodies:  # the answer is learnt; the next stream breaks off
                load.doomed.add("router-1")
            return {"router-1": killed.url}

        tally = await tally_of(routers)
    assert other.resumed_from == ["cmpl-1:1"]
    assert (tally.cut, tally.resumed, tally.finished, tally.errors) == (1, 1, 1, [])
    assert is_clean(tally, left=0)


@pytest.mark.parametrize(
    ("tally", "left"),
    [
        (Tally(finished=0), 0),
        (Tally(finished=1, mismatches=1), 0),
        (Tally(finished=1, duplicates=1), 0),
        (Tally(finished=1, losses=1), 0),
        (Tally(finished=1, errors=["500"]), 0),
        (Tally(finished=1), 1),
        (Tally(finished=1), -1),
    ],
)
def test_whatever_went_wrong_is_not_clean(tally: Tally, left: int) -> None:
    assert is_clean(Tally(finished=1), left=0)
    assert not is_clean(tally, left)


@pytest.mark.parametrize(
    ("status", "stream", "is_seen"),
    [("500 Oh", "", True), ("200 OK", event(1, 5), True), ("200 OK", stream_of(5), False)],
    ids=["refused", "cut short", "whole"],
)
async def test_the_soak_bench_sees_what_is_not_answered(
    status: str, stream: str, is_seen: bool
) -> None:
    async with Router(stream, status) as router:
        load = SoakLoad(str(DEMO_MODEL), [router.url], seed=1)
        await load.run(1, lambda: len(load.kinds) == 4)
    assert load.answered[router.url] >= 4
    assert bool(load.errors) is is_seen, load.errors
