"""Answers to requests that are refused before the application sees them, and their log.

A refusal closes its connection: after a malformed request, the start of the next one is unknown.
Anyone can send malformed requests, as fast as the network carries them, so the log gets a bounded
number of lines, which count the refusals.
"""

from __future__ import annotations

import http
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from http_kit.errors import HttpError
from protocol.errors import RequestError

LOG_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status and message of a refusal; `reason` labels it in metrics."""

    status: int
    message: str
    reason: str = "malformed request"
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def answer(self) -> bytes:
        """The whole response."""
        body = HttpError(self.status, self.message, RequestError.kind, code=self.code).body()
        own = {"content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{name}: {value}\r\n" for name, value in (own | self.headers).items()]
        phrase = http.HTTPStatus(self.status).phrase
        head = f"HTTP/1.1 {self.status} {phrase}\r\n{''.join(lines)}connection: close\r\n\r\n"
        return head.encode() + body


MALFORMED = Refusal(400, "this is not a valid HTTP/1.1 request")
HEAD_TOO_SLOW = Refusal(
    408, "the head of the request did not come in time", "request not received in time"
)

NO_ROOM = Refusal(
    503, "this router has as many connections as it may; retry", headers={"retry-after": "1"}
)


class Refused(Exception):
    """Raised while a request is parsed."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RefusalLog:
    """Logs refusals: the first at once, then at most one line per interval, with their number."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._logger = logger
        self._clock = clock
        self._next_at = 0.0
        self._num_unlogged = 0

    def note(self, client: object, message: str) -> None:
        """Count one refusal, and log it unless the last line is too recent."""
        self._num_unlogged += 1
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + LOG_INTERVAL_S
        self._logger.warning(
            "refused %d malformed requests since the last such line; the latest, from %s: %s",
            self._num_unlogged,
            client,
            message,
        )
        self._num_unlogged = 0
