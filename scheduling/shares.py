"""The work that each share has had, and so whose turn it is: start-time fair queueing.

The share that has had the least comes first (Goyal, Vin and Cheng, 1996), so a flood of one share
takes no turns from another. An idle share saves no turns: when it starts to wait again, it counts
as having had as much as the share that was admitted last. Work is counted in any unit. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

MAX_IDLE_SHARES = 1024


class ShareAccounts:
    """What each share has had. `len` is the number of known shares."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._now: float = 0  # virtual time: what the share had that was admitted last

    def __len__(self) -> int:
        return len(self._had)

    def had(self, share: str) -> float:
        """What a share has had."""
        return self._had.get(share, 0)

    def join(self, share: str) -> None:
        """A share starts to wait."""
        self._had[share] = max(self._had.get(share, 0), self._now)

    def admit(self, share: str) -> None:
        """It is the turn of a share."""
        self._now = max(self._now, self._had.get(share, 0))

    def charge(self, share: str, cost: float) -> None:
        """A share has had more work; a negative cost corrects an earlier one."""
        self._had[share] = self._had.get(share, 0) + cost

    def forget_idle(self, waiting: Collection[str]) -> None:
        """Forget the idle shares that have had the least, if there are many. Call it now and then
        with the shares that wait."""
        if len(self._had) > MAX_IDLE_SHARES + len(waiting):
            most = heapq.nlargest(MAX_IDLE_SHARES // 2, self._had, key=self._had.__getitem__)
            self._had = {share: self._had[share] for share in {*most, *waiting}}
