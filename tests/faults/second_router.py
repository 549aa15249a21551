"""A second router beside that of a fleet of tests, to be stopped or killed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from protocol.messages import Role
from tests.faults.faulty_fleet import FaultyFleet
from tests.forked import ForkedChild
from tests.integration.fleets import wait_for


class SecondRouter:
    """A second router of a fleet, to be killed."""

    def __init__(
        self, fleet: FaultyFleet, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        real = fleet.fleet.processes["router"]
        self._port_file = folder / "port"
        own = ("--port=", "--port-file=")
        shared = [each for each in real._command if not each.startswith(own)]
        command = [*shared, "--port=0", f"--port-file={self._port_file}"]
        env = {**real._env, **(environment or {})}
        self.child = ForkedChild("router-2", Role.ROUTER, command, env, folder / "log")

    def start(self) -> str:
        """Start the router, or start it again. Returns its URL."""
        self._port_file.unlink(missing_ok=True)
        self.child.start()
        wait_for("the second router to serve", self._port_file.exists, 60)
        return f"http://127.0.0.1:{self._port_file.read_text().strip()}"

    def stop(self) -> None:
        """Send SIGTERM, and wait until the router has left the fleet and ended."""
        self.child.signal(signal.SIGTERM)
        assert self.child.wait(60)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.child.signal(signal.SIGKILL)
        assert self.child.wait(60)
