"""When a certificate expires, and when to warn about it."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

WARN_S = 14 * 86400.0
"""Seconds before the end at which warnings begin."""
_PAUSE_S = 86400.0
"""Seconds between two warnings in a log."""


class Expiry:
    """The end of a certificate that may be replaced. Times are seconds of the Unix epoch."""

    def __init__(self) -> None:
        self.at: float | None = None
        """When the certificate expires; None while it is not known."""
        self._warned_at = -_PAUSE_S

    def note(self, at: float, now: float) -> None:
        """Set a new time of expiry."""
        if at != self.at:
            self.at, self._warned_at = at, now - _PAUSE_S

    def warning(self, now: float) -> str | None:
        """A line that says that the certificate expires soon or has expired; None if neither is
        so."""
        if self.at is None or self.at - now > WARN_S:
            return None
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.at))
        if self.at <= now:
            return f"has expired ({date}): new connections fail until it is renewed"
        days = (self.at - now) / 86400
        left = f"{days:.0f} days" if days >= 1.5 else f"{max(1, round(24 * days))} h"
        return f"expires in {left} ({date}): renew it"

    def log_warning(self, whose: str, now: float) -> None:
        """Log the line of `warning`, at most once a day. `whose`: the server or file with the
        certificate."""
        if now - self._warned_at < _PAUSE_S:
            return
        if text := self.warning(now):
            self._warned_at = now
            log.warning("the certificate of %s %s", whose, text)
