"""`baton store --tls-port`: a Valkey on a Unix socket, and the front that clients connect to.

Owns the server's process and the folder of its socket. Both end with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import ssl
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import uvloop
from cryptography import x509

import process.bound_command
from cli.pods.store_settings import StoreSettings, configuration
from gateway.http.certificates import LOOK_S, CertificateReloader, TlsFiles
from process.open_files import allow_open_files
from process.sockets.certificate_chain import load_chain
from process.store.certificate_expiry import Expiry
from process.store.front import FrontPorts, StoreFront
from process.store.password_certificate import SERVER_NAME, certificate_of
from process.temporary_files import temporary_folder
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S = 0.02
_STOP_S = 25.0
_MOST_FILES = 8192
"""A connection takes two, and some 50 KB."""


def serve_with_tls(settings: StoreSettings, binary: Path, folder: Path) -> int:
    """Serve until a signal comes or the server ends; returns its status. Raises ConfigError."""
    allow_open_files(_MOST_FILES)
    with ExitStack() as stack:
        private = temporary_folder("baton-store-")
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        certificate = ServedCertificate(settings, private)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, certificate, (binary, folder), private))


async def _serve(
    settings: StoreSettings, certificate: ServedCertificate, server: tuple[Path, Path], path: Path
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # ignored, as by Valkey
    socket = path / "valkey.sock"
    valkey = await _start_valkey(settings, *server, socket)
    front = StoreFront(socket, certificate.context, _ports(settings))
    ended = asyncio.create_task(valkey.wait())
    try:
        if not await _listens(socket, ended):
            raise ConfigError("Valkey did not start: see its lines above")
        serving = asyncio.create_task(front.run(lambda: _announce(settings)))
        watching = asyncio.create_task(certificate.watch())
        stopped = asyncio.create_task(stop.wait())
        tasks = (serving, watching, stopped)
        await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
    finally:
        status = await _end(valkey, ended)
    return status if stop.is_set() else status or 1


def _ports(settings: StoreSettings) -> FrontPorts:
    assert settings.tls_port is not None
    return FrontPorts(
        host=settings.host,
        tls_port=settings.tls_port,
        plain_port=None if settings.plain_idle_s == 0 else settings.port,
        plain_idle_s=settings.plain_idle_s,
    )


def _announce(settings: StoreSettings) -> None:
    plain = "" if settings.plain_idle_s == 0 else f", and without TLS at port {settings.port}"
    log.info("serving with TLS at %s:%d%s", settings.host, settings.tls_port, plain)


async def _start_valkey(
    settings: StoreSettings, binary: Path, folder: Path, socket: Path
) -> asyncio.subprocess.Process:
    tether = [sys.executable, "-I", "-S", process.bound_command.__file__, str(os.getpid())]
    with configuration(settings, f"port 0\nunixsocket {socket}\nunixsocketperm 700") as file:
        return await asyncio.create_subprocess_exec(
            *tether, str(binary), "-", stdin=file, cwd=folder, start_new_session=True
        )


async def _listens(socket: Path, ended: asyncio.Task[int]) -> bool:
    """Wait until the server takes connections; False if it ended."""
    while not ended.done():
        with suppress(OSError):
            _, writer = await asyncio.open_unix_connection(socket)
            writer.close()
            return True
        await asyncio.sleep(_POLL_S)
    return False


async def _end(valkey: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> int:
    """Stop the server; returns its status."""
    if not ended.done():
        valkey.terminate()
        done, _ = await asyncio.wait([ended], timeout=_STOP_S)
        if not done:
            valkey.kill()
    return await ended


class ServedCertificate:
    """The server's certificates. Clients that ask by name for the certificate from the password get
    it. If there are certificate files, other clients get the certificate in them; it is read again
    when they change."""

    def __init__(self, settings: StoreSettings, private: Path) -> None:
        """`private`: a folder that only this user can read. Raises ConfigError."""
        self._derived = self.context = _server_context()
        self._load_derived(settings.store_password, private)
        self._files: TlsFiles | None = None
        self._expiry = Expiry()
        if settings.tls_cert_file is not None:
            self.context = _server_context()
            self.context.sni_callback = self._choose
            self._files = TlsFiles(settings.tls_cert_file, settings.tls_key_file)
            self._load_files(self._files)
        elif settings.tls_key_file is not None:
            raise ConfigError("tls_key_file needs tls_cert_file")

    async def watch(self) -> None:
        """Read changed files again, and warn before the certificate expires; until cancelled."""
        if self._files is None:
            await asyncio.Event().wait()
            return
        reloader = CertificateReloader(self.context, self._files)
        while True:
            reloader.reload_if_changed()
            self._note_end(Path(self._files.cert))
            self._expiry.log_warning(self._files.cert, time.time())
            await asyncio.sleep(LOOK_S)

    def _choose(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if name == SERVER_NAME:
            handshake.context = self._derived

    def _load_files(self, files: TlsFiles) -> None:
        try:
            load_chain(self.context, files.cert, files.key)
        except OSError as error:
            raise ConfigError(f"tls_cert_file {files.cert} cannot be used: {error}") from error

    def _load_derived(self, password: str, private: Path) -> None:
        derived = certificate_of(password)
        file = private / "certificate.pem"  # OpenSSL reads keys from files only
        file.touch(mode=0o600)
        file.write_text(derived.certificate + derived.key)
        self._derived.load_cert_chain(file)
        file.unlink()

    def _note_end(self, file: Path) -> None:
        with suppress(OSError, ValueError):
            first = x509.load_pem_x509_certificates(file.read_bytes())[0]
            self._expiry.note(first.not_valid_after_utc.timestamp(), time.time())


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # clients stay connected, and resume nothing
    return context
