"""The order among waiting sequences: priorities that age, and equal turns for every share.

A share is the owner of a key; requests without a key are one share. Within a share, a sequence of a
higher priority comes first, and each step of priority is worth `aging_s` seconds of waiting. So
nothing waits for ever, and an old backlog does not hold up an urgent newcomer. A session that has
had much work waits as one of lower priority: see `scheduling.session_service`. Between shares, the
share that has had the fewest tokens comes first, whatever its priorities: see `scheduling.shares`.
Sequences of a priority below 0 cost their share more, so background work yields. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from itertools import count

from scheduling.sequence import Sequence
from scheduling.session_service import OwnedSession, SessionService
from scheduling.shares import ShareAccounts

MOST_STEPS = 5
"""Each step of priority below 0 doubles the cost of a token, at most `MOST_STEPS` times."""


class Turns:
    """The tokens that each share has had. `len` is the number of known shares."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._accounts = ShareAccounts()
        self._sessions = SessionService()
        self._backlogged: set[str] = set()

    def __len__(self) -> int:
        return len(self._accounts)

    def seniority(self, sequence: Sequence) -> tuple[float, int]:
        """A key that is smaller for more senior sequences. Each step of priority counts like an
        arrival `aging_s` seconds earlier."""
        return (sequence.arrival - sequence.priority * self._aging_s, sequence.order)

    def by_seniority(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """The sequences in order, the most senior one first."""
        if len(sequences) < 2:
            return list(sequences)
        return sorted(sequences, key=self.seniority)

    def in_turn(self, waiting: Collection[Sequence]) -> Iterator[Sequence]:
        """The waiting sequences in the order in which they may be admitted. The order follows the
        admissions that happen meanwhile."""
        shares = {each.share for each in waiting}
        self._join(shares)
        if len(waiting) < 2:
            yield from list(waiting)
            return
        ordered = sorted(waiting, key=self._rank_in_share)
        if len(shares) < 2:
            yield from ordered
            return
        queues: dict[str, list[Sequence]] = {}
        for sequence in reversed(ordered):
            queues.setdefault(sequence.share, []).append(sequence)
        ties = count()
        heap = [(*self._rank(queue[-1]), next(ties), queue) for queue in queues.values()]
        heapq.heapify(heap)
        while heap:
            queue = heapq.heappop(heap)[-1]
            yield queue.pop()
            if queue:
                heapq.heappush(heap, (*self._rank(queue[-1]), next(ties), queue))

    def pause(self) -> None:
        """Note that no sequence waits."""
        self._join(set())

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Admit a sequence, and charge its share for `num_tokens`."""
        self._accounts.admit(sequence.share)
        self._sessions.admit(_session(sequence))
        self.charge(sequence, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the share of a sequence for `num_tokens`."""
        self._accounts.charge(sequence.share, num_tokens * token_cost(sequence.priority))
        if sequence.session:
            self._sessions.charge(_session(sequence), num_tokens)

    def _rank_in_share(self, sequence: Sequence) -> tuple[float, int]:
        senior_at, order = self.seniority(sequence)
        if sequence.num_preemptions:
            return senior_at, order
        steps_behind = self._sessions.steps_behind(_session(sequence))
        return senior_at + steps_behind * self._aging_s, order

    def _rank(self, head: Sequence) -> tuple[float, tuple[float, int]]:
        return self._accounts.had(head.share), self._rank_in_share(head)

    def _join(self, backlogged: set[str]) -> None:
        """A share that starts to wait is charged up to the virtual time."""
        if not backlogged and not self._backlogged:
            return
        for share in backlogged - self._backlogged:
            self._accounts.join(share)
        self._backlogged = backlogged
        self._accounts.forget_idle(backlogged)


def token_cost(priority: int) -> int:
    """What a token of a request with this priority costs its share."""
    return 1 << min(MOST_STEPS, -priority) if priority < 0 else 1


def _session(sequence: Sequence) -> OwnedSession:
    return sequence.share, sequence.session
