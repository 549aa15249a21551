"""What strangers do at the TLS port: each is cut off, and a client beside them is served."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from tests.unit.gateway.http.test_tls import TlsServer, tls_server, trusting

CUT_S = 30.0
SLOW = 40
"""Handshakes that are held open at once."""


def client_hello(server_name: str = "localhost") -> bytes:
    """The first bytes of a handshake, as OpenSSL writes them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = context.wrap_bio(incoming, outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


HELLO = client_hello()
ATTACKS = {
    "plain HTTP": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": bytes(4096),
    "a record of 64 KiB": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "data before a handshake": b"\x17\x03\x03\x00\x10" + bytes(16),
    "a hello of SSL 2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(37),
    "a hello of SSL 3": HELLO.replace(b"\x03\x03", b"\x03\x00").replace(b"\x03\x04", b"\x03\x00"),
    "a hello of nothing but garbage": HELLO[:11] + b"\xff" * (len(HELLO) - 11),
    "a hello twice": HELLO + HELLO,
    "a name of garbage": client_hello("x" * 9).replace(b"x" * 9, b"\xff\x00\r\n../\x1b"),
    "a name with a wrong length": client_hello("y" * 9).replace(b"\x00\x09yyyy", b"\xff\xffyyyy"),
}


def address(server: TlsServer) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_what_is_no_handshake_is_cut_off(tmp_path: Path, attack: bytes) -> None:
    """Without an answer of HTTP."""
    authority = trustme.CA()
    async with tls_server(authority, tmp_path) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(attack)
        writer.write_eof()
        async with asyncio.timeout(CUT_S):
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        assert not answer.startswith(b"HTTP")
        writer.transport.abort()
        async with trusting(authority) as client:
            assert (await client.get(server.url)).text == "https"


async def test_handshakes_that_are_held_open_keep_nobody_out(tmp_path: Path) -> None:
    """Some send nothing, some half a hello, some a hello byte by byte, some stop after it."""
    authority = trustme.CA()
    async with tls_server(authority, tmp_path) as server:
        writers = []
        for number in range(SLOW):
            _, writer = await asyncio.open_connection(*address(server))
            writer.write((b"", HELLO[:100], HELLO[: number + 1], HELLO)[number % 4])
            writers.append(writer)
        async with trusting(authority) as client:
            assert (await client.get(server.url)).text == "https"
        for writer in writers:
            writer.transport.abort()


async def test_a_hello_in_pieces_is_a_hello(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with tls_server(authority, tmp_path) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        transport_socket = writer.get_extra_info("socket")
        transport_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(len(HELLO)):
            writer.write(HELLO[place : place + 1])
            await writer.drain()
        async with asyncio.timeout(CUT_S):
            assert (await reader.readexactly(1)) == b"\x16", "a server's hello"
        writer.transport.abort()


@pytest.mark.parametrize(
    ("version", "ciphers"),
    [
        (ssl.TLSVersion.TLSv1, "DEFAULT@SECLEVEL=0"),
        (ssl.TLSVersion.TLSv1_1, "DEFAULT@SECLEVEL=0"),
        (ssl.TLSVersion.TLSv1_2, "aNULL@SECLEVEL=0"),
        (ssl.TLSVersion.TLSv1_2, "eNULL@SECLEVEL=0"),
        (ssl.TLSVersion.TLSv1_2, "PSK@SECLEVEL=0"),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_and_ciphers_that_hide_nothing_are_refused(
    tmp_path: Path, version: ssl.TLSVersion, ciphers: str
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers(ciphers)
    context.minimum_version = context.maximum_version = version
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with tls_server(authority, tmp_path) as server:
        async with httpx.AsyncClient(verify=context, timeout=CUT_S) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)
        async with trusting(authority) as client:
            assert (await client.get(server.url)).text == "https"


async def test_no_client_makes_the_server_negotiate_again(tmp_path: Path) -> None:
    """Neither does the server take compressed records, nor a version below 1.2."""
    async with tls_server(trustme.CA(), tmp_path) as server:
        context = server.reloader._context
        assert context.options & ssl.OP_NO_RENEGOTIATION
        assert context.options & ssl.OP_NO_COMPRESSION
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
