"""Commands find a router whatever proxies the environment names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.http_json import RouterAccess, get_json, is_ok

NOBODY = "http://127.0.0.1:1"


class Recording(ThreadingHTTPServer):
    """Answers every GET, and keeps the targets: a proxy is asked for whole URLs."""

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Handler)
        self.targets: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.targets.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Recording]:
    with Recording("127.0.0.1") as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def without_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_router_of_this_host_is_asked_directly(
    server: Recording, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)
    assert get_json(f"http://{host}:{server.server_port}/fleet") == {}
    assert is_ok(f"http://{host}:{server.server_port}/health")
    assert server.targets == ["/fleet", "/health"]


def test_a_router_of_another_host_is_asked_through_the_proxy(
    server: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    assert get_json("http://router.example:8000/fleet") == {}
    assert server.targets == ["http://router.example:8000/fleet"]


def test_baton_up_asks_its_own_router_directly_at_any_address(
    server: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of this host that a proxy could not reach; 0.0.0.0 is none of loopback's."""
    monkeypatch.setenv("http_proxy", NOBODY)
    url = f"http://0.0.0.0:{server.server_port}/fleet"
    assert get_json(url, access=RouterAccess(is_here=True)) == {}
    assert server.targets == ["/fleet"]
