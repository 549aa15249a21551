"""What a sequence may fetch, and has fetched: the notes in `Sequence.holders`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.handoff.key import HandoffKey
from protocol.messages import KvHolder
from protocol.traces import FetchSpan
from scheduling.sequence import Sequence


@dataclass
class Holders:
    """Workers that may be asked, the best first, and the fetch that is `running`.

    Until `connect_by` the sequence waits for workers that have not answered yet. `spans` are the
    fetches that are over.
    """

    left: list[KvHolder]
    connect_by: float
    num_fetches: int = 0
    running: HandoffKey | None = None
    spans: list[FetchSpan] = field(default_factory=list)


def holders_of(sequence: Sequence) -> Holders | None:
    """The notes of a sequence, if it has any."""
    holders = sequence.holders
    return holders if isinstance(holders, Holders) else None


def fetch_spans(sequence: Sequence) -> tuple[FetchSpan, ...]:
    """The fetches of a sequence that are over."""
    holders = holders_of(sequence)
    return () if holders is None else tuple(holders.spans)
