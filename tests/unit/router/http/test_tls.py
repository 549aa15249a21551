"""The HTTP server with a certificate."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry

from protocol.errors import ConfigError
from router.http.connection import BoundedProtocols, ConnectionLimits
from router.http.server import Doorway, HttpServer, TlsFiles, listen, url_of


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    certificate.private_key_pem.write_to_path(key)

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    tls = TlsFiles(str(cert), str(key))
    doorway = Doorway(BoundedProtocols(ConnectionLimits(), CollectorRegistry()), tls)
    server = HttpServer(app, doorway, 1.0, lambda: None, lambda: None)
    stop, listener = asyncio.Event(), listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve_until(stop, listener))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    url = url_of(listener, tls)
    assert url.startswith("https://127.0.0.1:")
    async with httpx.AsyncClient(verify=trusting) as client:
        assert (await client.get(url)).text == "https"
    async with httpx.AsyncClient(verify=ssl.create_default_context()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    stop.set()
    await task
    listener.close()


def test_wrong_tls_files_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("no certificate")
    for cert in (tmp_path / "cert", tmp_path / "missing"):
        doorway = Doorway(
            BoundedProtocols(ConnectionLimits(), CollectorRegistry()), TlsFiles(str(cert))
        )
        with pytest.raises(ConfigError, match=f"TLS with {cert}"):
            HttpServer(lambda *args: None, doorway, 1.0, lambda: None, lambda: None)
