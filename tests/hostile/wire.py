"""Attacks below the body: heads, trailers, chunks, pipelines, slow and absent readers, crowds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zstandard

from gateway.http.paths import NOT_GENERATION
from tests.hostile.client import HostileClient, request_of
from tests.hostile.sizes import base_of

_COMPLETIONS = "/v1/completions"
_OPEN = ("/health", "/ready", "/ping", "/live", "/version", "/openapi.json", "/docs", "/metrics")
_SHORT_WAIT_S = 0.5


@dataclass(frozen=True)
class WireAttack:
    """An attack that is more than one request with a body."""

    name: str
    run: Callable[[HostileClient], Awaitable[None]]


def _get(path: str, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{head}\r\n".encode()


def _head_with(name: str, value: Callable[[HostileClient], str]) -> WireAttack:
    async def run(client: HostileClient) -> None:
        body = json.dumps(base_of(_COMPLETIONS, client.sizes) | {"stream": True}).encode()
        await client.send(request_of(_COMPLETIONS, body, ((name, value(client)),)))

    return WireAttack(f"header {name}", run)


async def _long_target(client: HostileClient) -> None:
    await client.send(_get("/" + "a" * (client.sizes.head_bytes - 200)))


async def _many_headers(client: HostileClient) -> None:
    lines = [f"x{i}: y" for i in range(client.sizes.head_bytes // 12)]
    await client.send(_get("/v1/models", *lines), may_be_cut=True)


async def _endless_head(client: HostileClient) -> None:
    await client.send(b"GET / HTTP/1.1\r\nx: ", *[b"a" * 65_536] * 64, may_be_cut=True)


async def _every_get(client: HostileClient) -> None:
    for path in (*_OPEN, "/fleet", "/v1/models", f"/v1/models/{'m' * 4000}", "/requests/x/trace"):
        await client.send(_get(path))


async def _refused_paths(client: HostileClient) -> None:
    body = b"[" * (client.sizes.body_bytes // 16)
    for path in NOT_GENERATION:
        await client.send(request_of(path, body), may_be_cut=True)


def _chunked(client: HostileClient, chunks: list[bytes], end: bytes = b"0\r\n\r\n") -> list[bytes]:
    head = (
        f"POST {_COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return [head.encode(), *chunks, end]


def _bomb(encoding: str) -> WireAttack:
    """A small body that decodes to far more than a body may have."""

    async def run(client: HostileClient) -> None:
        zeros = b" " * (1 << 20)
        if encoding == "zstd":
            packer = zstandard.ZstdCompressor().compressobj()
            pieces = [packer.compress(zeros) for _ in range(256)]
            body = b"".join([*pieces, packer.flush()])
        else:
            squeezer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else -15)
            body = b"".join([squeezer.compress(zeros) for _ in range(256)] + [squeezer.flush()])
        body = body[: client.sizes.body_bytes]
        await client.send(request_of(_COMPLETIONS, body, (("content-encoding", encoding),)))

    return WireAttack(f"a bomb of {encoding}", run)


async def _old_client(client: HostileClient) -> None:
    body = json.dumps(base_of(_COMPLETIONS, client.sizes) | {"stream": True}).encode()
    await client.send(request_of(_COMPLETIONS, body).replace(b" HTTP/1.1", b" HTTP/1.0", 1))


async def _every_head(client: HostileClient) -> None:
    for path in (*_OPEN, "/v1/models", "/dashboard/stream"):
        await client.send(_get(path).replace(b"GET", b"HEAD", 1))


async def _tiny_chunks(client: HostileClient) -> None:
    pieces = [b"1\r\n \r\n" * 10_000] * (client.sizes.body_bytes // 100_000)
    await client.send(*_chunked(client, pieces))


async def _long_chunk_sizes(client: HostileClient) -> None:
    pieces = [(b"0" * 60 + b"1\r\n \r\n") * 1000] * (client.sizes.body_bytes // 100_000)
    await client.send(*_chunked(client, pieces))


async def _chunk_extensions(client: HostileClient) -> None:
    pieces = [b"1;" + b"a=b;" * 1000 + b"\r\n \r\n"] * (client.sizes.body_bytes // 10_000)
    await client.send(*_chunked(client, pieces), may_be_cut=True)


async def _trailers(client: HostileClient) -> None:
    body = json.dumps(base_of(_COMPLETIONS, client.sizes)).encode()
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    end = b"0\r\nx: " + b"a" * client.sizes.body_bytes + b"\r\n\r\n"
    await client.send(*_chunked(client, [chunk], end), may_be_cut=True)


async def _endless_body(client: HostileClient) -> None:
    size = 1 << 20 if client.sizes.body_bytes > 1 << 21 else 1 << 14
    piece = b"%x\r\n%b\r\n" % (size, b" " * size)
    pieces = [piece] * (3 * client.sizes.body_bytes // size)
    await client.send(*_chunked(client, pieces), may_be_cut=True)


async def _pipeline(client: HostileClient) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    await client.send(*[one * 100] * client.sizes.connections, _get("/live"))


async def _pipelined_posts(client: HostileClient) -> None:
    one = client.small(_COMPLETIONS).replace(b"connection: close\r\n", b"")
    await client.send(one * client.sizes.connections, client.small(_COMPLETIONS))


async def _absent_readers(client: HostileClient) -> None:
    """Clients that leave once a large answer has begun."""
    count = client.sizes.reported // (client.sizes.logprobs + 1) // 2
    ids = [5] * min(count, client.sizes.context - 10)
    fields = {"prompt": ids, "prompt_logprobs": client.sizes.logprobs}
    data = client.small(_COMPLETIONS, **fields)
    await asyncio.gather(*(client.send(data, reads=False) for _ in range(client.sizes.crowd)))


async def _slow_readers(client: HostileClient) -> None:
    """Clients that read a large answer, and clients that stop reading it for a while."""
    count = client.sizes.reported // (client.sizes.logprobs + 1)
    ids = [5] * min(count, client.sizes.context - 10)
    data = client.small(_COMPLETIONS, prompt=ids, prompt_logprobs=client.sizes.logprobs)

    async def hold() -> None:
        reader, writer = await client.connect()
        writer.write(data)
        await asyncio.sleep(2 * _SHORT_WAIT_S)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_SHORT_WAIT_S):
                await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    await asyncio.gather(*(hold() for _ in range(client.sizes.crowd)), client.send(data))


async def _stopped_streams(client: HostileClient) -> None:
    """Streams of many choices that nobody reads."""
    data = client.small(
        _COMPLETIONS, n=client.sizes.choices, stream=True, max_tokens=50 * client.sizes.output
    )
    writers = []
    for _ in range(min(6, client.sizes.crowd)):
        _, writer = await client.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(data)
        writers.append(writer)
    await asyncio.sleep(_SHORT_WAIT_S)
    for writer in writers:
        writer.transport.abort()


async def _idle_connections(client: HostileClient) -> None:
    writers = [(await client.connect())[1] for _ in range(client.sizes.connections)]
    for writer in writers:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nx")
    await client.send(_get("/live"))
    for writer in writers:
        writer.transport.abort()


async def _unfinished_bodies(client: HostileClient) -> None:
    """Bodies of which the last byte is missing."""
    half = request_of(_COMPLETIONS, b" " * client.sizes.body_bytes)[:-1]
    writers = []
    for _ in range(client.sizes.crowd):
        _, writer = await client.connect()
        writer.write(half)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5 * _SHORT_WAIT_S):
                await writer.drain()
        writers.append(writer)
    for writer in writers:
        writer.transport.abort()


def _crowd(name: str, path: str, make: Callable[[HostileClient], dict[str, object]]) -> WireAttack:
    async def run(client: HostileClient) -> None:
        data = client.small(path, **make(client))
        await asyncio.gather(*(client.send(data) for _ in range(client.sizes.crowd)))

    return WireAttack(f"a crowd with {name}", run)


WIRE_ATTACKS: tuple[WireAttack, ...] = (
    _head_with("x-request-id", lambda client: "i" * (client.sizes.head_bytes - 400)),
    _head_with("traceparent", lambda client: "0" * (client.sizes.head_bytes - 400)),
    _head_with("x-baton-timing", lambda client: "1"),
    _head_with("Last-Event-ID", lambda client: "A" * (client.sizes.head_bytes - 400)),
    _head_with("authorization", lambda client: "Bearer " + "k" * (client.sizes.head_bytes - 400)),
    WireAttack("a long target", _long_target),
    WireAttack("many headers", _many_headers),
    WireAttack("an endless head", _endless_head),
    WireAttack("every GET", _every_get),
    WireAttack("every HEAD", _every_head),
    WireAttack("an HTTP/1.0 client", _old_client),
    *(_bomb(encoding) for encoding in ("gzip", "deflate", "zstd")),
    WireAttack("bodies of refused paths", _refused_paths),
    WireAttack("chunks of one byte", _tiny_chunks),
    WireAttack("long chunk sizes", _long_chunk_sizes),
    WireAttack("chunk extensions", _chunk_extensions),
    WireAttack("a long trailer", _trailers),
    WireAttack("an endless body", _endless_body),
    WireAttack("a pipeline of GETs", _pipeline),
    WireAttack("a pipeline of POSTs", _pipelined_posts),
    WireAttack("readers that leave", _absent_readers),
    WireAttack("readers that stop", _slow_readers),
    WireAttack("streams that nobody reads", _stopped_streams),
    WireAttack("idle connections", _idle_connections),
    WireAttack("unfinished bodies", _unfinished_bodies),
    _crowd(
        "long texts", "/v1/completions", lambda client: {"prompt": "x" * client.sizes.body_bytes}
    ),
    _crowd(
        "many messages",
        "/v1/chat/completions",
        lambda client: {"messages": [{"role": "user", "content": "x"}] * client.sizes.many(5)},
    ),
    _crowd(
        "token ids",
        "/v1/completions",
        lambda client: {
            "prompt": [1] * (client.sizes.token_ids - 100),
            "truncate_prompt_tokens": 10,
        },
    ),
    _crowd(
        "prompt log-probabilities",
        "/v1/completions",
        lambda client: {
            "prompt": [5] * min(client.sizes.reported // 21, client.sizes.context - 10),
            "prompt_logprobs": client.sizes.logprobs,
        },
    ),
    _crowd(
        "log-probabilities",
        "/v1/completions",
        lambda client: {
            "n": client.sizes.choices,
            "logprobs": client.sizes.logprobs,
            "max_tokens": client.sizes.reported // 21 // client.sizes.choices,
        },
    ),
    _crowd(
        "streams of all choices",
        "/v1/completions",
        lambda client: {
            "n": client.sizes.choices // 2,
            "stream": True,
            "max_tokens": client.sizes.output,
        },
    ),
)
