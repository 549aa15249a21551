"""A fleet is replaced process by process under steady load, and no client notices."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from process.store.embedded_valkey import EmbeddedValkey
from protocol.messages import Role
from tests.faults.faulty_fleet import Stream
from tests.faults.test_store_upgrade import SHARED, leaving_fleet, own, serves
from tests.http_client import HTTP
from tests.integration.fleets import running_fleet, wait_for
from tests.integration.reference import NUM_TOKENS, Reference

CLIENTS, MORE = 4, 8
LOOK_S = 1.0


class Clients:
    """Clients that send one request after the other to the first router that was ready at the last
    look, as behind a load balancer."""

    def __init__(self, urls: list[str], references: list[Reference]) -> None:
        self.urls = urls
        self.num_served = 0
        self.wrong: list[object] = []
        self._references = references
        self._ready = urls
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(place,)) for place in range(CLIENTS)
        ]
        self._threads.append(threading.Thread(target=self._look))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Wait until each client has had its last answer. May be called twice."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def serve_more(self) -> None:
        """Wait until more requests were served."""
        enough = self.num_served + MORE
        wait_for("requests to be served", lambda: self.num_served >= enough)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._ready = [url for url in self.urls if _is_ready(url)] or self._ready

    def _run(self, place: int) -> None:
        while not self._stop.is_set():
            one = self._references[place % len(self._references)]
            place += 1
            stream = Stream(self._ready[0], list(one.prompt), NUM_TOKENS).wait()
            with self._lock:
                self.num_served += 1
                if (stream.error, stream.tokens) != (None, list(one.output)):
                    self.wrong.append((stream.error, len(stream.tokens)))


def _is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/ready").status_code == 200
    except httpx.ConnectError:  # it has left
        return False


@pytest.mark.nightly
def test_no_request_fails_while_each_process_is_replaced(
    long_prompts: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_LAME_DUCK_S", "3")
    with EmbeddedValkey() as store, leaving_fleet(redis_url=store.url, **SHARED) as former:
        clients = Clients([former.url], long_prompts)
        with clients.running():
            clients.serve_more()
            with running_fleet(redis_url=store.url, **SHARED) as new:
                wait_for("one fleet", lambda: serves(former, own(former) | own(new)))
                clients.urls = [former.url, new.url]
                children = sorted(
                    former.processes.values(), key=lambda each: each.role == Role.ROUTER
                )
                for child in children:
                    clients.serve_more()
                    child.signal(signal.SIGTERM)
                    assert child.wait(60)
                    assert child.exit_status() == 0
                clients.serve_more()
                clients.stop()
    assert clients.wrong == []
