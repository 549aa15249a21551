"""The HTTP server with a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from prometheus_client import CollectorRegistry

from gateway.http.certificates import CertificateReloader, TlsFiles
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.server import Doorway, HttpServer, listen, url_of
from protocol.errors import ConfigError


@dataclass
class TlsServer:
    """A server whose certificate an authority of the test's has issued."""

    folder: Path
    url: str
    reloader: CertificateReloader

    def rotate(self, authority: trustme.CA, *, key: bool = True) -> None:
        """Put a new certificate in place; without `key`, only half of it."""
        write_certificate(authority, self.folder, key)


def write_certificate(authority: trustme.CA, folder: Path, key: bool = True) -> None:
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    if key:
        certificate.private_key_pem.write_to_path(folder / "key.pem")


def trusting(authority: trustme.CA) -> httpx.AsyncClient:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return httpx.AsyncClient(verify=context, timeout=60.0)


@asynccontextmanager
async def tls_server(authority: trustme.CA, folder: Path) -> AsyncIterator[TlsServer]:
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    write_certificate(authority, folder)
    tls = TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"))
    doorway = Doorway(BoundedProtocols(ConnectionLimits(), CollectorRegistry()), tls)
    server = HttpServer(app, doorway, 1.0, lambda: None, lambda: None)
    stop, listener = asyncio.Event(), listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve_until(stop, listener))
    reloader = server.certificate_reloader()
    assert reloader is not None
    try:
        yield TlsServer(folder, url_of(listener, tls), reloader)
    finally:
        stop.set()
        await task
        listener.close()


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with tls_server(authority, tmp_path) as server:
        assert server.url.startswith("https://127.0.0.1:")
        async with trusting(authority) as client:
            assert (await client.get(server.url)).text == "https"
        async with httpx.AsyncClient(verify=ssl.create_default_context()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)


async def test_a_certificate_that_rotates_is_read_again(tmp_path: Path) -> None:
    """Open connections go on, new ones get the new certificate, and half of one changes nothing."""
    old, new = trustme.CA(), trustme.CA()
    async with tls_server(old, tmp_path) as server, trusting(old) as connected:
        assert (await connected.get(server.url)).status_code == 200
        server.rotate(new, key=False)
        server.reloader.reload_if_changed()
        async with trusting(old) as client:
            assert (await client.get(server.url)).status_code == 200
        server.rotate(new)
        watching = asyncio.create_task(server.reloader.run(interval_s=0.01))
        async with asyncio.timeout(60), trusting(new) as client:
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    assert (await client.get(server.url)).status_code == 200
                    break
                await asyncio.sleep(0.01)
        watching.cancel()
        assert (await connected.get(server.url)).status_code == 200
        async with trusting(old) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)


async def test_a_certificate_that_is_missing_for_a_while_stays_in_use(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with tls_server(authority, tmp_path) as server, trusting(authority) as client:
        (tmp_path / "cert.pem").unlink()
        server.reloader.reload_if_changed()
        assert (await client.get(server.url)).status_code == 200


def test_ipv6_hosts_may_have_brackets() -> None:
    for host in ("::1", "[::1]"):
        with listen(host, 0) as listener:
            assert url_of(listener).startswith("http://[::1]:")


def test_wrong_tls_files_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("no certificate")
    for cert in (tmp_path / "cert", tmp_path / "missing"):
        doorway = Doorway(
            BoundedProtocols(ConnectionLimits(), CollectorRegistry()), TlsFiles(str(cert))
        )
        with pytest.raises(ConfigError, match=f"TLS with {cert}"):
            HttpServer(lambda *args: None, doorway, 1.0, lambda: None, lambda: None)


async def test_nobody_is_asked_for_the_passphrase_of_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither at the start nor when a key is renewed, where the question would stop the router."""
    authority, text = trustme.CA(), "the key in .*/key.pem has a passphrase: give a key without one"
    async with tls_server(authority, tmp_path) as server, trusting(authority) as client:
        server.rotate(authority)
        encrypt(tmp_path / "key.pem")
        server.reloader.reload_if_changed()
        assert re.search(text, caplog.text)
        assert (await client.get(server.url)).status_code == 200
    files = TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    doorway = Doorway(BoundedProtocols(ConnectionLimits(), CollectorRegistry()), files)
    with pytest.raises(ConfigError, match=text):
        HttpServer(lambda *args: None, doorway, 1.0, lambda: None, lambda: None)


def encrypt(file: Path) -> None:
    """Give a key a passphrase."""
    key = load_pem_private_key(file.read_bytes(), None)
    kind, how = PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    file.write_bytes(key.private_bytes(Encoding.PEM, kind, how))
