"""Old clients, clients that compress, and clients that only ask for heads."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib

import httpx
import pytest
import zstandard
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from gateway.http.connection_limits import ConnectionLimits
from gateway.http.fast_path import Application
from gateway.http.server import url_of
from gateway.http.variants.content_encoding import MAX_GZIP_MEMBERS, MAX_WINDOW_BYTES, decoder_of
from router_process.settings import RouterSettings
from tests.unit.gateway.api_harness import MODEL
from tests.unit.gateway.served_http import (
    COMPLETIONS,
    MAX_BODY_BYTES,
    WAIT_S,
    Serve,
    Served,
    completion,
)


async def answer_to(served: Served, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, which ends with the connection."""
    client = await served.connect()
    await served.send(client, sent)
    head, _, body = (await served.read_all(client)).partition(b"\r\n\r\n")
    client.close()
    return head.lower(), body


def of_1_0(request: bytes) -> bytes:
    return request.replace(b" HTTP/1.1", b" HTTP/1.0", 1)


async def test_an_http_1_0_client_reads_a_stream_to_the_connection_s_end(serve: Serve) -> None:
    served = await serve()
    served.tokens(5)
    head, body = await answer_to(served, of_1_0(completion(stream=True)))
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    data = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    assert data.pop() == b"[DONE]"
    assert [json.loads(each)["choices"][0]["text"] for each in data] == ["e"] * 5
    await served.until_nothing_is_left()


@pytest.mark.parametrize("num_tokens", [3, 5000])
async def test_an_http_1_0_client_reads_a_whole_answer(serve: Serve, num_tokens: int) -> None:
    """A long one, too, which is sent in pieces."""
    served = await serve()
    served.tokens(num_tokens)
    head, body = await answer_to(served, of_1_0(completion(max_tokens=num_tokens)))
    assert b"transfer-encoding" not in head
    assert json.loads(body)["usage"]["completion_tokens"] == num_tokens
    await served.until_nothing_is_left()


async def test_an_http_1_0_client_gets_no_interim_answer(serve: Serve) -> None:
    served = await serve()
    served.tokens(1)
    expecting = completion().replace(b"host: x\r\n", b"host: x\r\nexpect: 100-continue\r\n")
    head, _ = await answer_to(served, of_1_0(expecting))
    assert head.startswith(b"http/1.1 200")


async def test_an_old_client_behind_a_newer_request_of_the_same_connection(serve: Serve) -> None:
    served = await serve()
    served.tokens(2)
    client = await served.connect()
    await served.send(client, completion(stream=True) + of_1_0(completion(stream=True)))
    whole = await served.read_all(client)
    client.close()
    first, second = whole.split(b"0\r\n\r\nHTTP/1.1 200 OK")
    assert b"transfer-encoding: chunked" in first
    assert b"transfer-encoding" not in second
    assert second.endswith(b"\n\ndata: [DONE]\n\n")


# -- Content-Encoding ---------------------------------------------------------------------------


def deflated(body: bytes) -> bytes:
    squeezer = zlib.compressobj(wbits=-15)
    return squeezer.compress(body) + squeezer.flush()


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": lambda body: gzip.compress(body[:5]) + gzip.compress(body[5:]),
    "deflate": zlib.compress,
    "Deflate": deflated,
    "zstd": zstandard.compress,
    "ZSTD": lambda body: zstandard.compress(body[:9]) + zstandard.compress(body[9:]),
    "identity": bytes,
}


async def post(served: Served, body: bytes, encoding: str) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with httpx.AsyncClient(base_url=url_of(served.listener), timeout=WAIT_S) as client:
        return await client.post(COMPLETIONS, content=body, headers=headers)


