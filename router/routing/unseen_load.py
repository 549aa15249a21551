"""How much load other routers have put on workers that this router does not see yet.

Pure. Between two reports of a worker, a router sees only its own requests there, and those that
others have told it of (`sent_requests`). Workers report how many requests each router has sent,
which shows how many others send for each known one: none while all messages arrive. Part of them go
where the known ones went, because routers that see the same fleet choose alike; the rest go
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

HALF_LIFE = 64
"""A request counts half once this many others have followed."""
MOST_OTHERS = 15.0
"""Most requests of other routers that are assumed for each known one."""
ALIKE = 0.2
"""The part of others' requests that counts as sent where the known ones went."""


class Unseen(NamedTuple):
    """Load that workers' reports do not count yet, in requests, prompt tokens and blocks."""

    requests: float = 0.0
    tokens: float = 0.0
    blocks: float = 0.0


NOTHING = Unseen()


class Arrivals:
    """The requests that a worker has lately received: all of them, and the known ones, which this
    router has sent itself or knows from another router's messages."""

    __slots__ = ("_told", "everybody", "known")

    def __init__(self) -> None:
        self.known = self.everybody = 0.0
        self._told = 0.0  # requests of messages that no report has counted yet

    def note_told(self, count: int) -> None:
        """Note that messages of other routers have named so many requests."""
        self._told += count

    def observe(self, former: dict[str, int], received: dict[str, int], session: str) -> None:
        """Take a worker's new numbers of received requests, by session; `session` is this
        router's."""
        if received == former:
            return
        new = {name: count - former.get(name, 0) for name, count in received.items()}
        count = sum([each for each in new.values() if each > 0])
        kept = 0.5 ** (count / HALF_LIFE)
        own = max(0, new.get(session, 0))
        told = min(self._told, count - own)
        self._told = kept * (self._told - told)
        self.known = kept * self.known + own + told
        self.everybody = kept * self.everybody + count


def others_of(arrivals: Iterable[Arrivals]) -> float:
    """How many requests other routers have lately sent for each known one."""
    known = everybody = 0.0
    for each in arrivals:
        known += each.known
        everybody += each.everybody
    return min(MOST_OTHERS, max(0.0, everybody - known) / (known + 1))


def unseen_of_others(known: list[Unseen], others: float) -> list[Unseen]:
    """What others have probably sent to each worker of a pool, besides what is `known`."""
    if not others or not known:
        return [NOTHING] * len(known)
    near, far = others * ALIKE, others * (1 - ALIKE) / len(known)
    requests, tokens, blocks = (far * sum([each[at] for each in known]) for at in range(3))
    return [
        Unseen(requests + near * each[0], tokens + near * each[1], blocks + near * each[2])
        for each in known
    ]
