"""What both sides of a handoff share: its name, and the memory of those that ended.

A handoff is named by request and attempt. Closed names are remembered, boundedly and in the
order in which they closed, so that what still arrives for them gets the same answer again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol


class HandoffKey(NamedTuple):
    """One attempt to move the KV of one request."""

    request_id: str
    attempt: int


class IllegalMove(Exception):
    """A state machine was asked for a move that its state does not have: a bug of ours."""


class Named(Protocol):
    """A message that speaks of a handoff."""

    @property
    def request_id(self) -> str:
        """The request."""

    @property
    def attempt(self) -> int:
        """The attempt at it."""


def key_of(message: Named) -> HandoffKey:
    """The handoff that a message speaks of."""
    return HandoffKey(message.request_id, message.attempt)


class ClosedHandoffs:
    """The last `capacity` handoffs that closed, and with which error ("" for none)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._errors: OrderedDict[HandoffKey, str] = OrderedDict()

    def remember(self, key: HandoffKey, error: str) -> None:
        """Add one; the oldest goes when there are too many."""
        self._errors[key] = error
        self._errors.move_to_end(key)
        if len(self._errors) > self._capacity:
            self._errors.popitem(last=False)

    def error_of(self, key: HandoffKey) -> str | None:
        """How it closed, or None if it is not remembered."""
        return self._errors.get(key)
