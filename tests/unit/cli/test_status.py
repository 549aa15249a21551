"""`baton status` against a router that answers, one that does not, and one that is none."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.main import main as baton
from process.store.embedded_valkey import EmbeddedValkey


def main(argv: list[str]) -> int:
    return baton(["status", *argv])


WORKER = {
    "worker_id": "decode-1",
    "role": "decode",
    "state": "ready",
    "host": "here",
    "pid": 7,
    "control": "tcp://127.0.0.1:1",
    "model": "a-model-of-a-rather-long-name-that-no-narrow-terminal-shows-in-one-line",
    "transport": "nixl",
    "num_waiting": 1,
    "num_running": 2,
    "queued_tokens": 3456,
    "blocks_total": 8192,
    "blocks_used": 55,
    "blocks_cached": 66,
    "connected": False,
}
USABLE = {"state": "usable", "cause": None, "reason": None, "since_us": 1, "is_replaced": False}
REFUSED = USABLE | {
    "state": "refused", "cause": "other_model", "since_us": 61_000_000,
    "reason": "it serves 'stray', and this fleet 'real'",
}  # fmt: skip


class Answering(ThreadingHTTPServer):
    """Answers every GET with `status` and `body`."""

    status = 200
    body = b'{"workers": []}'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body if self.path == "/fleet" else b"?")

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def router() -> Iterator[Answering]:
    server = Answering(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_tiers_have_a_column_where_a_worker_has_some(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    other = WORKER | {"worker_id": "decode-2"}
    tiers = {"host_tier_bytes": 4 << 30, "host_tier_used_bytes": 1 << 30, "disk_tier_bytes": 0}
    failing = [{"worker_id": "decode-1", "tier": "disk", "failures": 2, "since_us": 5}]
    fleet = {"workers": [WORKER | tiers, other], "tiers": failing}
    router.body = json.dumps(fleet).encode()
    assert main([f"--router-url={router.url}/"]) == 0
    heading, first, second, said = capsys.readouterr().out.splitlines()
    assert "TIERS" in heading
    assert "host memory 1.00 GiB of 4.00 GiB" in first.replace("\xa0", " ")
    assert "GiB" not in second
    assert said == "decode-1: 2 blocks failed in its disk tier; it serves on."


def test_a_table_with_load(router: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    away = WORKER | {"condition": USABLE | {"state": "not connected"}}
    router.body = json.dumps({"workers": [away]}).encode()
    assert main([f"--router-url={router.url}/v1"]) == 0  # as `baton up` prints it
    heading, row = capsys.readouterr().out.splitlines()
    assert "QUEUED TOKENS" in heading
    cells = [
        "decode-1", "decode", "not connected", WORKER["model"], "nixl",
        "8,192", "55", "66", "2", "1", "3,456", "here", "7",
    ]  # fmt: skip
    positions = [row.index(cell) for cell in cells[:6]]
    assert positions == sorted(positions)
    assert row.split()[-7:] == cells[-7:]


def test_a_refused_worker_is_named_with_the_reason(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = WORKER | {"condition": REFUSED}
    router.body = json.dumps({"workers": [stray, WORKER | {"condition": USABLE}]}).encode()
    assert main([f"--router-url={router.url}"]) == 0
    _, row, other, reason = capsys.readouterr().out.splitlines()
    assert "  refused  " in row + other
    assert reason == (
        "decode-1 is refused since 00:01:01 UTC: it serves 'stray', and this fleet 'real'"
    )


def test_a_worker_that_another_has_replaced_is_no_complaint(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"state": "lost", "cause": "lost", "reason": "its lease ended", "since_us": 61_000_000}
    rows = [
        WORKER
        | {"worker_id": name, "state": "lost", "condition": lost | {"is_replaced": is_replaced}}
        for name, is_replaced in (("gone", True), ("missed", False))
    ]
    router.body = json.dumps({"workers": rows}).encode()
    assert main([f"--router-url={router.url}"]) == 0
    complaints = capsys.readouterr().out.splitlines()[3:]
    assert complaints == ["missed is lost since 00:01:01 UTC: its lease ended"]


def test_trouble_with_store_and_logs_is_told_and_that_serving_goes_on(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    notice = "the certificate of redis://x expires in 3 days"
    store = {"trouble": "redis://x cannot be reached: refused", "since_us": 1, "notice": notice}
    logs = [{"process": "router", "lost": 1, "since_us": 1}]
    router.body = json.dumps({"workers": [WORKER], "store": store, "logs": logs}).encode()
    assert main([f"--router-url={router.url}"]) == 0
    trouble, shown_notice, last = capsys.readouterr().out.splitlines()[-3:]
    assert trouble.startswith("redis://x cannot be reached: refused; requests go on")
    assert shown_notice == notice
    assert last == "router cannot write its log: 1 line lost; it serves on."


def test_json_is_the_router_s_own(router: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    router.body = json.dumps({"workers": [WORKER]}).encode()
    assert main([f"--router-url={router.url}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": [WORKER]}


def test_an_empty_fleet(router: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--router-url={router.url}"]) == 0
    assert capsys.readouterr().out == "no worker is registered\n"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", "does not answer with JSON: is it a router?"),
        (404, b"nothing here", "answers 404: nothing here"),
        (503, b"later", "answers 503: later"),
        (401, b'{"error":{"message":"no key"}}', "answers 401: no key\n"),
        (500, b'{"error":"odd"}', 'answers 500: {"error":"odd"}'),
    ],
)
def test_something_else_than_a_router(
    router: Answering,
    capsys: pytest.CaptureFixture[str],
    status: int,
    body: bytes,
    words: str,
) -> None:
    router.status, router.body = status, body
    assert main([f"--router-url={router.url}"]) == 1
    assert words in capsys.readouterr().err


def test_without_a_router_the_registry_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedValkey() as valkey:
        monkeypatch.setenv("BATON_REDIS_URL", valkey.url)
        assert main(["--router-url=http://127.0.0.1:1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "no worker is registered\n"
    assert "load is not known" in captured.err


def test_nobody_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--router-url=http://127.0.0.1:1"]) == 1
    assert "name one by --router-url, or the fleet's Redis by --redis-url" in (
        capsys.readouterr().err
    )


def test_an_answer_of_another_version(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    router.body = json.dumps([WORKER]).encode()
    assert main([f"--router-url={router.url}"]) == 1
    assert "does not list workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["http://me:pa/word@h", "http://me:word@h:1", "http://:word@h:x", "ftp://me:word@h"]
)
def test_no_password_of_a_url_is_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert baton(["status", f"--router-url={url}"]) != 0
    assert "word" not in capsys.readouterr().err


def test_nothing_of_a_router_steers_the_terminal(
    router: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07[red]:smile:\u202e\ud800"
    row = WORKER | {
        "worker_id": hostile,
        "condition": REFUSED | {"reason": hostile, "since_us": -1},
    }
    router.body = json.dumps({"workers": [row]}).encode()
    assert main([f"--router-url={router.url}"]) == 0
    table = capsys.readouterr().out
    assert table.count("]52;c;ZXZpbA==[red]:smile:") == 3
    router.status, router.body = 500, hostile.replace("\ud800", "").encode()
    assert main([f"--router-url={router.url}"]) == 1
    error = capsys.readouterr().err
    assert "]52;c;ZXZpbA==" in error
    assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(table + error)
