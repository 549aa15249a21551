"""One budget for the memory that all requests in flight hold: bodies, their fields, whole answers.

A body's bytes count as they arrive, because a false `content-length` costs a client nothing. Fields
made from a body count before they are made; an answer that is sent whole counts while it grows. All
of it counts until the request's answer has ended.

No caller can take all of it: a caller may hold as much as is left for all others. So a single
flooding caller holds half, two of them hold a third each, and so on (dynamic thresholds: Choudhury
and Hahne, 1998).
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from protocol.errors import Overloaded, TooManyRequests


class ByteBudget:
    """Counts the bytes, in all and by caller (`share`); `limit` None allows any number.
    `retry_after_s` tells refused clients when to come back."""

    def __init__(self, limit: int | None, registry: CollectorRegistry | None = None) -> None:
        self._limit = limit
        self._held: dict[str, int] = {}  # by share; no value is 0
        self.in_flight = 0
        self.retry_after_s: Callable[[], int] = lambda: 1
        if registry is not None:
            shown = Gauge(
                "baton_http_bytes_in_flight",
                "Memory that the bodies, fields and whole answers of all requests hold, estimated",
                registry=registry,
            )
            shown.set_function(lambda: self.in_flight)

    def check(self, share: str, num_bytes: int, own_bytes: int = 0) -> None:
        """Raises Overloaded if there is no room for this many bytes now, TooManyRequests if the
        caller holds too much already. A request that is alone, whose `own_bytes` are all that is
        held, may take everything."""
        if self._limit is None:
            return
        left = self._limit - self.in_flight - num_bytes
        if left < 0:
            raise Overloaded(
                f"all requests together may hold {self._limit} bytes of memory; try again later",
                self.retry_after_s(),
            )
        held = self._held.get(share, 0)
        if held + num_bytes > left and self.in_flight > own_bytes:
            raise TooManyRequests(
                f"this caller's requests hold {held} bytes of memory, and {num_bytes} more would "
                "leave less than that for all others; try again when some have ended",
                self.retry_after_s(),
            )

    def take(self, share: str, num_bytes: int, own_bytes: int = 0) -> None:
        """Count bytes that are held from now on. Raises as `check`."""
        if num_bytes == 0:
            return
        held, total = self._held.get(share, 0) + num_bytes, self.in_flight + num_bytes
        if self._limit is not None and held + total > self._limit:  # otherwise there is room
            self.check(share, num_bytes, own_bytes)
        self.in_flight, self._held[share] = total, held

    def give_back(self, share: str, num_bytes: int) -> None:
        """Release the bytes of a request that has ended."""
        if num_bytes == 0:
            return
        self.in_flight -= num_bytes
        left = self._held[share] - num_bytes
        if left:
            self._held[share] = left
        else:
            del self._held[share]
