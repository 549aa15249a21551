"""The pairs of workers that cannot hand over. Pure.

Two sources say so: what both workers registered (`handover_facts`), and the refusals that
a sink reports, by the incarnation of the source. So what is known of a pair ends with either of its
processes. Pairs of a prefill and a decode worker are kept ready for decisions, which pay nothing
while there are none. Owns the registrations that it compares, and the refusals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from process.number_text import count
from protocol.messages import Role
from protocol.registration import WorkerInfo
from router.routing.handover_facts import HandoverFacts, facts_of, why_apart
from router.routing.placement import Candidate, WorkerLoad

MAX_NAMED = 3
"""The most workers or pairs that a text names."""
NOBODY: frozenset[str] = frozenset()


class ApartPair(NamedTuple):
    """A pair that cannot hand over, and the reason."""

    source: str
    sink: str
    reason: str


class Barriers:
    """The pairs of one fleet that cannot hand over. False if there are none of a prefill and a
    decode worker."""

    def __init__(self) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._facts: dict[str, HandoverFacts] = {}
        self._refusals: dict[str, Mapping[str, str]] = {}  # by sink, then incarnation of the source
        self._rows: dict[str, dict[str, str]] = {}  # reasons by decode, then prefill worker
        self._shut: dict[str, frozenset[str]] = {}  # the prefill workers in `_rows`
        self._text: str | None = ""

    def __bool__(self) -> bool:
        return bool(self._shut)

    def take(self, info: WorkerInfo) -> None:
        """Take a worker's newest registration."""
        name, known = info.worker_id, self._infos.get(info.worker_id)
        if known is info:
            return
        facts = facts_of(info)
        self._infos[name] = info
        is_same = known is not None and known.incarnation == info.incarnation
        if not is_same or facts != self._facts[name]:
            self._facts[name] = facts
            self._judge(name)

    def forget(self, worker_id: str) -> None:
        """Forget a worker, and its refusals."""
        if self._infos.pop(worker_id, None) is not None:
            del self._facts[worker_id]
            self._refusals.pop(worker_id, None)
            self._judge(worker_id)

    def take_refusals(self, sink: str, refusals: Mapping[str, str]) -> None:
        """Take all refusals that a sink reports: reasons by the incarnation of the source."""
        if sink in self._infos and self._refusals.get(sink, {}) != refusals:
            self._refusals[sink] = refusals
            self._judge(sink)

    def why(self, source: str, sink: str) -> str:
        """Why a worker cannot write to the pool of another; "" if nothing is known against it."""
        theirs = self._infos.get(source)
        if theirs is None or sink not in self._infos:
            return ""
        refusal = self._refusals.get(sink, {}).get(theirs.incarnation, "")
        return refusal or why_apart(self._facts[source], self._facts[sink])

    def pairs(self) -> Iterator[ApartPair]:
        """All prefill workers that cannot hand over to a decode worker, by name."""
        for sink in sorted(self._rows):
            for source, reason in sorted(self._rows[sink].items()):
                yield ApartPair(source, sink, reason)

    @property
    def text(self) -> str:
        """All pairs in one line; "" if there are none."""
        if self._text is None:
            num_pairs = sum(map(len, self._rows.values()))
            first = next(self.pairs())
            self._text = (
                f"{count(num_pairs, 'pair')} cannot hand over, such as {first.source} to "
                f"{first.sink}: {first.reason}"
            )
        return self._text

    def why_alone(self, sink: str) -> str:
        """The reasons for which no prefill worker can hand over to this decode worker."""
        row = sorted(self._rows.get(sink, {}).items())
        named = "; ".join(f"{source}: {reason}" for source, reason in row[:MAX_NAMED])
        return named + (f" and {len(row) - MAX_NAMED} more" if len(row) > MAX_NAMED else "")

    def able(
        self, prefill: Sequence[Candidate], decode: Sequence[WorkerLoad]
    ) -> tuple[tuple[Candidate, ...], frozenset[str]]:
        """The prefill workers that can hand over to one of these decode workers, and the decode
        workers, by id, to which none of them can."""
        names = frozenset([each.worker_id for each in prefill])
        shut = {each.worker_id: self._shut.get(each.worker_id, NOBODY) for each in decode}
        useless = names.intersection(*shut.values())
        alone = frozenset([sink for sink, sources in shut.items() if names <= sources])
        return tuple([each for each in prefill if each.worker_id not in useless]), alone

    def islands(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Iterator[tuple[Sequence[Candidate], Sequence[Candidate]]]:
        """The candidates in parts: within a part, each prefill worker can hand over to each decode
        worker. Every possible pair is in one part."""
        parts: dict[frozenset[str], list[Candidate]] = {}
        for each in decode:
            parts.setdefault(self._shut.get(each.worker_id, NOBODY), []).append(each)
        for shut in sorted(parts, key=sorted) if len(parts) > 1 else parts:
            sources = [each for each in prefill if each.worker_id not in shut]
            if sources:
                yield sources, parts[shut]

    def _judge(self, name: str) -> None:
        """Compare a worker with all others, after a change of it."""
        info = self._infos.get(name)
        self._rows.pop(name, None)
        for row in self._rows.values():
            row.pop(name, None)
        if info is not None and info.role in (Role.PREFILL, Role.DECODE):
            for other in self._infos.values():
                if info.role is Role.PREFILL and other.role is Role.DECODE:
                    self._note(name, other.worker_id)
                elif info.role is Role.DECODE and other.role is Role.PREFILL:
                    self._note(other.worker_id, name)
        self._rows = {sink: row for sink, row in self._rows.items() if row}
        self._shut = {sink: frozenset(row) for sink, row in self._rows.items()}
        self._text = None if self._rows else ""

    def _note(self, source: str, sink: str) -> None:
        if reason := self.why(source, sink):
            self._rows.setdefault(sink, {})[source] = reason
