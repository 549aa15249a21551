"""Requests that are too large, malformed or left alone: each is refused, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random

import httpx
import pytest

from gateway.http.connection import MAX_PIPELINED, PARSED_AT_ONCE, BoundedProtocol
from gateway.http.server import url_of
from tests.unit.gateway.served_http import WAIT_S, Serve, completion


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nlong: " + b"x" * 2100 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nnever-ends: " + b"x" * 5000,
        b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 1100,
        b"GET /" + b"x" * 2100 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"n" * 5000,
    ],
)
@pytest.mark.parametrize("size", [500, 10**6])
async def test_a_head_that_is_too_large_is_refused(serve: Serve, head: bytes, size: int) -> None:
    served = await serve()
    client = await served.connect()
    with contextlib.suppress(ConnectionError):
        for at in range(0, len(head), size):
            await served.send(client, head[at : at + size])
            await asyncio.sleep(0)
        while not served.cuts("head too large"):
            await served.send(client, b"x" * 3000)
            await asyncio.sleep(0)
    await served.until(lambda: served.cuts("head too large") == 1)
    await served.until_nothing_is_left()
    answer = await served.read_all(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    client.close()


async def test_a_refusal_of_a_head_is_json(serve: Serve) -> None:
    served = await serve()
    async with httpx.AsyncClient(base_url=url_of(served.listener), timeout=WAIT_S) as client:
        answer = await client.get("/v1/models", headers={"x-long": "x" * 2100})
        assert answer.status_code == 431
        assert "2000 bytes" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"x-long": "x" * 1000})).status_code == 200
        for _ in range(5):  # each request counts for itself
            assert (
                await client.get("/v1/models", headers={"x-long": "x" * 900})
            ).status_code == 200


@pytest.mark.parametrize("sends", [b"", b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_connection_with_one_of_the_last_descriptors_is_refused_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sends: bytes
) -> None:
    served = await serve()
    monkeypatch.setattr("gateway.http.connection.is_reserved", lambda descriptor: True)
    client = await served.connect()
    await served.send(client, sends)
    head, _, body = (await served.read_all(client)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert "as many connections as it may" in json.loads(body)["error"]["message"]
    await served.until_nothing_is_left()
    assert served.cuts("no descriptors left") == 1
    monkeypatch.setattr("gateway.http.connection.is_reserved", lambda descriptor: False)
    client = await served.connect()
    await served.send(client, b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await served.read_all(client)).startswith(b"HTTP/1.1 200 ")


async def test_a_head_counts_once_however_it_is_cut(serve: Serve) -> None:
    served = await serve()
    head = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + b"abc: defgh\r\n" * 140
    assert 1700 < len(head) < 2000
    for size in (100, 700, 1000):
        client = await served.connect()
        for at in range(0, len(head), size):
            await served.send(client, head[at : at + size])
            await asyncio.sleep(0.01)  # the next part is to come alone
        await served.send(client, b"\r\n")
        assert (await served.read_all(client)).startswith(b"HTTP/1.1 200 ")
        client.close()


async def test_pipelined_requests_are_read_a_few_ahead_and_all_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading thousands of requests in one go would hold up everybody."""
    most = 0
    parse = BoundedProtocol._parse

    def watched(self: BoundedProtocol, data: bytes) -> None:
        nonlocal most
        parse(self, data)
        most = max(most, len(self._exchanges) - 1)

    monkeypatch.setattr(BoundedProtocol, "_parse", watched)
    served = await serve()
    client = await served.connect()
    one = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    last = one.replace(b"host: x", b"host: x\r\nconnection: close")
    await served.send(client, one * 5000 + last[:20])
    await served.send(client, last[20:])
    answers = await served.read_all(client)
    assert answers.count(b"HTTP/1.1 200 ") == 5001
    assert 100 < most < MAX_PIPELINED + PARSED_AT_ONCE // len(one) + 2
    client.close()


async def test_what_is_not_http_is_answered_400(serve: Serve) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    answer = await served.read_all(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    client.close()
    await served.until_nothing_is_left()


async def test_a_body_without_end_is_answered_then_cut(serve: Serve) -> None:
    served = await serve()
    client = await served.connect()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await served.send(client, head)
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            await served.send(client, chunk)
        pytest.fail("80 MB were taken")
    await served.until(lambda: served.cuts("message too large") == 1)
    assert served.statuses(413) == 1
    await served.until_nothing_is_left()
    client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_with_requests_behind_its_first_is_no_error_of_ours(
    serve: Serve, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, completion(stream=stream, max_tokens=10**8) + completion())
    await served.until(lambda: served.num_produced > 0)
    client.close()
    await served.until_nothing_is_left()
    gc.collect()
    assert served.statuses(499) == 1
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_mutated_requests_never_break_the_server(serve: Serve) -> None:
    """Bytes removed, added and changed anywhere, in parts of any size; then the client leaves."""
    served = await serve()
    served.tokens(3)
    rng = random.Random(11)
    right = completion(max_tokens=3) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    for _ in range(300):
        mutated = bytearray(right)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(mutated))
            mutated[at : at + rng.choice([0, 1, 1, 20])] = rng.randbytes(rng.choice([0, 1, 1, 8]))
        client = await served.connect()
        with contextlib.suppress(ConnectionError):
            size = rng.choice([7, 100, 10_000])
            for start in range(0, len(mutated), size):
                await served.send(client, bytes(mutated[start : start + size]))
        client.close()
    await served.until_nothing_is_left()
    assert served.statuses(500) == 0
    async with httpx.AsyncClient(base_url=url_of(served.listener), timeout=WAIT_S) as client:
        assert (await client.get("/v1/models")).status_code == 200
