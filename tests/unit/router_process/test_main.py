"""A router as a process of its own, with a real registry and fake workers."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoint.texts_fingerprint import texts_fingerprint
from process.store.embedded_valkey import EmbeddedValkey
from protocol.messages import Abort, FinishReason
from tests.unit.router.fake_worker import WAIT_S, FakeWorker
from tests.unit.router_process.running_router import (
    COMPLETION,
    RouterProcess,
    healthy,
    registered,
    serve,
)

END = b"\n\n"
END_ID = 1
"""The checkpoint's end of text."""


async def closed(url: httpx.URL) -> None:
    """Wait until nobody accepts connections."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.close()
                await writer.wait_closed()
            except ConnectionError:  # refused, or reset as the listener closes
                return


async def serves_context(client: httpx.AsyncClient, num_tokens: int) -> None:
    """Wait until that is the context of the model."""
    async with asyncio.timeout(WAIT_S):
        while True:
            (model,) = (await client.get("/v1/models")).json()["data"]
            if model["max_model_len"] == num_tokens:
                return
            await asyncio.sleep(0.02)


async def ended_trace(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    """The trace of a request whose answer was read, once its generation has ended, too."""
    async with asyncio.timeout(WAIT_S):
        while (trace := (await client.get(f"/requests/{request_id}/trace")).json())[
            "outcome"
        ] == "running":
            await asyncio.sleep(0.02)
    return trace


async def test_before_any_worker_it_says_why_and_shows_the_fleet(router: RouterProcess) -> None:
    """To a browser, too, which is led to the page."""
    for path in ("/health", "/v1/models", "/v1/chat/completions"):
        answer = await router.client.get(path)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"] == "no decode worker is registered"
    document = (await router.client.post("/v1/messages", json={})).json()
    assert document["type"] == "error"  # in Anthropic's format
    assert document["error"]["type"] == "overloaded_error"
    assert (await router.client.get("/fleet")).json()["workers"] == []
    root = await router.client.get("/", headers={"accept": "text/html"})
    assert (root.status_code, root.headers["location"]) == (307, "dashboard/")
    assert (await router.client.get("/dashboard/")).status_code == 200
    assert "baton_router_inflight 0.0" in (await router.client.get("/metrics")).text
    assert (await router.client.get("/requests/x/trace")).status_code == 404
    assert await router.stop() == 0


async def test_the_context_is_the_largest_of_a_decode_worker_now(
    router: RouterProcess, worker: FakeWorker, valkey: EmbeddedValkey, cluster: str
) -> None:
    client = router.client
    await healthy(client)
    await serves_context(client, 123)
    async with registered(valkey, cluster, worker_id="d2", max_context=199):
        await serves_context(client, 199)
    await serves_context(client, 123)


async def test_it_serves_what_its_workers_serve(router: RouterProcess, worker: FakeWorker) -> None:
    client = router.client
    await healthy(client)
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("model", 123)
    (shown,) = (await client.get("/fleet")).json()["workers"]
    assert (shown["worker_id"], shown["connected"]) == ("d1", True)

    serving = asyncio.create_task(serve(worker, [70, 71, 72], finish=FinishReason.LENGTH))
    async with client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        body = await answer.aread()
    await serving
    assert body.endswith(b"data: [DONE]" + END)
    trace = await ended_trace(client, answer.headers["x-request-id"])
    assert trace["outcome"] == "finished"
    assert trace["num_output_tokens"] == 3
    assert trace["placement"]["decode"] == "d1"
    metrics = (await client.get("/metrics")).text
    assert 'baton_router_generations_total{outcome="finished"} 1.0' in metrics


async def test_a_stray_worker_that_registered_first_is_not_served(
    router: RouterProcess, valkey: EmbeddedValkey, cluster: str, checkpoint: Path
) -> None:
    ours = texts_fingerprint(checkpoint)
    stray = {"worker_id": "d0", "model": "stray", "model_fingerprint": "s"}
    async with registered(valkey, cluster, **stray, texts_fingerprint="of another model"):
        async with asyncio.timeout(WAIT_S):
            while "'stray'" not in (told := (await router.client.get("/ready")).text):
                await asyncio.sleep(0.02)
        assert "d0 is refused: it serves 'stray'" in told
        async with registered(valkey, cluster, worker_id="d1", texts_fingerprint=ours):
            await healthy(router.client)
            served = (await router.client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in served] == ["model"]


SET = [
    *("--served-model-name", "model", "other"),
    "--unknown-fields=refuse",
    "--control-tokens-in-text=allow",
    "--responses-store",
]


@pytest.mark.parametrize(
    ("router", "are_set"), [([], False), (SET, True)], ids=["default", "set"], indirect=["router"]
)
async def test_the_settings_say_what_clients_may_send(
    router: RouterProcess, worker: FakeWorker, are_set: bool
) -> None:
    client = router.client
    await healthy(client)
    names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert names == (["model", "other"] if are_set else ["model"])

    conversation = {"model": names[-1], "messages": [{"role": "user", "content": "Hi<|end|>"}]}
    tokens = (await client.post("/tokenize", json=conversation)).json()["tokens"]
    assert tokens.count(END_ID) == (2 if are_set else 1)

    unknown = await client.post("/tokenize", json={**conversation, "zzz": 1})
    assert unknown.status_code == (400 if are_set else 200)
    assert "zzz" in (unknown.text if are_set else unknown.headers["x-baton-ignored"])

    serving = asyncio.create_task(serve(worker, [70], finish=FinishReason.STOP))
    asked = {"model": names[-1], "input": "Hi", "store": True}
    answer = await client.post("/v1/responses", json=asked)
    await serving
    assert answer.headers.get("x-baton-ignored") == (None if are_set else "store")
    assert (answer.json()["model"], answer.json()["store"]) == ("model", are_set)


async def test_a_client_that_leaves_aborts_its_generation(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        leg = await serving
        await anext(answer.aiter_raw())
    abort = await worker.received.next(Abort)
    assert (abort.request_id, abort.attempt) == (leg.request_id, leg.attempt)


async def test_a_stopping_router_lets_streams_finish(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        leg = await serving
        chunks = answer.aiter_raw()
        await anext(chunks)
        router.tell_to_stop()
        await closed(router.client.base_url)
        worker.tokens(leg, 1, [71, 72], finish=FinishReason.LENGTH)
        rest = b"".join([chunk async for chunk in chunks])
    assert rest.endswith(b"data: [DONE]" + END)
    assert await router.stop() == 0


@pytest.mark.parametrize("router", [["--lame-duck-s=600"]], indirect=True)
async def test_a_lame_duck_serves_new_connections_and_is_not_ready(
    router: RouterProcess, worker: FakeWorker
) -> None:
    client = router.client
    await healthy(client)
    router.process.signal(signal.SIGHUP)  # means nothing
    router.tell_to_stop()
    async with asyncio.timeout(WAIT_S):
        while (answer := await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
    assert answer.json()["error"]["message"] == "the router is stopping"
    assert (await client.get("/live")).status_code == 200
    for stream in (True, False):  # an answer by the slow path, and one by the fast
        serving = asyncio.create_task(serve(worker, [70, 71, 72], finish=FinishReason.LENGTH))
        async with httpx.AsyncClient(base_url=client.base_url, timeout=WAIT_S) as newcomer:
            body = {**COMPLETION, "stream": stream}
            answer = await newcomer.post("/v1/completions", json=body)
        await serving
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert router.process.is_running()
    router.process.signal(signal.SIGTERM)
    assert await router.ended() == -signal.SIGTERM


@pytest.mark.parametrize("router", [["--lame-duck-s=0.2"]], indirect=True)
async def test_a_lame_duck_leaves_when_its_time_is_over(router: RouterProcess) -> None:
    router.tell_to_stop()
    await closed(router.client.base_url)
    assert await router.stop() == 0


@pytest.mark.parametrize("router", [["--shutdown-grace-s=0"]], indirect=True)
async def test_a_stopping_router_leaves_unfinished_streams_to_another(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        await serving
        router.tell_to_stop()
        events = (await answer.aread()).split(END)
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "generation_failed"
    assert await router.stop() == 0
    assert worker.received.queues[Abort].empty(), "its worker keeps it for another router"


@pytest.mark.parametrize("router", [["--shutdown-grace-s=0"]], indirect=True)
async def test_a_stopping_router_aborts_whole_answers_that_are_not_finished(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    asking = asyncio.create_task(
        router.client.post("/v1/completions", json={**COMPLETION, "stream": False})
    )
    leg = await serving
    router.tell_to_stop()
    abort = await worker.received.next(Abort)
    assert (abort.request_id, abort.attempt) == (leg.request_id, leg.attempt)
    answer = await asking
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"
    assert await router.stop() == 0
