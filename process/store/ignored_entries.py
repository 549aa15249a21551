"""Entries of the store that a process ignores: whatever the store holds is untrusted.

Any process with the store's password may have written anything under any key: another type,
another shape, text that is not UTF-8, a gigabyte. Readers decode what they read into types with
bounds, leave out what does not fit, and count it here. Each such entry is logged once, as long as
it stays the same.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from protocol.error_line import one_line

log = logging.getLogger(__name__)

REGISTRATION, DRAIN_REQUEST, ROUTER, SUMMARY, QUESTION, RESPONSE, ANSWER, SENT = KINDS = (
    "registration",
    "drain_request",
    "router",
    "summary",
    "question",
    "response",
    "answer",
    "sent",
)
_MOST_KNOWN = 1000
_SHOWN_CHARS = 100


class IgnoredEntries(Collector):
    """Counts and logs the entries that one process ignores, each once while it stays the same.
    `counts` holds a count for each kind. The object can be registered as metrics."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()

    def collect(self) -> Iterator[Metric]:
        """The counts."""
        family = CounterMetricFamily(
            "baton_store_entries_ignored",
            "Entries of the store and messages of its channels that were ignored because they "
            "could not be decoded",
            labels=["kind"],
        )
        for kind, count in self.counts.items():
            family.add_metric([kind], count)
        yield family

    def note(self, kind: str, name: str, value: object, reason: object) -> bool:
        """Note an ignored entry. Returns whether it is a new one."""
        key, digest = (kind, name), hash(value)
        if self._known.get(key) == digest:
            return False
        self._known[key] = digest
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self.counts[kind] += 1
        shown = one_line(name)[:_SHOWN_CHARS]
        log.warning("ignored the store's %s %s: %s", kind, shown, one_line(reason))
        return True


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for malformed bytes."""
