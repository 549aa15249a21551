"""Two hosts on one machine: network namespaces that only a virtual cable connects.

Owns the namespaces. Each has its own loopback interface and an `eth0`. Needs Linux, root and `ip`
(Debian: iproute2).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from typing import Self

from protocol.errors import ConfigError

INTERFACE = "eth0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PREFIX_BITS = 24


class TwoHosts:
    """A context manager; hosts are numbered 0 and 1 and have the addresses `ADDRESSES`."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self.namespaces = (f"baton-{token}-0", f"baton-{token}-1")

    @staticmethod
    def why_not() -> str:
        """Why namespaces cannot be made here; "" if they can. Tries it."""
        if shutil.which("ip") is None:
            return "there is no `ip` (Debian: apt-get install iproute2)"
        if os.geteuid() != 0:
            return "only root can make network namespaces"
        try:
            with TwoHosts():
                return ""
        except ConfigError as error:
            return str(error)

    def command(self, host: int, *arguments: str) -> list[str]:
        """The command line that runs `arguments` on a host, as the same process."""
        return ["ip", "netns", "exec", self.namespaces[host], *arguments]

    def received_bytes(self, host: int) -> int:
        """Bytes that came over the cable so far."""
        path = f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"
        return int(_run(*self.command(host, "cat", path)))

    def __enter__(self) -> Self:
        """Raises ConfigError with the reason if the system does not let us."""
        try:
            for name in self.namespaces:
                _run("ip", "netns", "add", name)
            one, other = self.namespaces
            ends = ("netns", one), ("type", "veth", "peer", "name", INTERFACE, "netns", other)
            _run("ip", "link", "add", "name", INTERFACE, *ends[0], *ends[1])
            for host, address in enumerate(ADDRESSES):
                inside = ("ip", "-n", self.namespaces[host])
                _run(*inside, "link", "set", "lo", "up")
                _run(*inside, "address", "add", f"{address}/{_PREFIX_BITS}", "dev", INTERFACE)
                _run(*inside, "link", "set", INTERFACE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
