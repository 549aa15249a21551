"""Settings of `baton store`, and the configuration of Valkey that follows from them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO

from process.settings import setting

PASSWORD_PATTERN = r"[A-Za-z0-9_.~-]{16,}"


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of `baton store`."""

    host: str = setting("127.0.0.1", help="address to listen on", pattern=r"\S+")
    port: int = setting(6379, help="port for clients that do not encrypt", minimum=1, maximum=65535)
    tls_port: int | None = setting(
        None,
        help="port for clients that encrypt; none: no such port",
        minimum=1,
        maximum=65535,
    )
    plain_idle_s: float | None = setting(
        None,
        help="with tls_port: how long the port without TLS stays open while no client uses it; "
        "0: it is never open; none: it always stays open",
        unit="s",
        minimum=0,
    )
    tls_cert_file: str | None = setting(
        None,
        help="with tls_port: a certificate of your own with its chain, as a PEM file that is "
        "read again when it changes; none: a certificate derived from the password, which "
        "clients check with ?trust=password",
    )
    tls_key_file: str | None = setting(
        None, help="PEM file of that certificate's key, if it is another file"
    )
    store_password: str = setting(
        help="password of clients: 16 or more letters, digits and _.~-, as it is part of a URL",
        pattern=PASSWORD_PATTERN,
        secret=True,
        flag=False,
    )
    data_dir: str | None = setting(
        None, help="folder for a log of all writes, to start again with; none: only in memory"
    )


def configuration(settings: StoreSettings, listen: str) -> IO[bytes]:
    """The server's configuration as an unnamed file, at its beginning. `listen`: its lines about
    where the server listens."""
    lines = [
        listen,
        f"requirepass {settings.store_password}",
        'save ""',
        "daemonize no",
        f"appendonly {'yes' if settings.data_dir else 'no'}",
        "appendfsync everysec",
        "repl-diskless-load swapdb",
    ]
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(("\n".join(lines) + "\n").encode())
    file.seek(0)
    return file
