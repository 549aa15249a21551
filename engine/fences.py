"""Fences: points in the work queued on a device, to wait for.

Imports no torch; the fences of cards lie in `engine.device`.
"""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """A point in the work queued on a device."""

    def is_done(self) -> bool:
        """Whether the device has passed the fence; any thread may call this."""

    def wait(self) -> None:
        """Wait until the device has passed the fence."""


class PassedFence:
    """The fence of an idle device."""

    def is_done(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


PASSED = PassedFence()
