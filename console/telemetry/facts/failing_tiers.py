"""Which tiers below the pools of workers fail, and since when.

Owns the last counts of each tier, which workers report as counters. A tier fails from its first
block that cannot be kept or used, until a minute passes without such a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from console.doctor.facts import TierFacts
from router.fleet.worker import Worker

FAILS_FOR_US = 60_000_000
_TIERS = {"host_tier_failures": "host memory", "disk_tier_failures": "disk"}


@dataclass
class _Tier:
    failures: int
    before: int  # when it began to fail
    since_us: int = 0  # 0: it works
    failed_us: int = 0  # when it failed last


class TierWatch:
    """The tiers by worker and counter."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[str, str, str], _Tier] = {}

    def sample(self, workers: Iterable[Worker], now_us: int) -> None:
        """Take the counts of all workers; call it once per second."""
        present = {
            (each.worker_id, each.info.incarnation, name): each.stats.counters.get(name, 0)
            for each in workers
            if each.stats is not None
            for name in _TIERS
        }
        for key, failures in present.items():
            tier = self._tiers.setdefault(key, _Tier(failures, failures))
            if failures > tier.failures:
                tier.before = tier.before if tier.since_us else tier.failures
                tier.since_us = tier.since_us or now_us
                tier.failed_us = now_us
            elif now_us - tier.failed_us >= FAILS_FOR_US:
                tier.since_us = 0
            tier.failures = failures
        for gone in self._tiers.keys() - present.keys():
            del self._tiers[gone]

    def facts(self) -> tuple[TierFacts, ...]:
        """The tiers that fail, by worker."""
        return tuple(
            TierFacts(
                worker_id=worker_id,
                tier=_TIERS[name],
                failures=tier.failures - tier.before,
                since_us=tier.since_us,
            )
            for (worker_id, _, name), tier in sorted(self._tiers.items())
            if tier.since_us
        )
