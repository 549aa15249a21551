"""How many Python functions a router calls for a request: its cost, whatever the machine's speed.

The router calls some functions for every request, and others now and then. Only whole calls per
request count, so that the figure does not depend on how long the requests take.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.router.mock_fleet import RouterFleet

_POLL_S = 0.02
_SWITCH_S = 30.0
_ROOT = f"{Path(__file__).parents[2]}/"


class CountedFleet(RouterFleet):
    """A fleet whose router can count its calls."""

    def _router_command(self, name: str) -> list[str]:
        flags = super()._router_command(name)[2:]
        return ["bench.router.counted", str(self._calls_file), *flags]

    def calls(self, send: Callable[[], object], num_requests: int) -> Counter[str]:
        """The calls per request while `send` sends this many, by file and line of the function.
        Raises TimeoutError if the router does not count."""
        self._calls_file.touch()
        self._switch(is_written=False)
        send()
        self._switch(is_written=True)
        counted = msgspec.json.decode(self._calls_file.read_bytes(), type=dict[str, int])
        per_request = {name: num // num_requests for name, num in counted.items()}
        return Counter({name.removeprefix(_ROOT): num for name, num in per_request.items() if num})

    def _switch(self, is_written: bool) -> None:
        """Let the router begin to count, which removes the file, or end, which writes it."""
        (router,) = self.names("router")
        self.signal(router, signal.SIGUSR2)
        deadline = time.monotonic() + _SWITCH_S
        while self._calls_file.exists() is not is_written:
            if time.monotonic() > deadline:
                raise TimeoutError("the router does not count its calls")
            time.sleep(_POLL_S)

    @property
    def _calls_file(self) -> Path:
        return self._processes.folder / "calls.json"
