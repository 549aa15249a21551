"""The bounds on one HTTP connection, and the timers that enforce them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gateway.http.refusals import Refusal

MAX_BODY_BYTES = 16 * 1024 * 1024
"""The default: enough for four million tokens of plain text. Nothing else runs while a body is
parsed."""
BODY_WINDOW_S = 30.0
LATE_S = 0.5


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on one connection.

    - `max_head_bytes`: request line and headers (and trailers).
    - `max_body_bytes`: the longest body that the application accepts; with chunk framing a message
      may be twice as long.
    - `receive_timeout_s`: the time from the connection, or from a later request's first byte, to
      the end of the head.
    - `stall_timeout_s`: the time for draining a full write buffer, or the rest of an answer.
    - `idle_timeout_s`: the time between two requests. It must be longer than that of load
      balancers, about a minute: if the router closes first, it may meet a request that they have
      just sent.
    - `min_body_rate`: bytes per second. Each part of a body, of as many bytes as this rate brings
      in `body_window_s`, must arrive within that time; the whole may take as long as it needs.
    """

    max_head_bytes: int = 32 * 1024
    max_body_bytes: int = MAX_BODY_BYTES
    receive_timeout_s: float = 60.0
    stall_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    min_body_rate: int = 1024

    @cached_property
    def max_message_bytes(self) -> int:
        """Bytes of one request on the wire."""
        return self.max_head_bytes + 2 * self.max_body_bytes

    @cached_property
    def body_window_s(self) -> float:
        """The time over which the rate of a body is measured: long enough for a bad line to recover
        and resend lost packets."""
        return min(BODY_WINDOW_S, self.receive_timeout_s)

    @cached_property
    def body_part_bytes(self) -> int:
        """Bytes of a body that may take `body_window_s`."""
        return max(1, round(self.min_body_rate * self.body_window_s))

    def body_too_slow(self) -> Refusal:
        """The refusal of a request whose body comes too slowly, or not at all."""
        message = (
            f"less than {self.body_part_bytes} bytes of the body came within "
            f"{self.body_window_s:g} s; send it again"
        )
        return Refusal(408, message, "body too slow")

    def head_too_large(self) -> Refusal:
        """The refusal of a request whose head is too large."""
        message = (
            f"request line, headers and trailers may have {self.max_head_bytes} bytes together"
        )
        return Refusal(431, message, "head too large")


class Countdown:
    """A timer that is started and stopped many times; it calls `on_end` when it runs out. If the
    event loop is late, `on_end` is called a little later, because data may have arrived that is
    still unread.

    A stopped countdown leaves the event loop's timer as it is, and the next start uses it: most
    countdowns are stopped within milliseconds, and making and cancelling a timer for each would
    cost more than the rest of a connection's work.
    """

    __slots__ = ("_due", "_handle", "_loop", "_on_end", "_seconds", "_wakes_at")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_end = on_end
        self._due: float | None = None  # None: it does not run
        self._handle: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it was started and has neither run out nor been stopped."""
        return self._due is not None

    def start(self, seconds: float | None = None) -> None:
        """Start the timer unless it runs; for its usual time if `seconds` is None."""
        if self._due is None:
            wait_s = self._seconds if seconds is None else seconds
            self._due = self._loop.time() + wait_s
            if self._handle is None or self._wakes_at > self._due:
                self._wake_in(wait_s, self._due)

    def stop(self) -> None:
        """Stop the timer if it runs."""
        self._due = None

    def close(self) -> None:
        """Stop the timer for good and drop the reference to its owner, to break the reference cycle
        between the two."""
        self.stop()
        self._on_end = _nothing
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wake_in(self, wait_s: float, at: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._wakes_at = self._loop.call_later(wait_s, self._wake), at

    def _wake(self) -> None:
        self._handle = None
        if self._due is None:
            return
        late_s = self._loop.time() - self._due
        if late_s < 0:  # it was stopped and started again meanwhile
            self._wake_in(-late_s, self._due)
            return
        self._due = None
        if late_s > LATE_S:
            self.start(LATE_S)
        else:
            self._on_end()


def _nothing() -> None:
    """The callback of a closed countdown."""
