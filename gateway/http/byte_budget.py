"""One budget for the memory that all requests in flight hold: bodies, their fields, whole answers.

A body's bytes count as they arrive, because a false `content-length` costs a client nothing. Fields
made from a body count before they are made; an answer that is sent whole counts while it grows. All
of it counts until the request's answer has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from protocol.errors import Overloaded


class ByteBudget:
    """Counts the bytes; `limit` None allows any number. `retry_after_s` tells refused clients when
    to come back."""

    def __init__(self, limit: int | None, registry: CollectorRegistry | None = None) -> None:
        self._limit = limit
        self.in_flight = 0
        self.retry_after_s: Callable[[], int] = lambda: 1
        if registry is not None:
            shown = Gauge(
                "baton_http_bytes_in_flight",
                "Memory that the bodies, fields and whole answers of all requests hold, estimated",
                registry=registry,
            )
            shown.set_function(lambda: self.in_flight)

    def check(self, num_bytes: int) -> None:
        """Raises Overloaded if there is no room for this many bytes now."""
        if self._limit is not None and self.in_flight + num_bytes > self._limit:
            raise Overloaded(
                f"all requests together may hold {self._limit} bytes of memory; try again later",
                self.retry_after_s(),
            )

    def take(self, num_bytes: int) -> None:
        """Count bytes that are held from now on. Raises Overloaded if there is no room for them."""
        self.check(num_bytes)
        self.in_flight += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release the bytes of a request that has ended."""
        self.in_flight -= num_bytes