@pytest.mark.parametrize("encoding", PACKERS)
async def test_an_encoded_body_is_decoded_within_the_limit(serve: Serve, encoding: str) -> None:
    served = await serve()
    served.tokens(1)
    pack = PACKERS[encoding]
    body = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
    assert (await post(served, pack(body), encoding)).status_code == 200
    longest = body.ljust(MAX_BODY_BYTES)
    assert (await post(served, pack(longest), encoding)).status_code == 200
    assert (await post(served, pack(longest + b" "), encoding)).status_code == 413
    assert (await post(served, pack(b"{"), encoding)).status_code == 400
    await served.until_nothing_is_left()
    assert served.metric("bytes_in_flight") == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_what_is_not_encoded_as_it_says_is_a_400(serve: Serve, encoding: str) -> None:
    served = await serve()
    whole = PACKERS[encoding](b"x" * 1000)
    for body in (b"{}", whole[: len(whole) // 2], b""):
        answer = await post(served, body, encoding)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress"])
async def test_other_encodings_are_a_415_that_names_those_known(
    serve: Serve, encoding: str
) -> None:
    answer = await post(await serve(), b"{}", encoding)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, x-gzip, deflate, zstd"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_bomb_takes_no_more_memory_than_a_body(encoding: str) -> None:
    decode = decoder_of(encoding)
    assert decode is not None
    bomb = PACKERS[encoding](b"\0" * 20_000_000)
    with pytest.raises(Exception, match="decoded body exceeds 1000 bytes"):
        decode(bomb, 1000)


def test_members_of_a_gzip_file_may_end_anywhere() -> None:
    """Also in the middle of a part that is read at once, or at its end."""
    decode, rng = decoder_of("gzip"), random.Random(2)
    assert decode is not None
    texts = [rng.randbytes(size) for size in (0, 1, 70_000, 65_513, 0, 200_000, 3)]
    packed = b"".join(map(gzip.compress, texts))
    whole = b"".join(texts)
    assert decode(packed, len(whole)) == whole
    with pytest.raises(HTTPException, match="exceeds"):
        decode(packed, len(whole) - 1)
    with pytest.raises(HTTPException, match="ends too early"):
        decode(packed[:-1], len(whole))


def test_a_gzip_file_of_very_many_members_is_refused() -> None:
    """They decode to nothing, so no limit on the decoded body bounds them."""
    decode, empty = decoder_of("gzip"), gzip.compress(b"")
    assert decode is not None
    assert decode(empty * MAX_GZIP_MEMBERS, 1000) == b""
    with pytest.raises(HTTPException, match="more than 1024 members"):
        decode(empty * (MAX_GZIP_MEMBERS + 1), 1000)


def test_a_body_that_needs_a_large_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=25, compression_level=1)
    bomb = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = bomb.compress(b"\0" * (MAX_WINDOW_BYTES + 1)) + bomb.flush()
    decode = decoder_of("zstd")
    assert decode is not None
    with pytest.raises(Exception, match="not valid zstd"):
        decode(body, 1 << 30)


# -- HEAD and connections that are kept -----------------------------------------------------------


async def test_head_is_answered_as_get_is(serve: Serve) -> None:
    served = await serve()
    async with httpx.AsyncClient(base_url=url_of(served.listener), timeout=WAIT_S) as client:
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/version", "/openapi.json",
                     "/docs", "/metrics", "/v1/completions", "/nowhere"):  # fmt: skip
            head, get = await client.head(path), await client.get(path)
            assert head.status_code == get.status_code, path
            assert head.content == b""
            if path != "/metrics":  # whose length changes with its numbers
                assert head.headers["content-length"] == get.headers["content-length"]
            assert head.headers["content-type"] == get.headers["content-type"]


async def test_the_head_of_a_stream_without_end_ends() -> None:
    router, ended = APIRouter(), asyncio.Event()

    async def forever():
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            ended.set()

    @router.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(forever(), headers={"x-kind": "stream"})

    app = Application()
    app.include_router(router)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.head("/stream")
    assert (answer.status_code, answer.headers["x-kind"], answer.content) == (200, "stream", b"")


async def test_an_idle_connection_is_kept_for_as_long_as_the_setting_says(serve: Serve) -> None:
    served = await serve(idle_timeout_s=0.2)
    client = await served.connect()
    await served.send(client, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    await served.read_all(client)  # until the server closes
    client.close()
    by_default = RouterSettings(model="m", redis_url="redis://x", cluster_secret="s" * 16)
    assert by_default.idle_timeout_s == ConnectionLimits().idle_timeout_s == 75
