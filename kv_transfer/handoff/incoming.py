"""One handoff or fetch at its sink, from the grant on: the granted blocks of each group, and those
that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf

from kv_transfer.handoff.states import SinkState
from protocol.handoff_messages import KvWritten


@dataclass(frozen=True)
class FetchLimits:
    """How long a fetch may take: after `deadline_s` the source is asked to stop, and if it does not
    answer within `stop_wait_s`, the sink continues without the blocks."""

    deadline_s: float
    stop_wait_s: float


@dataclass(slots=True)
class IncomingGroup:
    """The granted blocks of one group. `digests` are those of arrived blocks, by prompt index."""

    first_block: int
    block_ids: tuple[int, ...]
    digests: dict[int, bytes] = field(default_factory=dict)
    num_expected: int = -1  # the peer writes the first so many of the granted blocks

    def __post_init__(self) -> None:
        self.num_expected = len(self.block_ids)

    @property
    def end_block(self) -> int:
        """The prompt index after the last block that the peer writes."""
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

    def can_hold(self, written: KvWritten) -> bool:
        """Whether these are blocks that were granted and that the peer still writes."""
        end = written.first_block + written.num_blocks
        return self.first_block <= written.first_block < end <= self.end_block

    def add(self, written: KvWritten) -> int:
        """Note arrived blocks. Returns how many of them had not arrived before."""
        first, digests = written.first_block, written.digests or repeat(b"")
        arrived = zip(range(first, first + written.num_blocks), digests, strict=False)
        new = {block: digest for block, digest in arrived if block not in self.digests}
        self.digests |= new
        return len(new)


@dataclass(slots=True)
class Incoming:
    """Changed by `HandoffSink` only. The first group of a fetch has blocks of the prompt, others
    have slots, which count from 0 and are of use only if every block that the peer writes has
    arrived."""

    state: SinkState
    peer: str
    groups: Sequence[IncomingGroup]
    next_send: float  # when to send the next renewal or abort
    landed_at: float = 0.0  # in states with a deadline: when no write can land, inf if unknown
    num_verified: int = 0  # groups whose digests were compared
    stop_at: float = inf  # a fetch: the end of its current deadline
    stop_wait_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every block that the peer writes has arrived."""
        return all(each.is_complete for each in self.groups)

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The granted blocks of each group."""
        return tuple(each.block_ids for each in self.groups)

    @property
    def is_whole_or_nothing(self) -> bool:
        """Whether the blocks are of use only if all of them arrive."""
        return len(self.groups) > 1

    def expect(self, num_blocks: int) -> None:
        """The peer of a fetch writes `num_blocks` of the first group, and at most as many of the
        slots of each other group."""
        for each in self.groups:
            each.num_expected = min(len(each.block_ids), num_blocks)
        if self.is_whole_or_nothing and not num_blocks:
            for each in self.groups:
                each.digests.clear()

    def may_end_with(self, num_blocks: int) -> bool:
        """Whether a fetch may end with `num_blocks` blocks, given those that have arrived."""
        first = self.groups[0]
        if self.is_whole_or_nothing and not num_blocks:
            return True
        return first.num_arrived_end <= num_blocks <= len(first.block_ids)

    def settle(self) -> None:
        """Note that no more blocks of a fetch arrive. Only the leading run of arrived blocks
        counts, and no block if a part is of no use."""
        if not self.is_whole_or_nothing:
            self.groups[0].num_expected = self.groups[0].num_leading
        elif not self.is_complete:
            self.expect(0)

    def find(self, group: int) -> IncomingGroup | None:
        """The blocks of a group, if there is such a group."""
        return self.groups[group] if group < len(self.groups) else None
