"""Whose turn it is, by the work done for each share: start-time fair queueing. The share with the
least work comes first (Goyal, Vin and Cheng, 1996), so a flood of one share takes no turns from
another. An idle share saves no turns: when it starts to wait again, its work counts as that of the
share that was admitted last. Work is counted in any unit. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

MAX_IDLE_SHARES = 1024


class ShareAccounts:
    """The work done for each share. `len` is the number of known shares."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._now: float = 0  # virtual time: the work of the share that was admitted last

    def __len__(self) -> int:
        return len(self._had)

    def had(self, share: str) -> float:
        """The work done for a share."""
        return self._had.get(share, 0)

    def join(self, share: str) -> None:
        """Note that a share starts to wait."""
        self._had[share] = max(self._had.get(share, 0), self._now)

    def admit(self, share: str) -> None:
        """Note that a share is admitted."""
        self._now = max(self._now, self._had.get(share, 0))

    def charge(self, share: str, cost: float) -> None:
        """Add work done for a share; a negative cost corrects an earlier one."""
        self._had[share] = self._had.get(share, 0) + cost

    def forget_idle(self, waiting: Collection[str]) -> None:
        """Forget the idle shares with the least work, if there are many. Call it now and then with
        the shares that wait."""
        if len(self._had) > MAX_IDLE_SHARES + len(waiting):
            most = heapq.nlargest(MAX_IDLE_SHARES // 2, self._had, key=self._had.__getitem__)
            self._had = {share: self._had[share] for share in {*most, *waiting}}
