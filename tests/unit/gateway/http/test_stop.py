"""The end of a server whose clients keep their connections open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from gateway.http.certificates import TlsFiles
from gateway.http.connection import BoundedProtocol
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.http.test_tls import write_certificate
from tests.unit.gateway.served_http import MAX_BODY_BYTES, WAIT_S, Served, completion

UPGRADE = (
    b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
STREAM = completion(stream=True, max_tokens=10**8)
WHOLE = completion(max_tokens=100_000, return_token_ids=True)
UPLOAD = completion(prompt="x" * (MAX_BODY_BYTES // 2))[:-1]


@pytest.fixture
def sudden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.server.ABORT_WAIT_S", 0.2)


@contextlib.asynccontextmanager
async def serving(served: Served) -> AsyncIterator[asyncio.Event]:
    """Serve until the block has set the event; the server must then end although the clients stay,
    and leave nothing."""
    stop = asyncio.Event()
    task = asyncio.create_task(served.server.serve_until(stop, served.listener))
    await served.until(lambda: served.server.started)
    try:
        yield stop
        assert stop.is_set()
        async with asyncio.timeout(WAIT_S):
            await task
        state = served.server.server_state
        assert not state.connections
        assert not state.tasks
        served.generator.wait_idle()
    finally:
        for connection in list(served.server.server_state.connections):
            connection.transport.abort()  # of a server that failed to do so
        for client in served.clients:
            client.close()
        served.listener.close()


def in_flight(served: Served) -> int:
    """How many connections have a request."""
    return sum(bool(each._exchanges) for each in served.server.server_state.connections)


def certificate(folder: Path) -> tuple[TlsFiles, ssl.SSLContext]:
    """A server's new certificate in this folder, and a client's context that trusts it."""
    authority, trusting = trustme.CA(), ssl.create_default_context()
    write_certificate(authority, folder)
    authority.configure_trust(trusting)
    return TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem")), trusting


async def connect(served: Served, tls: ssl.SSLContext | None) -> socket.socket:
    """A client that reads nothing, once its TLS is set up."""
    client = await served.connect()
    if tls is None:
        return client
    client.setblocking(True)
    wrapped = await asyncio.to_thread(tls.wrap_socket, client, server_hostname="127.0.0.1")
    served.clients[-1] = wrapped
    return wrapped


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize(
    "sent", [STREAM, WHOLE, WHOLE * 20, UPLOAD],
    ids=["stream", "whole answer", "pipelined", "upload"],
)  # fmt: skip
async def test_a_client_that_neither_reads_nor_leaves_does_not_keep_the_server(
    checkpoint: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    sudden: None,
    is_tls: bool,
    sent: bytes,
) -> None:
    files, trusting = certificate(tmp_path) if is_tls else (None, None)
    served = Served(checkpoint, tokenizer, files)
    if sent not in (STREAM, UPLOAD):
        large = TokenDelta([70] * 100_000, finish=FinishReason.LENGTH)
        served.generator.script = lambda request: [large]
    async with serving(served) as stop:
        client = await connect(served, trusting)
        await asyncio.to_thread(client.sendall, sent)
        await served.until(lambda: in_flight(served) == 1)
        if sent != UPLOAD:
            (connection,) = served.server.server_state.connections
            await served.until(lambda: connection.flow.write_paused)
        stop.set()
    assert served.cuts("server stopped") == 1


async def test_an_answer_that_is_whole_but_not_read_does_not_keep_the_server(
    checkpoint: Path, tokenizer: Tokenizer, sudden: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is over, and its connection closes once the rest of it is read."""
    monkeypatch.setattr("gateway.http.connection.WRITE_BUFFER_BYTES", 10**7)
    served = Served(checkpoint, tokenizer)
    large = TokenDelta([70] * 100_000, finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [large]
    async with serving(served) as stop:
        client = await served.connect()
        await served.send(client, WHOLE)
        await served.until(lambda: served.statuses(200) == 1)
        stop.set()
    assert served.cuts("server stopped") == 1


async def test_a_client_that_reads_a_byte_at_a_time_does_not_keep_the_server(
    checkpoint: Path, tokenizer: Tokenizer, sudden: None
) -> None:
    served = Served(checkpoint, tokenizer)
    async with serving(served) as stop:
        client = await served.connect()

        async def read_slowly() -> None:
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(client, 1):
                    await asyncio.sleep(0.05)

        await served.send(client, STREAM)
        reading = asyncio.create_task(read_slowly())
        await served.until(lambda: in_flight(served) == 1)
        stop.set()
    assert served.cuts("server stopped") == 1
    reading.cancel()
    await asyncio.wait([reading])


async def test_an_attempt_to_upgrade_does_not_keep_the_server(
    checkpoint: Path, tokenizer: Tokenizer, sudden: None
) -> None:
    """It is answered as plain HTTP. Its connection is idle then, as is one without a request."""
    served = Served(checkpoint, tokenizer)
    async with serving(served) as stop:
        await served.connect()
        await served.until(lambda: served.server.server_state.connections)
        client = await served.connect()
        await served.send(client, UPGRADE)
        answer = await asyncio.get_running_loop().sock_recv(client, 1000)
        assert answer.startswith(b"HTTP/1.1 405 ")
        stop.set()
    assert served.cuts("server stopped") == 0


async def test_clients_that_pool_idle_tls_connections_do_not_keep_the_server(
    checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not look at a connection, and so do not close it, until they need it again."""
    monkeypatch.setattr("gateway.http.server.CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr("gateway.http.server.ABORT_WAIT_S", 10.0)
    files, trusting = certificate(tmp_path)
    served = Served(checkpoint, tokenizer, files)
    async with serving(served) as stop:
        client = await connect(served, trusting)
        await asyncio.to_thread(client.sendall, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await asyncio.to_thread(client.recv, 1000)
        assert answer.startswith(b"HTTP/1.1 200 ")
        await connect(served, trusting)
        await served.until(lambda: len(served.server.server_state.connections) == 2)
        stop.set()
    assert served.cuts("server stopped") == 0


async def test_a_connection_that_is_lost_meanwhile_does_not_keep_other_tls_connections_open(
    checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop closes a TLS socket before it tells the connection."""
    monkeypatch.setattr("gateway.http.server.CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr("gateway.http.server.ABORT_WAIT_S", 10.0)
    lose, told = BoundedProtocol.connection_lost, asyncio.Event()

    async def lose_late(connection: BoundedProtocol, exc: Exception | None) -> None:
        await told.wait()
        lose(connection, exc)

    losing: list[asyncio.Task[None]] = []
    monkeypatch.setattr(
        BoundedProtocol,
        "connection_lost",
        lambda self, exc: losing.append(asyncio.create_task(lose_late(self, exc))),
    )
    files, trusting = certificate(tmp_path)
    served = Served(checkpoint, tokenizer, files)
    async with serving(served) as stop:
        leaving = await connect(served, trusting)
        await connect(served, trusting)
        await served.until(lambda: len(served.server.server_state.connections) == 2)
        leaving.close()
        await served.until(lambda: len(losing) == 1)
        stop.set()
        await served.until(lambda: len(losing) == 2)
        told.set()
    assert served.cuts("server stopped") == 0
