"""A chat API that answers as it is told, piece by piece, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "a-model"
PLACEMENT = {"mode": "remote", "prefill": "prefill-1", "decode": "decode-1", "reason": "far"}


class ChatServer(ThreadingHTTPServer):
    """Answers each chat with the next of `answers`, then with the last one again. A None among an
    answer's pieces waits until the client has gone away, which `was_left` then says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[list[str | None]] = [["Hello", " there."]]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refusal: str | None = None
        self.events: list[dict[str, Any]] = []
        """These come first."""
        self.placement: dict[str, str] = PLACEMENT
        self.was_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send_json(200, {"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.append(self.headers.get("authorization"))
        self.server.asked.append(body)
        assert self.headers["x-baton-timing"] == "1"
        if self.server.refusal is not None:
            self._send_json(400, {"error": {"message": self.server.refusal}})
            return
        answers = self.server.answers
        pieces = answers[min(len(self.server.asked), len(answers)) - 1]
        self.send_response(200)
        self.send_header("x-baton-request-id", "chatcmpl-1")
        self.end_headers()
        for event in self.server.events:
            self._send_event(event)
        for piece in pieces:
            if piece is None:
                self.connection.settimeout(60)
                assert self.rfile.read(1) == b""
                self.server.was_left.set()
                return
            self._send_event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        self._send_event({"choices": [], "usage": usage})
        self._send_event(
            {"choices": [], "baton": {"choices": [{"placement": self.server.placement}]}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _send_json(self, status: int, value: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
