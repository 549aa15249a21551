"""Every attack once, at small sizes, and at night at full size; no field of the API without one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.api.operations import OPERATIONS
from gateway.text.tokenizer import Tokenizer
from tests.effort import some
from tests.hostile import wire
from tests.hostile.attacks import Outcome, all_attacks, report
from tests.hostile.client import HostileClient, body_of
from tests.hostile.conversations import BODY_ATTACKS
from tests.hostile.core_waits import core_waits, longest_wait_s
from tests.hostile.sizes import SMALL, base_of
from tests.hostile.wrong import all_fields, body_schemas, reached_fields
from tests.paths import ROOT
from tests.unit.gateway.api_harness import MODEL, LiveApi, write_checkpoint

SIZES = replace(SMALL, model=MODEL)
AT_ONCE = 8


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = Tokenizer(folder)
    with LiveApi(folder, tokenizer) as api:
        api.reset()
        yield api
    tokenizer.close()


def attack(live: LiveApi, runs: list[Callable[[HostileClient], Awaitable[None]]]) -> HostileClient:
    """Run attacks, a few at a time, and check that nothing is left of them."""
    client = HostileClient("127.0.0.1", live.port, SIZES)
    waiting = iter(runs)

    async def work() -> None:
        for run in waiting:
            await run(client)

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    asyncio.run(all_of_them())
    live.generator.wait_idle()
    live.settle(lambda: live.metric("baton_http_bytes_in_flight") == 0)
    return client


@pytest.mark.parametrize("path", body_schemas())
def test_every_field_that_takes_values_is_attacked(path: str) -> None:
    reached: set[str] = set()
    for each in BODY_ATTACKS:
        if each.path == path:
            reached |= reached_fields(path, each.make(SMALL))
    assert sorted(all_fields(path) - reached) == []


def test_every_endpoint_with_a_body_is_attacked() -> None:
    with_body = {each.path for each in OPERATIONS if each.body is not None}
    assert {each.path for each in BODY_ATTACKS} == with_body == set(body_schemas())


def test_a_field_without_an_attack_is_noticed() -> None:
    path = "/v1/chat/completions"
    assert "ChatRequest.metadata" in all_fields(path) - reached_fields(path, base_of(path, SMALL))
    reached = reached_fields(path, {"messages": [{"role": "user", "content": "x"}]})
    assert reached == {"ChatRequest.messages", "ChatMessage.role", "ChatMessage.content"}


def test_attacks_get_answers_and_leave_nothing(live: LiveApi) -> None:
    live.generator.requests.clear()
    attacks = [each for each in all_attacks(1) if "attack" not in each.name]
    chosen = [each.run for each in attacks if ": " not in each.name]
    chosen += [each.run for each in some([each for each in attacks if ": " in each.name], 30)]
    client = attack(live, chosen)
    assert client.answers.faults == []
    statuses = client.answers.statuses
    assert statuses[200] > 50
    assert statuses[400] > 100
    assert statuses[413] > 0
    assert set(statuses) <= {200, 400, 401, 403, 404, 405, 413, 415, 431, 503}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SHORT_WAIT_S", 0.02)


@pytest.mark.parametrize("kind", ["words", "emoji", "quotes"])
def test_a_huge_text_fills_a_body_and_no_more(kind: str) -> None:
    """An attack that is refused for its length alone attacks nothing behind that limit."""
    name = f"huge text of {kind}"
    (huge,) = [each for each in BODY_ATTACKS if each.name == name]
    assert 0.9 * SMALL.body_bytes < len(body_of(huge, SMALL)) <= SMALL.body_bytes


def outcome(**changes: object) -> Outcome:
    return replace(Outcome("x", 0.1, 0.0, 0.1, 0.0, 0.0, 0.0, 10**8, 1.0, {200: 1}, 10), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "harm",
    [
        {"rest_s": 0.3},
        {"probe_s": 0.3},
        {"memory": 2 * 10**9},
        {"faults": ["503 without Retry-After"]},
    ],
)
def test_harm_is_a_stall_too_much_memory_or_a_wrong_answer(harm: dict[str, object]) -> None:
    assert outcome().is_harmless
    assert not outcome(**harm).is_harmless
    assert "\n" not in outcome(**harm).harm


def test_each_harm_is_named_in_one_line() -> None:
    harm = outcome(rest_s=0.3, memory=2 << 30, faults=["a\r\nb"] * 3).harm
    assert (
        harm == "the stream stalled 300 ms, bound 250; the router had 2048 MiB, bound 1430; 3 x a b"
    )


def test_times_without_a_core_are_those_of_the_thread_that_had_the_most() -> None:
    before = {"1/1": 0, "1/2": 10, "2/2": 5}
    now = {"1/1": 2_000_000_000, "1/2": 1_000_000_010, "2/2": 500_000_005, "1/3": 9**9}
    assert longest_wait_s(before, now) == 2.0


def test_the_kernel_tells_how_long_each_thread_of_this_process_had_no_core() -> None:
    waits = core_waits(os.getpid())
    assert f"{os.getpid()}/{os.getpid()}" in waits
    assert longest_wait_s(waits, core_waits(os.getpid())) >= 0


@pytest.mark.parametrize(
    ("answer", "faults"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", []),
        (b"HTTP/1.1 503 Unavailable\r\nRetry-After: 1\r\n\r\n", []),
        (b"HTTP/1.1 503 Unavailable\r\n\r\n", ["503 without Retry-After"]),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", ["429 without Retry-After"]),
        (b"HTTP/1.1 500 Error\r\n\r\n", ["HTTP/1.1 500 Error\r\n\r\n"]),
        (b"", ["no answer: b''"]),
    ],
)
def test_answers_are_judged(answer: bytes, faults: list[str]) -> None:
    client = HostileClient("127.0.0.1", 1, SMALL)
    client.answers.take(answer, len(answer))
    assert client.answers.faults == faults


def test_the_worst_ten_are_shown() -> None:
    shown = report([outcome(name=f"attack {place}", rest_s=place / 100) for place in range(30)])
    names = list(shown.columns[0].cells)
    assert names[:10] == [f"attack {place}" for place in range(29, 19, -1)]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_attack_does_harm() -> None:
    """Needs a machine with nothing else to do: the bounds are times."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
