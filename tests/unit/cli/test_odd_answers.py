"""Commands that ask a router, where something else answers, or a router of another version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cli.main import main as baton

COMMANDS = {
    "status": (["status"], 1),
    "doctor": (["doctor"], 3),
    "trace": (["trace", "cmpl-1"], 1),
    "flight": (["trace", "--process=d1"], 1),
    "flights": (["trace", "--process=all"], 1),
    "chat": (["chat", "hello"], 1),
    "check": (["check", "--wait-s=0"], 1),
}
ANSWERS: dict[str, Any] = {
    "another object": {"status": "ok"},
    "a list": [],
    "a text": "ok",
    "nothing": None,
    "other members": {"workers": [1], "findings": [2], "data": [{"id": "m"}], "attempts": [3]},
    "no members": {"workers": [{}], "findings": [{}], "data": [], "attempts": [{}], "events": [{}]},
}


class Handler(BaseHTTPRequestHandler):
    answer: Any = None

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_odd_answer_is_one_line(
    command: str,
    answer: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Handler, "answer", ANSWERS[answer])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    argv, status = COMMANDS[command]
    assert baton([*argv, f"--router-url={url}"]) == status
    told = capsys.readouterr().err
    assert told.startswith(f"baton {argv[0]}: ")
    assert told.count("\n") == 1
    if "routers of this version" in told:
        assert "Error(" in told, "what was not understood"
