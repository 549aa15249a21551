"""Compares each sender's link counters with the KV that it sent, to find the path of each pair.

Owns, by sender, samples of the last minute. Reads load reports and registrations only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from console.telemetry.kv_paths import (
    TCP,
    UNKNOWN,
    allowed_paths,
    is_one_machine,
    is_tcp_link,
    measured_path,
)
from protocol.registration import WorkerInfo

WINDOW_US = 60_000_000


class _Sample(NamedTuple):
    at_us: int
    links: Mapping[str, int]
    moved: Mapping[str, int]


class PathWatch:
    """Links and KV by sender; `moved` returns the bytes to each target so far."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}
        self._moved: dict[str, dict[str, int]] = {}

    def add(self, source: str, target: str, count: int) -> None:
        """Add bytes of KV that moved."""
        targets = self._moved.setdefault(source, {})
        targets[target] = targets.get(target, 0) + count

    def sample(self, source: str, links: Mapping[str, int], now_us: int) -> None:
        """Take the counters of the sender's links. Call it with every new measurement."""
        samples = self._samples.setdefault(source, deque())
        if samples and samples[-1].links == links:
            return
        samples.append(_Sample(now_us, links, dict(self._moved.get(source, {}))))
        while len(samples) > 2 and samples[1].at_us < now_us - WINDOW_US:
            samples.popleft()

    def forget(self, sources: set[str]) -> None:
        """Drop all senders but these."""
        self._samples = {k: v for k, v in self._samples.items() if k in sources}
        self._moved = {k: v for k, v in self._moved.items() if k in sources}

    def path(self, source: WorkerInfo, target: WorkerInfo, known: Mapping[str, WorkerInfo]) -> str:
        """The path from `source` to `target` in the last minute."""
        samples = self._samples.get(source.worker_id)
        if source.transport == "shm" or not samples or len(samples) < 2:
            return measured_path(source, target, {}, 0)
        first, last = samples[0], samples[-1]
        links = {each: sent - first.links.get(each, 0) for each, sent in last.links.items()}
        grown = {name: count - first.moved.get(name, 0) for name, count in last.moved.items()}
        if not grown.get(target.worker_id):
            return UNKNOWN
        only = allowed_paths(source, target)
        if len(only) == 1:  # the only path: no counter is needed
            return only[0]
        near = [known[name] for name in grown if name in known]
        near = [each for each in near if _shares_link(source, target, each)]
        bound = {each.worker_id for each in near if allowed_paths(source, each) == (TCP,)}
        moved = sum(grown[each.worker_id] for each in near if each.worker_id not in bound)
        return measured_path(
            source, target, without_tcp(links, sum(grown[e] for e in bound)), moved
        )


def without_tcp(links: Mapping[str, int], sent: int) -> dict[str, int]:
    """The links' bytes without the `sent` bytes that certainly went over TCP."""
    left = dict(links)
    for link in sorted(left, key=lambda each: -left[each]):
        if is_tcp_link(link):
            taken = min(sent, left[link])
            left[link], sent = left[link] - taken, sent - taken
    return left


def _shares_link(source: WorkerInfo, target: WorkerInfo, other: WorkerInfo) -> bool:
    """Whether KV for `other` appears in the same counters as KV for `target`."""
    if is_one_machine(source, target):
        return is_one_machine(source, other)
    return other.machine == target.machine and other.host == target.host
