"""Late steps of mock workers: the part of a stream's stalls that its worker causes, not the router.

A mock worker appends a line to a file for each pause between two steps that is longer than
intended. Readers subtract these pauses from the gaps of a stream. Times are seconds of
`time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_LATE_S = 0.02


@dataclass(frozen=True, order=True)
class Span:
    """A time without a token."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.start


class LateSteps:
    """The worker's side; owns the open file. `step_s` is the intended time between steps."""

    def __init__(self, path: Path, step_s: float) -> None:
        """Creates the file. Raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._longest_s = step_s + MIN_LATE_S
        self._sent_at: float | None = None

    def idle(self) -> None:
        """Note that no request runs, so that nobody waits for the next step."""
        self._sent_at = None

    def sent(self, now: float) -> None:
        """Note that the tokens of a step have been sent."""
        if self._sent_at is not None and now - self._sent_at > self._longest_s:
            os.write(self._file, f"{self._sent_at!r} {now!r}\n".encode())
        self._sent_at = now

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_late_steps(path: Path) -> list[Span]:
    """All late steps so far, in order. Raises OSError."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [Span(*map(float, line.split())) for line in whole.splitlines()]


def rest_s(gap: Span, late: Iterable[Span]) -> float:
    """The part of a gap during which the worker was not late. `late` are spans of one worker, which
    do not overlap."""
    shared = (min(gap.end, each.end) - max(gap.start, each.start) for each in late)
    return gap.seconds - sum(each for each in shared if each > 0)
