"""The notes in `Sequence.holders`: what a sequence may fetch, and what it has fetched."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.handoff.key import HandoffKey
from kv_transfer.tiers.host_tier import Load
from protocol.messages import KvHolder
from protocol.traces import FetchSpan
from scheduling.sequence import Sequence


@dataclass
class Holders:
    """Workers that may be asked, the best first, and the fetch that is `running`.

    Until `connect_by` the sequence waits for workers that have not answered yet. `spans` are the
    fetches that are over. With `may_load`, blocks may also come from this worker's own tiers:
    `load` is the load under way, and `from_disk` are the blocks that are read from the disk for the
    sequence.
    """

    left: list[KvHolder]
    connect_by: float
    num_fetches: int = 0
    running: HandoffKey | None = None
    spans: list[FetchSpan] = field(default_factory=list)
    may_load: bool = False
    load: TierLoad | None = None
    from_disk: DiskRead | None = None


@dataclass(eq=False)
class TierLoad:
    """Blocks of a prompt on their way from a tier into the pool. `hashes` are the prompt's hashes
    up to the end of these blocks. By group, `needed` are the blocks' places in the prompt, and
    `slots` the blocks of the pool that they go to. `copies` is the tier's part of the work."""

    first_block: int
    hashes: list[bytes]
    needed: list[range]
    slots: list[list[int]]
    copies: Load | None = None


@dataclass
class DiskRead:
    """Blocks that are read from the disk into host memory while a request waits. The request waits
    for them until `wait_until`. `seconds` is the time that each arrived unit of a block took."""

    began_us: int
    wait_until: float
    seconds: dict[bytes, float] = field(default_factory=dict)

    def note(self, name: bytes, seconds: float) -> None:
        """Note that a unit has arrived in host memory."""
        self.seconds[name] = seconds


def holders_of(sequence: Sequence) -> Holders | None:
    """The notes of a sequence, if it has any."""
    holders = sequence.holders
    return holders if isinstance(holders, Holders) else None


def fetch_spans(sequence: Sequence) -> tuple[FetchSpan, ...]:
    """The fetches of a sequence that are over."""
    holders = holders_of(sequence)
    return () if holders is None else tuple(holders.spans)
