"""Shared by both sides of a handoff: its key, and a record of closed handoffs.

Request, attempt and part identify a handoff. A bounded record keeps the latest closed keys, in
closing order, so that late messages for them get the same answer again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol


class HandoffKey(NamedTuple):
    """One attempt to move the KV of one request: part 0 is the handoff to the worker that continues
    the request, higher parts are fetches of blocks that a worker holds in its cache."""

    request_id: str
    attempt: int
    part: int = 0

    def supersedes(self, other: HandoffKey) -> bool:
        """Whether this is a later attempt at the same request."""
        return self.request_id == other.request_id and self.attempt > other.attempt


class IllegalMove(Exception):
    """A bug of ours: a state machine was asked for a move that its state does not allow."""


class Named(Protocol):
    """A message about a handoff."""

    @property
    def request_id(self) -> str:
        """The request."""

    @property
    def attempt(self) -> int:
        """The attempt at it."""


def key_of(message: Named) -> HandoffKey:
    """The handoff that a message is about. Messages without a part are about handoffs alone."""
    return HandoffKey(message.request_id, message.attempt, getattr(message, "part", 0))


class ClosedHandoffs:
    """The last `capacity` handoffs that closed, each with its error ("" for none) and, for a fetch,
    the number of blocks that were written."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[HandoffKey, tuple[str, int]] = OrderedDict()

    def remember(self, key: HandoffKey, error: str, num_blocks: int = 0) -> None:
        """Add a handoff; beyond `capacity` the oldest is forgotten."""
        self._ends[key] = error, num_blocks
        self._ends.move_to_end(key)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def remember_new(self, key: HandoffKey, error: str) -> None:
        """Add a handoff unless it is remembered already."""
        if key not in self._ends:
            self.remember(key, error)

    def error_of(self, key: HandoffKey) -> str | None:
        """The error with which the handoff closed; None if it is not remembered."""
        end = self._ends.get(key)
        return None if end is None else end[0]

    def blocks_of(self, key: HandoffKey) -> int:
        """The number of blocks that were written for a remembered fetch."""
        return self._ends.get(key, ("", 0))[1]
