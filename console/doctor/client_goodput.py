"""What clients get, from the facts of the last minute. Pure. Goodput here also counts requests that
percentiles of finished requests leave out: those that were refused, and those that already wait for
longer than the target. Keys that flood are left out, because they cause their own late answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from console.doctor.facts import Facts, KeyFacts

FLOOD = 60
"""A key with this many requests refused with 429 within a minute counts as flooding."""
MANY_INVALID = 20
"""A key with this many invalid requests within a minute counts as used by a misconfigured
client."""
MIN_BAD = 3
"""The fewest missed requests that are not put down to chance."""


@dataclass(frozen=True)
class Clients:
    """The requests of the last minute of all keys that do not flood."""

    ended: int = 0
    good: int = 0
    refused: int = 0
    waiting: int = 0
    late: int = 0

    @property
    def total(self) -> int:
        """All requests whose fate is known."""
        return self.ended + self.refused + self.late

    @property
    def goodput(self) -> float | None:
        """The share of good requests; None without requests."""
        return self.good / self.total if self.total else None

    def are_missed(self, target: float) -> bool:
        """Whether fewer than the target's share of requests are good."""
        return self.goodput is not None and self.goodput < target

    def suffer(self, target: float) -> bool:
        """Whether too many requests miss a target for it to be chance."""
        return self.are_missed(target) and self.total - self.good >= MIN_BAD


def clients_of(facts: Facts) -> Clients:
    """The requests of clients that do not flood."""
    keys = [each for each in facts.keys if not floods(each)]
    return Clients(
        ended=sum(each.ended for each in keys),
        good=sum(each.good for each in keys),
        refused=sum(each.refused for each in keys),
        waiting=sum(each.waiting for each in keys),
        late=sum(each.late for each in keys),
    )


def floods(key: KeyFacts) -> bool:
    """Whether a key sends far more than it may, so that most of its requests are refused."""
    return key.limited >= FLOOD and key.limited >= key.accepted


def is_mostly_invalid(key: KeyFacts) -> bool:
    """Whether most requests of a key are invalid."""
    return key.invalid >= MANY_INVALID and key.invalid > key.accepted + key.refused
