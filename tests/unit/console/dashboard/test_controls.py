"""The controls over HTTP: what they change, what they refuse and why, and what they log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from console.dashboard.control_log import KEPT, ControlLog
from console.dashboard.controls import ControlParts, controls_router
from console.dashboard.live_settings import LiveSetting, LiveSettings
from console.dashboard.sample_prompts import SamplePrompts
from http_kit.caller import KEY_NAME
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import InvalidRequest
from protocol.registration import WorkerState
from tests.unit.router.router_harness import Harness

CLUSTER = "controls"


class Values:
    """Where the settings of these tests live."""

    threshold = 64
    target = 1000.0

    def settings(self) -> LiveSettings:
        whole = LiveSetting(
            "threshold", "router", "tokens", 0, 4096, True,
            lambda: self.threshold, lambda value: self._set("threshold", value),
        )  # fmt: skip
        target = LiveSetting(
            "target", "router", "ms", 1, None, False,
            lambda: self.target, lambda value: self._set("target", value),
        )  # fmt: skip
        return LiveSettings([whole, target])

    def _set(self, name: str, value: float) -> tuple[int, int]:
        setattr(self, name, value)
        return 1, 1


async def encode_characters(text: str) -> list[int]:
    return [ord(each) % 200 for each in text]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


@pytest.fixture
def values() -> Values:
    return Values()


@pytest.fixture
async def client(
    harness: Harness, values: Values, valkey: EmbeddedValkey
) -> AsyncIterator[httpx.AsyncClient]:
    prompts = SamplePrompts(harness.dispatcher, encode_characters, harness.fleet)
    parts = ControlParts(
        redis_url=valkey.url,
        cluster=CLUSTER,
        fleet=harness.fleet,
        settings=values.settings(),
        prompts=prompts,
        log=ControlLog(lambda: 7),
        preview=lambda worker_id: {"prefill": 0.5, "decode": None},
    )
    app = FastAPI(openapi_url=None)
    app.include_router(controls_router(parts))

    async def named(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, KEY_NAME: "ops-2"}, receive, send)

    transport = httpx.ASGITransport(app=named)
    async with httpx.AsyncClient(transport=transport, base_url="http://router/control") as made:
        yield made
    await prompts.close()


@pytest.fixture(scope="module")
def valkey():
    with EmbeddedValkey() as running:
        yield running


async def test_a_setting_changes_and_is_logged(
    client: httpx.AsyncClient, values: Values, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        body = {"name": "threshold", "scope": "router", "value": 512}
        answer = await client.post("/settings", json=body)
    assert answer.json() == {"applied": 1, "of": 1, "reason": None}
    assert values.threshold == 512
    (shown, _) = (await client.get("/settings")).json()
    assert (shown["value"], shown["minimum"], shown["maximum"]) == (512, 0, 4096)
    (entry,) = (await client.get("/log")).json()
    assert entry == {
        "at_us": 7, "key": "ops-2", "action": "threshold (router)", "result": "on 1 of 1 router",
        "old": "64", "new": "512",
    }  # fmt: skip
    assert "event=control key='ops-2' action='threshold (router)'" in caplog.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"name": "threshold", "scope": "router", "value": 5000}, "at most 4,096"),
        ({"name": "threshold", "scope": "router", "value": 1.5}, "whole number"),
        ({"name": "threshold", "scope": "decode", "value": 5}, "threshold (router)"),
        ({"name": "threshold", "scope": "router"}, "value"),
        ({"name": "threshold", "scope": "router", "value": "5"}, "value"),
        ({"name": "target", "scope": "router", "value": 0}, "at least 1"),
    ],
)
async def test_a_wrong_change_is_refused(
    client: httpx.AsyncClient, values: Values, body: dict, message: str
) -> None:
    answer = await client.post("/settings", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert (values.threshold, values.target) == (64, 1000.0)
    assert (await client.get("/log")).json() == []


async def test_bodies_that_are_no_json_or_too_long(client: httpx.AsyncClient) -> None:
    answer = await client.post("/drain", content=b"{")
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]
    answer = await client.post("/test", content=b'"' + b"x" * 70_000)
    assert answer.status_code == 400


async def test_workers_that_cannot_be_drained_or_resumed(
    client: httpx.AsyncClient, harness: Harness
) -> None:
    await harness.join("d1", "p1")
    for action, worker, words in (
        ("drain", "nobody", "no worker nobody is registered"),
        ("resume", "d1", "d1 is ready: only a draining worker can go on"),
        ("drain", "d1", "d1 has left"),  # the store of this test does not know it
    ):
        answer = (await client.post(f"/{action}", json={"worker_id": worker})).json()
        assert answer == {"accepted": False, "reason": words}
    assert [each["result"] for each in (await client.get("/log")).json()][-1].startswith(
        "no worker"
    )
    assert harness.fleet.info("d1").state == WorkerState.READY


async def test_a_preview(client: httpx.AsyncClient) -> None:
    answer = await client.post("/preview", json={"worker_id": "d1"})
    assert answer.json() == {"predicted": {"prefill": 0.5, "decode": None}}


async def test_a_test_prompt_goes_where_it_is_told(
    client: httpx.AsyncClient, harness: Harness
) -> None:
    await harness.join("d1", "d2", "p1", "p2")
    body = {"prompt": "x" * 300, "prefill": "p2", "decode": "d2"}
    request_id = (await client.post("/test", json=body)).json()["request_id"]
    assert request_id.startswith("test-")
    placement = None
    while placement is None:
        trace = harness.traces.get(request_id)
        placement = trace.attempts[0].placement if trace and trace.attempts else None
        if placement is None:
            await asyncio.sleep(0.001)
    assert (placement.decode.worker_id, placement.prefill.worker_id) == ("d2", "p2")
    (entry,) = (await client.get("/log")).json()
    assert (entry["action"], entry["result"]) == ("test prompt", request_id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "max_tokens": 65}, "max_tokens"),
        ({"prompt": "x", "decode": "d9"}, "decode"),
        ({"prompt": "x", "prefill": "d1"}, "prefill"),
    ],
)
async def test_a_wrong_test_prompt(
    client: httpx.AsyncClient, harness: Harness, body: dict, param: str
) -> None:
    await harness.join("d1")
    answer = await client.post("/test", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_log_keeps_the_newest() -> None:
    log = ControlLog(lambda: 0)
    for number in range(KEPT + 5):
        log.note("k", f"a{number}", "r")
    assert len(log.as_json()) == KEPT
    assert log.as_json()[0]["action"] == f"a{KEPT + 4}"


@given(st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans()))
def test_only_numbers_within_bounds_pass(value: object) -> None:
    setting = LiveSetting("n", "router", "", 0, 10, True, lambda: 0, lambda value: (1, 1))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_good = is_number and 0 <= value <= 10 and value == int(value)
    if is_good:
        assert setting.check(value) == value
    else:
        with pytest.raises(InvalidRequest):
            setting.check(value)
