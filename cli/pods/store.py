"""`baton store`: the Valkey of the wheel in the foreground, for pods and hosts without their own.

The process becomes the server: its configuration, with the password, comes from an unnamed file on
standard input, so that no argument or file of the host shows it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from process.settings import setting, settings_or_exit
from process.store.embedded_valkey import find_binary
from protocol.errors import ConfigError

PASSWORD_PATTERN = r"[A-Za-z0-9_.~-]{16,}"


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of `baton store`."""

    host: str = setting("127.0.0.1", help="address to listen on", pattern=r"\S+")
    port: int = setting(6379, help="port to listen on", minimum=1, maximum=65535)
    store_password: str = setting(
        help="password of clients: 16 or more letters, digits and _.~-, as it is part of a URL",
        pattern=PASSWORD_PATTERN,
        secret=True,
        flag=False,
    )
    data_dir: str | None = setting(
        None, help="folder for a log of all writes, to start again with; none: only in memory"
    )


def main(argv: Sequence[str]) -> int:
    """Become the server; returns 2 if it cannot start. Raises ConfigError."""
    settings = settings_or_exit(
        StoreSettings,
        argv,
        prog="baton store",
        description="Run the Valkey that comes with Baton, for a fleet on several hosts or pods.",
        section="store",
    )
    binary = find_binary()
    folder = Path(settings.data_dir or "/")
    if not folder.is_dir():
        raise ConfigError(f"data_dir {folder} is not a folder")
    with tempfile.TemporaryFile() as configuration:
        configuration.write(_configuration(settings).encode())
        configuration.seek(0)
        os.dup2(configuration.fileno(), 0)
    os.chdir(folder)
    os.execv(binary, [str(binary), "-"])


def _configuration(settings: StoreSettings) -> str:
    host = settings.host.strip("[]")
    lines = [
        f"bind {'* -::*' if host in ('0.0.0.0', '::') else host}",
        f"port {settings.port}",
        f"requirepass {settings.store_password}",
        'save ""',
        "daemonize no",
        f"appendonly {'yes' if settings.data_dir else 'no'}",
        "appendfsync everysec",
    ]
    return "\n".join(lines) + "\n"
