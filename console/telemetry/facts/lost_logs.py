"""Which processes of the fleet lose lines of their logs, as on a full disk, and since when.

Owns the last counts of each process: workers report theirs as counters, the router reads its own. A
process loses lines from the first line that cannot be written until a line is written again. Lines
that were lost before its first counts arrived do not count, unless no line was ever written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from console.doctor.facts import LogFacts
from process.logs import LogCounts
from router.fleet.worker import Worker

ROUTER = "router"


@dataclass
class _Log:
    counts: LogCounts
    since_us: int = 0  # 0: it is written


class LogWatch:
    """The logs by process."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    def sample(self, workers: Iterable[Worker], own: LogCounts, now_us: int) -> None:
        """Take the counts of all processes; call it once per second."""
        present = {ROUTER: own}
        for worker in workers:
            if worker.stats is not None:
                counters = worker.stats.counters
                counts = LogCounts(counters.get("log_lines", 0), counters.get("log_lines_lost", 0))
                present[f"{worker.worker_id}/{worker.info.incarnation}"] = counts
        for process, counts in present.items():
            log = self._logs.setdefault(process, _Log(counts if counts.written else LogCounts()))
            if counts.lost > log.counts.lost:
                log.since_us = log.since_us or now_us
            elif counts.written > log.counts.written:
                log.since_us = 0
            log.counts = counts
        for gone in self._logs.keys() - present.keys():
            del self._logs[gone]

    def facts(self) -> tuple[LogFacts, ...]:
        """The processes that lose lines, by name."""
        return tuple(
            LogFacts(process=name.partition("/")[0], lost=log.counts.lost, since_us=log.since_us)
            for name, log in sorted(self._logs.items())
            if log.since_us
        )
