"""What clients of a fleet under diagnosis send, until they are told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.http_client import HTTP
from tests.paths import DEMO_MODEL

GIVE_UP_S = 120.0


@dataclass(frozen=True)
class Load:
    """Clients that send one prompt after the other on each of `num_clients` connections.

    - `pause_s`: between two requests of a client.
    - `burst_s`: all clients pause and start together, once in each period of this length; 0: they
      never pause.
    - `read_pause_s`: between two reads of an answer.
    - `leaves_after`: clients close the connection after so many lines of an answer; 0: they read
      the whole answer.
    - `key`: the API key of these clients.
    - `model`: the model that they ask for.
    """

    num_clients: int = 2
    prompts: tuple[int, ...] = (120, 200, 280)
    outputs: tuple[int, ...] = (16, 24)
    num_prefixes: int = 4
    prefix: int = 64
    pause_s: float = 0.1
    burst_s: float = 0.0
    read_pause_s: float = 0.0
    leaves_after: int = 0
    key: str = ""
    model: str = DEMO_MODEL.name

    def body(self, number: int) -> dict[str, object]:
        """The body of a request."""
        start = 3 + 37 * (number % self.num_prefixes)
        length = self.prompts[number % len(self.prompts)]
        prefix = [(start + 11 * k) % 900 + 20 for k in range(self.prefix)]
        own = [20 + number % 900, 20 + number // 900 % 900]  # no prompt comes a second time
        own += [(number * 31 + 7 * k) % 900 + 20 for k in range(length - self.prefix)]
        return {
            "model": self.model, "prompt": (prefix + own)[:length], "ignore_eos": True,
            "max_tokens": self.outputs[number % len(self.outputs)], "stream": True,
        }  # fmt: skip


@contextmanager
def sent(url: str, *loads: Load) -> Iterator[None]:
    """Send the loads to a router while the context lasts."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_client, args=(url, load, number, over), daemon=True)
        for load in loads
        for number in range(load.num_clients)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join(GIVE_UP_S)


def _client(url: str, load: Load, number: int, over: threading.Event) -> None:
    i = number
    while not over.is_set():
        i += load.num_clients
        if load.burst_s and over.wait(load.burst_s - time.monotonic() % load.burst_s):
            return
        try:
            _complete(url, load, i, over)
        except httpx.HTTPError:  # the console's view of this client is judged, not the client's
            over.wait(0.2)
        over.wait(load.pause_s)


def _complete(url: str, load: Load, number: int, over: threading.Event) -> None:
    headers = {"authorization": f"Bearer {load.key}"} if load.key else {}
    address = f"{url}/v1/completions"
    with HTTP.stream(
        "POST", address, json=load.body(number), headers=headers, timeout=GIVE_UP_S
    ) as reply:
        for read, _ in enumerate(reply.iter_lines(), 1):
            if over.is_set() or read == load.leaves_after:
                return
            if load.read_pause_s:
                over.wait(load.read_pause_s)
