"""One handoff or fetch at its sink, from the grant on: the granted blocks, and those that have
arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from kv_transfer.handoff.states import SinkState


@dataclass(frozen=True)
class FetchLimits:
    """How long a fetch may take: after `deadline_s` the source is asked to stop, and if it does not
    answer within `stop_wait_s`, the sink goes on without the blocks."""

    deadline_s: float
    stop_wait_s: float


@dataclass
class Incoming:
    """Changed by `HandoffSink` only."""

    state: SinkState
    peer: str
    first_block: int
    block_ids: tuple[int, ...]
    next_send: float  # when to send the next renewal or abort
    landed_at: float = 0.0  # in the timed states: when no write can land any more
    digests: dict[int, bytes] = field(default_factory=dict)  # of arrived blocks, by prompt index
    num_expected: int = -1  # of the granted blocks, the first ones: those that the peer writes
    stop_at: float = inf  # a fetch: the end of its current deadline
    stop_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_expected = len(self.block_ids)

    @property
    def end_block(self) -> int:
        """The index in the prompt behind the last block that the peer writes."""
        return self.first_block + self.num_expected

    @property
    def is_complete(self) -> bool:
        """Whether every block that the peer writes has arrived."""
        return len(self.digests) == self.num_expected

    @property
    def num_arrived_end(self) -> int:
        """The number of granted blocks up to the last one that has arrived."""
        return max(self.digests) + 1 - self.first_block if self.digests else 0

    @property
    def num_leading(self) -> int:
        """The length of the unbroken run of arrived blocks from the first granted one on."""
        number = 0
        while self.first_block + number in self.digests:
            number += 1
        return number
