"""Counts of a tier's work so far, and its measured reading speed."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

WEIGHT = 0.3
"""The weight of a new measurement of the speed."""


class TierCounts:
    """Blocks stored and loaded, and failures. Warns of the first failure of each kind."""

    def __init__(self, unit_bytes: int, bytes_per_s: float) -> None:
        """`bytes_per_s` is the assumed speed until a block was loaded."""
        self.unit_bytes = unit_bytes
        self.bytes_per_s = bytes_per_s
        self.num_stored = 0
        self.num_loaded = 0
        self.num_missed = 0
        """Blocks that were overwritten before they were copied."""
        self.num_failures = 0
        self._warned: set[str] = set()

    @property
    def stored_bytes(self) -> int:
        """Bytes that were written to the tier."""
        return self.num_stored * self.unit_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were read from the tier and were intact."""
        return self.num_loaded * self.unit_bytes

    def note_loaded(self, num_blocks: int, seconds: float) -> None:
        """Count blocks that were read and were intact."""
        self.num_loaded += num_blocks
        if num_blocks and seconds > 0:
            speed = num_blocks * self.unit_bytes / seconds
            self.bytes_per_s += WEIGHT * (speed - self.bytes_per_s)

    def fail(self, what: str, error: Exception | None) -> None:
        """Count a block that cannot be kept or used. `what` is the same for all failures of a
        kind."""
        self.num_failures += 1
        if what not in self._warned:
            self._warned.add(what)
            reason = "" if error is None else f" ({error})"
            log.warning("%s%s; such blocks are computed again", what, reason)
