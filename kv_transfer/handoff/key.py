"""Shared by both sides of a handoff: its key, and a record of closed handoffs.

Request and attempt identify a handoff. A bounded record keeps the latest closed keys, in closing
order, so that late messages for them get the same answer again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol


class HandoffKey(NamedTuple):
    """One attempt to move the KV of one request."""

    request_id: str
    attempt: int


class IllegalMove(Exception):
    """A state machine was asked for a move that its state does not allow: our own bug."""


class Named(Protocol):
    """A message about a handoff."""

    @property
    def request_id(self) -> str:
        """The request."""

    @property
    def attempt(self) -> int:
        """The attempt at it."""


def key_of(message: Named) -> HandoffKey:
    """The handoff that a message is about."""
    return HandoffKey(message.request_id, message.attempt)


class ClosedHandoffs:
    """The last `capacity` handoffs that closed, each with its error ("" for none)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._errors: OrderedDict[HandoffKey, str] = OrderedDict()

    def remember(self, key: HandoffKey, error: str) -> None:
        """Add a handoff; beyond `capacity` the oldest is forgotten."""
        self._errors[key] = error
        self._errors.move_to_end(key)
        if len(self._errors) > self._capacity:
            self._errors.popitem(last=False)

    def error_of(self, key: HandoffKey) -> str | None:
        """The error with which the handoff closed; None if it is not remembered."""
        return self._errors.get(key)
