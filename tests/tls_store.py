"""A real store behind TLS, as `baton store` runs it, within the test's process."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trustme
import uvloop

import process.bound_command
from process.store.front import FrontPorts, StoreFront
from process.store.password_certificate import certificate_of
from process.store.valkey_binary import find_binary
from tests.ports import held_port

PASSWORD = "a-password-of-tests"
_START_S = 60.0


@dataclass(frozen=True)
class TlsStore:
    """Where a store listens; `context` is the server's, whose certificate may be replaced."""

    tls_port: int
    plain_port: int
    context: ssl.SSLContext

    @property
    def url(self) -> str:
        """The URL for clients that check the certificate by the password."""
        return f"{self.tls_url}?trust=password"

    @property
    def tls_url(self) -> str:
        """The URL for clients that check the certificate in another way."""
        return f"rediss://:{PASSWORD}@127.0.0.1:{self.tls_port}"

    @property
    def plain_url(self) -> str:
        """The URL for clients without TLS."""
        return f"redis://:{PASSWORD}@127.0.0.1:{self.plain_port}"


def context_of(folder: Path, issued: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """A server's context with a certificate of an authority, or with that of the password."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if issued is not None:
        issued.configure_cert(context)
        return context
    derived = certificate_of(PASSWORD)
    file = folder / "derived.pem"
    file.write_text(derived.certificate + derived.key)
    context.load_cert_chain(file)
    return context


@contextmanager
def tls_store(
    folder: Path, context: ssl.SSLContext | None = None, plain_idle_s: float | None = None
) -> Iterator[TlsStore]:
    """A running store behind TLS; its socket lies in `folder`."""
    socket, context = folder / "valkey.sock", context or context_of(folder)
    with held_port() as tls, held_port() as plain:
        ports = FrontPorts(
            host="127.0.0.1",
            tls_port=tls.getsockname()[1],
            plain_port=plain.getsockname()[1],
            plain_idle_s=plain_idle_s,
        )
        with _valkey(socket), _serving(StoreFront(socket, context, ports)):
            yield TlsStore(ports.tls_port, ports.plain_port or 0, context)


@contextmanager
def _valkey(socket: Path) -> Iterator[None]:
    tether = [sys.executable, "-I", "-S", process.bound_command.__file__, str(os.getpid())]
    settings = f'port 0\nunixsocket {socket}\nrequirepass {PASSWORD}\nsave ""\nappendonly no\n'
    command = [*tether, str(find_binary()), "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        assert server.stdin is not None
        server.stdin.write(settings.encode())
        server.stdin.close()
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        try:
            yield
        finally:
            server.terminate()


@contextmanager
def _serving(front: StoreFront) -> Iterator[None]:
    is_listening, ends = threading.Event(), []

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        ends.append(lambda: loop.call_soon_threadsafe(task.cancel))
        with suppress(asyncio.CancelledError):
            await front.run(is_listening.set)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_listening.wait(_START_S)
        yield
    finally:
        for end in ends:
            end()
        thread.join()
